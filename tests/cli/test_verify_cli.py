"""`vitgraph verify`: every row's small tower replays as it runs eagerly, and a fault ends with its exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vitgraph.cli import app
from vitgraph.graphs.manager import EncoderCudaGraphManager
from vitgraph.models.registry import ROWS, ModelRow

TOLERANCE = 1e-5


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_row_replays_as_it_runs_eagerly(row: ModelRow) -> None:
    result = CliRunner().invoke(
        app, ["verify", "--model", row.debug_preset, "--device", "cpu", "--calls", "60", "--json", "--quiet"]
    )
    assert result.exit_code == 0, result.stderr
    (found,) = json.loads(result.stdout)["rows"]
    assert (found["row"], found["status"], found["failed_checks"]) == (row.name, "ok", [])
    assert found["max_rel_l2"] <= TOLERANCE
    assert found["calls"] == 60


def test_a_compiled_tower_is_verified_compiled(fresh_compiler: None) -> None:
    arguments = ["verify", "--model", "internvl-debug", "--device", "cpu", "--calls", "5", "--compile", "--quiet"]
    found = CliRunner().invoke(app, [*arguments, "--json"])
    assert found.exit_code == 0, found.stderr
    (row,) = json.loads(found.stdout)["rows"]
    assert (row["status"], row["compiled_blocks"]) == ("ok", 3)
    assert row["max_rel_l2"] <= TOLERANCE


def test_a_fault_ends_with_4_and_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = EncoderCudaGraphManager.execute_planned
    monkeypatch.setattr(
        EncoderCudaGraphManager, "execute_planned", lambda self, *call: [rows * 1.01 for rows in real(self, *call)]
    )
    folder = tmp_path / "run"
    arguments = ["verify", "--model", "qwen3-vl-debug", "--device", "cpu", "--calls", "5", "--quiet"]
    result = CliRunner().invoke(app, [*arguments, "--output-dir", str(folder)])
    assert result.exit_code == 4
    assert "qwen3_vl: failed" in result.stderr
    (saved,) = json.loads((folder / "run.json").read_text())["rows"]
    assert saved["status"] == "failed"
    assert saved["max_rel_l2"] == pytest.approx(0.01, rel=0.01)


@pytest.mark.parametrize("arguments", [[], ["--all", "--model", "qwen3-vl-debug"]])
def test_it_asks_for_a_model_or_all(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, ["verify", "--device", "cpu", *arguments])
    assert result.exit_code == 2
    assert "--all" in result.stderr
