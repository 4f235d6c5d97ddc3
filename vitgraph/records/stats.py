"""Statistics of latency samples: summaries, paired bootstrap intervals, noise floors and the verdict rule.

The rules: no sample is removed; a percentile needs three observations above it before anything is claimed of it;
every difference is graph minus eager in percent, so negative is faster; its 95 % interval is a paired bootstrap
over requests (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, percentile interval); and a verdict
is given only where the whole interval lies on one side of what eager differs from itself in the same run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Verdict = Literal["faster", "slower", "same", "undecided", "invalid"]
Metric = Literal["mean", "p50", "p99"]
FloatArray = npt.NDArray[np.float64]
Values = Sequence[float] | npt.NDArray[np.floating[Any]]

METRICS: tuple[Metric, ...] = ("mean", "p50", "p99")
P99_MIN_SAMPLES = 300
MIN_PAIRS = 10
"""Pairs below which a bootstrap interval is not given: it would be far too narrow."""
RESAMPLES = 2000
CONFIDENCE_PCT = 95.0
REQUEST_NOISE_PERCENTILE = 95.0
FEWEST_NOISE_PAIRS = 10
FIXED_THRESHOLD_PCT = 2.0

_OBSERVATIONS_ABOVE = 3
_CHUNK_ELEMENTS = 1_000_000
_PERCENTILE_OF: dict[str, float] = {"p50": 50.0, "p99": 99.0}


@dataclass(frozen=True, slots=True)
class Summary:
    """Describes one series of values, in the unit of the values.

    Attributes:
        n: Number of values.
        mean: Arithmetic mean; None without values.
        p50: Median, linear between neighbours; None without values.
        p90: 90th percentile, linear between neighbours.
        p99: 99th percentile, linear between neighbours, whether or not `n` supports it.
        max: Largest value.
        std: Standard deviation with n - 1; None below two values.
        outliers: Values beyond 1.5 interquartile ranges of the quartiles (Tukey); counted, never removed.
    """

    n: int
    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None
    max: float | None
    std: float | None
    outliers: int

    @property
    def is_p99_supported(self) -> bool:
        """True when at least three values lie above the 99th percentile."""
        return self.n >= P99_MIN_SAMPLES


@dataclass(frozen=True, slots=True)
class Delta:
    """A difference in percent of the first series, and its 95 % interval.

    Attributes:
        delta_pct: 100 x (second - first) / first; negative means the second is faster. None where it is undefined.
        ci95: Lower and upper end of the interval in percent; None where there are too few pairs for one.
    """

    delta_pct: float | None
    ci95: tuple[float, float] | None

    @property
    def improvement_pct(self) -> float | None:
        """The same difference as tables print it: positive means the second is faster."""
        return None if self.delta_pct is None else 0.0 - self.delta_pct


@dataclass(frozen=True, slots=True)
class SlowerCount:
    """How many requests were slower in graph mode than eager.

    Attributes:
        n: Requests compared.
        threshold_pct: What counts as slower: the request noise of the run; None if it was not measured.
        count: Requests slower by more than the threshold; None without a threshold.
        share: `count / n`; None without a threshold or requests.
        over_2pct_count: Requests slower by more than 2 %.
        over_2pct_share: `over_2pct_count / n`; None without requests.
    """

    n: int
    threshold_pct: float | None
    count: int | None
    share: float | None
    over_2pct_count: int
    over_2pct_share: float | None


def min_samples(q: float) -> int:
    """Number of samples from which three of them lie above the `q`-th percentile (300 for P99)."""
    return math.ceil(_OBSERVATIONS_ABOVE / (1.0 - q / 100.0) - 1e-9)


def summarize(values: Values) -> Summary:
    """Describes `values`; nothing is removed and nothing is invented for an empty series.

    Args:
        values: Any number of finite or not finite numbers, for example milliseconds a request.
    """
    array = np.asarray(values, dtype=np.float64)
    n = int(array.size)
    if n == 0:
        return Summary(0, None, None, None, None, None, None, 0)
    p25, p50, p75, p90, p99 = (float(value) for value in np.percentile(array, (25, 50, 75, 90, 99)))
    reach = 1.5 * (p75 - p25)
    outliers = int(np.count_nonzero((array < p25 - reach) | (array > p75 + reach)))
    std = float(np.std(array, ddof=1)) if n > 1 else None
    return Summary(n, float(np.mean(array)), p50, p90, p99, float(np.max(array)), std, outliers)


def paired_mean_delta(eager: Values, graph: Values, seed: int = 0) -> Delta:
    """Relative difference of the means, graph against eager, with a paired bootstrap interval.

    Args:
        eager: One value a request (its mean over the rounds), in any unit.
        graph: The same requests in the same order.
        seed: Seed of the resampling; the same seed gives the same interval.

    Returns:
        The ratio of the means less one, in percent. The interval needs `MIN_PAIRS` requests.

    Raises:
        ValueError: The series differ in length.
    """
    return _paired_delta(eager, graph, _row_means, MIN_PAIRS, seed)


def percentile_delta(eager: Values, graph: Values, q: float, seed: int = 0) -> Delta:
    """Relative difference of the `q`-th percentiles, with a bootstrap interval over requests.

    Each resample draws the same requests for both modes, so that a heavy request weighs on both alike.

    Args:
        eager: One value a request, in any unit.
        graph: The same requests in the same order.
        q: Percentile between 0 and 100, linear between neighbours.
        seed: Seed of the resampling.

    Returns:
        The difference in percent. The interval needs three requests above the percentile: 300 for P99.

    Raises:
        ValueError: The series differ in length.
    """
    return _paired_delta(eager, graph, lambda rows: _row_percentiles(rows, q), max(MIN_PAIRS, min_samples(q)), seed)


def metric_delta(eager: Values, graph: Values, metric: Metric, seed: int = 0) -> Delta:
    """`paired_mean_delta` or `percentile_delta`, by the name of the metric."""
    if metric == "mean":
        return paired_mean_delta(eager, graph, seed)
    return percentile_delta(eager, graph, _PERCENTILE_OF[metric], seed)


def noise_floor(eager: Values, eager_repeat: Values, metric: Metric, seed: int = 0) -> float | None:
    """What eager differs from itself in this run, in percent: the larger end of that difference's 95 % interval.

    Returns:
        A number of percent, at least 0, or None with too few pairs for an interval.
    """
    ci95 = metric_delta(eager, eager_repeat, metric, seed).ci95
    return None if ci95 is None else max(abs(ci95[0]), abs(ci95[1]))


def verdict(delta_pct: float | None, ci95: tuple[float, float] | None, floor_pct: float | None) -> Verdict:
    """`faster` or `slower` if the whole interval is beyond the noise floor, `same` if within it, else `undecided`.

    Without an interval or without a measured noise floor nothing can be told apart, which is `undecided` too.
    `invalid` (clock drop, throttling, another process on the device) is for the caller to set.
    """
    if delta_pct is None or ci95 is None or floor_pct is None:
        return "undecided"
    low, high = ci95
    if high < -floor_pct:
        return "faster"
    if low > floor_pct:
        return "slower"
    if -floor_pct <= low and high <= floor_pct:
        return "same"
    return "undecided"


def request_noise_pct(eager: Values, eager_repeat: Values) -> float | None:
    """95th percentile over requests of how far a repeat of eager was from eager, in percent.

    None with fewer than `FEWEST_NOISE_PAIRS`, which may all lie close together by chance.

    Raises:
        ValueError: The series differ in length.
    """
    first, second = _as_pairs(eager, eager_repeat)
    if first.size < FEWEST_NOISE_PAIRS:
        return None
    return float(np.percentile(np.abs(second / first - 1.0), REQUEST_NOISE_PERCENTILE) * 100.0)


def slower_than_eager(eager: Values, graph: Values, noise_pct: float | None) -> SlowerCount:
    """Counts requests that graph mode made slower by more than the request noise, and by more than 2 %.

    Args:
        eager: One value a request.
        graph: The same requests in the same order.
        noise_pct: Threshold in percent, from `request_noise_pct`; None where too few repeats were measured.

    Raises:
        ValueError: The series differ in length.
    """
    first, second = _as_pairs(eager, graph)
    n = int(first.size)

    def slower_by(threshold_pct: float) -> int:
        return int(np.count_nonzero(second > first * (1.0 + threshold_pct / 100.0)))

    count = None if noise_pct is None else slower_by(noise_pct)
    fixed = slower_by(FIXED_THRESHOLD_PCT)
    share = count / n if count is not None and n else None
    return SlowerCount(n, noise_pct, count, share, fixed, fixed / n if n else None)


def _as_pairs(first: Values, second: Values) -> tuple[FloatArray, FloatArray]:
    left = np.asarray(first, dtype=np.float64)
    right = np.asarray(second, dtype=np.float64)
    if left.shape != right.shape or left.ndim != 1:
        raise ValueError(f"paired series must be flat and equally long, got shapes {left.shape} and {right.shape}")
    return left, right


def _row_means(rows: FloatArray) -> FloatArray:
    return np.mean(rows, axis=-1)


def _row_percentiles(rows: FloatArray, q: float) -> FloatArray:
    """Linear percentile of each row; a partition is several times faster here than `numpy.percentile`."""
    n = rows.shape[-1]
    position = q / 100.0 * (n - 1)
    below = math.floor(position)
    above = min(below + 1, n - 1)
    ordered = np.partition(rows, (below, above), axis=-1)
    low, high = ordered[..., below], ordered[..., above]
    return low + (high - low) * (position - below)


def _paired_delta(
    eager: Values, graph: Values, statistic: Callable[[FloatArray], FloatArray], pairs_needed: int, seed: int
) -> Delta:
    """Percent difference of a row statistic; resamples in chunks so that memory does not grow with the requests."""
    first, second = _as_pairs(eager, graph)
    n = int(first.size)
    if n == 0:
        return Delta(None, None)
    base = float(statistic(first))
    if not math.isfinite(base) or base == 0.0:
        return Delta(None, None)
    delta_pct = (float(statistic(second)) / base - 1.0) * 100.0
    if n < pairs_needed or not math.isfinite(delta_pct):
        return Delta(delta_pct, None)
    rng = np.random.default_rng(seed)
    ratios = np.empty(RESAMPLES)
    chunk = max(1, _CHUNK_ELEMENTS // n)
    for start in range(0, RESAMPLES, chunk):
        stop = min(start + chunk, RESAMPLES)
        picks = rng.integers(0, n, size=(stop - start, n), dtype=np.int32)
        ratios[start:stop] = statistic(second[picks]) / statistic(first[picks])
    tail = (100.0 - CONFIDENCE_PCT) / 2.0
    low, high = np.percentile((ratios - 1.0) * 100.0, (tail, 100.0 - tail))
    return Delta(delta_pct, (float(low), float(high)))
