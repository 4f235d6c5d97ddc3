"""What counts as another program on the GPU of a run."""

from __future__ import annotations

import os

import pytest
import torch

from vitgraph.measure import environment
from vitgraph.measure.environment import read_gpu_state, validity_problems


def test_ranks_of_the_same_run_are_no_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def answer(*arguments: str) -> str:
        asked.append(arguments[-1])
        return f"{os.getpid()}\n4001\n" if "compute-apps" in arguments[0] else "NVIDIA H200"

    monkeypatch.setattr(environment, "_nvidia_smi", answer)
    monkeypatch.setattr(environment, "OWN_PROCESSES", {4001})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    state = read_gpu_state(torch.device("cuda", 1))
    assert state is not None and state.other_processes == 0
    assert set(asked) == {"--id=3"}
    assert validity_problems([state]) == []
    monkeypatch.setattr(environment, "OWN_PROCESSES", set())
    stranger = read_gpu_state(torch.device("cuda", 1))
    assert stranger is not None and stranger.other_processes == 1
