"""What `plan` says of one call and of a workload, with and without predicted times."""

from __future__ import annotations

import pytest
from synthetic import Machine, image, plan_of, synthetic_profile, video

from vitgraph.errors import UsageError
from vitgraph.planning.packing import pack_items
from vitgraph.predict.cost_model import CostModel
from vitgraph.predict.targets import TARGETS, VITGRAPH, TargetCost
from vitgraph.tuning.explain import explain_plan, explain_workload

MACHINE = Machine()
COST = TargetCost(CostModel(synthetic_profile(MACHINE)), TARGETS[VITGRAPH])
PLAN = plan_of([128, 512], 2)


def test_call_is_explained_without_a_calibration() -> None:
    """176 tokens pad to 256: 31.25 % waste; 600 tokens fit nothing."""
    answer = explain_plan([image(176), image(600)], plan_of([64, 256]), "greedy")
    hit, miss = answer["batches"]
    assert hit["items"] == [0]
    assert (hit["runs"][0]["token_budget"], hit["runs"][0]["waste"]) == (256, 0.3125)
    assert (miss["is_hit"], miss["runs"][0]["miss_reason"]) == (False, "too_many_tokens")
    assert miss["runs"][0]["miss_text"] == "more tokens than the largest budget"
    assert (answer["counts"]["hits"], answer["counts"]["misses"]) == (1, 1)
    assert answer["predicted"] is None


@pytest.mark.parametrize("tokens", [176, 64])
def test_exact_policy_misses_what_would_be_padded(tokens: int) -> None:
    answer = explain_plan([image(tokens)], plan_of([256, 4096]), "exact")
    assert answer["batches"][0]["runs"][0]["miss_reason"] == "not_exact"


def test_call_is_priced_with_a_calibration() -> None:
    answer = explain_plan([image(100), image(120), image(500)], PLAN, "greedy", COST)
    expected = MACHINE.replay(512, 2, [image(100), image(120)]) + MACHINE.replay(512, 1, [image(500)])
    assert sum(batch["replay_ms"] for batch in answer["batches"]) == pytest.approx(expected + 0.1, rel=1e-3)
    assert answer["predicted"]["graph_ms"] == pytest.approx(expected + 0.3, rel=1e-3)
    assert answer["predicted"]["is_faster"]
    assert "median 0.0%" in answer["predicted"]["error_text"]


def test_optimal_packing_needs_a_calibration() -> None:
    with pytest.raises(UsageError, match="give a calibration"):
        explain_plan([image(100)], PLAN, "optimal")
    assert explain_plan([image(100)], PLAN, "optimal", COST)["counts"]["hits"] == 1


@pytest.mark.parametrize("with_cost", [False, True])
def test_workload_is_counted_as_the_packing_counts_it(with_cost: bool) -> None:
    calls = [[image(100)], [image(100)], [image(600), image(50)], [video(4, 20)]]
    answer = explain_workload(calls, PLAN, "greedy", COST if with_cost else None)
    packed = [pack_items(specs, PLAN, "greedy") for specs in calls]
    hits = sum(len(batch.items) for batches in packed for batch in batches if batch.is_hit)
    assert (answer["calls"], answer["counts"]["items"], answer["counts"]["hits"]) == (4, 5, hits)
    assert {row["reason"]: row["items"] for row in answer["misses"]} == {"too_many_tokens": 1, "video_disabled": 1}
    assert (answer["predicted"] is not None) == with_cost


def test_workload_is_priced_per_request() -> None:
    calls = [[image(100), image(100)]]
    answer = explain_workload(calls, PLAN, "greedy", COST, [2])
    expected = MACHINE.graph_call([(512, 2, [image(100)] * 2)]) / 2
    assert answer["predicted"]["graph"]["mean_ms"] == pytest.approx(expected, rel=1e-3)
    assert answer["predicted"]["eager"]["mean_ms"] == pytest.approx(9.0, rel=1e-3)
    assert answer["predicted"]["slower_than_eager_share"] == 0.0
