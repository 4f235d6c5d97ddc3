"""Plans that are used again: the model is asked once for each combination of sizes, and nothing stale is ever used."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from vitgraph.errors import CaptureError
from vitgraph.graphs.manager import EncoderCudaGraphManager
from vitgraph.measure.correctness import relative_l2
from vitgraph.models.base import EncoderInputs, MetadataCache
from vitgraph.models.encoder import VisionEncoder
from vitgraph.models.geometry import GridGeometry
from vitgraph.planning.budgets import IMAGE, plan_budgets, resolve_budget_settings

A, B = (4, 4), (4, 8)


@pytest.fixture
def manager(tower: VisionEncoder) -> Iterator[EncoderCudaGraphManager]:
    settings = resolve_budget_settings((1, 64), [16, 64], 3, 0)
    manager = EncoderCudaGraphManager(tower, plan_budgets(settings))
    manager.capture()
    yield manager
    manager.clear()


def call(tower: VisionEncoder, sizes: Sequence[tuple[int, int]], seed: int) -> EncoderInputs:
    items = [GridGeometry(IMAGE, 1, h, w) for h, w in sizes]
    rows = sum(item.patches for item in items)
    return tower.make_inputs(items, tower.random_pixels({"pixel_values": rows}, seed))


@torch.inference_mode()
def assert_equals_eager(manager: EncoderCudaGraphManager, mm_kwargs: EncoderInputs, plan: Any = None) -> None:
    tower = manager.model
    outputs = manager.execute(mm_kwargs) if plan is None else manager.execute_planned(mm_kwargs, plan)
    counts = [spec.output_tokens for spec in tower.get_encoder_cudagraph_item_specs(mm_kwargs)]
    for item, expected in zip(outputs, tower.encoder_eager_forward(mm_kwargs).split(counts), strict=True):
        assert relative_l2(item, expected) <= 1e-5


def count_preparations(tower: VisionEncoder, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    prepared: list[tuple[int, ...]] = []
    real = tower.prepare_encoder_cudagraph_replay_buffers

    def noted(mm_kwargs: EncoderInputs, capacity: Any) -> Any:
        prepared.append(mm_kwargs.indices)
        return real(mm_kwargs, capacity)

    monkeypatch.setattr(tower, "prepare_encoder_cudagraph_replay_buffers", noted)
    return prepared


def test_the_model_is_asked_once_for_calls_of_the_same_sizes(
    tower: VisionEncoder, manager: EncoderCudaGraphManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = count_preparations(tower, monkeypatch)
    for seed in range(3):
        # Sizes alternate, so each of the two batches gathers rows from several places and scatters its results.
        assert_equals_eager(manager, call(tower, [A, B, A, B, A], seed))
    assert prepared == [(0, 2, 4), (1, 3)]


def test_calls_of_the_same_sizes_with_pixels_elsewhere_use_their_own(
    tower: VisionEncoder, manager: EncoderCudaGraphManager
) -> None:
    """The plan is that of the sizes; where the pixels lie may differ from the call that made it."""
    whole = call(tower, [A, B, A], 1)
    for indices in ([0], [2], [1], [0, 2], [2, 0], [0]):
        assert_equals_eager(manager, tower.select_encoder_cudagraph_items(whole, indices))


def test_a_selection_of_all_items_in_another_order_has_their_sizes_in_that_order(
    tower: VisionEncoder, manager: EncoderCudaGraphManager
) -> None:
    whole = call(tower, [A, B], 2)
    turned = tower.select_encoder_cudagraph_items(whole, [1, 0])
    assert turned.chosen == (whole.items[1], whole.items[0])
    assert_equals_eager(manager, turned)
    assert [len(item) for item in manager.execute(turned)] == [8, 4]


def test_a_plan_keeps_no_metadata_and_prepares_anew_once_the_cache_has_dropped_it(
    tower: VisionEncoder, manager: EncoderCudaGraphManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tower, "_cache", MetadataCache())
    prepared = count_preparations(tower, monkeypatch)
    mm_kwargs = call(tower, [A], 3)
    plan = manager.plan_call(mm_kwargs)
    assert_equals_eager(manager, mm_kwargs)
    (kept,) = plan.prepared.values()
    tower._cache.clear()
    gc.collect()
    assert kept.metadata() is None
    assert_equals_eager(manager, mm_kwargs)
    assert len(prepared) == 2


def test_metadata_of_another_kind_is_asked_for_every_time(
    tower: VisionEncoder, manager: EncoderCudaGraphManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model may return a plain dict, which no plan can refer to weakly."""
    from dataclasses import replace

    real = tower.prepare_encoder_cudagraph_replay_buffers
    asked = []

    def plain(mm_kwargs: EncoderInputs, capacity: Any) -> Any:
        values = real(mm_kwargs, capacity)
        asked.append(capacity)
        return replace(values, metadata=dict(values.metadata))

    monkeypatch.setattr(tower, "prepare_encoder_cudagraph_replay_buffers", plain)
    for seed in range(2):
        assert_equals_eager(manager, call(tower, [A], seed))
    assert len(asked) == 2


def test_a_plan_that_outlives_its_graphs_is_checked_again_and_keeps_no_buffer(
    tower: VisionEncoder, manager: EncoderCudaGraphManager
) -> None:
    mm_kwargs = call(tower, [A], 4)
    plan = manager.plan_call(mm_kwargs)
    manager.execute_planned(mm_kwargs, plan)
    buffers = [weakref.ref(tensor) for graph in manager.graphs.values() for tensor in graph.input_buffers.values()]
    manager.clear()
    gc.collect()
    assert not [buffer for buffer in buffers if buffer() is not None]
    manager.capture()
    for graph in manager.graphs.values():
        graph.scalars["max_seqlen"] = 8
    with pytest.raises(CaptureError, match=r"max_seqlen is 16.*8"):
        manager.execute_planned(mm_kwargs, plan)


def test_two_managers_do_not_share_what_one_of_them_has_checked(
    tower: VisionEncoder, manager: EncoderCudaGraphManager
) -> None:
    mm_kwargs = call(tower, [A], 5)
    plan = manager.plan_call(mm_kwargs)
    manager.execute_planned(mm_kwargs, plan)
    other = EncoderCudaGraphManager(tower, manager.plan)
    other.capture()
    for graph in other.graphs.values():
        graph.pixel_capacity["pixel_values"] = 8
    assert_equals_eager(other, mm_kwargs, plan)
    assert plan.batches[0].miss_reason == "buffer_overflow"
