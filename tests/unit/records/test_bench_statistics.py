"""What is derived from the samples of a bench: latencies weighed by requests, gains, verdicts with reasons."""

from __future__ import annotations

import pytest

from vitgraph.records.sample_table import Sample, Samples, read_samples
from vitgraph.records.series import Pair
from vitgraph.records.stats import compare_bench, latencies
from vitgraph.records.store import SAMPLES_FILE, read_record


def make_sample(
    call: int, series: str, wall_ms: float, round_index: int = 0, requests: int = 1, **more: float
) -> Sample:
    places = tuple(range(10 * call, 10 * call + requests))
    place = {"call": call, "requests": places, "series": series, "round": round_index, "position": 0}
    return Sample(**place, wall_ms=wall_ms, items=1, tokens=64, input_rows=256, **more)  # type: ignore[arg-type]


def make_run(eager: list[float], graph: list[float], repeat: list[float] | None = None) -> Samples:
    series = {"eager": eager, "graph": graph, "eager_repeat": repeat or []}
    return Samples.of(
        make_sample(call, name, time) for name, times in series.items() for call, time in enumerate(times)
    )


def first_pair(samples: Samples) -> Pair:
    return compare_bench(samples).pairs[0]


def test_the_stored_example_agrees_with_its_samples() -> None:
    from saved_run_folders import EXAMPLE

    record = read_record(EXAMPLE, "bench")
    samples = read_samples(EXAMPLE / SAMPLES_FILE)
    for name, latency in latencies(samples).items():
        assert latency.mean_ms == pytest.approx(record.result.latency[name].mean_ms)  # type: ignore[attr-defined]
        assert latency.p99_ms == pytest.approx(record.result.latency[name].p99_ms)  # type: ignore[attr-defined]


def test_a_call_is_the_mean_of_its_rounds() -> None:
    samples = Samples.of(
        [
            make_sample(0, "eager", 10.0, 0, gpu_ms=4.0),
            make_sample(0, "graph", 8.0, 0, gpu_ms=5.0),
            make_sample(0, "eager", 20.0, 1, gpu_ms=6.0),
            make_sample(0, "graph", 10.0, 1, gpu_ms=5.0),
        ]
    )
    eager = latencies(samples)["eager"]
    assert (eager.mean_ms, eager.p99_ms, eager.max_ms, eager.std_ms) == (15.0, 15.0, 15.0, None)
    assert (eager.requests, eager.calls, eager.gpu_mean_ms, eager.p99_supported) == (1, 1, 5.0, False)
    comparison = compare_bench(samples)
    assert (comparison.requests, comparison.calls, comparison.rounds) == (1, 1, 2)
    assert comparison.pairs[0].mean.improvement_pct == pytest.approx(40.0)


def test_means_weigh_calls_by_their_requests() -> None:
    samples = Samples.of(
        make_sample(call, name, time, requests=count)
        for name, times in {"eager": [30.0, 20.0], "graph": [15.0, 20.0]}.items()
        for call, (time, count) in enumerate(zip(times, (3, 1), strict=True))
    )
    found = latencies(samples)
    assert (found["eager"].requests, found["eager"].calls) == (4, 2)
    assert found["eager"].mean_ms == pytest.approx(50 / 4)
    assert found["graph"].mean_ms == pytest.approx(35 / 4)
    comparison = compare_bench(samples)
    assert (comparison.requests, comparison.calls) == (4, 2)
    assert comparison.pairs[0].mean.improvement_pct == pytest.approx(30.0)


def test_an_interrupted_round_counts_only_where_both_series_ran() -> None:
    samples = Samples.of([make_sample(0, "eager", 10.0), make_sample(0, "graph", 5.0), make_sample(1, "eager", 99.0)])
    assert {name: latency.mean_ms for name, latency in latencies(samples).items()} == {"eager": 10.0, "graph": 5.0}
    comparison = compare_bench(samples)
    assert (comparison.requests, comparison.unpaired_samples) == (1, 1)


def test_the_stock_forward_is_summarized_beside() -> None:
    found = latencies(Samples.joined([make_run([2.0], [1.0]), Samples.of([make_sample(0, "hf", 3.0)])]))
    assert list(found) == ["eager", "graph", "hf"]
    assert (found["hf"].mean_ms, found["hf"].gpu_mean_ms) == (3.0, None)


def test_monolithic_graphs_are_compared_with_eager_and_two_paths_over_the_same_calls() -> None:
    samples = Samples.joined([make_run([10.0, 10.0], [5.0, 4.0]), Samples.of([make_sample(0, "monolithic", 8.0)])])
    assert {name: (of.calls, of.mean_ms) for name, of in latencies(samples).items()} == {
        "eager": (1, 10.0),
        "graph": (1, 5.0),
        "monolithic": (1, 8.0),
    }
    comparison = compare_bench(samples)
    assert (comparison.requests, comparison.unpaired_samples) == (1, 2)
    gains = {(pair.base, pair.series): pair.mean.improvement_pct for pair in comparison.pairs}
    assert gains == {
        ("eager", "graph"): pytest.approx(50.0),
        ("eager", "monolithic"): pytest.approx(20.0),
        ("monolithic", "graph"): pytest.approx(37.5),
    }
    assert len(compare_bench(make_run([10.0], [5.0])).pairs) == 1


def test_no_samples_compare_to_nothing() -> None:
    assert latencies(Samples.of([])) == {}
    comparison = compare_bench(Samples.of([]))
    assert (comparison.requests, comparison.pairs[0].mean.improvement_pct, comparison.verdict) == (0, None, "undecided")
    assert comparison.verdict_reason == "no call was measured in both"


def steady(factor: float) -> list[float]:
    return [factor * (1.0 + 0.1 * request) for request in range(20)]


BEYOND = "the 95% interval of the mean lies wholly beyond the noise floor of ±1.00%"
WITHIN = "the 95% interval of the mean lies wholly within ±2%"
NO_CONTROL = "the noise is not known, since too few calls were measured against themselves: measure more requests"
TOO_FEW = "5 calls are too few for an interval of the mean; it takes 10"


@pytest.mark.parametrize(
    ("graph", "repeat", "verdict", "reason"),
    [
        (steady(0.8), steady(1.01), "faster", BEYOND),
        (steady(1.2), steady(1.01), "slower", BEYOND),
        (steady(1.0), steady(1.01), "same", WITHIN),
        (steady(0.8), None, "undecided", NO_CONTROL),
        (steady(0.8)[:5], steady(1.01), "undecided", TOO_FEW),
    ],
)
def test_verdicts_come_with_their_reason(
    graph: list[float], repeat: list[float] | None, verdict: str, reason: str
) -> None:
    comparison = compare_bench(make_run(steady(1.0), graph, repeat))
    assert (comparison.verdict, comparison.verdict_reason) == (verdict, reason)


def test_any_reason_against_the_times_makes_every_verdict_invalid() -> None:
    samples = make_run(steady(1.0), steady(0.8), steady(1.0))
    comparison = compare_bench(samples, invalid_reasons=["the clock dropped to 60%", "another process ran"])
    pair = comparison.pairs[0]
    assert {pair.mean.verdict, pair.p50.verdict, pair.p99.verdict, comparison.verdict} == {"invalid"}  # type: ignore[union-attr]
    assert comparison.verdict_reason == "the clock dropped to 60%; another process ran"


def test_slower_requests_use_the_noise_of_the_repeat() -> None:
    slower = first_pair(make_run([10.0] * 12, [9.0, 10.3, 10.6, 12.0] * 3, [10.5] * 12)).slower
    assert slower is not None and slower.threshold_pct == pytest.approx(5.0)
    assert (slower.count, slower.share, slower.requests) == (6, 0.5, 12)
    assert (slower.over_2pct_count, slower.over_2pct_share) == (9, 0.75)


def test_a_few_repeats_are_no_noise_of_a_request() -> None:
    slower = first_pair(make_run([10.0] * 4, [9.0, 10.3, 10.6, 12.0], [10.5] * 4)).slower
    assert slower is not None
    assert (slower.threshold_pct, slower.count, slower.share, slower.over_2pct_count) == (None, None, None, 3)


def test_the_same_is_what_lies_within_the_margin_that_is_asked_for() -> None:
    eager = [10.0 + 0.01 * (call % 7) for call in range(60)]
    samples = make_run(eager, [0.97 * time for time in eager], [1.05 * time for time in eager])
    assert compare_bench(samples).verdict == "undecided"
    assert compare_bench(samples, margin_pct=4.0).verdict == "same"
    assert compare_bench(samples, margin_pct=4.0).pairs[0].mean.verdict == "same"
