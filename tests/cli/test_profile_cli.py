"""`vitgraph profile` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from vitgraph.cli import app

TINY = ["profile", "--device", "cpu", "--repeats", "1", "--quiet"]


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, [*TINY, *arguments])


@pytest.mark.slow
def test_a_profile_leaves_a_record_a_plot_and_traces(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    result = run("--items", "2*96x64", "--chrome-trace", "--output-dir", str(folder))
    assert result.exit_code == 0, result.output
    assert "2 × 96×64" in result.stdout
    assert "matrix products" in result.stdout
    record = json.loads((folder / "run.json").read_text())
    for name in ("plots/profile.png", "plots/profile.svg", *record["result"]["trace_files"]):
        assert (folder / name).stat().st_size > 0
    assert record["result"]["trace_files"] == ["trace-eager.json", "trace-graph.json"]
    assert json.loads((folder / "trace-graph.json").read_text())["traceEvents"]


def test_torchs_profiler_tells_nothing_of_its_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    result = run("--items", "96x64", "--output-dir", str(tmp_path / "run"))
    assert result.exit_code == 0, result.output
    said = capfd.readouterr()
    assert "USDT" not in said.err + said.out


@pytest.mark.slow
def test_a_call_can_be_drawn_as_random_mm_draws_it(tmp_path: Path) -> None:
    result = run(
        "--random-mm-bucket-config", '{"(64,96,1)": 1.0}', "--random-mm-base-items-per-request", "3", "--json",
        "--output-dir", str(tmp_path / "run"),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["result"]["call"]["items"] == [[96, 64, 1]] * 3


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--items", "336"], "20*336x336"),
        (["--items", "64x64", "--random-mm-bucket-config", '{"(64,96,1)": 1.0}'], "one of them"),
        (["--items", "64x64", "--repeats", "0"], "--repeats is 0"),
        (["--model", "gpt-17"], "`vitgraph models` lists the presets"),
        (["--items", "64x64,2x4000"], "does not take every item"),
    ],
)
def test_bad_options_end_with_2_and_a_way_out(arguments: list[str], named: str, tmp_path: Path) -> None:
    result = run(*arguments, "--output-dir", str(tmp_path / "run"))
    assert result.exit_code == 2, result.output
    assert named in result.stderr
    assert not (tmp_path / "run").exists()


def test_a_record_is_not_replaced_unless_asked(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    result = run("--items", "64x64", "--output-dir", str(tmp_path))
    assert result.exit_code == 2
    assert "--overwrite" in result.stderr
