"""The graph manager on a CPU: the buffers, padding and packing of a GPU, replayed by calling the forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from vitgraph.errors import CaptureError, InputError, NothingReplayedError
from vitgraph.graphs import capture as capture_module
from vitgraph.graphs.manager import EncoderCudaGraphManager
from vitgraph.measure.correctness import relative_l2
from vitgraph.models.base import EncoderInputs
from vitgraph.models.encoder import VisionEncoder
from vitgraph.models.geometry import GridGeometry
from vitgraph.planning.accounting import count_calls
from vitgraph.planning.budgets import IMAGE, VIDEO, plan_budgets, resolve_budget_settings

Grids = Sequence[tuple[int, int, int]]


def make_manager(
    tower: VisionEncoder, budgets: Sequence[int], items: int, frames: int = 0, policy: str = "greedy"
) -> EncoderCudaGraphManager:
    settings = resolve_budget_settings((1, max(budgets)), budgets, items, frames)
    manager = EncoderCudaGraphManager(tower, plan_budgets(settings), policy=policy)
    manager.capture()
    return manager


def call(tower: VisionEncoder, grids: Grids, seed: int = 0) -> EncoderInputs:
    items = [GridGeometry(IMAGE if t == 1 else VIDEO, t, h, w) for t, h, w in grids]
    rows = sum(item.patches for item in items)
    return tower.make_inputs(items, tower.random_pixels({"pixel_values": rows}, seed))


@torch.inference_mode()
def eager_items(tower: VisionEncoder, mm_kwargs: EncoderInputs) -> list[torch.Tensor]:
    counts = [spec.output_tokens for spec in tower.get_encoder_cudagraph_item_specs(mm_kwargs)]
    return list(tower.encoder_eager_forward(mm_kwargs).split(counts))


def assert_equals_eager(tower: VisionEncoder, manager: EncoderCudaGraphManager, mm_kwargs: EncoderInputs) -> None:
    outputs = manager.execute(mm_kwargs)
    reference = eager_items(tower, mm_kwargs)
    assert [len(item) for item in outputs] == [len(item) for item in reference]
    for item, expected in zip(outputs, reference, strict=True):
        assert relative_l2(item, expected) <= 1e-5


def counters(manager: EncoderCudaGraphManager, mm_kwargs: EncoderInputs) -> tuple[int, int]:
    counts = count_calls([manager.plan_call(mm_kwargs).batches])
    return counts.hits, counts.misses


def test_eight_small_images_take_two_replays(tower: VisionEncoder) -> None:
    manager = make_manager(tower, [16, 64], 4)
    mm_kwargs = call(tower, [(1, 4, 4)] * 8)
    plan = manager.plan_call(mm_kwargs)
    assert [run.key.token_budget for batch in plan.batches for run in batch.runs.values() if run.key] == [16, 16]
    assert [len(item) for item in manager.execute(mm_kwargs)] == [4] * 8
    assert counters(manager, mm_kwargs) == (8, 0)
    assert_equals_eager(tower, manager, mm_kwargs)


def test_an_image_above_every_budget_runs_eagerly(tower: VisionEncoder) -> None:
    manager = make_manager(tower, [16, 64], 4)
    mm_kwargs = call(tower, [(1, 18, 18)])
    assert [len(item) for item in manager.execute(mm_kwargs)] == [81]
    assert counters(manager, mm_kwargs) == (0, 1)
    assert_equals_eager(tower, manager, mm_kwargs)


def test_outputs_come_in_input_order_when_eager_and_replay_mix(tower: VisionEncoder) -> None:
    manager = make_manager(tower, [16, 64], 4)
    mm_kwargs = call(tower, [(1, 18, 18), (1, 4, 4), (1, 4, 4)])
    assert [len(item) for item in manager.execute(mm_kwargs)] == [81, 4, 4]
    assert counters(manager, mm_kwargs) == (2, 1)
    assert_equals_eager(tower, manager, mm_kwargs)


def test_a_video_has_one_segment_a_frame(tower: VisionEncoder) -> None:
    manager = make_manager(tower, [16, 64], 4, 8)
    mm_kwargs = call(tower, [(2, 4, 4), (1, 4, 4)])
    (batch,) = manager.plan_call(mm_kwargs).batches
    assert batch.runs["default"].segments == 3
    assert [len(item) for item in manager.execute(mm_kwargs)] == [8, 4]
    assert_equals_eager(tower, manager, mm_kwargs)


def test_videos_beyond_the_frame_limit_are_split_not_crashed(tower: VisionEncoder) -> None:
    manager = make_manager(tower, [16], 4, 8)
    mm_kwargs = call(tower, [(6, 2, 2), (6, 2, 2)])
    assert len(manager.plan_call(mm_kwargs).batches) == 2
    assert counters(manager, mm_kwargs) == (2, 0)
    assert_equals_eager(tower, manager, mm_kwargs)


@torch.inference_mode()
def test_a_canary_is_the_same_after_larger_calls_in_poisoned_buffers(tower: VisionEncoder) -> None:
    manager = make_manager(tower, [64, 128, 256, 512], 8)
    canary = call(tower, [(1, 16, 16)], seed=1)
    first = manager.execute(canary)[0].clone()
    for side in (22, 28, 32, 44):
        for output in manager._buffers.outputs.values():
            output.fill_(float("nan"))
        larger = call(tower, [(1, side, side)], seed=side)
        assert torch.isfinite(manager.execute(larger)[0]).all()
        assert_equals_eager(tower, manager, larger)
        again = manager.execute(canary)[0]
        assert torch.equal(again, first)
    for graph in manager.graphs.values():
        assert graph.current_pointers() == graph.pointers


def test_boundaries_are_sent_anew_for_equal_totals(tower: VisionEncoder) -> None:
    manager = make_manager(tower, [32], 4)
    for grids in (
        [(1, 4, 4), (1, 4, 6), (1, 4, 8)],
        [(1, 4, 6), (1, 4, 4), (1, 4, 8)],
        [(1, 2, 10), (1, 4, 6), (1, 2, 14)],
    ):
        assert_equals_eager(tower, manager, call(tower, grids))


@torch.inference_mode()
def test_results_do_not_alias_the_buffers_and_survive_later_replays(tower: VisionEncoder) -> None:
    manager = make_manager(tower, [16, 64], 4)
    kept = manager.execute(call(tower, [(1, 4, 4)], seed=3))[0]
    before = kept.clone()
    buffers = {tensor.untyped_storage().data_ptr() for tensor in manager._buffers.outputs.values()}
    assert kept.untyped_storage().data_ptr() not in buffers
    manager.execute(call(tower, [(1, 4, 4)], seed=4))
    assert torch.equal(kept, before)


@torch.inference_mode()
def test_stale_pixels_of_a_larger_item_are_cleared(tower: VisionEncoder) -> None:
    manager = make_manager(tower, [16, 64], 4)
    poison = call(tower, [(1, 16, 16)])
    poison.pixels["pixel_values"].fill_(float("nan"))
    manager.execute(poison)
    healthy = call(tower, [(1, 4, 4)])
    assert torch.isfinite(manager.execute(healthy)[0]).all()
    # Rows past the budget's own are no concern of this graph and need no clearing.
    assert not manager._buffers.pixels["pixel_values"][16 : 16 * 4].isnan().any()


def test_an_odd_grid_is_refused_by_name(tower: VisionEncoder) -> None:
    with pytest.raises(InputError, match=r"\[1, 5, 7\].*merge 2"):
        tower.rule.item_spec(GridGeometry(IMAGE, 1, 5, 7))


def test_random_calls_of_images_and_videos_equal_eager(tower: VisionEncoder) -> None:
    manager = make_manager(tower, [16, 32, 100], 5, 12, policy="greedy-defer")
    generator = torch.Generator().manual_seed(5)
    for seed in range(40):
        count = int(torch.randint(1, 9, (1,), generator=generator))
        grids = [
            (
                int(torch.randint(1, 5, (1,), generator=generator)),
                2 * int(torch.randint(1, 6, (1,), generator=generator)),
                2 * int(torch.randint(1, 6, (1,), generator=generator)),
            )
            for _ in range(count)
        ]
        assert_equals_eager(tower, manager, call(tower, grids, seed))


def test_clear_releases_everything_and_capturing_again_works(tower: VisionEncoder) -> None:
    manager = make_manager(tower, [16], 4)
    with pytest.raises(CaptureError, match="clear"):
        manager.capture()
    manager.clear()
    assert (manager.graphs, manager.buffer_bytes, manager.pool_bytes) == ({}, 0, 0)
    manager.clear()
    manager.capture()
    assert_equals_eager(tower, manager, call(tower, [(1, 4, 4)]))


def test_budgets_that_do_not_fit_are_dropped_and_the_others_serve(
    tower: VisionEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = capture_module.capture_budget

    def fail_above_sixteen(model: Any, key: Any, *rest: Any) -> Any:
        if key.token_budget > 16:
            raise torch.OutOfMemoryError("tried to allocate 3 GiB")
        return real(model, key, *rest)

    monkeypatch.setattr("vitgraph.graphs.capture.capture_budget", fail_above_sixteen)
    manager = make_manager(tower, [16, 64], 4)
    assert {(drop.key.token_budget, "3 GiB" in drop.reason) for drop in manager.dropped} == {(64, True)}
    mm_kwargs = call(tower, [(1, 4, 4), (1, 10, 10)])
    assert_equals_eager(tower, manager, mm_kwargs)
    reasons = {batch.items: batch.miss_reason for batch in manager.plan_call(mm_kwargs).batches}
    assert "not_captured" in reasons.values()


def test_nothing_captured_is_an_error_not_an_empty_success(
    tower: VisionEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory at all")

    monkeypatch.setattr("vitgraph.graphs.capture.capture_budget", fail)
    with pytest.raises(NothingReplayedError, match="0 graphs captured"):
        make_manager(tower, [16], 4)


def test_a_scalar_above_the_captured_bound_is_an_error(tower: VisionEncoder) -> None:
    manager = make_manager(tower, [16], 4)
    for graph in manager.graphs.values():
        graph.scalars["max_seqlen"] = 8
    with pytest.raises(CaptureError, match=r"max_seqlen is 16.*8"):
        manager.execute(call(tower, [(1, 4, 4)]))


def test_a_batch_that_overflows_a_buffer_is_a_counted_miss(
    tower: VisionEncoder, caplog: pytest.LogCaptureFixture
) -> None:
    manager = make_manager(tower, [16], 4)
    for graph in manager.graphs.values():
        graph.pixel_capacity["pixel_values"] = 8
    mm_kwargs = call(tower, [(1, 4, 4)])
    assert_equals_eager(tower, manager, mm_kwargs)
    assert manager.plan_call(mm_kwargs).batches[0].miss_reason == "buffer_overflow"
    assert counters(manager, mm_kwargs) == (0, 1)
    assert "16 rows into 8" in caplog.text


def test_a_selection_of_a_call_equals_its_items(tower: VisionEncoder) -> None:
    mm_kwargs = call(tower, [(1, 4, 4), (1, 6, 4), (1, 4, 8)])
    selected = tower.select_encoder_cudagraph_items(mm_kwargs, [2, 0])
    manager = make_manager(tower, [64], 4)
    whole, part = manager.execute(mm_kwargs), manager.execute(selected)
    assert relative_l2(part[0], whole[2]) <= 1e-5
    assert relative_l2(part[1], whole[0]) <= 1e-5


def test_dense_budget_lists_share_one_set_of_buffers(tower: VisionEncoder) -> None:
    one = make_manager(tower, [256], 4)
    many = make_manager(tower, list(range(16, 257, 16)), 4)
    assert len(many.graphs) > 10 * len(one.graphs) / 2
    assert many.buffer_bytes == one.buffer_bytes
