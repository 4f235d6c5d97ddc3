"""`auto` in the commands that run a tower: what was taken and what the others would have cost is said and recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from vitgraph.attention import registry
from vitgraph.attention.base import AttentionBackend, Packed, TorchSdpaBackend
from vitgraph.attention.per_shape import PerShapeBackend, Trial
from vitgraph.cli import app

TINY = ["--model", "qwen3-vl-debug", "--load-format", "dummy", "--device", "cpu", "--quiet"]
WORKLOAD = ["--dataset-name", "random-mm", "--num-prompts", "4", "--num-warmups", "1", "--seed", "0"]
BUCKETS = ["--random-mm-bucket-config", '{"(64,64,1)": 0.5, "(320,320,1)": 0.5}', "--token-budgets", "64,128"]


class Short(TorchSdpaBackend):
    is_capture_safe = True


class Long(Short):
    pass


def cost(backend: AttentionBackend, arguments: Packed, is_graph: bool) -> Trial:
    """`SHORT` takes a second for each row of a segment, `LONG` 300 seconds."""
    taken = 3e5 if isinstance(backend, Long) else 1e3 * float(arguments[3].diff().max())
    return Trial(taken, lambda: lambda: (0.0, taken))


@pytest.fixture(autouse=True)
def auto_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU `auto` takes what is there; here it chooses between two."""
    real = registry.create_backend

    def create(name: str, device: torch.device, **facts: Any) -> AttentionBackend:
        if name != registry.AUTO:
            return real(name, device, **facts)
        heads, width, dtype = facts["heads"], facts["head_width"], facts["dtype"]
        backends = {"SHORT": Short(), "LONG": Long()}
        return registry._registered(PerShapeBackend(backends, heads, width, dtype, device, timer=cost))

    monkeypatch.setattr(registry, "create_backend", create)


def ran(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return " ".join(result.stdout.split())


def record_of(folder: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return record


def check(choices: list[dict[str, Any]], said: str, *, has_calls: bool = True) -> None:
    graphs = [row for row in choices if row["is_graph"]]
    assert {row["backend"] for row in graphs} == {"SHORT", "LONG"}
    assert any(row["calls"] for row in choices) == has_calls
    assert "graphs: SHORT at" in said and "LONG at" in said
    assert ("one backend alone: " in said) == has_calls


@pytest.mark.parametrize("more", [[], pytest.param(["--compile"], marks=pytest.mark.slow)])
def test_bench(more: list[str], tmp_path: Path) -> None:
    said = ran("bench", *TINY, *WORKLOAD, *BUCKETS, "--output-dir", str(tmp_path / "run"), *more)
    check(record_of(tmp_path / "run")["environment"]["encoder"]["attn_choices"], said)


@pytest.mark.slow
def test_compare_backends(tmp_path: Path) -> None:
    options = ["--backends", "auto,TORCH_SDPA", "--output-dir", str(tmp_path / "run")]
    said = ran("compare-backends", *TINY, *WORKLOAD, *BUCKETS, *options)
    check(record_of(tmp_path / "run")["result"]["candidates"][0]["choices"], said)


@pytest.mark.slow
def test_profile(tmp_path: Path) -> None:
    options = ["--items", "2*64x64,320x320", "--repeats", "1", "--output-dir", str(tmp_path / "run")]
    said = ran("profile", *TINY, *options)
    choices = record_of(tmp_path / "run")["environment"]["encoder"]["attn_choices"]
    assert 1 in {row["calls"] for row in choices if row["is_graph"]}
    assert "graphs: " in said and "one backend alone: " in said


@pytest.mark.slow
def test_verify(tmp_path: Path) -> None:
    options = ["--calls", "3", "--output-dir", str(tmp_path / "run")]
    said = ran("verify", *TINY, *options)
    check(record_of(tmp_path / "run")["result"]["models"][0]["attn_choices"], said, has_calls=False)


@pytest.mark.slow
def test_calibrate(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    ran("calibrate", *TINY, "--max-model-len", "512", "--time-limit", "10", "--output", str(path))
    choices = json.loads(path.read_text())["environment"]["encoder"]["attn_choices"]
    assert {row["backend"] for row in choices if row["is_graph"]} == {"SHORT", "LONG"}
