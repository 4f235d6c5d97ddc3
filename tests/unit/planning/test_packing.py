"""Packing, hits and waste: each kind of limit, each policy, and the counts that follow from them."""

from __future__ import annotations

import pytest

from vitgraph.errors import UsageError
from vitgraph.planning.accounting import count_calls
from vitgraph.planning.budgets import (
    IMAGE,
    VIDEO,
    BudgetPlan,
    CaptureAxis,
    EncoderItemSpec,
    plan_budgets,
    resolve_budget_settings,
)
from vitgraph.planning.packing import POLICIES, pack_items

SEED_BUDGETS = [512, 1024, 1536, 2048, 2560, 3072, 3584, 4096, 4864]


def image(tokens: int) -> EncoderItemSpec:
    return EncoderItemSpec(IMAGE, tokens * 4, tokens)


def video(frames: int, tokens_per_frame: int) -> EncoderItemSpec:
    return EncoderItemSpec(VIDEO, frames * tokens_per_frame * 4, frames * tokens_per_frame, frames)


def plan(budgets: list[int], items: int = 0, frames: int | None = 0, low: int = 1) -> BudgetPlan:
    return plan_budgets(resolve_budget_settings((low, max(budgets, default=16384)), budgets, items, frames))


def used(specs: list[EncoderItemSpec], budget_plan: BudgetPlan, policy: str = "greedy") -> list[tuple[int, int | None]]:
    """Tokens and budget of each batch."""
    return [
        (run.tokens, run.key.token_budget if run.key else None)
        for batch in pack_items(specs, budget_plan, policy)
        for run in batch.runs.values()
    ]


def test_twenty_images_on_one_rank_and_on_four() -> None:
    twenty = [image(100)] * 20
    assert used(twenty, plan(SEED_BUDGETS, 8)) == [(800, 1024), (800, 1024), (400, 512)]
    assert used(twenty[:5], plan(SEED_BUDGETS, 8)) == [(500, 512)]
    counters = count_calls([pack_items(twenty, plan(SEED_BUDGETS, 8))])
    assert (counters.hits, counters.misses, counters.replays) == (20, 0, 3)
    rank = count_calls([pack_items(twenty[:5], plan(SEED_BUDGETS, 8))])
    assert rank.waste == pytest.approx(1 - 500 / 512)


def test_twenty_larger_images() -> None:
    assert used([image(144)] * 20, plan([*SEED_BUDGETS, 8192], 8)) == [(1152, 1536), (1152, 1536), (576, 1024)]


def test_mixed_sizes_with_automatic_and_with_the_published_settings() -> None:
    sizes = [64] * 4 + [100] * 6 + [196] * 4 + [441] * 4 + [1024] * 2
    assert sum(sizes) == 5452
    automatic = plan_budgets(resolve_budget_settings((64, 16384)))
    specs = [image(tokens) for tokens in sizes]
    assert used(specs, automatic) == [(5452, 8192)]
    waste = count_calls([pack_items(specs, automatic)]).waste
    assert waste is not None
    assert 1 - waste == pytest.approx(0.666, abs=5e-4)
    assert used(specs, plan(SEED_BUDGETS, 8)) == [(656, 1024), (1866, 2048), (2930, 3072)]


def test_oversize_items_are_counted_misses_and_do_not_drag_others_along() -> None:
    specs = [image(81), image(4), image(4)]
    batches = pack_items(specs, plan([16, 64], 4))
    assert [(batch.items, batch.miss_reason) for batch in batches] == [((1, 2), None), ((0,), "too_many_tokens")]
    counters = count_calls([batches])
    assert (counters.hits, counters.misses, dict(counters.misses_by_reason)) == (2, 1, {"too_many_tokens": 1})


def test_videos_that_fit_by_tokens_and_items_but_not_by_frames_are_split() -> None:
    batches = pack_items([video(6, 1), video(6, 1)], plan([16], 4, 8))
    assert [batch.items for batch in batches] == [(0,), (1,)]
    assert all(batch.is_hit for batch in batches)


def test_a_video_with_more_frames_than_any_graph_is_a_miss_with_that_reason() -> None:
    (batch,) = pack_items([video(9, 1)], plan([16], 4, 8))
    assert batch.miss_reason == "too_many_frames"


@pytest.mark.parametrize("policy", POLICIES)
def test_videos_that_stay_eager_leave_the_images_to_the_graphs(policy: str) -> None:
    batches = pack_items([video(2, 2), image(3), video(1, 1), image(1)], plan([4, 16], 4, 0), policy)
    found = [
        (batch.items, batch.miss_reason, [run.key and run.key.token_budget for run in batch.runs.values()])
        for batch in batches
    ]
    assert found == [((1, 3), None, [4]), ((2,), "video_disabled", [None]), ((0,), "video_disabled", [None])]


@pytest.mark.parametrize("policy", POLICIES)
def test_an_axis_that_is_not_covered_is_one_items_reason(policy: str) -> None:
    axis = CaptureAxis("grid", ((4,),))
    budget_plan = plan_budgets(resolve_budget_settings((1, 64), [64], 4, 0), axes=(axis,))
    specs = [EncoderItemSpec(IMAGE, 4, 32, axis_sizes={"grid": (size,)}) for size in (4, 5, 3)]
    batches = pack_items(specs, budget_plan, policy)
    assert [(batch.items, batch.miss_reason) for batch in batches] == [((0, 2), None), ((1,), "axis_not_captured")]


def test_items_that_need_different_keys_of_an_axis_are_replayed_apart() -> None:
    axis = CaptureAxis("grid", ((2, 8), (8, 2)))
    budget_plan = plan_budgets(resolve_budget_settings((1, 64), [64], 4, 0), axes=(axis,))
    specs = [EncoderItemSpec(IMAGE, 4, 8, axis_sizes={"grid": size}) for size in ((1, 7), (7, 1))]
    batches = pack_items(specs, budget_plan)
    assert [[run.key.axis_key for run in batch.runs.values() if run.key] for batch in batches] == [[(2, 8)], [(8, 2)]]


def test_a_frame_limit_below_the_items_holds_where_a_video_takes_part() -> None:
    budget_plan = plan([64], 32, 4)
    batches = pack_items([video(9, 1), video(9, 1), video(3, 1), image(1), image(1), *[image(2)] * 8], budget_plan)
    assert {batch.items: batch.miss_reason for batch in batches if batch.miss_reason} == {
        (0,): "too_many_frames",
        (1,): "too_many_frames",
    }
    replayed = {batch.items: run.segments for batch in batches for run in batch.runs.values() if run.key}
    assert [segments for items, segments in replayed.items() if 2 in items] == [3]
    assert max(replayed.values()) == 10, "images alone are limited by their number"


def test_padding_waste_of_single_images_and_the_exact_policy() -> None:
    budgets = plan([64, 256, 4096], 1)
    assert count_calls([pack_items([image(176)], budgets)]).waste == pytest.approx(0.3125)
    assert count_calls([pack_items([image(64)], plan([4096], 1))]).waste == pytest.approx(0.984375)
    for tokens, budget_list in ((176, [256]), (64, [4096])):
        (batch,) = pack_items([image(tokens)], plan(budget_list, 1), "exact")
        assert batch.miss_reason == "not_exact"
    assert used([image(64)], budgets, "exact") == [(64, 64)]


def test_the_exact_policy_replays_a_call_whose_sum_is_a_budget() -> None:
    assert used([image(100), image(156)], plan([256], 4), "exact") == [(256, 256)]


def test_deferring_avoids_a_larger_budget_where_two_smaller_ones_sum_to_less() -> None:
    budgets = plan([512, 1024, 4096], 8)
    specs = [image(500), image(600)]
    assert used(specs, budgets, "greedy") == [(1100, 4096)]
    assert used(specs, budgets, "greedy-defer") == [(500, 512), (600, 1024)]


def test_an_unknown_policy_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match="greedy-defer"):
        pack_items([image(1)], plan([16], 1), "tetris")


def test_zero_items_make_no_batches_and_no_hit_rate() -> None:
    assert pack_items([], plan([16], 1)) == []
    counters = count_calls([[]])
    assert (counters.items, counters.hit_rate, counters.waste) == (0, None, None)


def test_two_paths_are_limited_together_and_budgeted_apart() -> None:
    paths = plan_budgets(resolve_budget_settings((100, 1088)), path_minimums={"global": 272, "local": 100})
    tiled = EncoderItemSpec(IMAGE, 1, 472, 1, {"global": 272, "local": 200})
    untiled = EncoderItemSpec(IMAGE, 1, 272, 1, {"global": 272, "local": 0})
    (batch,) = pack_items([tiled, untiled], paths)
    assert {path: run.key.token_budget for path, run in batch.runs.items() if run.key} == {"global": 544, "local": 200}
    (alone,) = pack_items([untiled], paths)
    assert list(alone.runs) == ["global"]
    counters = count_calls([[batch, alone]])
    assert (counters.items, counters.hits, counters.path_runs, counters.path_replays) == (3, 3, 3, 3)


def test_an_item_with_one_eager_path_is_a_miss_and_a_partial_hit() -> None:
    paths = plan_budgets(resolve_budget_settings((100, 1088)), path_minimums={"global": 272, "local": 100})
    huge = EncoderItemSpec(IMAGE, 1, 272 + 2000, 1, {"global": 272, "local": 2000})
    counters = count_calls([pack_items([huge], paths)])
    assert (counters.hits, counters.misses, counters.partial_hits) == (0, 1, 1)
    assert counters.path_replays == 1
