"""`optimal` packing against trying every partition with every choice of eager items."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from synthetic import Machine, image, plan_of, synthetic_profile, two_path_cost, video

from vitgraph.planning.budgets import BudgetPlan, BudgetSettings, CaptureAxis, EncoderItemSpec, plan_budgets
from vitgraph.planning.graph_tables import call_items, graph_tables
from vitgraph.planning.optimal import NEIGHBOURS, best_packing, pack_optimally
from vitgraph.planning.packing import (
    AXIS_NOT_CAPTURED,
    EAGER_IS_FASTER,
    TOO_MANY_FRAMES,
    TOO_MANY_TOKENS,
    VIDEO_DISABLED,
    pack_items,
)
from vitgraph.predict.cost_model import CostModel, item_features
from vitgraph.predict.targets import TARGETS, VITGRAPH, TargetCost

COST = TargetCost(CostModel(synthetic_profile(Machine(launch=9.0))), TARGETS[VITGRAPH])
PLAN = plan_of([100, 250, 400, 700, 1000], 3)


def partitions(places: list[int]) -> Iterator[list[list[int]]]:
    if not places:
        yield []
        return
    first, rest = places[0], places[1:]
    for others in partitions(rest):
        yield [[first], *others]
        for index in range(len(others)):
            yield [*others[:index], [first, *others[index]], *others[index + 1 :]]


def cheapest(specs: Sequence[EncoderItemSpec], plan: BudgetPlan) -> float:
    """The least cost over all partitions, with each block replayed or left to eager."""
    best = np.inf
    for blocks in partitions(list(range(len(specs)))):
        for choice in range(1 << len(blocks)):
            replays, left = 0.0, []
            for number, block in enumerate(blocks):
                chosen = [specs[place] for place in block]
                tokens, segments = sum(s.output_tokens for s in chosen), sum(s.segments for s in chosen)
                budget = next((b for b in plan.path_budgets["default"] if b >= tokens), None)
                if choice >> number & 1:
                    left += chosen
                    continue
                slots = None if budget is None else plan.select_slots("default", budget, segments)
                if budget is None or slots is None or len(block) > plan.max_items:
                    replays = np.inf
                    break
                features = item_features(chosen).sum(axis=0)
                replays += float(COST.group_ms("default", (), np.array(budget), np.array(slots), features))
            parts = COST.eager_parts("default", item_features(left).sum(axis=0)) if left else (np.zeros(()),) * 2
            best = min(best, float(COST.join_ms(np.array(replays), *parts)))
    return best


def cost_of(specs: Sequence[EncoderItemSpec], plan: BudgetPlan, exact_items: int = 10) -> float:
    items = call_items([specs], plan, COST)
    return float(best_packing(items, graph_tables(plan), COST, exact_items=exact_items).latency_ms[0])


def test_equals_trying_everything() -> None:
    rng = np.random.default_rng(0)
    for _ in range(40):
        specs = [image(int(tokens)) for tokens in rng.integers(64, 1300, size=int(rng.integers(1, 6)))]
        assert cost_of(specs, PLAN) == pytest.approx(cheapest(specs, PLAN), rel=1e-12)


def test_neighbours_are_as_good_for_equal_items_and_never_better_than_all_partitions() -> None:
    rng = np.random.default_rng(1)
    for size in (5, 7):
        equal = [image(230)] * size
        assert cost_of(equal, PLAN, exact_items=0) == pytest.approx(cost_of(equal, PLAN))
    for _ in range(20):
        specs = [image(int(tokens)) for tokens in rng.integers(64, 1300, size=6)]
        assert cost_of(specs, PLAN, exact_items=0) >= cost_of(specs, PLAN) - 1e-9


@pytest.mark.parametrize("count", [4, 30])
def test_batches_hold_every_item_once_and_cost_what_was_promised(count: int) -> None:
    rng = np.random.default_rng(count)
    specs = [image(int(tokens)) for tokens in rng.integers(64, 1300, size=count)]
    batches = pack_optimally(specs, PLAN, COST)
    assert sorted(index for batch in batches for index in batch.items) == list(range(count))
    assert all(len(batch.items) <= PLAN.max_items for batch in batches if batch.is_hit)
    assert COST.predict_call(specs, PLAN, "optimal").graph_ms == pytest.approx(cost_of(specs, PLAN))


def test_groups_what_shares_a_budget() -> None:
    """Two images of 200 in one graph of 400 beat two graphs of 250: the floor of a replay is paid once."""
    (batch,) = pack_optimally([image(200), image(200)], PLAN, COST)
    assert batch.items == (0, 1)
    assert batch.runs["default"].key is not None
    assert batch.runs["default"].key.token_budget == 400


def test_leaves_to_eager_what_padding_would_slow_down() -> None:
    """70 tokens in a graph of 4,096 take 49 ms; the eager run takes 9."""
    (batch,) = pack_optimally([image(70)], plan_of([4096]), COST)
    assert batch.miss_reason == EAGER_IS_FASTER


@pytest.mark.parametrize("count", [1, 12])
def test_a_doubtful_gain_is_left_to_eager(count: int) -> None:
    """What replays gain over eager counts only beyond the doubt, and what is promised stays the prediction."""
    specs, plan = [image(200 // count)] * count, plan_of([400], 16)
    graph = COST.predict_call(specs, plan, "greedy").graph_ms
    gain = 1.0 - graph / COST.model.eager_ms(specs)
    assert gain > 0
    sure, doubtful = (TargetCost(COST.model, COST.target, doubt) for doubt in (gain / 2, 2 * gain / (1 - gain)))
    assert sure.predict_call(specs, plan, "optimal").graph_ms == pytest.approx(graph)
    promised = best_packing(call_items([specs], plan, sure), graph_tables(plan), sure).latency_ms
    assert promised[0] == pytest.approx(graph)
    assert {batch.miss_reason for batch in pack_items(specs, plan, "optimal", doubtful)} == {EAGER_IS_FASTER}


def test_unfit_items_keep_their_own_reason() -> None:
    axis = CaptureAxis("grid", ((4,),))
    settings = BudgetSettings((400,), 4, 0)
    plan = plan_budgets(settings, axes=(axis,))
    fits = EncoderItemSpec("image", 4, 200, axis_sizes={"grid": (4,)})
    wide = EncoderItemSpec("image", 4, 200, axis_sizes={"grid": (5,)})
    large = EncoderItemSpec("image", 4, 900, axis_sizes={"grid": (1,)})
    clip = EncoderItemSpec("video", 4, 200, 4, axis_sizes={"grid": (1,)})
    reasons = {batch.items: batch.miss_reason for batch in pack_optimally([fits, wide, large, clip], plan, COST)}
    assert reasons[1,] == AXIS_NOT_CAPTURED
    assert reasons[2,] == TOO_MANY_TOKENS
    assert reasons[3,] == VIDEO_DISABLED


def test_video_of_too_many_frames_is_eager() -> None:
    reasons = [batch.miss_reason for batch in pack_optimally([video(40, 10)], plan_of([400], 2, 32), COST)]
    assert reasons == [TOO_MANY_FRAMES]


def test_unfit_items_join_an_eager_run_in_large_calls() -> None:
    """Above the exact size, an oversize item and small ones that ride along with it are one eager run."""
    specs = [image(1200), *[image(64)] * 11]
    batches = pack_optimally(specs, PLAN, COST)
    assert next(batch for batch in batches if 0 in batch.items).miss_reason == TOO_MANY_TOKENS
    assert sorted(index for batch in batches for index in batch.items) == list(range(12))


def test_empty_call_has_no_batches() -> None:
    assert pack_optimally([], PLAN, COST) == []


def test_a_path_is_replayed_while_the_other_runs_eagerly() -> None:
    """Six crops of 100 tokens are above 544; launching both paths eagerly takes 36 ms, one replay and one launch 18."""
    cost = two_path_cost(launch=18.0)
    plan = plan_budgets(
        BudgetSettings((272, 544), 2, 0),
        path_minimums={"global": 272, "local": 100},
        segment_free_paths=frozenset({"global", "local"}),
    )
    crops = {"global": 272, "local": 600}
    specs = [EncoderItemSpec("image", 7, 872, path_output_tokens=crops)]
    (batch,) = pack_optimally(specs, plan, cost)
    assert {path: run.miss_reason for path, run in batch.runs.items()} == {"global": None, "local": TOO_MANY_TOKENS}
    optimal, greedy = (cost.predict_call(specs, plan, policy).graph_ms for policy in ("optimal", "greedy"))
    assert optimal == pytest.approx(greedy) and optimal < 0.6 * cost.model.eager_ms(specs)


def test_a_call_of_hundreds_of_items_is_weighed_in_bounded_work(monkeypatch: pytest.MonkeyPatch) -> None:
    weighed = []
    measure = COST.model.replay["default"].replay_ms

    def counted(*arguments: np.ndarray) -> np.ndarray:
        weighed.append(np.size(arguments[1]))
        return measure(*arguments)

    monkeypatch.setattr(COST.model.replay["default"], "replay_ms", counted)
    rng = np.random.default_rng(3)
    plan = plan_of([400, 1000, 4096, 16384], 400)
    for count in (200, 600):
        weighed.clear()
        specs = [image(int(tokens)) for tokens in rng.integers(64, 1300, size=count)]
        batches = pack_optimally(specs, plan, COST)
        assert sorted(index for batch in batches for index in batch.items) == list(range(count))
        assert len(weighed) <= 2 and sum(weighed) <= count * NEIGHBOURS
        assert COST.predict_call(specs, plan, "optimal").graph_ms <= COST.predict_call(specs, plan, "greedy").graph_ms
