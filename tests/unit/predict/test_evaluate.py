"""The vectorised packers and predictions against packing and predicting call by call."""

from __future__ import annotations

import random

import numpy as np
import pytest
from plain_packing import random_call
from synthetic import image, plan_of, synthetic_profile, two_path_cost, video

from vitgraph.planning.budgets import BudgetPlan, BudgetSettings, CaptureAxis, EncoderItemSpec, plan_budgets
from vitgraph.planning.graph_tables import call_items, graph_tables
from vitgraph.planning.packing import group_items
from vitgraph.predict.cost_model import CostModel
from vitgraph.predict.targets import TARGETS, VITGRAPH, VLLM, TargetCost, make_plan
from vitgraph.predict.workload_cost import Traffic, eager_calls, group_ids, oracle_calls, predict_calls, replayed_groups

MODEL = CostModel(synthetic_profile())
COSTS = {name: TargetCost(MODEL, target) for name, target in TARGETS.items()}


def random_calls(seed: int, *, with_videos: bool, most_items: int = 5) -> list[tuple[EncoderItemSpec, ...]]:
    rng = np.random.default_rng(seed)
    calls = []
    for _ in range(30):
        items = [image(int(tokens)) for tokens in rng.integers(16, 700, size=int(rng.integers(1, most_items + 1)))]
        if with_videos and rng.random() < 0.5:
            items.insert(0, video(int(rng.integers(2, 40)), int(rng.integers(4, 20))))
        calls.append(tuple(items))
    return calls


PLANS = {
    "images": plan_of([64, 128, 256, 512, 1024], 4),
    "one item": plan_of([200, 900]),
    "videos": plan_of([64, 150, 400, 800], 3, 24),
    "videos eager": plan_of([64, 150, 400, 800], 3, 0),
    "one slot count": make_plan(
        TARGETS[VLLM], MODEL.profile.encoder, BudgetSettings((64, 300, 900), 4, 48, "greedy-defer")
    ),
}


@pytest.mark.parametrize(
    ("policy", "target"),
    [*((policy, VITGRAPH) for policy in TARGETS[VITGRAPH].policies), ("greedy", VLLM), ("greedy-defer", VLLM)],
)
@pytest.mark.parametrize("name", PLANS)
def test_equals_predicting_call_by_call(name: str, policy: str, target: str) -> None:
    cost, plan = COSTS[target], PLANS[name]
    calls = random_calls(len(name), with_videos="videos" in name)
    traffic = Traffic(calls)
    found = predict_calls(traffic, cost, plan, policy)[traffic.source]
    expected = [cost.predict_call(specs, plan, policy).graph_ms for specs in calls]
    assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("policy", ["greedy", "greedy-defer", "exact"])
@pytest.mark.parametrize("name", PLANS)
def test_large_calls_are_weighed_together_and_alike(name: str, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of an overloaded engine have dozens of items, hardly two of them equally many."""
    cost, plan = COSTS[VLLM], PLANS[name]
    calls = random_calls(len(name), with_videos="videos" in name, most_items=40)
    filled = Traffic(calls)
    assert len(filled.buckets(plan, cost)) < 12
    found = predict_calls(filled, cost, plan, policy)[filled.source]
    assert found == pytest.approx([cost.predict_call(specs, plan, policy).graph_ms for specs in calls], rel=1e-9)
    together = replayed_groups(filled, cost, plan, policy)
    monkeypatch.setattr("vitgraph.predict.workload_cost.MOST_ITEMS_APART", 10**6)
    apart = replayed_groups(Traffic(calls), cost, plan, policy)
    for one, other in (
        (together.tokens, apart.tokens),
        (together.counts, apart.counts),
        (together.eager_ms, apart.eager_ms),
    ):
        assert sorted(one.tolist()) == pytest.approx(sorted(other.tolist()))


@pytest.mark.parametrize("policy", ["greedy", "greedy-defer", "exact"])
def test_groups_equal_those_of_the_packer(policy: str) -> None:
    drawn = random.Random(3)
    for _ in range(150):
        specs, plan = random_call(drawn)
        if specs:
            specs.sort(key=lambda spec: spec.output_tokens)
            ids = group_ids(call_items([specs], plan, COSTS[VITGRAPH]), graph_tables(plan), policy)[0]
            groups = sorted(sorted(group) for group in group_items(specs, plan, policy))
            assert sorted(list(np.flatnonzero(ids == number)) for number in set(ids)) == groups


def test_capture_axis_decides_what_is_eager() -> None:
    axis = CaptureAxis("grid", ((2, 2), (4, 8)))
    plan = plan_budgets(BudgetSettings((400,), 4, 0), axes=(axis,))
    sizes = [(1, 2), (4, 3), (5, 1), (1, 9)]
    calls = [(EncoderItemSpec("image", 4, 100, axis_sizes={"grid": size}),) for size in sizes]
    found = predict_calls(Traffic(calls), COSTS[VITGRAPH], plan, "greedy")
    eager = eager_calls(Traffic(calls), COSTS[VITGRAPH], plan)
    assert list(found < eager) == [True, True, False, False]
    assert found.tolist() == pytest.approx(
        [COSTS[VITGRAPH].predict_call(specs, plan, "greedy").graph_ms for specs in calls]
    )


def test_segment_free_path_ignores_segments() -> None:
    plan = plan_budgets(
        BudgetSettings((256, 1024), 8, 0), min_tokens_per_segment=64, segment_free_paths=frozenset({"default"})
    )
    calls = [(EncoderItemSpec("image", 13, 13 * 64, 13),), (EncoderItemSpec("image", 2, 128, 2),) * 2]
    traffic = Traffic(calls)
    expected = [COSTS[VITGRAPH].predict_call(specs, plan, "greedy").graph_ms for specs in calls]
    assert predict_calls(traffic, COSTS[VITGRAPH], plan, "greedy")[traffic.source] == pytest.approx(expected)


def test_two_paths_replay_what_fits_and_run_the_rest() -> None:
    cost = two_path_cost(launch=18.0)
    plan = BudgetPlan({"global": (128,), "local": (256,)}, 2, 0, {("global", 128): (2,), ("local", 256): (2,)})
    calls = [(two_path(60, 100),), (two_path(60, 0), two_path(60, 200)), (two_path(60, 400),)]
    traffic = Traffic(calls)
    for policy in ("greedy", "greedy-defer", "exact", "optimal"):
        found = predict_calls(traffic, cost, plan, policy)[traffic.source]
        assert found == pytest.approx([cost.predict_call(specs, plan, policy).graph_ms for specs in calls])


def two_path(on_global: int, on_local: int) -> EncoderItemSpec:
    tokens = {"global": on_global, "local": on_local}
    return EncoderItemSpec("image", 4, on_global + on_local, path_output_tokens=tokens)


def test_equal_calls_are_counted_once_whatever_their_order() -> None:
    traffic = Traffic([(image(64), image(200)), (image(200), image(64)), (image(64),)], [1, 1, 1])
    assert len(traffic.distinct) == 2
    assert traffic.counts.tolist() == [2, 1]
    assert traffic.per_request(np.array([6.0, 2.0])).tolist() == [6.0, 6.0, 2.0]


def test_latency_of_a_call_is_shared_by_its_requests() -> None:
    traffic = Traffic([(image(64), image(200)), (image(64),)], [2, 1])
    assert traffic.per_request(np.array([6.0, 2.0])).tolist() == [3.0, 3.0, 2.0]


def test_oracle_is_the_faster_of_eager_and_an_exact_graph() -> None:
    traffic = Traffic([(image(100),), (image(8000),)])
    plan = PLANS["images"]
    oracle = oracle_calls(traffic, COSTS[VITGRAPH], plan)
    eager = eager_calls(traffic, COSTS[VITGRAPH], plan)
    assert oracle[0] == pytest.approx(1.4 + 1.15 + 0.018, rel=1e-3)
    assert oracle[1] == pytest.approx(eager[1], rel=0.01)
