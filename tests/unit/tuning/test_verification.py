"""Measuring a tuning result on a small tower: every strategy on the same calls, and the oracle beside them."""

from __future__ import annotations

import pytest
from synthetic import synthetic_profile

from vitgraph.graphs.manager import EncoderCudaGraphManager
from vitgraph.measure.calls import EncoderCall, make_calls
from vitgraph.measure.setup import resolve_source
from vitgraph.models.encoder import VisionEncoder
from vitgraph.records.tune_result import Measured
from vitgraph.specs.parts import ModelSpec
from vitgraph.tuning.advice import Advice, tune_budgets
from vitgraph.tuning.judge import FEWEST_CALLS, Verification, representative
from vitgraph.workloads.base import MediaItem, Request

SOURCE = resolve_source(ModelSpec("qwen3-vl-debug"))
SERIES = ("eager", "tuned", "automatic", "exact_graph")
SIZES = ((224, 224), (320, 256), (300, 400), (640, 480))


def some_calls(count: int, requests_per_call: int = 2) -> list[EncoderCall]:
    requests = [Request(number, (MediaItem(*SIZES[number % 4]),)) for number in range(count)]
    return make_calls(requests, SOURCE.rule(), requests_per_call)[0]


@pytest.fixture(scope="module")
def advice() -> Advice:
    return tune_budgets(some_calls(12), SOURCE, synthetic_profile(), max_call_tokens=512)


@pytest.fixture(scope="module")
def measured(tower: VisionEncoder, advice: Advice) -> Measured:
    del advice.tuned.plans["seed_nine"]
    return Verification(tower, some_calls(12), advice, rounds=1).run(max_calls=4)


def test_every_strategy_is_measured_on_the_same_calls(measured: Measured, advice: Advice) -> None:
    assert advice.result.measured is measured
    assert measured.mode == "cpu-replay"
    assert (measured.calls, measured.calls_left_out) == (4, 0)
    assert set(measured.strategies) == {"eager", "oracle", "tuned", "automatic"}
    assert {strategy.latency.requests for strategy in measured.strategies.values()} == {8}
    by_series = {name: {sample.call for sample in advice.samples if sample.series == name} for name in SERIES}
    assert all(len(calls) == 4 for calls in by_series.values())
    assert any(sample.series == "eager_repeat" for sample in advice.samples)


def test_oracle_is_the_faster_of_eager_and_the_exact_graph(measured: Measured, advice: Advice) -> None:
    times = {
        (sample.series, sample.call): sample.wall_ms / len(sample.requests)
        for sample in advice.samples
        if sample.series in ("eager", "exact_graph")
    }
    calls = {call for _, call in times}
    best = [min(times["eager", call], times["exact_graph", call]) for call in calls]
    assert measured.strategies["oracle"].latency.mean_ms == pytest.approx(sum(best) / len(best))


def test_prediction_is_held_against_the_measurement(measured: Measured) -> None:
    """The profile is another machine's, so that its predictions are far off, and said to be."""
    tuned = measured.strategies["tuned"]
    assert tuned.prediction_error is not None and tuned.prediction_error.n == 4
    assert (tuned.prediction_error.median_pct or 0.0) > 20
    assert (tuned.graphs or 0) > 0 and tuned.dropped == 0
    assert (tuned.memory_bytes or 0) > 0


def test_tower_can_be_captured_again_afterwards(tower: VisionEncoder, measured: Measured, advice: Advice) -> None:
    plan, policy = advice.tuned.plans["tuned"]
    manager = EncoderCudaGraphManager(tower, plan, policy=policy)
    manager.capture()
    assert len(manager.graphs) == len(plan.graph_keys())
    manager.clear()


def test_every_beginning_of_the_order_is_representative() -> None:
    calls = some_calls(80, 1)
    order = list(representative(calls, seed=1))
    assert sorted(call.index for call in order) == list(range(80))
    assert [call.index for call in order] == [call.index for call in representative(calls, seed=1)]
    sizes = [call.tokens for call in calls]
    for count in (8, 20, 33):
        taken = [call.tokens for call in order[:count]]
        for size in set(sizes):
            assert taken.count(size) / count == pytest.approx(sizes.count(size) / len(sizes), abs=0.13)


def test_a_short_time_takes_fewer_calls_and_says_so(tower: VisionEncoder, advice: Advice) -> None:
    answer = Verification(tower, some_calls(60, 1), advice, rounds=1, time_limit_s=0.0).run()
    assert answer.calls == 1
    assert answer.calls_left_out == FEWEST_CALLS - 1
    assert answer.calls_of_workload == 60


def test_a_stop_keeps_what_was_measured(tower: VisionEncoder, advice: Advice, monkeypatch: pytest.MonkeyPatch) -> None:
    meet, met = Verification._meet, []

    def stop_at_third(self: Verification, call: EncoderCall, **options: bool) -> None:
        met.append(call)
        if len(met) == 3:
            raise KeyboardInterrupt
        meet(self, call, **options)

    monkeypatch.setattr(Verification, "_meet", stop_at_third)
    answer = Verification(tower, some_calls(12), advice, rounds=1).run()
    assert answer.is_interrupted
    assert (answer.calls, answer.calls_left_out) == (2, 4)


def test_graphs_that_no_call_meets_are_not_captured(tower: VisionEncoder, advice: Advice) -> None:
    automatic = Verification(tower, some_calls(4, 1), advice, rounds=1).run().strategies["automatic"]
    assert 0 < (automatic.graphs_captured or 0) < (automatic.graphs or 0)
