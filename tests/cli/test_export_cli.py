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
from made_up_reports import changed, comparison_record, profile_record
from saved_run_folders import on_a_cpu, scale, set_field, write_run
from typer.testing import CliRunner

from vitgraph.cli import app
from vitgraph.records.record import Record

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
from vitgraph.__main__ import main
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
    record["resolved"]["packing"] = record["settings"]["graph"]["packing"] = "greedy-defer"
    (folder / "run.json").write_text(json.dumps(record), encoding="utf-8")
    return folder


def test_one_run_is_exported_beside_itself(copy: Path) -> None:
    result = run(str(copy), "--formats", "csv,html")
    assert result.exit_code == 0, result.output
    assert "Graphs are faster: mean latency +22.9%" in result.stdout, "the tables are printed again"
    assert result.stdout.endswith(
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


@pytest.mark.usefixtures("drawn")
@pytest.mark.slow
def test_it_needs_no_torch_and_no_transformers(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    arguments = ["export", str(EXAMPLE), "--output-dir", str(tmp_path / "out")]
    command = [sys.executable, "-c", WITHOUT_TORCH, *arguments]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=environment, cwd=tmp_path, check=False
    )
    assert result.returncode == 0, result.stderr
    names = {path.name for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert {"samples.parquet", "table.md", "table.tex", "report.html", "budgets.svg", "latency_by_tokens.png"} <= names
    blocked = [sys.executable, "-c", WITHOUT_TORCH, "bench", "--model", "qwen3-vl-debug", "--device", "cpu"]
    result = subprocess.run(
        blocked, capture_output=True, text=True, timeout=300, env=environment, cwd=tmp_path, check=False
    )
    assert "No module named 'torch'" in result.stderr


@pytest.mark.slow
def test_two_runs_are_compared_with_their_deltas_and_verdict(copy: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    result = run("--compare", str(EXAMPLE), str(copy), "--output-dir", str(folder))
    assert result.exit_code == 0, result.output
    assert "Compared: packing (greedy against greedy-defer)" in result.stdout
    assert "the 95% interval of the mean lies wholly within ±2%" in " ".join(result.stdout.split())
    names = {path.name for path in folder.iterdir()}
    assert names == {"columns.csv", "plots", *(f"comparison.{end}" for end in ("csv", "parquet", "md", "tex", "html"))}
    as_json = run("--compare", str(EXAMPLE), str(copy), "--output-dir", str(folder), "--overwrite", "--json")
    found = json.loads(as_json.stdout)
    assert found["verdict"] == "same"
    assert found["differing"] == [{"name": "packing", "first": "greedy", "second": "greedy-defer"}]
    assert len(found["rows"]) == 6


@pytest.mark.parametrize(
    ("factor", "limit", "status", "said"),
    [
        (1.05, "2%", 5, "graph mode is 5.0% slower than the base"),
        (1.05, "8", 0, ""),
        (0.9, "2%", 0, ""),
        (1.01, "0.5%", 5, "1.0% slower than the base"),
    ],
)
def test_a_regression_ends_with_5(factor: float, limit: str, status: int, said: str, tmp_path: Path) -> None:
    new = write_run(tmp_path / "new", set_field("resolved", "packing", value="exact"), scale(graph=factor))
    gate = ("--fail-on-slower", limit, "--formats", "csv", "--output-dir", str(tmp_path / "out"))
    result = run("--compare", str(EXAMPLE), str(new), *gate)
    assert result.exit_code == status, result.output
    assert said in " ".join(result.stderr.split())
    assert "noise between processes is unknown" in " ".join(result.stdout.split())


@pytest.mark.slow
def test_a_regression_among_noisy_processes_is_not_claimed_and_said(tmp_path: Path) -> None:
    base = [str(write_run(tmp_path / f"a{f}", wall_ms=scale(eager=f, graph=f))) for f in (1.0, 1.06, 0.95)]
    new = [str(write_run(tmp_path / f"b{f}", wall_ms=scale(eager=f, graph=f))) for f in (1.04, 1.07, 1.0)]
    out = ("--formats", "csv", "--output-dir", str(tmp_path / "out"))
    result = run("--compare", ",".join(base), ",".join(new), "--fail-on-slower", "2%", *out)
    assert result.exit_code == 0, result.output
    assert "slower, which is not sure" in result.stderr and "3 and 3 runs" in " ".join(result.stdout.split())
    worse = [str(write_run(tmp_path / f"c{f}", wall_ms=scale(eager=f, graph=f))) for f in (1.3, 1.35, 1.28)]
    failed = run("--compare", ",".join(base), ",".join(worse), "--fail-on-slower", "2%", *out, "--overwrite")
    assert failed.exit_code == 5 and "slower than the base" in failed.stderr


def test_a_gate_does_not_pass_on_an_invalid_run(tmp_path: Path) -> None:
    new = write_run(tmp_path / "new", on_a_cpu)
    result = run("--compare", str(new), str(write_run(tmp_path / "b", on_a_cpu)), "--fail-on-slower", "2%",
                 "--output-dir", str(tmp_path / "out"))  # fmt: skip
    assert result.exit_code == 1 and "no verdict" in result.stderr


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
        ([str(EXAMPLE), "--fail-on-slower", "2%"], "only --compare compares runs"),
        ([str(EXAMPLE), "--same-margin", "1"], "--same-margin is 1, but only --compare compares runs"),
        (["--compare", str(EXAMPLE), str(EXAMPLE), "--same-margin", "0"], "--same-margin is 0.0; it must be a share"),
        (["--compare", str(EXAMPLE), str(EXAMPLE), "--fail-on-slower", "much"], "'much' is no share in percent"),
        ([str(EXAMPLE), "--formats", "pdf"], "give some of csv, parquet, markdown, latex, plots, html"),
        (["no-such-run"], "no-such-run"),
    ],
)
def test_bad_options_end_with_2_and_a_way_out(arguments: list[str], named: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert named in result.stderr
    assert "Traceback" not in result.stderr


def test_a_record_of_another_kind_and_one_of_another_format_are_refused(copy: Path) -> None:
    record = json.loads((copy / "run.json").read_text(encoding="utf-8"))
    (copy / "run.json").write_text(json.dumps(record | {"format": 9}), encoding="utf-8")
    newer = run(str(copy))
    assert newer.exit_code == 2
    assert "is of format 9, and this vitgraph reads 2" in newer.stderr
    (copy / "run.json").write_text(json.dumps({"format": 2, "kind": "recipe"}), encoding="utf-8")
    other = run(str(copy))
    assert other.exit_code == 2
    assert "is of kind 'recipe'; what is read here is bench, compare-backends, " in other.stderr
    compared = run("--compare", str(copy), str(EXAMPLE))
    assert compared.exit_code == 2
    assert "kind 'recipe'" in compared.stderr


def test_compile_rows_are_shown_again_and_go_into_one_table(tmp_path: Path) -> None:
    rows = changed(comparison_record(), {"kind": "compile-rows"})
    rows = changed(rows, {"result.candidates.0.name": "plain", "result.candidates.1.name": "compiled"})
    folders = [str(saved(tmp_path / name, rows)) for name in ("one", "two")]
    result = run(folders[0], "--output-dir", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    assert "graph+compile" in result.stdout
    assert (tmp_path / "out" / "backends.csv").exists()
    table = run(*folders, "--markdown")
    assert table.exit_code == 0, table.output
    lines = [line for line in table.stdout.splitlines() if line.startswith("|")]
    assert len(lines) == 4 and "| 5.13 | 5.42 | 4.52 | 4.36 |" in lines[2]
    mixed = run(folders[0], str(EXAMPLE), "--markdown")
    assert mixed.exit_code == 2
    assert "is a record of kind 'compile-rows'" in mixed.stderr


def test_runs_are_printed_as_one_markdown_table(copy: Path) -> None:
    result = run(str(EXAMPLE), str(copy), "--markdown")
    assert result.exit_code == 0, result.output
    counts = [line.count("|") for line in result.stdout.splitlines() if line.startswith("|")]
    assert len(counts) == 4 and len(set(counts)) == 1
    assert not (copy / "export").exists()
    refused = run(str(EXAMPLE), "--markdown", "--formats", "csv")
    assert refused.exit_code == 2
    assert "--markdown prints one table of the runs and writes no files" in refused.stderr


def saved(folder: Path, record: Record) -> Path:
    folder.mkdir()
    (folder / "run.json").write_text(record.model_dump_json(), encoding="utf-8")
    return folder


@pytest.fixture
def comparison(tmp_path: Path) -> Path:
    return saved(tmp_path / "compared", comparison_record())


@pytest.mark.slow
@pytest.mark.usefixtures("drawn")
def test_a_backend_comparison_is_rebuilt_in_every_format_from_its_record_alone(comparison: Path) -> None:
    result = run(str(comparison))
    assert result.exit_code == 0, result.output
    assert "vitgraph compare-backends: qwen3-vl-30b-a3b on NVIDIA H200" in result.stdout
    names = {path.name for path in (comparison / "export").rglob("*") if path.is_file()}
    assert {"backends.csv", "backends.parquet", "table.md", "table.tex", "report.html", "backends.png"} <= names
    again = run(str(comparison / "run.json"))
    assert again.exit_code == 2
    assert "backends.csv exists; results are not replaced" in again.stderr
    as_json = run(str(comparison), "--formats", "csv", "--overwrite", "--json")
    assert [Path(path).name for path in json.loads(as_json.stdout)] == ["backends.csv", "columns.csv"]


@pytest.mark.usefixtures("drawn")
def test_a_profile_is_printed_again_and_its_plot_rebuilt(tmp_path: Path) -> None:
    folder = saved(tmp_path / "profiled", profile_record())
    result = run(str(folder), "--formats", "plots")
    assert result.exit_code == 0, result.output
    assert "vitgraph profile: org/some-tower on NVIDIA H200" in result.stdout
    assert result.stdout.endswith(f"{folder / 'export' / 'plots'}: profile.png, profile.svg\n")


def test_records_that_are_not_of_bench_go_alone(comparison: Path) -> None:
    several = run(str(comparison), str(EXAMPLE))
    assert several.exit_code == 2
    assert "only bench runs go together" in several.stderr
    assert not (comparison / "export").exists()


def test_a_damaged_record_is_named(comparison: Path) -> None:
    data = json.loads((comparison / "run.json").read_text(encoding="utf-8"))
    del data["result"]["candidates"][0]["eager"]
    (comparison / "run.json").write_text(json.dumps(data), encoding="utf-8")
    result = run(str(comparison))
    assert result.exit_code == 2, result.output
    assert "run.json: result.candidates.0.eager" in result.stderr
