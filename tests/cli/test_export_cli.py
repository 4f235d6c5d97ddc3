"""`vitgraph export` as a user runs it: files, comparisons, refusals, and that it needs no torch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from made_up_comparison import make_record
from made_up_profile import made_up_profile
from typer.testing import CliRunner

from vitgraph.cli import app

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "tests" / "data" / "bench-run"

# Runs the program as if torch and transformers were not installed.
WITHOUT_TORCH = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "datasets", "triton"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
from vitgraph.cli import main
main()
"""


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["export", *arguments])


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The example run again, with another packing policy."""
    folder = tmp_path / "deferred"
    shutil.copytree(EXAMPLE, folder)
    record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    record["settings"]["graph"]["packing"] = "greedy-defer"
    (folder / "run.json").write_text(json.dumps(record), encoding="utf-8")
    return folder


def test_one_run_is_exported_beside_itself(copy: Path) -> None:
    result = run(str(copy), "--formats", "csv,html")
    assert result.exit_code == 0, result.output
    assert result.stdout == (
        f"{copy / 'export'}: runs.csv, summary.csv, per_budget.csv, per_path.csv, misses.csv, dropped.csv, "
        "samples.csv, columns.csv, report.html\n"
    )
    assert (copy / "export" / "report.html").read_text("utf-8").startswith("<!doctype html>")
    again = run(str(copy), "--formats", "csv,html")
    assert again.exit_code == 2
    assert "exists; results are not replaced. Use --overwrite or another --output-dir" in again.stderr
    assert run(str(copy), "--formats", "csv,html", "--overwrite").exit_code == 0


def test_several_runs_go_to_a_new_folder(copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(str(EXAMPLE), str(copy), "--formats", "markdown", "--json")
    assert result.exit_code == 0, result.output
    (written,) = json.loads(result.stdout)
    assert Path(written).parent.parent == Path("runs")
    assert "deferred" in Path(written).read_text("utf-8")


def test_it_needs_no_torch_and_no_transformers(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    arguments = ["export", str(EXAMPLE), "--output-dir", str(tmp_path / "out")]
    command = [sys.executable, "-c", WITHOUT_TORCH, *arguments]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=environment, cwd=tmp_path, check=False
    )
    assert result.returncode == 0, result.stderr
    names = {path.name for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert {"samples.parquet", "table.md", "table.tex", "report.html", "budgets.svg", "latency_by_tokens.png"} <= names
    blocked = [sys.executable, "-c", WITHOUT_TORCH, "bench", "--model", "qwen3-vl-debug", "--device", "cpu"]
    result = subprocess.run(
        blocked, capture_output=True, text=True, timeout=120, env=environment, cwd=tmp_path, check=False
    )
    assert "No module named 'torch'" in result.stderr


def test_two_runs_are_compared_with_their_deltas_and_verdict(copy: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    result = run("--compare", str(EXAMPLE), str(copy), "--output-dir", str(folder))
    assert result.exit_code == 0, result.output
    assert "Compared: packing (greedy against greedy-defer)" in result.stdout
    assert "same: the 95% interval of the mean lies wholly within ±2%" in " ".join(result.stdout.split())
    assert max(map(len, result.stdout.splitlines()[:-1])) <= 80
    assert {path.suffix for path in folder.iterdir()} == {".csv", ".parquet", ".md", ".tex", ".html"}
    as_json = run("--compare", str(EXAMPLE), str(copy), "--output-dir", str(folder), "--overwrite", "--json")
    found = json.loads(as_json.stdout)
    assert found["verdict"] == "same"
    assert found["differing"] == [{"name": "packing", "first": "greedy", "second": "greedy-defer"}]
    assert len(found["rows"]) == 6


def test_unlike_runs_end_with_2_and_the_difference_named(copy: Path, tmp_path: Path) -> None:
    record = json.loads((copy / "run.json").read_text(encoding="utf-8"))
    record["workload"]["fingerprint"] = "other"
    (copy / "run.json").write_text(json.dumps(record), encoding="utf-8")
    result = run("--compare", str(EXAMPLE), str(copy), "--output-dir", str(tmp_path / "out"))
    assert result.exit_code == 2
    assert "they differ in workload fingerprint (synthetic-320 against other)" in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "give one or more runs, or --compare with two of them"),
        ([str(EXAMPLE), "--compare", str(EXAMPLE), str(EXAMPLE)], "(and not both)"),
        ([str(EXAMPLE), "--across", "backend"], "only --compare compares runs"),
        ([str(EXAMPLE), "--formats", "pdf"], "give some of csv, parquet, markdown, latex, plots, html"),
        (["no-such-run"], "no-such-run"),
    ],
)
def test_bad_options_end_with_2_and_a_way_out(arguments: list[str], named: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert named in result.stderr
    assert "Traceback" not in result.stderr


def test_a_record_of_another_kind_and_one_of_a_newer_version_are_refused(copy: Path) -> None:
    record = json.loads((copy / "run.json").read_text(encoding="utf-8"))
    (copy / "run.json").write_text(json.dumps(record | {"schema_version": 9}), encoding="utf-8")
    newer = run(str(copy))
    assert newer.exit_code == 2
    assert "has schema_version 9; this vitgraph reads up to 1. Update vitgraph to open it" in newer.stderr
    (copy / "run.json").write_text(json.dumps({"schema_version": 1, "kind": "calibration"}), encoding="utf-8")
    other = run(str(copy))
    assert other.exit_code == 2
    assert "is a record of kind 'calibration'; export takes bench, compare-backends, " in other.stderr
    compared = run("--compare", str(copy), str(EXAMPLE))
    assert compared.exit_code == 2
    assert "is a record of kind 'calibration', and this takes runs of kind 'bench'" in compared.stderr


COMPILED = [str(ROOT / "results" / "compile-rows" / row) for row in ("qwen3_vl", "gemma4")]


def test_compile_rows_are_shown_again_and_go_into_one_table(tmp_path: Path) -> None:
    result = run(COMPILED[0], "--output-dir", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "graph+compile" in result.stdout
    assert (tmp_path / "backends.csv").read_text().count("\n") == 5
    table = run(*COMPILED, "--markdown")
    assert table.exit_code == 0, table.output
    lines = [line for line in table.stdout.splitlines() if line.startswith("|")]
    assert [line.count("|") for line in lines] == [13] * 4
    assert lines[3].startswith("| `gemma4` | gemma-4-26b-a4b | mixed-chat, 24 | 58.46 | 25.00 | 28.10 | 12.94 |")
    mixed = run(COMPILED[0], str(EXAMPLE), "--markdown")
    assert mixed.exit_code == 2
    assert "is a record of kind 'compile-rows'" in mixed.stderr


def test_runs_are_printed_as_one_markdown_table(copy: Path) -> None:
    result = run(str(EXAMPLE), str(copy), "--markdown")
    assert result.exit_code == 0, result.output
    assert [line.count("|") for line in result.stdout.splitlines() if line.startswith("|")] == [13] * 4
    assert not (copy / "export").exists()
    refused = run(str(EXAMPLE), "--markdown", "--formats", "csv")
    assert refused.exit_code == 2
    assert "--markdown prints one table of the runs and writes no files" in refused.stderr


@pytest.fixture
def comparison(tmp_path: Path) -> Path:
    folder = tmp_path / "compared"
    make_record().save(folder)
    return folder


def test_a_backend_comparison_is_rebuilt_from_its_record_alone(comparison: Path) -> None:
    result = run(str(comparison))
    assert result.exit_code == 0, result.output
    assert "vitgraph compare-backends: qwen3-vl-30b-a3b on NVIDIA H200" in result.stdout
    assert result.stdout.endswith(
        f"{comparison / 'export'}: backends.csv\n{comparison / 'export' / 'plots'}: backends.png, backends.svg\n"
    )
    again = run(str(comparison / "run.json"))
    assert again.exit_code == 2
    assert "backends.csv exists; results are not replaced" in again.stderr
    as_json = run(str(comparison), "--formats", "csv", "--overwrite", "--json")
    assert json.loads(as_json.stdout) == [str(comparison / "export" / "backends.csv")]


def test_a_profile_is_printed_again_and_its_plot_rebuilt(tmp_path: Path) -> None:
    record = {"schema_version": 1, "kind": "profile", **made_up_profile()}
    (tmp_path / "run.json").write_text(json.dumps(record), encoding="utf-8")
    result = run(str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "vitgraph profile: org/some-tower on NVIDIA H200" in result.stdout
    assert result.stdout.endswith(f"{tmp_path / 'export' / 'plots'}: profile.png, profile.svg\n")
    del record["modes"]
    (tmp_path / "run.json").write_text(json.dumps(record), encoding="utf-8")
    damaged = run(str(tmp_path), "--overwrite")
    assert damaged.exit_code == 2
    assert "is no whole record of kind 'profile' (KeyError('modes'))" in damaged.stderr


def test_a_verification_is_printed_again_and_writes_nothing(tmp_path: Path) -> None:
    saved = ROOT / "results" / "verify" / "every-row" / "run.json"
    shutil.copy(saved, tmp_path)
    result = run(str(tmp_path))
    assert result.exit_code == 0, result.output
    rows = json.loads(saved.read_text(encoding="utf-8"))["rows"]
    assert all(row["preset"] in result.stdout for row in rows)
    passed = sum(row["status"] == "ok" for row in rows)
    assert f"{passed} of {len(rows)} encoders verified" in result.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_records_that_are_not_of_bench_have_fewer_formats_and_go_alone(comparison: Path) -> None:
    page = run(str(comparison), "--formats", "csv,html")
    assert page.exit_code == 2
    assert "--formats has html, but" in page.stderr
    assert "which has csv and plots; the other formats are of bench runs" in page.stderr
    several = run(str(comparison), str(EXAMPLE))
    assert several.exit_code == 2
    assert "only bench runs go together, so give it alone" in several.stderr
    assert not (comparison / "export").exists()


def test_a_damaged_record_is_named(comparison: Path) -> None:
    record = json.loads((comparison / "run.json").read_text(encoding="utf-8"))
    del record["backends"][0]["modes"]
    (comparison / "run.json").write_text(json.dumps(record), encoding="utf-8")
    result = run(str(comparison))
    assert result.exit_code == 2, result.output
    assert "is no whole record of kind 'compare-backends' (KeyError('modes'))" in result.stderr
