"""The cost model against a machine whose times are known formulas."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from synthetic import BUDGETS, Machine, image, plan_of, synthetic_profile, video

from vitgraph.planning.budgets import EncoderItemSpec
from vitgraph.predict.cost_model import CostModel, item_features
from vitgraph.predict.doubt import model_error, summarize_errors
from vitgraph.predict.targets import TARGETS, VITGRAPH, VLLM, TargetCost, fit_overheads
from vitgraph.tuning.describe import closed_share

MACHINE = Machine()
MODEL = CostModel(synthetic_profile(MACHINE))


def replay_ms(model: CostModel, budget: int, slots: int, items: Sequence[EncoderItemSpec]) -> float:
    features = item_features(items).sum(axis=0)
    return float(model.replay["default"].replay_ms((), np.array(budget), np.array(slots), features))


@pytest.mark.parametrize(
    ("budget", "slots", "items"),
    [
        (100, 1, [image(100)]),
        (900, 1, [image(700)]),
        (2500, 8, [image(300)] * 7),
        (3000, 1, [image(1500)]),
        (1200, 32, [video(16, 70)]),
        (5000, 64, [image(64)] * 40),
    ],
)
def test_replay_of_unmeasured_budget_and_batch(budget: int, slots: int, items: list[EncoderItemSpec]) -> None:
    assert replay_ms(MODEL, budget, slots, items) == pytest.approx(MACHINE.replay(budget, slots, items), rel=1e-3)


@pytest.mark.parametrize("items", [[image(100)], [image(1400)], [image(3000)], [image(300)] * 7, [video(8, 200)]])
def test_eager_is_launch_bound_then_device_bound(items: list[EncoderItemSpec]) -> None:
    assert MODEL.eager_ms(items) == pytest.approx(MACHINE.eager(items), rel=0.02)


def test_empty_slots_cost_what_was_measured() -> None:
    """One image replayed with 1024 slots instead of 8: T20's gap, which grows with the empty slots."""
    gap = replay_ms(MODEL, 512, 1024, [image(512)]) - replay_ms(MODEL, 512, 8, [image(512)])
    assert gap == pytest.approx(1016 * MACHINE.per_slot, rel=0.01)


def test_slot_cost_may_grow_with_the_budget() -> None:
    class Growing(Machine):
        def replay(self, budget: int, slots: int, items: Sequence[EncoderItemSpec]) -> float:
            return super().replay(budget, slots, items) * (1 + 1e-4 * (slots - sum(i.segments for i in items)))

    machine = Growing(per_slot=0.0)
    model = CostModel(synthetic_profile(machine))
    for budget in (256, 1024, 4096):
        measured = machine.replay(budget, 256, [image(budget)])
        assert replay_ms(model, budget, 256, [image(budget)]) == pytest.approx(measured, rel=0.02)


def test_replay_never_gets_faster_with_more_rows() -> None:
    model = CostModel(synthetic_profile(noise=0.05))
    times = [replay_ms(model, budget, 1, [image(60)]) for budget in range(64, 20000, 97)]
    assert (np.diff(times) >= 0).all()


def test_error_on_unseen_calls_stays_below_five_percent() -> None:
    error = model_error(CostModel(synthetic_profile(noise=0.03, seed=3)))
    assert error.both.n == 48
    assert error.both.median_pct is not None
    assert error.both.median_pct < 5.0


def test_error_summary_on_known_numbers() -> None:
    summary = summarize_errors([1.1, 0.9, 2.0], [1.0, 1.0, 2.0])
    assert (summary.n, summary.median_pct, summary.bias_pct) == (3, pytest.approx(10.0), pytest.approx(0.0))
    assert summarize_errors([], []).median_pct is None


def test_overheads_of_the_manager_are_recovered() -> None:
    overheads = fit_overheads(TARGETS[VITGRAPH], synthetic_profile(MACHINE))
    assert overheads.call_ms == pytest.approx(MACHINE.call, abs=1e-6)
    assert overheads.replay_ms == pytest.approx(MACHINE.replay_overhead, abs=1e-6)
    assert overheads.miss_ms == 0.0


def test_predicted_call_adds_up() -> None:
    cost = TargetCost(MODEL, TARGETS[VITGRAPH])
    items = [image(90), image(280), image(700)]
    prediction = cost.predict_call(items, plan_of([100, 300, 900], 1), "greedy")
    expected = MACHINE.graph_call([(100, 1, items[:1]), (300, 1, items[1:2]), (900, 1, items[2:])])
    assert prediction.graph_ms == pytest.approx(expected, rel=1e-3)
    assert prediction.eager_ms == pytest.approx(MACHINE.eager(items), rel=0.02)
    assert [batch.items for batch in prediction.batches] == [(0,), (1,), (2,)]


def test_vllm_overheads_are_those_measured_with_its_manager() -> None:
    """0.68 ms outside the replays of a call of one, about 1.45 ms of a call of three."""
    overheads = fit_overheads(TARGETS[VLLM], synthetic_profile())
    assert overheads.call_ms + overheads.replay_ms == pytest.approx(0.68)
    assert overheads.call_ms + 3 * overheads.replay_ms == pytest.approx(1.45, abs=0.02)


def test_vllm_runs_misses_one_by_one() -> None:
    """Two oversize images pay the launches twice there, and once here."""
    items = [image(200), image(210)]
    plan = plan_of([100], 8)
    ours = TargetCost(MODEL, TARGETS[VITGRAPH]).predict_call(items, plan, "greedy").graph_ms
    theirs = TargetCost(MODEL, TARGETS[VLLM]).predict_call(items, plan, "greedy").graph_ms
    assert ours == pytest.approx(MACHINE.launch, rel=0.01)
    assert theirs == pytest.approx(2 * MACHINE.launch + 0.3, rel=0.01)


def test_memory_counts_shared_buffers_once_and_separate_ones_each() -> None:
    few, many = (np.array([1024]), np.arange(64, 1025, 64))
    shared = [MODEL.shared_bytes(1024, len(budgets)) for budgets in (few, many)]
    separate = [MODEL.separate_bytes(budgets) for budgets in (few, many)]
    assert shared[1] - shared[0] == pytest.approx(15 * 2**20)
    assert separate[1] - separate[0] == pytest.approx(15 * 2**20 + 40_000 * (many.sum() - 1024))


def test_capture_time_is_summed_over_graphs() -> None:
    cost = TargetCost(MODEL, TARGETS[VITGRAPH])
    assert cost.capture_s(plan_of([1024, 2048])) == pytest.approx((60 + 20.48 + 60 + 40.96) / 1e3)


def test_profile_of_few_points_still_gives_a_model() -> None:
    model = CostModel(synthetic_profile(budgets=BUDGETS[4:9]))
    assert replay_ms(model, 700, 1, [image(700)]) == pytest.approx(MACHINE.replay(700, 1, [image(700)]), rel=0.02)


def test_closed_share_of_the_way_to_the_oracle() -> None:
    assert closed_share(10.0, 6.0, 5.0) == pytest.approx(0.8)
    assert closed_share(10.0, 11.0, 5.0) == pytest.approx(-0.2)
    assert closed_share(5.0, 5.0, 5.0) is None
