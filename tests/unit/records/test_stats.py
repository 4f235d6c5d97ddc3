"""Statistics on data with a known answer, and on none, one, few and equal values."""

from __future__ import annotations

import math

import numpy as np
import pytest

from vitgraph.records import stats


def test_summary_of_known_values() -> None:
    summary = stats.summarize([4.0, 1.0, 3.0, 2.0, 100.0])
    assert (summary.n, summary.mean, summary.p50, summary.max) == (5, 22.0, 3.0, 100.0)
    assert summary.p90 == pytest.approx(61.6)  # position 3.6 between 4 and 100
    assert summary.p99 == pytest.approx(96.16)
    assert summary.std == pytest.approx(43.617656, rel=1e-6)  # divides by n - 1
    assert summary.outliers == 1  # 100 is beyond 4 + 1.5 * (4 - 2)


def test_summary_of_no_values_is_unknown_and_not_zero() -> None:
    assert stats.summarize([]) == stats.Summary(0, None, None, None, None, None, None, 0)


def test_summary_of_one_value_has_no_deviation() -> None:
    assert stats.summarize([2.5]) == stats.Summary(1, 2.5, 2.5, 2.5, 2.5, 2.5, None, 0)


@pytest.mark.parametrize(("n", "supported"), [(299, False), (300, True)])
def test_p99_needs_300_samples(n: int, supported: bool) -> None:
    summary = stats.summarize(np.arange(1, n + 1, dtype=float))
    assert summary.is_p99_supported is supported
    assert summary.p99 == pytest.approx(1 + 0.99 * (n - 1))


@pytest.mark.parametrize(("q", "n"), [(50, 6), (90, 30), (99, 300)])
def test_a_percentile_needs_three_samples_above_it(q: float, n: int) -> None:
    assert stats.min_samples(q) == n


@pytest.mark.parametrize("metric", stats.METRICS)
def test_a_constant_ratio_is_found_exactly(metric: stats.Metric) -> None:
    eager = np.random.default_rng(1).lognormal(1.5, 0.8, 400)
    delta = stats.metric_delta(eager, 0.9 * eager, metric)
    assert delta.delta_pct == pytest.approx(-10.0)
    assert delta.improvement_pct == pytest.approx(10.0)
    assert delta.ci95 == pytest.approx((-10.0, -10.0))


def test_the_difference_is_of_the_means_and_not_the_mean_of_differences() -> None:
    assert stats.paired_mean_delta([1.0, 9.0], [2.0, 9.0]).delta_pct == pytest.approx(10.0)


def test_the_interval_of_a_mean_agrees_with_the_normal_approximation() -> None:
    rng = np.random.default_rng(3)
    eager = np.full(2000, 10.0)
    graph = 9.0 + rng.normal(0.0, 1.0, 2000)
    ci95 = stats.paired_mean_delta(eager, graph).ci95
    half_width = 1.96 * graph.std(ddof=1) / math.sqrt(2000) / 10.0 * 100.0
    center = (graph.mean() / 10.0 - 1.0) * 100.0
    assert ci95 == pytest.approx((center - half_width, center + half_width), abs=0.05)


def test_pairing_cancels_what_both_modes_share() -> None:
    """Heavy requests weigh on both modes: resampling each mode alone would give an interval many times as wide."""
    rng = np.random.default_rng(5)
    eager = rng.lognormal(1.5, 1.0, 500)
    low, high = stats.paired_mean_delta(eager, eager * rng.normal(0.95, 0.01, 500)).ci95 or (math.nan, math.nan)
    assert -5.3 < low < -5.0 < high < -4.7


def test_the_interval_of_p99_resamples_the_same_requests_in_both_modes() -> None:
    rng = np.random.default_rng(7)
    eager = rng.lognormal(1.5, 1.0, 600)
    low, high = stats.percentile_delta(eager, eager + 0.001, 99).ci95 or (math.nan, math.nan)
    assert 0.0 < low <= high < 0.01


def test_the_seed_decides_the_interval() -> None:
    rng = np.random.default_rng(9)
    eager, graph = rng.lognormal(1.0, 1.0, (2, 350))
    first = stats.percentile_delta(eager, graph, 99, seed=1)
    assert first == stats.percentile_delta(eager, graph, 99, seed=1)
    assert first.ci95 != stats.percentile_delta(eager, graph, 99, seed=2).ci95


@pytest.mark.parametrize(
    ("metric", "n", "has_interval"), [("mean", 9, False), ("mean", 10, True), ("p99", 299, False), ("p99", 300, True)]
)
def test_too_few_pairs_give_a_difference_without_interval(metric: stats.Metric, n: int, has_interval: bool) -> None:
    eager = np.random.default_rng(2).lognormal(1.0, 0.5, n)
    delta = stats.metric_delta(eager, 2.0 * eager, metric)
    assert delta.delta_pct == pytest.approx(100.0)
    assert (delta.ci95 is not None) is has_interval


@pytest.mark.parametrize("metric", stats.METRICS)
def test_no_samples_have_no_difference(metric: stats.Metric) -> None:
    assert stats.metric_delta([], [], metric) == stats.Delta(None, None)
    assert stats.noise_floor([], [], metric) is None


def test_equal_samples_are_the_same() -> None:
    values = [5.0] * 20
    delta = stats.paired_mean_delta(values, values)
    assert delta == stats.Delta(0.0, (0.0, 0.0))
    assert stats.verdict(delta.delta_pct, delta.ci95, stats.noise_floor(values, values, "mean")) == "same"


def test_unlike_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"equally long, got shapes \(2,\) and \(1,\)"):
        stats.paired_mean_delta([1.0, 2.0], [1.0])


def test_the_noise_floor_is_the_far_end_of_the_interval() -> None:
    rng = np.random.default_rng(4)
    eager = rng.lognormal(1.0, 0.5, 200)
    repeat = eager * rng.normal(1.02, 0.05, 200)
    low, high = stats.paired_mean_delta(eager, repeat, seed=6).ci95 or (math.nan, math.nan)
    assert stats.noise_floor(eager, repeat, "mean", seed=6) == max(abs(low), abs(high)) == high


@pytest.mark.parametrize(
    ("ci95", "floor", "expected"),
    [
        ((-12.6, -10.9), 0.4, "faster"),
        ((10.9, 12.6), 0.4, "slower"),
        ((-0.3, 0.2), 0.4, "same"),
        ((-0.4, 0.4), 0.4, "same"),
        ((-0.9, 0.1), 0.4, "undecided"),
        ((-0.9, -0.3), 0.4, "undecided"),
        ((0.3, 0.9), 0.4, "undecided"),
        ((-5.0, 5.0), 0.4, "undecided"),
        (None, 0.4, "undecided"),
        ((-12.6, -10.9), None, "undecided"),
    ],
)
def test_verdicts(ci95: tuple[float, float] | None, floor: float | None, expected: str) -> None:
    assert stats.verdict(-1.0, ci95, floor) == expected


def test_request_noise_is_the_95th_percentile_of_the_repeat() -> None:
    eager = np.full(101, 10.0)
    repeat = 10.0 + np.arange(101) * 0.01 * np.where(np.arange(101) % 2, 1, -1)
    assert stats.request_noise_pct(eager, repeat) == pytest.approx(9.5)
    assert stats.request_noise_pct([], []) is None


def test_slower_requests_are_counted_beyond_the_noise_and_beyond_two_percent() -> None:
    slower = stats.slower_than_eager([10.0] * 5, [9.0, 10.1, 10.3, 10.6, 12.0], noise_pct=5.0)
    assert slower == stats.SlowerCount(5, 5.0, 2, 0.4, 3, 0.6)


def test_slower_requests_without_a_repeat_are_not_counted_against_noise() -> None:
    slower = stats.slower_than_eager([10.0, 10.0], [11.0, 9.0], noise_pct=None)
    assert (slower.count, slower.share, slower.over_2pct_count) == (None, None, 1)


def test_slower_requests_of_none_have_no_share() -> None:
    slower = stats.slower_than_eager([], [], noise_pct=1.0)
    assert (slower.n, slower.share, slower.over_2pct_share) == (0, None, None)
