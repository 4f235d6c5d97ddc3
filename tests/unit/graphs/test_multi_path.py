"""Two paths in the manager: absent paths, partial replays, counts for items and paths, results that stay."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch

from vitgraph.attention.registry import create_backend
from vitgraph.graphs.capture import reserve_together
from vitgraph.graphs.manager import EncoderCudaGraphManager
from vitgraph.measure.setup import plan_graphs
from vitgraph.models.base import EncoderInputs
from vitgraph.models.loading import load_encoder
from vitgraph.models.registry import resolve_model
from vitgraph.models.two_path import GLOBAL, LOCAL, CropGeometry, TwoPathEncoder
from vitgraph.planning.accounting import count_calls
from vitgraph.planning.budgets import IMAGE, EncoderItemSpec, GraphKey, plan_budgets, resolve_budget_settings
from vitgraph.planning.packing import pack_items
from vitgraph.specs.parts import GraphSpec
from vitgraph.verify.probes import encode_eagerly

CPU = torch.device("cpu")
TOLERANCE = 1e-5
CLASSES = ("deepseek-ocr-debug", "step3-vl-debug")
UNTILED = CropGeometry(IMAGE, 0, 0)
TWO = CropGeometry(IMAGE, 2, 1)
SIX = CropGeometry(IMAGE, 3, 2)


@cache
def encoder_of(preset: str) -> TwoPathEncoder:
    backend = create_backend("TORCH_SDPA", CPU)
    encoder = load_encoder(resolve_model(preset), backend, device=CPU, dtype=torch.float32, load_format="dummy")
    assert isinstance(encoder, TwoPathEncoder)
    return encoder


@pytest.fixture(params=CLASSES)
def encoder(request: pytest.FixtureRequest) -> TwoPathEncoder:
    return encoder_of(request.param)


def captured(encoder: TwoPathEncoder, units: int, policy: str = "greedy") -> EncoderCudaGraphManager:
    """A manager whose largest budget is that of `units` global views."""
    budget = units * encoder.rule.path_tokens[GLOBAL]
    plan = plan_graphs(encoder.rule, GraphSpec(token_budgets=(budget,), max_vision_items_per_batch=units), [])
    manager = EncoderCudaGraphManager(encoder, plan, policy=policy)
    manager.capture()
    return manager


def call_of(encoder: TwoPathEncoder, items: Sequence[CropGeometry], seed: int) -> EncoderInputs:
    rows = {"pixel_values": len(items), encoder.rule.local_pixels: sum(item.crops for item in items)}
    return encoder.make_inputs(items, encoder.random_pixels(rows, seed))


def assert_equal(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    assert len(actual) == len(expected)
    for found, wanted in zip(actual, expected, strict=True):
        assert found.shape == wanted.shape
        assert float((found - wanted).norm() / wanted.norm()) <= TOLERANCE


def replays(manager: EncoderCudaGraphManager, path: str) -> int:
    return sum(graph.replay_count for key, graph in manager.graphs.items() if key.path == path)


def storages(manager: EncoderCudaGraphManager) -> set[int]:
    """Addresses of everything that a replay writes or reads."""
    graphs = manager.graphs.values()
    tensors = [tensor for graph in graphs for tensor in (graph.output_buffer, *graph.input_buffers.values())]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


@torch.inference_mode()
def test_untiled_results_survive_the_next_replay(encoder: TwoPathEncoder) -> None:
    manager = captured(encoder, 4)
    first, second = call_of(encoder, [UNTILED], 1), call_of(encoder, [UNTILED], 2)
    (kept,) = manager.execute(first)
    before = kept.clone()
    (other,) = manager.execute(second)
    assert torch.equal(kept, before)
    assert not torch.allclose(kept, other)
    assert_equal([kept, other], [*encode_eagerly(encoder, first), *encode_eagerly(encoder, second)])
    for result in (kept, other):
        assert result.untyped_storage().data_ptr() not in storages(manager)


@torch.inference_mode()
def test_a_tiled_and_an_untiled_item_count_as_two_hits(encoder: TwoPathEncoder) -> None:
    manager = captured(encoder, 4)
    tokens = encoder.rule.path_tokens
    tiled = manager.plan_call(call_of(encoder, [TWO], 1))
    (batch,) = tiled.batches
    assert {path: (run.tokens, run.key.token_budget) for path, run in batch.runs.items() if run.key} == {
        GLOBAL: (tokens[GLOBAL], tokens[GLOBAL]),
        LOCAL: (2 * tokens[LOCAL], 2 * tokens[LOCAL]),
    }
    untiled = manager.plan_call(call_of(encoder, [UNTILED], 2))
    assert list(untiled.batches[0].runs) == [GLOBAL]
    counters = count_calls([tiled.batches, untiled.batches])
    assert (counters.items, counters.hits, counters.misses) == (2, 2, 0)
    assert (counters.path_runs, counters.path_replays, counters.partial_hits) == (3, 3, 0)
    manager.execute(call_of(encoder, [UNTILED], 2))
    assert (replays(manager, GLOBAL), replays(manager, LOCAL)) == (1, 0)
    manager.execute(call_of(encoder, [TWO], 1))
    assert (replays(manager, GLOBAL), replays(manager, LOCAL)) == (2, 1)


@pytest.mark.parametrize("policy", ["greedy", "greedy-defer", "exact"])
@torch.inference_mode()
def test_any_order_of_tiled_and_untiled_calls(encoder: TwoPathEncoder, policy: str) -> None:
    manager = captured(encoder, 5, policy)
    calls = [
        [UNTILED],
        [SIX],
        [UNTILED],
        [UNTILED] * 5,
        [TWO, UNTILED, SIX, UNTILED],
        [SIX, TWO],
        [TWO],
        [UNTILED, TWO],
    ]
    results, expected, local = [], [], 0
    for seed, items in enumerate(calls):
        call = call_of(encoder, items, seed)
        results += manager.execute(call)
        expected += encode_eagerly(encoder, call)
        if not any(item.crops for item in items):
            assert replays(manager, LOCAL) == local, "absent crops were computed"
        local = replays(manager, LOCAL)
    # Compared only now, after every later replay had its chance to overwrite them.
    assert_equal(results, expected)
    assert local > 0


@torch.inference_mode()
def test_one_path_goes_eager_alone(encoder: TwoPathEncoder) -> None:
    manager = captured(encoder, 2)
    tokens = encoder.rule.path_tokens
    crops = 2 * tokens[GLOBAL] // tokens[LOCAL] + 1
    call = call_of(encoder, [UNTILED, CropGeometry(IMAGE, crops, 1)], 1)
    plan = manager.plan_call(call)
    assert plan.eager_items == {LOCAL: [1]}
    counters = count_calls([plan.batches])
    assert (counters.hits, dict(counters.misses_by_reason), counters.partial_hits) == (1, {"too_many_tokens": 1}, 1)
    assert (counters.path_runs, counters.path_replays) == (3, 2)
    whole, crop = counters.as_dict()["per_path"]
    assert [whole[name] for name in ("path", "items", "hits", "runs", "replays")] == [GLOBAL, 2, 2, 2, 2]
    assert [crop[name] for name in ("path", "items", "hits", "runs", "replays")] == [LOCAL, 1, 0, 1, 0]
    assert (whole["tokens_replayed"], whole["waste"]) == (2 * tokens[GLOBAL], 0.0)
    assert (crop["tokens_replayed"], crop["budget_tokens_replayed"], crop["waste"]) == (0, 0, None)
    assert_equal(manager.execute(call), encode_eagerly(encoder, call))


@torch.inference_mode()
def test_either_path_may_lack_its_graphs(encoder: TwoPathEncoder) -> None:
    for lost in (GLOBAL, LOCAL):
        manager = captured(encoder, 4)
        for key in [key for key in manager.graphs if key.path == lost]:
            del manager.graphs[key]
        call = call_of(encoder, [TWO, UNTILED, SIX], 1)
        plan = manager.plan_call(call)
        assert plan.eager_items == {lost: [0, 2] if lost == LOCAL else [0, 1, 2]}
        assert_equal(manager.execute(call), encode_eagerly(encoder, call))
        other = GLOBAL if lost == LOCAL else LOCAL
        assert replays(manager, other) >= 1


@torch.inference_mode()
def test_a_dropped_graph_is_replaced_by_a_larger_one() -> None:
    encoder = encoder_of("deepseek-ocr-debug")
    manager = captured(encoder, 4)
    for key in [key for key in manager.graphs if (key.path, key.token_budget) == (LOCAL, 8)]:
        del manager.graphs[key]
    call = call_of(encoder, [UNTILED, UNTILED, UNTILED, TWO], 1)
    (batch,) = manager.plan_call(call).batches
    used = batch.runs[LOCAL].key
    assert batch.is_hit and used is not None and used.token_budget == 16
    assert_equal(manager.execute(call), encode_eagerly(encoder, call))


def test_managers_of_one_encoder_reserve_what_the_largest_of_them_needs(
    encoder: TwoPathEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = (16 * encoder.rule.path_tokens[GLOBAL], 4 * encoder.rule.path_tokens[GLOBAL])
    managers = [
        EncoderCudaGraphManager(encoder, plan_graphs(encoder.rule, GraphSpec(token_budgets=(size,)), []))
        for size in sizes
    ]
    reserved: list[int] = []
    monkeypatch.setattr(encoder, "reserve_for_capture", reserved.append)
    reserve_together(managers[::-1])
    most = sizes[0] // encoder.rule.path_tokens[LOCAL]
    assert reserved == [most]


# -- what the planner must keep apart ----------------------------------------------------------------------------------


@torch.inference_mode()
def test_an_item_without_rows_on_an_eager_path_is_a_hit() -> None:
    encoder = encoder_of("deepseek-ocr-debug")
    manager = captured(encoder, 4)
    for key in [key for key in manager.graphs if key.path == LOCAL]:
        del manager.graphs[key]
    plan = manager.plan_call(call_of(encoder, [UNTILED, TWO], 1))
    assert len(plan.batches) == 1
    counters = count_calls([plan.batches])
    assert (counters.hits, counters.misses, counters.partial_hits) == (1, 1, 1)


@torch.inference_mode()
def test_a_graphs_items_are_those_with_rows_on_its_path() -> None:
    encoder = encoder_of("deepseek-ocr-debug")
    manager = captured(encoder, 4)
    plan = manager.plan_call(call_of(encoder, [UNTILED, TWO, UNTILED], 1))
    items: dict[str, int] = {}
    for key, use in count_calls([plan.batches]).use.items():
        items[key.path] = items.get(key.path, 0) + use.items
    assert items == {GLOBAL: 3, LOCAL: 1}


def segment_free_plan(max_items: int) -> Any:
    """Two paths as the rules give them, budgets up to four global views of 9 and crops of 4 rows."""
    return plan_budgets(
        resolve_budget_settings((9, 36), (36,), max_items),
        path_minimums={GLOBAL: 9, LOCAL: 4},
        segment_free_paths=frozenset({GLOBAL, LOCAL}),
    )


def test_slots_of_a_path_without_segments_are_its_views() -> None:
    tiers = segment_free_plan(4).slot_tiers
    assert {key: slots for key, slots in tiers.items() if key[1] in (9, 36, 8)} == {
        (GLOBAL, 9): (1,),
        (GLOBAL, 36): (4,),
        (LOCAL, 8): (2,),
        (LOCAL, 36): (9,),
    }


def test_items_of_several_views_need_no_segment_slots() -> None:
    tiled = EncoderItemSpec(IMAGE, 3, 17, 3, {GLOBAL: 9, LOCAL: 8})
    untiled = EncoderItemSpec(IMAGE, 1, 9, 1, {GLOBAL: 9, LOCAL: 0})
    (batch,) = pack_items([tiled, untiled, untiled, untiled], segment_free_plan(4))
    assert {path: run.miss_reason for path, run in batch.runs.items()} == {GLOBAL: None, LOCAL: None}
    keys = [run.key for run in batch.runs.values() if isinstance(run.key, GraphKey)]
    assert [(key.path, key.token_budget) for key in keys] == [(GLOBAL, 36), (LOCAL, 8)]
