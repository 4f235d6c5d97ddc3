"""Every packing policy against a second, plain implementation, on random calls."""

from __future__ import annotations

import os
import random

import pytest
from plain_packing import check_packing, random_call
from synthetic import Machine, synthetic_profile, two_path_cost

from vitgraph.planning.accounting import count_calls
from vitgraph.planning.packing import OPTIMAL, POLICIES, pack_items
from vitgraph.predict.cost_model import CostModel
from vitgraph.predict.targets import TARGETS, VITGRAPH, TargetCost

COSTS = {
    1: TargetCost(CostModel(synthetic_profile(Machine(launch=5.0))), TARGETS[VITGRAPH]),
    2: two_path_cost(launch=5.0),
}


def check_calls(policy: str, calls: int, seed: int) -> None:
    drawn = random.Random(seed)
    counted = []
    items = 0
    for _ in range(calls):
        specs, plan = random_call(drawn)
        cost = COSTS[len(plan.paths)]
        batches = pack_items(specs, plan, policy, cost)
        check_packing(specs, plan, policy, batches)
        counted.append(batches)
        items += len(specs)
        if policy == OPTIMAL and specs:
            best, *others = (cost.predict_call(specs, plan, name).graph_ms for name in (OPTIMAL, *POLICIES))
            assert best <= min(others) + 1e-9
    counters = count_calls(counted)
    assert counters.hits + counters.misses == counters.items == items


@pytest.mark.parametrize("policy", (*POLICIES, OPTIMAL))
def test_random_calls(policy: str) -> None:
    check_calls(policy, 200, seed=7)


@pytest.mark.slow
@pytest.mark.parametrize("policy", (*POLICIES, OPTIMAL))
def test_many_random_calls(policy: str) -> None:
    """`VITGRAPH_DRILL_CALLS` asks for more of them than a change has to pass."""
    check_calls(policy, int(os.environ.get("VITGRAPH_DRILL_CALLS", "1500")), seed=8)
