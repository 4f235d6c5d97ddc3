"""Data parallel over NCCL on two GPUs: outputs, unequal and empty shares, and the end of a run that loses a rank."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from rank_processes import rank_pids
from saved_run_folders import read_bench

pytestmark = [
    pytest.mark.requires_cuda,
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
ROOT = str(Path(__file__).parents[2])
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))}
PROGRAM = [sys.executable, "-m", "vitgraph"]
TWO_RANKS = ["--mm-encoder-tp-mode", "data", "--tensor-parallel-size", "2", "--quiet"]
LONG_BENCH = [
    "bench", "--model", "qwen3-vl-debug", "--load-format", "dummy", "--dataset-name", "random-mm", "--num-prompts",
    "100000", "--num-warmups", "2", "--rounds", "1", "--random-mm-base-items-per-request", "3",
    "--random-mm-bucket-config", '{"(224,224,1)": 1.0}', "--token-budgets", "64,128",
]  # fmt: skip


@pytest.mark.parametrize("model", ["qwen3-vl-debug", "deepseek-ocr-debug", "minicpm-v-2.6-debug", "ernie4.5-vl-debug"])
def test_two_gpus_give_what_one_gives(model: str) -> None:
    """The check `data_parallel` has calls of no item, of fewer items than ranks, and of unequal shares."""
    command = [*PROGRAM, "verify", "--model", model, "--calls", "10", "--json", *TWO_RANKS]
    result = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=300)
    assert result.returncode == 0, result.stderr
    (row,) = json.loads(result.stdout)["rows"]
    (shared,) = (check for check in row["checks"] if check["name"] == "data_parallel")
    assert (shared["status"], shared["failures"], row["ranks"]) == ("ok", 0, 2)
    assert shared["compared"] > 50


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_gone_or_hangs_ends_the_run(sent: signal.Signals, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = subprocess.Popen(
        [*PROGRAM, *LONG_BENCH, *TWO_RANKS, "--rank-timeout", "5", "--output-dir", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    try:
        samples = folder / "samples.csv"
        deadline = time.monotonic() + 180
        while not samples.exists() or samples.read_text().count("\n") < 50:
            assert process.poll() is None and time.monotonic() < deadline, process.communicate(timeout=5)
            time.sleep(0.1)
        os.kill(rank_pids(process.pid)["1"], sent)
        _, errors = process.communicate(timeout=120)
    finally:
        # A stopped rank outlives its launcher, and holds memory of a GPU that others measure on.
        ranks = rank_pids(process.pid)
        process.kill()
        for pid in ranks.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert process.returncode == 1, errors
    assert "error: rank 1 (" in errors
    record = read_bench(folder)
    assert record.status == "error"
    assert str(record.status_reason).startswith("rank 1 (")
    assert record.result.latency["graph"].calls > 0
