"""Host time of the steps of a graph call: it adds up, each step has its own, and nothing of the clocks stays behind."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from vitgraph.graphs.manager import EncoderCudaGraphManager
from vitgraph.measure import diagnose
from vitgraph.measure.calls import CallInputs, EncoderCall, make_calls
from vitgraph.measure.diagnose import HOST_STEPS, Diagnosis
from vitgraph.models.encoder import VisionEncoder
from vitgraph.planning.budgets import plan_budgets, resolve_budget_settings
from vitgraph.workloads.base import MediaItem, Request

STEPS = ("plan", "metadata", "copy_in", "replay", "clone_out", "split")


@pytest.fixture
def manager(tower: VisionEncoder) -> Iterator[EncoderCudaGraphManager]:
    settings = resolve_budget_settings((1, 128), [128], 4, 0)
    manager = EncoderCudaGraphManager(tower, plan_budgets(settings))
    manager.capture()
    yield manager
    manager.clear()


def calls_of(tower: VisionEncoder, *sizes: int) -> list[EncoderCall]:
    requests = [Request(index, (MediaItem(side, side),)) for index, side in enumerate(sizes)]
    return make_calls(requests, tower.rule, 1)[0]


def measured(tower: VisionEncoder, manager: EncoderCudaGraphManager, *sizes: int) -> dict[str, float]:
    calls = calls_of(tower, *sizes)
    return Diagnosis(manager, CallInputs(tower, calls, 0), calls).host_steps()


def test_the_steps_add_up_to_the_call(tower: VisionEncoder, manager: EncoderCudaGraphManager) -> None:
    steps = measured(tower, manager, 256, 320)
    assert list(steps) == [*STEPS, "other", "call", "specs_new", "packing_new", "metadata_new"]
    assert all(value > 0 for value in steps.values())
    assert sum(steps[name] for name in (*STEPS, "other")) == pytest.approx(steps["call"])
    assert not set(HOST_STEPS.values()) & set(vars(manager))


@pytest.mark.parametrize("slow", ["copy_in", "clone_out", "replay"])
def test_a_slow_step_shows_in_its_own_time(
    tower: VisionEncoder, manager: EncoderCudaGraphManager, monkeypatch: pytest.MonkeyPatch, slow: str
) -> None:
    now = 0.0
    monkeypatch.setattr(diagnose, "time", SimpleNamespace(perf_counter=lambda: now))
    real = getattr(EncoderCudaGraphManager, HOST_STEPS[slow])

    def slowed(self: EncoderCudaGraphManager, *arguments: Any) -> Any:
        nonlocal now
        now += 0.05
        return real(self, *arguments)

    monkeypatch.setattr(EncoderCudaGraphManager, HOST_STEPS[slow], slowed)
    steps = measured(tower, manager, 256)
    assert [name for name in STEPS if steps[name]] == [slow]
    assert steps[slow] == steps["call"] == pytest.approx(50)


def test_items_that_no_graph_holds_have_a_step_of_their_own(
    tower: VisionEncoder, manager: EncoderCudaGraphManager
) -> None:
    steps = measured(tower, manager, 512)
    assert steps["eager"] > 0
    assert "replay" not in steps
