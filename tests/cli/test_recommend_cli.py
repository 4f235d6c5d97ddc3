"""`vitgraph recommend`: one page from a shipped profile without a GPU, and from everything measured with one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import vitgraph
from vitgraph.cli import app
from vitgraph.commands import tuning
from vitgraph.predict import targets
from vitgraph.predict.profile import load_profile
from vitgraph.records.record import TuneRecord, VerifyRecord
from vitgraph.report.views.tune import advice_of

SMALL = [
    "recommend", "--model", "qwen3-vl-debug", "--load-format", "dummy", "--device", "cpu", "--num-prompts", "10",
    "--dataset-name", "random-mm", "--random-mm-bucket-config", '{"(128,128,1)": 0.5, "(128,192,1)": 0.5}',
    "--requests-per-call", "1", "--max-num-batched-tokens", "96", "--calibration-time-limit", "1", "--time-limit", "1",
    "--verify-calls", "4", "--check-calls", "3", "--search-share", "1", "--quiet",
]  # fmt: skip


def run(*words: str) -> Any:
    return CliRunner().invoke(app, list(words))


def shipped(folder: Path, *more: str) -> Any:
    words = ("recommend", "--model", "qwen3-vl-30b-a3b", "--num-prompts", "120", "--quiet", "--requests-per-call", "1")
    return run(*words, "--output-dir", str(folder), *more)


def test_without_a_gpu_the_page_names_the_profile_and_claims_no_measurement(tmp_path: Path) -> None:
    result = shipped(tmp_path / "a")
    assert result.exit_code == 0, result.stderr
    page = " ".join(result.stdout.split())
    assert "Use encoder graphs" in page and "--compilation-config '{" in page and "vllm serve" in page
    assert "nothing: there is no GPU" in page and "comes with vitgraph" in page and "NVIDIA H200" in page
    assert "Measured, " not in page
    assert vitgraph.read_record(tmp_path / "a").kind == "tune-budgets"
    assert (tmp_path / "a" / "recommendation.md").exists() and (tmp_path / "a" / "recommendation.html").exists()
    data = json.loads(shipped(tmp_path / "b", "--json").stdout)
    assert data["recommendation"]["advice"] == "use_graphs" and data["recommendation"]["is_measured"] is False
    assert data["verify"] is None and json.loads(data["recommendation"]["compilation_config"])["cudagraph_mm_encoder"]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("recommended") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "is_on_gpu", lambda device: True)
        # A graph of 4,864 tokens takes a CPU longer than all the rest.
        patch.setattr(targets, "SEED_BUDGETS", (64, 96))
        return folder, run(*SMALL, "--output-dir", str(folder))


@pytest.mark.slow
def test_with_a_device_it_calibrates_measures_and_verifies(measured: tuple[Path, Any]) -> None:
    folder, result = measured
    assert result.exit_code == 0, result.output
    page = " ".join(result.stdout.split())
    assert "Measured, tuned" in page and "Replay against eager ok" in page
    assert load_profile(folder / "calibration.json").is_cpu
    record, verified = vitgraph.read_record(folder), vitgraph.read_record(folder / "verify")
    assert isinstance(record, TuneRecord) and isinstance(verified, VerifyRecord)
    assert record.result.measured is not None and record.result.measured.calls
    assert [model.status for model in verified.result.models] == ["ok"]
    assert record.result.target == "vllm"


@pytest.mark.slow
def test_what_is_measured_is_the_headline(measured: tuple[Path, Any]) -> None:
    record = vitgraph.read_record(measured[0])
    assert isinstance(record, TuneRecord)
    assert "measured" in record.result.verdict_text and "Predicted: " in record.result.verdict_text
    assert advice_of(record, None) == record.result.verdict


@pytest.mark.slow
def test_a_replay_that_differs_outweighs_everything(measured: tuple[Path, Any]) -> None:
    folder, _ = measured
    data = json.loads((folder / "verify" / "run.json").read_text())
    data["result"]["models"][0]["status"] = "failed"
    record = vitgraph.read_record(folder)
    assert isinstance(record, TuneRecord)
    assert advice_of(record, VerifyRecord.model_validate(data)) == "incorrect"


def test_a_dry_run_says_what_would_be_done_and_leaves_nothing(tmp_path: Path) -> None:
    result = shipped(tmp_path / "dry", "--dry-run")
    assert result.exit_code == 0 and "would tune and predict for 120 calls" in result.stdout
    assert not (tmp_path / "dry").exists()
    refused = run("recommend", "--model", "qwen3-vl-debug", "--dry-run")
    assert refused.exit_code == 2 and "vitgraph calibrate" in refused.stderr
