"""Statistics on data with a known answer, and on none, one, few and equal values."""

from __future__ import annotations

import math

import numpy as np
import pytest

from vitgraph.records import stats


def test_summary_of_known_values() -> None:
    summary = stats.summarize([4.0, 1.0, 3.0, 2.0, 100.0])
    assert (summary.requests, summary.calls, summary.mean_ms, summary.p50_ms, summary.max_ms) == (
        5,
        5,
        22.0,
        3.0,
        100.0,
    )
    assert summary.p90_ms == pytest.approx(61.6)  # position 3.6 between 4 and 100
    assert summary.p99_ms == pytest.approx(96.16)
    assert summary.std_ms == pytest.approx(43.617656, rel=1e-6)  # divides by n - 1
    assert summary.outliers == 1  # 100 is beyond 4 + 1.5 * (4 - 2)


def test_summary_of_no_values_is_unknown_and_not_zero() -> None:
    found = stats.summarize([])
    assert (found.requests, found.calls, found.mean_ms, found.p99_ms, found.max_ms) == (0, 0, None, None, None)


def test_summary_of_one_value_has_no_deviation() -> None:
    found = stats.summarize([2.5])
    assert (found.mean_ms, found.p50_ms, found.p99_ms, found.std_ms, found.outliers) == (2.5, 2.5, 2.5, None, 0)


@pytest.mark.parametrize(("n", "supported"), [(299, False), (300, True)])
def test_p99_needs_300_samples(n: int, supported: bool) -> None:
    summary = stats.summarize(np.arange(1, n + 1, dtype=float))
    assert summary.p99_supported is supported
    assert summary.p99_ms == pytest.approx(1 + 0.99 * (n - 1))


@pytest.mark.parametrize(("q", "n"), [(50, 6), (90, 30), (99, 300)])
def test_a_percentile_needs_three_samples_above_it(q: float, n: int) -> None:
    assert stats.min_samples(q) == n


@pytest.mark.parametrize("metric", stats.ALL_METRICS)
def test_a_constant_ratio_is_found_exactly(metric: stats.Metric) -> None:
    base = np.random.default_rng(1).lognormal(1.5, 0.8, 400)
    found = stats.improvement(base, 0.9 * base, metric)
    assert found.improvement_pct == pytest.approx(10.0)
    assert found.ci95 == pytest.approx((10.0, 10.0))


def test_the_improvement_is_of_the_means_and_not_the_mean_of_improvements() -> None:
    assert stats.improvement([1.0, 9.0], [2.0, 9.0]).improvement_pct == pytest.approx(-10.0)


def test_a_call_weighs_by_its_requests() -> None:
    """Three requests of 2 ms that take 1 ms, and one of 6 ms that stays: 12 ms become 9."""
    found = stats.improvement([2.0, 6.0], [1.0, 6.0], requests=[3, 1])
    assert found.improvement_pct == pytest.approx(25.0)
    summary = stats.summarize([2.0, 6.0], [3, 1])
    assert (summary.requests, summary.calls, summary.mean_ms, summary.p50_ms) == (4, 2, 3.0, 2.0)
    slower = stats.count_slower([2.0, 6.0], [2.5, 6.0], noise_pct=None, requests=[3, 1])
    assert (slower.requests, slower.over_2pct_count) == (4, 3)


@pytest.mark.parametrize("metric", stats.ALL_METRICS)
def test_requests_count_in_the_estimate_and_calls_in_the_interval(metric: stats.Metric) -> None:
    rng = np.random.default_rng(11)
    base, other = rng.lognormal(1.0, 0.5, (2, 400))
    once, thrice = (stats.improvement(base, other, metric, requests=[k] * 400) for k in (1, 3))
    assert thrice.improvement_pct == pytest.approx(once.improvement_pct, abs=0.5)
    assert once.ci95 and thrice.ci95
    assert thrice.ci95[1] - thrice.ci95[0] == pytest.approx(once.ci95[1] - once.ci95[0], rel=0.1)


@pytest.mark.parametrize("q", ["p50", "p99"])
def test_percentiles_are_numpys_of_the_requests(q: stats.Metric) -> None:
    rng = np.random.default_rng(12)
    base, other = rng.lognormal(1.0, 0.5, (2, 50))
    requests = rng.integers(1, 5, 50)
    before, after = (np.percentile(np.repeat(series, requests), float(q[1:])) for series in (base, other))
    found = stats.improvement(base, other, q, requests)
    assert found.improvement_pct == pytest.approx(100 * (before - after) / before)


def test_the_interval_of_a_mean_agrees_with_the_normal_approximation() -> None:
    rng = np.random.default_rng(3)
    base = np.full(2000, 10.0)
    other = 9.0 + rng.normal(0.0, 1.0, 2000)
    half_width = 1.96 * other.std(ddof=1) / math.sqrt(2000) / 10.0 * 100.0
    center = (1.0 - other.mean() / 10.0) * 100.0
    assert stats.improvement(base, other).ci95 == pytest.approx((center - half_width, center + half_width), abs=0.05)


def test_the_interval_of_few_calls_is_students() -> None:
    rng = np.random.default_rng(13)
    other = 9.0 + rng.normal(0.0, 1.0, 30)
    low, high = stats.improvement(np.full(30, 10.0), other).ci95 or (math.nan, math.nan)
    student = 2 * 2.0452 * other.std(ddof=1) / math.sqrt(30) * 10.0
    assert high - low == pytest.approx(student, rel=0.08)


def test_calls_alike_in_a_row_tell_less_than_as_many_apart() -> None:
    rng = np.random.default_rng(14)
    noise = np.repeat(rng.normal(0.0, 0.05, 40), 10)
    base = rng.lognormal(1.0, 0.5, 400)
    together = stats.improvement(base, base * (1.0 + noise)).ci95 or (0.0, 0.0)
    apart = stats.improvement(base, base * (1.0 + rng.permutation(noise))).ci95 or (0.0, 0.0)
    assert together[1] - together[0] > 2.0 * (apart[1] - apart[0])


def test_an_improvement_that_grows_with_size_is_no_noise_in_calls_ordered_by_size() -> None:
    rng = np.random.default_rng(15)
    base = np.sort(rng.lognormal(1.0, 0.5, 400))
    other = base * np.linspace(0.8, 1.0, 400) * rng.normal(1.0, 0.001, 400)
    places = rng.permutation(400)
    ordered, mixed = (stats.improvement(base[p], other[p]).ci95 or (0.0, 0.0) for p in (np.arange(400), places))
    assert ordered[1] - ordered[0] < 1.5 * (mixed[1] - mixed[0])


def test_pairing_cancels_what_both_series_share() -> None:
    """Heavy calls weigh on both: resampling each series alone would give an interval many times as wide."""
    rng = np.random.default_rng(5)
    base = rng.lognormal(1.5, 1.0, 500)
    low, high = stats.improvement(base, base * rng.normal(0.95, 0.01, 500)).ci95 or (math.nan, math.nan)
    assert 4.7 < low < 5.0 < high < 5.3


def test_the_interval_of_p99_resamples_the_same_calls_in_both_series() -> None:
    rng = np.random.default_rng(7)
    base = rng.lognormal(1.5, 1.0, 600)
    low, high = stats.improvement(base, base + 0.001, "p99").ci95 or (math.nan, math.nan)
    assert -0.01 < low <= high < 0.0


def test_the_seed_decides_the_interval() -> None:
    rng = np.random.default_rng(9)
    base, other = rng.lognormal(1.0, 1.0, (2, 350))
    first = stats.improvement(base, other, "p99", seed=1)
    assert first == stats.improvement(base, other, "p99", seed=1)
    assert first.ci95 != stats.improvement(base, other, "p99", seed=2).ci95


@pytest.mark.parametrize(
    ("metric", "n", "has_interval"), [("mean", 9, False), ("mean", 10, True), ("p99", 299, False), ("p99", 300, True)]
)
def test_too_few_calls_give_an_improvement_without_interval(metric: stats.Metric, n: int, has_interval: bool) -> None:
    base = np.random.default_rng(2).lognormal(1.0, 0.5, n)
    found = stats.improvement(base, 2.0 * base, metric)
    assert found.improvement_pct == pytest.approx(-100.0)
    assert (found.ci95 is not None) is has_interval


@pytest.mark.parametrize("metric", stats.ALL_METRICS)
def test_no_calls_have_no_improvement(metric: stats.Metric) -> None:
    assert stats.improvement([], [], metric) == stats.Gain(None, None)
    assert stats.Noise.of([], []).floors[metric] is None


@pytest.mark.parametrize("time", [math.nan, math.inf, 0.0, -1.0])
def test_times_that_are_none_have_no_improvement(time: float) -> None:
    values = [5.0] * 20
    assert stats.improvement(values, [*values[1:], time]) == stats.Gain(None, None)
    assert stats.Noise.of(values, [*values[1:], time]).floors["mean"] is None


def test_equal_samples_are_the_same() -> None:
    values = [5.0] * 20
    assert stats.Noise.of(values, values).judge(values, values).verdict == "same"


def test_unlike_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"equally long, got shapes \(2,\), \(1,\)"):
        stats.improvement([1.0, 2.0], [1.0])


def test_the_noise_floor_is_the_far_end_of_the_interval() -> None:
    rng = np.random.default_rng(4)
    base = rng.lognormal(1.0, 0.5, 200)
    repeat = base * rng.normal(1.02, 0.05, 200)
    low, high = stats.improvement(base, repeat, "trimmed_mean", seed=6).ci95 or (math.nan, math.nan)
    assert stats.Noise.of(base, repeat, seed=6).floors["trimmed_mean"] == max(abs(low), abs(high)) == -low


def test_one_interrupted_call_does_not_decide_the_noise_floor() -> None:
    rng = np.random.default_rng(16)
    base = rng.lognormal(1.0, 0.5, 50)
    repeat = base * rng.normal(1.0, 0.01, 50)
    interrupted = repeat.copy()
    interrupted[7] *= 100.0
    quiet, noisy = (stats.Noise.of(base, series).floors["mean"] for series in (repeat, interrupted))
    assert noisy is not None and quiet is not None and noisy < 1.5 * quiet


def test_the_largest_noise_is_by_metric_and_unknown_where_one_is() -> None:
    noises = [stats.Noise({"mean": 1.0, "p99": None}), stats.Noise({"mean": 0.5, "p99": 2.0})]
    assert stats.Noise.largest(noises).floors == {"mean": 1.0, "p99": None}


@pytest.mark.parametrize(
    ("ci95", "floor", "expected"),
    [
        ((10.9, 12.6), 0.4, "faster"),
        ((-12.6, -10.9), 0.4, "slower"),
        ((0.5, 0.9), 0.4, "faster"),
        ((-0.3, 0.2), 0.4, "same"),
        ((-0.9, 0.1), 0.4, "same"),
        ((-1.9, 2.0), None, "same"),
        ((-1.9, 2.1), 0.4, "undecided"),
        ((0.3, 5.0), 0.4, "undecided"),
        ((19.1, 37.1), 46.0, "undecided"),
        ((-5.0, 5.0), 46.0, "undecided"),
        (None, 0.4, "undecided"),
        ((10.9, 12.6), None, "undecided"),
    ],
)
def test_verdicts(ci95: tuple[float, float] | None, floor: float | None, expected: str) -> None:
    assert stats.verdict(stats.Gain(ci95[0] if ci95 else 1.0, ci95), floor) == expected


def test_same_is_within_the_margin_that_was_asked_for() -> None:
    found = stats.Gain(0.0, (-3.0, 3.0))
    assert (stats.verdict(found, 0.1), stats.verdict(found, 0.1, margin_pct=4.0)) == ("undecided", "same")


def test_a_mean_that_few_calls_made_is_no_claim() -> None:
    base = np.random.default_rng(17).normal(10.0, 0.1, 300)
    other = base.copy()
    other[[7, 20, 33, 41, 152, 168, 177, 190, 250]] *= 10.0
    judged = stats.Noise({"mean": 1.0}).judge(base, other)
    assert judged.improvement.ci95 is not None and judged.improvement.ci95[1] < -1.0
    assert judged.verdict == "undecided"
    assert "by few calls alone: measure more requests" in judged.reason()


@pytest.mark.parametrize(
    ("ci95", "floor", "words"),
    [
        ((19.1, 37.1), 46.0, "excludes zero, but reaches into the noise floor of ±46.00%: measure on a quieter host"),
        ((-3.0, 9.0), 1.0, r"is too wide for a claim: measure more requests (about 544 calls), or on a quieter host"),
        ((3.0, 9.0), None, "the noise is not known"),
        (None, 1.0, "100 calls are too few for an interval of the mean; it takes 10"),
        (
            (3.0, 9.0),
            1.0,
            "the 95% interval of the mean lies wholly beyond the noise floor of ±1.00%",
        ),
        ((-1.0, 1.0), 5.0, "lies wholly within ±2%"),
    ],
)
def test_every_verdict_says_why_and_an_undecided_one_what_to_do(
    ci95: tuple[float, float] | None, floor: float | None, words: str
) -> None:
    middle = sum(ci95) / 2 if ci95 else None
    assert words in stats.Judgement(stats.Gain(middle, ci95), floor, 2.0, 100).reason()


def test_few_far_off_calls_do_not_hide_what_all_others_show() -> None:
    rng = np.random.default_rng(18)
    base, other, repeat = rng.lognormal(1.0, 0.5, 300) * rng.normal(1.0, 0.03, (3, 300)) * [[1.0], [0.95], [1.0]]
    for series, places in ((base, (3, 50, 270)), (other, (20, 150)), (repeat, (99, 200, 201))):
        series[list(places)] *= 9.0
    noise = stats.Noise.of(base, repeat)
    mean, trimmed = (noise.judge(base, other, metric) for metric in ("mean", "trimmed_mean"))
    assert (mean.verdict, trimmed.verdict) == ("undecided", "faster")
    verdict, reason = stats.conclude(mean, trimmed)
    assert verdict == "faster" and "the plain mean is spread by few far-off calls" in reason


def test_all_calls_but_few_do_not_overrule_a_mean_that_points_the_other_way() -> None:
    mean = stats.Judgement(stats.Gain(-3.0, (-9.0, 6.0)), 1.0, 2.0, 100)
    trimmed = stats.Judgement(stats.Gain(5.0, (4.0, 6.0)), 1.0, 2.0, 100)
    assert stats.conclude(mean, trimmed)[0] == "undecided"


def test_request_noise_is_the_95th_percentile_of_the_repeat() -> None:
    eager = np.full(101, 10.0)
    repeat = 10.0 + np.arange(101) * 0.01 * np.where(np.arange(101) % 2, 1, -1)
    assert stats.request_noise_pct(eager, repeat) == pytest.approx(9.5)
    assert stats.request_noise_pct([], []) is None


def test_slower_requests_are_counted_beyond_the_noise_and_beyond_two_percent() -> None:
    slower = stats.count_slower([10.0] * 5, [9.0, 10.1, 10.3, 10.6, 12.0], noise_pct=5.0)
    assert (slower.requests, slower.threshold_pct, slower.count, slower.share) == (5, 5.0, 2, 0.4)
    assert (slower.over_2pct_count, slower.over_2pct_share) == (3, 0.6)


def test_slower_requests_without_a_repeat_are_not_counted_against_noise() -> None:
    slower = stats.count_slower([10.0, 10.0], [11.0, 9.0], noise_pct=None)
    assert (slower.count, slower.share, slower.over_2pct_count) == (None, None, 1)


def test_slower_requests_of_none_have_no_share() -> None:
    slower = stats.count_slower([], [], noise_pct=1.0)
    assert (slower.requests, slower.share, slower.over_2pct_share) == (0, None, None)
