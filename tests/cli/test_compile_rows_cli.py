"""`vitgraph bench --compile-rows` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from vitgraph.cli import app

TINY = [
    "bench", "--compile-rows", "--model", "qwen3-vl-debug", "--load-format", "dummy", "--device", "cpu",
    "--num-prompts", "4", "--num-warmups", "1", "--rounds", "1", "--mm-processor-kwargs", '{"max_pixels": 160000}',
    "--token-budgets", "64,192", "--quiet",
]  # fmt: skip


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, [*TINY, *arguments])


@pytest.mark.slow
def test_four_rows_and_a_record(tmp_path: Path, traced_only: None) -> None:
    folder = tmp_path / "run"
    result = run("--output-dir", str(folder))
    assert result.exit_code == 0, result.output
    for name in ("eager ", "eager+compile", "graph ", "graph+compile", "Compilation"):
        assert name in result.stdout
    assert json.loads((folder / "run.json").read_text())["kind"] == "compile-rows"
    assert (folder / "backends.csv").stat().st_size > 0


def test_a_dry_run_shows_the_plan_and_measures_nothing(tmp_path: Path) -> None:
    result = run("--dry-run", "--output-dir", str(tmp_path / "run"))
    assert result.exit_code == 0, result.output
    assert "64, 192" in result.stdout
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "arguments",
    [["--baseline", "hf"], ["--fail-on-slower"], ["--tensor-parallel-size", "2", "--mm-encoder-tp-mode", "data"]],
)
def test_options_that_the_rows_do_not_have_are_refused(arguments: list[str], tmp_path: Path) -> None:
    result = run(*arguments, "--output-dir", str(tmp_path / "run"))
    assert result.exit_code == 2, result.output
    assert f"leave {arguments[0]} out" in result.stderr
