"""Two paths and the monolithic graph of both, captured side by side on a GPU and measured in one run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vitgraph.cli import app

pytestmark = pytest.mark.requires_cuda


@pytest.mark.parametrize("model", ["deepseek-ocr-debug", "step3-vl-debug"])
def test_both_sides_are_right_timed_and_have_memory_of_their_own(model: str, tmp_path: Path) -> None:
    arguments = [
        "bench", "--model", model, "--load-format", "dummy", "--dataset-path", "documents", "--num-prompts", "40",
        "--num-warmups", "4", "--token-budgets", "600", "--baseline", "monolithic", "--output-dir",
        str(tmp_path / "run"), "--json", "--quiet",
    ]  # fmt: skip
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert record["correctness"]["status"] == "ok"
    for graph in (record["graph"], record["graph"]["monolithic"]):
        assert (graph["mode"], graph["hits"], graph["dropped"]) == ("cuda", 40, [])
        assert graph["pool_bytes"] > 0 and graph["launch_gap"] > 0
        assert all(row["replay_ms"] > 0 for row in graph["per_path"])
    assert {row["path"] for row in record["graph"]["per_path"]} == {"global", "local"}
    assert record["summary"]["monolithic"]["gpu_mean_ms"] > 0
