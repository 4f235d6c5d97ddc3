"""`vitgraph compare-backends` as a user runs it: table, record, exit statuses and the texts of errors."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_run_folders import read_compare
from typer.testing import CliRunner

from vitgraph.attention import registry
from vitgraph.attention.base import TorchSdpaBackend
from vitgraph.cli import app
from vitgraph.measure.experiment import Experiment
from vitgraph.records.sample_table import read_samples

TINY = [
    "compare-backends", "--model", "qwen3-vl-debug", "--load-format", "dummy", "--device", "cpu", "--num-prompts", "4",
    "--num-warmups", "1", "--mm-processor-kwargs", '{"min_pixels": 1024, "max_pixels": 25000}',
    "--token-budgets", "16,32", "--quiet",
]  # fmt: skip


class Second(TorchSdpaBackend):
    name = "SECOND"


class Wrong(TorchSdpaBackend):
    name = "WRONG"

    def varlen(self, *arguments: Any) -> torch.Tensor:
        return super().varlen(*arguments) * 1.5


def run(*arguments: str) -> Any:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, [*TINY, *arguments])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    for fake in (Second, Wrong):
        monkeypatch.setitem(registry.BACKENDS, fake.name, fake)


def test_every_registered_backend_has_a_row_with_figures_or_a_reason(folder: Path) -> None:
    result = run("--output-dir", str(folder))
    assert result.exit_code == 0, result.output
    assert "no speed-up is claimed here" in result.stdout
    found = read_compare(folder).result
    assert [row.name for row in found.candidates] == list(registry.BACKENDS)
    assert [row.name for row in found.candidates if row.status == "ok"] == ["TORCH_SDPA"]
    for row in found.candidates:
        assert row.name in result.stdout
        assert row.reason is None or row.reason.split(",")[0] in result.stdout
    latency = found.candidates[-1].graph.latency
    assert latency is not None and latency.calls == 4
    assert found.comparison.mode == "cpu-replay"
    with (folder / "backends.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 2 * len(registry.BACKENDS)
    for name in ("samples.csv", "plots/backends.png", "plots/backends.svg"):
        assert (folder / name).stat().st_size > 0


def test_json_prints_one_object_with_the_record(folder: Path, fakes: None) -> None:
    result = run("--output-dir", str(folder), "--json", "--backends", "SECOND,TORCH_SDPA,WRONG")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert [row["status"] for row in data["result"]["candidates"]] == ["ok", "ok", "incorrect"]
    assert data["settings"]["compare"] == {"backends": ["SECOND", "TORCH_SDPA", "WRONG"], "isolate": False}
    assert data["result"]["candidates"][2]["eager"]["latency"] is None
    assert {entry["name"] for entry in data["result"]["comparison"]["standings"]} == {"SECOND", "TORCH_SDPA"}


@pytest.mark.slow
def test_each_backend_runs_in_a_process_of_its_own(folder: Path) -> None:
    result = run("--isolate", "--backends", "TORCH_SDPA", "--seed", "3", "--output-dir", str(folder))
    assert result.exit_code == 0, result.output
    assert "each backend in a process of its own" in result.stdout
    record, part = read_compare(folder), read_compare(folder / "parts" / "TORCH_SDPA")
    assert record.result.comparison.isolated and not part.result.comparison.isolated
    assert record.workload == part.workload
    assert part.settings["model"]["seed"] == 3  # type: ignore[call-overload,index]
    whole, alone = (read_samples(place / "samples.csv") for place in (folder, folder / "parts" / "TORCH_SDPA"))
    assert len(whole) == len(alone) > 0
    latency = record.result.candidates[0].graph.latency
    assert latency is not None and latency.calls == 4


def test_attention_alone_has_its_own_record_and_table(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitgraph.measure import micro

    monkeypatch.setattr(micro, "CPU_SEGMENT_LENGTHS", (16,))
    result = run("--micro", "--backends", "TORCH_SDPA,FLASH_ATTN", "--output-dir", str(folder))
    assert result.exit_code == 0, result.output
    assert "4 heads of 24 · float32" in result.stdout
    assert "FLASH_ATTN unsupported: FlashAttention needs a CUDA device" in result.stdout
    record = json.loads((folder / "run.json").read_text())
    assert (record["kind"], record["status"]) == ("compare-backends-micro", "complete")
    with (folder / "micro.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(record["result"]["rows"]) == 2 + 5 + 1
    again = run("--micro", "--backends", "FLASH_ATTN", "--output-dir", str(folder), "--overwrite")
    assert again.exit_code == 2
    assert "no backend could be timed (FLASH_ATTN" in again.stderr


def test_a_dry_run_shows_plan_and_availability_and_measures_nothing(folder: Path) -> None:
    result = run("--dry-run", "--output-dir", str(folder))
    assert result.exit_code == 0, result.output
    assert "\nExpected\nItems" in result.stdout
    assert "FLASH_ATTN     unavailable: FlashAttention needs a CUDA device" in result.stdout
    assert not folder.exists()


def test_a_config_file_sets_options_of_the_comparison(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "compare.yaml"
    file.write_text("backends: TORCH_SDPA\nrequests_per_call: 2\n", encoding="utf-8")
    result = run("--config", str(file), "--output-dir", str(folder), "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert [row["name"] for row in data["result"]["candidates"]] == ["TORCH_SDPA"]
    assert data["workload"]["calls"] == 2


def test_nothing_right_is_a_failure_that_still_shows_its_table(folder: Path, fakes: None) -> None:
    result = run("--backends", "WRONG,FLASH_ATTN", "--output-dir", str(folder))
    assert result.exit_code == 4
    assert "no backend's outputs are right" in result.stderr
    assert "incorrect" in result.stdout
    assert "unavailable" in result.stdout
    assert read_compare(folder).result.recommendation.name is None


def test_nothing_available_is_a_usage_error_with_the_reasons(folder: Path) -> None:
    result = run("--backends", "FLASH_ATTN", "--output-dir", str(folder))
    assert result.exit_code == 2
    assert "FLASH_ATTN: FlashAttention needs a CUDA device" in result.stderr


def test_a_stop_by_the_user_keeps_what_was_measured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Experiment._time_call

    def stop_at_the_third(self: Any, call: Any, *rest: Any) -> Any:
        if call.index == 2:
            raise KeyboardInterrupt
        return real(self, call, *rest)

    monkeypatch.setattr(Experiment, "_time_call", stop_at_the_third)
    result = run("--backends", "TORCH_SDPA", "--output-dir", str(folder))
    assert result.exit_code == 130
    assert "Interrupted: stopped by the user while measuring" in result.stdout
    latency = read_compare(folder).result.candidates[0].graph.latency
    assert latency is not None and latency.calls == 2
    assert (folder / "backends.csv").exists()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--backends", "FLASHY"], "known: FLASH_ATTN"),
        (["--backends", "TORCH_SDPA,TORCH_SDPA"], "TORCH_SDPA twice"),
        (["--micro", "--isolate"], "leave --isolate out"),
        (["--micro", "--dry-run"], "leave --dry-run out"),
        (["--rounds", "0"], "--rounds is 0"),
        (["--load-format", "magic"], "--load-format is 'magic'"),
        (["--device", "cuda:7"], "cuda:7"),
    ],
)
def test_bad_options_end_with_2_and_a_way_out(arguments: list[str], named: str, folder: Path) -> None:
    result = run(*arguments, "--output-dir", str(folder))
    assert result.exit_code == 2, result.output
    assert named in result.stderr
    assert "Traceback" not in result.stderr
