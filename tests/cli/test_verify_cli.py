"""`vitgraph verify`: every row's small tower replays as it runs eagerly, and a fault ends with its exit status."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from vitgraph.cli import app
from vitgraph.errors import NothingReplayedError
from vitgraph.graphs.manager import EncoderCudaGraphManager
from vitgraph.models.registry import ROWS, ModelRow
from vitgraph.records import store
from vitgraph.records.record import VerifyRecord
from vitgraph.records.store import read_record
from vitgraph.verify import models

TOLERANCE = 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_row_replays_as_it_runs_eagerly(row: ModelRow) -> None:
    result = CliRunner().invoke(
        app, ["verify", "--model", row.debug_preset, "--device", "cpu", "--calls", "12", "--json", "--quiet"]
    )
    assert result.exit_code == 0, result.stderr
    (found,) = json.loads(result.stdout)["result"]["models"]
    assert (found["row"], found["status"]) == (row.name, "ok")
    assert not [check for check in found["checks"] if check["status"] == "failed"]
    assert found["max_rel_l2"] <= TOLERANCE
    assert found["calls"] == 12


@pytest.mark.slow
def test_a_compiled_tower_is_verified_compiled(fresh_compiler: None) -> None:
    arguments = ["verify", "--model", "internvl-debug", "--device", "cpu", "--calls", "5", "--compile", "--quiet"]
    found = CliRunner().invoke(app, [*arguments, "--json"])
    assert found.exit_code == 0, found.stderr
    (row,) = json.loads(found.stdout)["result"]["models"]
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
    record = read_record(folder)
    assert isinstance(record, VerifyRecord) and record.status == "complete"
    (saved,) = record.result.models
    assert saved.status == "failed"
    assert saved.max_rel_l2 == pytest.approx(0.01, rel=0.01)


def test_a_stop_between_models_leaves_what_was_verified_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, seen = models.verify_row, []

    def stop_in_the_second(encoder: Any, **settings: Any) -> Any:
        seen.append(encoder)
        if len(seen) == 2:
            raise KeyboardInterrupt
        return real(encoder, **settings)

    monkeypatch.setattr(models, "verify_row", stop_in_the_second)
    names = "qwen3-vl-debug,internvl-debug"
    arguments = ["verify", "--model", names, "--device", "cpu", "--calls", "2", "--token-budgets", "64"]
    result = CliRunner().invoke(app, [*arguments, "--output-dir", str(tmp_path / "run"), "--json"])
    assert result.exit_code == 130
    data = json.loads(result.stdout)
    assert (data["status"], data["status_reason"]) == ("interrupted", "stopped by the user after 1 of 2 models")
    assert [row["preset"] for row in data["result"]["models"]] == ["qwen3-vl-debug"]
    saved = read_record(tmp_path / "run")
    assert saved.status == "interrupted"
    assert "verifying" in result.stderr and "2/2" not in result.stderr
    monkeypatch.setattr(models, "verify_row", lambda *arguments, **settings: (_ for _ in ()).throw(KeyboardInterrupt))
    shown = CliRunner().invoke(app, [*arguments, "--quiet"])
    assert shown.exit_code == 130
    assert "Interrupted: stopped by the user after 0 of 2 models" in shown.stdout


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--token-budgets", "48,96", "--max-vision-items-per-batch", "49"], "49"),
        (["--dtype", "int3"], "--dtype is 'int3'"),
        (["--mm-encoder-attn-backend", "FLASH_ATTN"], "FLASH_ATTN cannot run on cpu"),
    ],
)
def test_what_cannot_be_verified_is_refused_before_anything_is_loaded(options: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["verify", "--model", "qwen3-vl-debug", "--device", "cpu", "--quiet", *options])
    assert result.exit_code == 2
    assert said in result.stderr and result.stderr.count("\n") == 1


def test_a_model_of_which_nothing_is_replayed_ends_with_3(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: EncoderCudaGraphManager, *arguments: Any) -> None:
        raise NothingReplayedError("not one graph fits in memory")

    monkeypatch.setattr(EncoderCudaGraphManager, "capture", refuse)
    result = CliRunner().invoke(app, ["verify", "--model", "qwen3-vl-debug", "--device", "cpu", "--quiet"])
    assert result.exit_code == 3
    assert "not one graph was replayed of qwen3-vl-debug" in result.stderr


@pytest.mark.parametrize("arguments", [[], ["--all", "--model", "qwen3-vl-debug"]])
def test_it_asks_for_a_model_or_all(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, ["verify", "--device", "cpu", *arguments])
    assert result.exit_code == 2
    assert "--all" in result.stderr


@pytest.mark.slow
def test_what_was_verified_is_shown_where_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store, "write_atomically", full)
    arguments = ["verify", "--model", "qwen3-vl-debug", "--device", "cpu", "--calls", "1", "--token-budgets", "64,128"]
    result = CliRunner().invoke(app, [*arguments, "--quiet", "--json", "--output-dir", str(tmp_path / "run")])
    assert result.exit_code == 1
    assert "No space left on device" in result.stderr and "Saved: nothing" in result.stderr
    assert json.loads(result.stdout)["result"]["models"][0]["status"] == "ok"
    assert not (tmp_path / "run").exists()
