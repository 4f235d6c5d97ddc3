"""Several ranks as a user starts them: options, a run that vitgraph launches, and a rank killed under torchrun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rank_processes import rank_pids
from saved_run_folders import read_bench
from typer.testing import CliRunner

from vitgraph.cli import app
from vitgraph.commands import on_ranks
from vitgraph.errors import EXIT_INTERRUPTED
from vitgraph.ranks.launch import RanksEnded
from vitgraph.records.sample_table import read_samples
from vitgraph.records.store import SAMPLES_FILE

DATA = ["--mm-encoder-tp-mode", "data", "--tensor-parallel-size"]
TINY = [
    "bench", "--model", "qwen3-vl-debug", "--load-format", "dummy", "--device", "cpu", "--num-warmups", "1",
    "--rounds", "1", "--dataset-name", "random-mm", "--random-mm-base-items-per-request", "3",
    "--random-mm-bucket-config", '{"(96,64,1)": 1.0}', "--mm-processor-kwargs", '{"min_pixels": 1024}',
    "--token-budgets", "16,32",
]  # fmt: skip
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--tensor-parallel-size", "2"], "add --mm-encoder-tp-mode data"),
        (["--tensor-parallel-size", "2", "--mm-encoder-tp-mode", "weights"], "is not supported"),
        (["--mm-encoder-tp-mode", "both"], "known: data, weights"),
        ([*DATA, "0"], "--tensor-parallel-size is 0"),
        ([*DATA, "2", "--dp-assignment", "lottery"], "known: size, cost"),
        ([*DATA, "2", "--dp-assignment", "cost"], "vitgraph calibrate --model qwen3-vl-debug"),
        ([*DATA, "2", "--rank-timeout", "0"], "--rank-timeout is 0"),
    ],
)
def test_options_that_contradict_are_refused(arguments: list[str], named: str) -> None:
    result = run(*TINY, *arguments, "--dry-run")
    assert result.exit_code == 2, result.output
    assert named in result.stderr


def test_one_gpu_for_all_ranks_is_refused() -> None:
    result = run(*TINY, *DATA, "2", "--device", "cuda:1")
    assert result.exit_code == 2
    assert "several ranks need a GPU each" in result.stderr


def test_torchrun_without_the_option_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    for name, value in {
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29400",
    }.items():
        monkeypatch.setenv(name, value)
    result = run(*TINY)
    assert result.exit_code == 2
    assert "pass --mm-encoder-tp-mode data --tensor-parallel-size 4" in result.stderr


def test_the_published_command_plans_one_replay_a_rank() -> None:
    config = (
        '{"cudagraph_mm_encoder": true, "encoder_cudagraph_token_budgets": [512, 1024, 1536, 2048, 2560, 3072, 3584, '
        '4096, 4864], "encoder_cudagraph_max_vision_items_per_batch": 8}'
    )
    result = run(
        "bench", "--model", "Qwen/Qwen3-VL-32B-Instruct", "--dataset-name", "random-mm",
        "--random-mm-base-items-per-request", "20", "--random-mm-num-mm-items-range-ratio", "0.0",
        "--random-mm-bucket-config", '{"(336,336,1)": 1.0}', "--num-prompts", "1000", "--num-warmups", "200",
        "--max-model-len", "8192", "--seed", "42", "--load-format", "dummy",
        "--compilation-config", config, *DATA, "4", "--dry-run", "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    plan = json.loads(result.stdout)
    assert plan["settings"]["parallel"]["ranks"] == 4
    assert (plan["expected"]["hits"], plan["expected"]["replays"]) == (20000, 4000)
    assert [row["token_budget"] for row in plan["expected"]["per_budget"]] == [512]
    assert plan["expected"]["waste"] == pytest.approx(12 / 512)
    assert plan["sharing"] == {"ranks": 4, "calls_with_idle_ranks": 0, "input_imbalance": 1.0, "by_cost": None}


def test_a_dry_run_says_what_sharing_by_cost_changes() -> None:
    result = run(
        "bench", "--model", "qwen3-vl-30b-a3b", "--load-format", "dummy", "--dataset-path", "mixed-chat",
        "--num-prompts", "50", "--requests-per-call", "5", *DATA, "2", "--dp-assignment", "cost", "--dry-run", "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    sharing = json.loads(result.stdout)["sharing"]
    by_cost = sharing["by_cost"]
    assert by_cost["calls"] == 10
    assert 0 < by_cost["predicted_slowest_ms"]["cost"] <= 1.05 * by_cost["predicted_slowest_ms"]["size"]
    assert "sharing by cost instead of size changes" in " ".join(json.loads(result.stdout)["warnings"])


def test_a_launcher_says_that_its_run_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_ranks, "launch_ranks", lambda *_: RanksEnded(EXIT_INTERRUPTED))
    result = run(*TINY, *DATA, "2", "--output-dir", str(tmp_path / "run"))
    assert result.exit_code == EXIT_INTERRUPTED
    assert result.stderr.splitlines()[-1] == "stopped"


@pytest.mark.slow
def test_vitgraph_starts_the_ranks_and_rank_0_reports(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = [*TINY, *DATA, "2", "--num-prompts", "6", "--json", "--quiet", "--output-dir", str(folder)]
    result = subprocess.run(
        [sys.executable, "-m", "vitgraph", *command], capture_output=True, text=True, env=ENVIRONMENT, timeout=300
    )
    assert result.returncode == 0, result.stderr
    printed = json.loads(result.stdout)
    record = read_bench(folder)
    assert printed["result"]["graph"]["items"] == record.result.graph.items == 18
    assert record.environment is not None and len(record.environment.ranks) == 2
    table = read_samples(folder / SAMPLES_FILE)
    assert len(table) == 3 * len(table.calls)
    assert (folder / "summary.csv").exists()
    again = run(*command)
    assert again.exit_code == 2
    assert "--overwrite" in again.stderr


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").exists(), reason="finds the ranks in /proc")
def test_a_killed_rank_ends_the_run_with_its_name_and_what_was_measured(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*TINY, *DATA, "2", "--num-prompts", "5000", "--quiet", "--output-dir", str(folder)]
    process = subprocess.Popen(
        [*torchrun, "-m", "vitgraph", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    try:
        samples = folder / "samples.csv"
        deadline = time.monotonic() + 240
        while not samples.exists() or samples.read_text().count("\n") < 20:
            assert process.poll() is None and time.monotonic() < deadline, process.communicate(timeout=5)
            time.sleep(0.05)
        os.kill(rank_pids(process.pid)["1"], signal.SIGKILL)
        _, errors = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode != 0
    assert "error: rank 1 (" in errors and f"What was measured is saved in {folder}" in errors
    record, reason = read_bench(folder), str(read_bench(folder).status_reason)
    assert record.status == "error"
    assert reason.startswith("rank 1 (") and "killed, or hanging" in reason
    # How many calls there were by then depends on the machine.
    assert 0 < record.result.latency["graph"].calls < 5000


@pytest.mark.slow
def test_backends_are_compared_under_torchrun(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = [*TINY[1:], *DATA, "2", "--num-prompts", "6", "--backends", "TORCH_SDPA", "--quiet"]
    command = [*torchrun, "-m", "vitgraph", "compare-backends", *options, "--output-dir", str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=300)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("vitgraph compare-backends:") == 1
    assert "By rank" in result.stdout
    assert {"run.json", "samples.csv"} <= {path.name for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(["--micro"], "leave --tensor-parallel-size out"), (["--tensor-parallel-size", "3", "--isolate"], "--isolate")],
)
def test_comparisons_that_ranks_cannot_do_are_refused(
    arguments: list[str], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = run("compare-backends", *TINY[1:], *DATA, "2", *arguments)
    assert result.exit_code == 2
    assert named in result.stderr


@pytest.mark.slow
def test_plan_shows_the_ranks_and_what_sharing_by_cost_changes() -> None:
    """The shipped calibration: a long video and a large image of as many pixel rows do not cost the same."""
    options = ["--model", "qwen3-vl-30b-a3b", "--items", "2048x2048,512x512x32,512x512,512x512", *DATA, "2"]
    by_cost = run("plan", *options, "--dp-assignment", "cost")
    assert by_cost.exit_code == 0, by_cost.stderr
    text = " ".join(by_cost.stdout.split())
    assert "rank 0: items" in text and "rank 1: items" in text
    assert "size, as vLLM" in text and "slowest rank gains" in text
    assert "No predicted times" not in text and text.count("Predicted ms") == 2
    found = json.loads(run("plan", *options, "--dp-assignment", "cost", "--json").stdout)
    assert sorted(item for rank in found["ranks"] for item in rank["items"]) == [0, 1, 2, 3]
    for rank in found["ranks"]:
        assert sorted(n for batch in rank["explanation"]["batches"] for n in batch["items"]) == rank["items"]
        assert [item["index"] for item in rank["explanation"]["items"]] == rank["items"]
    predicted = found["sharing"]["by_cost"]["predicted_slowest_ms"]
    assert 0 < predicted["cost"] <= predicted["size"]
    by_size = json.loads(run("plan", *options, "--json").stdout)
    assert by_size["sharing"]["by_cost"] is None


@pytest.mark.slow
def test_plan_of_a_workload_counts_each_rank() -> None:
    options = ["--model", "qwen3-vl-30b-a3b", "--dataset-path", "mixed-chat", "--num-prompts", "20", *DATA, "2"]
    result = run("plan", *options, "--requests-per-call", "4", "--dp-assignment", "cost", "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    counts = [rank["explanation"]["counts"] for rank in found["ranks"]]
    assert sum(count["items"] for count in counts) >= 20
    assert found["sharing"]["by_cost"]["calls"] == 5


def test_libraries_of_a_rank_do_not_write_into_what_it_prints() -> None:
    program = (
        "import os, sys; from vitgraph.commands.process import keep_stdout; keep_stdout(); "
        "os.write(1, b'NCCL version'); print('{}'); sys.stdout.flush(); os._exit(0)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (result.stdout, result.stderr) == ("{}\n", "NCCL version")
