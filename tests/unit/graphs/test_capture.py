"""A capture on a GPU, step by step, with CUDA played by a fake."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from vitgraph.errors import CaptureError
from vitgraph.graphs import capture
from vitgraph.planning.budgets import DEFAULT_PATH, GraphKey

KEY = GraphKey(DEFAULT_PATH, 64, 4, ())
CLEAR = "clear workspaces"


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was asked of CUDA, in order."""
    done: list[str] = []

    class Graph:
        def capture_begin(self, **_: Any) -> None:
            done.append("begin")

        def capture_end(self) -> None:
            done.append("end")

        def replay(self) -> None:
            done.append("replay")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("empty cache"))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: done.append(CLEAR), raising=False)
    return done


class Stream:
    device = torch.device("cuda", 0)

    def wait_stream(self, other: Any) -> None: ...

    def synchronize(self) -> None: ...


def test_a_graph_is_captured_with_a_workspace_of_its_own(steps: list[str]) -> None:
    capture._capture_cuda(lambda: steps.append("run"), None, Stream(), KEY)
    warmups = ["run"] * capture.WARMUP_RUNS
    # The warm-up's workspace goes before the cache is emptied, and the graph's before anything else can use it. The
    # graph's slow first launch is over before a request comes.
    assert steps == [*warmups, CLEAR, "empty cache", "begin", "run", "end", CLEAR, "replay"]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("3 GiB"), KeyboardInterrupt(), RuntimeError("not permitted")])
def test_a_capture_that_ends_early_leaves_no_workspace_of_its_pool(steps: list[str], error: BaseException) -> None:
    def run() -> None:
        steps.append("run")
        if "begin" in steps:
            raise error

    expected = CaptureError if type(error) is RuntimeError else type(error)
    with pytest.raises(expected):
        capture._capture_cuda(run, None, Stream(), KEY)
    assert steps[-3:] == ["run", "end", CLEAR]
