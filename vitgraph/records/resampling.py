"""Paired bootstrap over calls: the statistics of an improvement, its interval, and what makes intervals wider.

The percentiles of the resamples are widened for small samples (Hesterberg, What Teachers Should Know About the
Bootstrap, The American Statistician 69(4), 2015), and where the noise of successive calls is alike.

Of repeated runs the calls are drawn once for all, since every run has the same; the runs' deviations from their side's
mean are drawn for each side, scaled for the few that there are, and the interval, which then holds the noise between
processes, is widened by Student's quantile.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Metric = Literal["mean", "p50", "p99", "trimmed_mean"]
FloatArray = npt.NDArray[np.float64]
Values = npt.ArrayLike

MIN_PAIRS = 10
"""Calls below which a bootstrap interval is not given: it would be far too narrow."""
RESAMPLES = 2000
TRIMMED_SHARE = 0.05
"""Requests left out of `trimmed_mean` on either side, by the ratio of their call's two times."""

_TAIL = 0.025
_OBSERVATIONS_ABOVE = 3
_CHUNK_ELEMENTS = 100_000
_FEW = 10
_CALLS_AN_OUTLIER = 100
_LARGEST_CORRELATION = 0.9
_SIZE_NEIGHBOURS = 4
_LEAST_DEGREES = 2.0
_FAR_OFF = 4.5
_OF_EVERY_CALL: tuple[Metric, ...] = ("mean", "p99")
"""What far-off calls can move."""
_PERCENTILE_OF: dict[str, float] = {"p50": 50.0, "p99": 99.0}


@dataclass(frozen=True, slots=True)
class Gain:
    """How much faster the second series is, and how sure that is.

    Attributes:
        improvement_pct: 100 x (base - other) / base; positive means the second is faster. None where it is undefined.
        without_few_pct: Of a mean, what is left of it without few calls, which alone are no reason for a claim: the
            trimmed mean or the mean without the ten calls that speak most for it. None for the other metrics.
    """

    improvement_pct: float | None
    ci95: tuple[float, float] | None
    without_few_pct: float | None = None


@dataclass(frozen=True, slots=True)
class Calls:
    """Two series of the same calls, `[n]` each, and the requests of the calls."""

    base: FloatArray
    other: FloatArray
    requests: npt.NDArray[np.int64]

    @classmethod
    def of(cls, base: Values, other: Values, requests: Values | None) -> Calls:
        left, right = np.asarray(base, dtype=np.float64), np.asarray(other, dtype=np.float64)
        weights = np.ones(left.shape, np.int64) if requests is None else np.asarray(requests, dtype=np.int64)
        if not left.shape == right.shape == weights.shape or left.ndim != 1:
            shapes = f"{left.shape}, {right.shape} and {weights.shape}"
            raise ValueError(f"paired series and their requests must be flat and equally long, got shapes {shapes}")
        return cls(left, right, weights)

    @property
    def n(self) -> int:
        return int(self.base.size)

    @property
    def residuals(self) -> FloatArray:
        """What the ratio of the means leaves of each call, in milliseconds of the whole call."""
        ratio = (self.requests @ self.other) / (self.requests @ self.base)
        return self.requests * (self.other - ratio * self.base)

    @property
    def is_comparable(self) -> bool:
        """True where there are calls and every time is a finite, positive number."""
        times = np.stack([self.base, self.other])
        return bool(self.n and np.isfinite(times).all() and (times > 0.0).all())

    def without(self, places: npt.NDArray[np.int64]) -> Calls:
        """All calls but those at `places`."""
        kept = np.setdiff1d(np.arange(self.n), places)
        return Calls(self.base[kept], self.other[kept], self.requests[kept])

    def without_outliers(self) -> Calls:
        """All but the one call in a hundred, at least one, that is furthest from the others."""
        drop = -(-self.n // _CALLS_AN_OUTLIER)
        if self.n - drop < MIN_PAIRS or not self.is_comparable:
            return self
        return self.without(np.argsort(-np.abs(self.residuals), kind="stable")[:drop])


Statistic = Callable[[npt.NDArray[Any], FloatArray, FloatArray], FloatArray]
"""From weights `[resamples, n]` and both series `[n]` to the improvement of each resample, as a share."""


def _mean_gain(weights: npt.NDArray[Any], base: FloatArray, other: FloatArray) -> FloatArray:
    return 1.0 - (weights @ other) / (weights @ base)


def _percentile_gain(q: float) -> Statistic:
    return lambda weights, base, other: 1.0 - percentiles(weights, other, q) / percentiles(weights, base, q)


def _trimmed_gain(weights: npt.NDArray[Any], base: FloatArray, other: FloatArray) -> FloatArray:
    order = np.argsort(other / base, kind="stable")
    ordered = weights[:, order]
    reached = np.cumsum(ordered, axis=1)
    cut = TRIMMED_SHARE * reached[:, -1:]
    kept = np.minimum(reached, reached[:, -1:] - cut) - np.maximum(reached - ordered, cut)
    return _mean_gain(np.maximum(kept, 0.0), base[order], other[order])


_STATISTICS: dict[Metric, Statistic] = {
    "mean": _mean_gain,
    "p50": _percentile_gain(50.0),
    "p99": _percentile_gain(99.0),
    "trimmed_mean": _trimmed_gain,
}


def percentiles(weights: npt.NDArray[Any], values: FloatArray, q: float) -> FloatArray:
    """Percentile of `values` `[n]`, linear between neighbours, each counted as often as a row of `weights` says."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    reached = np.cumsum(weights[:, order], axis=1)
    last = reached[:, -1] - 1
    position = q / 100.0 * last
    below = np.floor(position)
    low = ordered[(reached <= below[:, None]).sum(axis=1)]
    high = ordered[(reached <= np.minimum(below + 1, last)[:, None]).sum(axis=1)]
    return low + (high - low) * (position - below)


def improvement_of(calls: Calls, metric: Metric, seed: int) -> Gain:
    """The improvement with its interval; resamples in chunks so that memory does not grow with the calls."""
    n, statistic = calls.n, _STATISTICS[metric]
    if not calls.is_comparable:
        return Gain(None, None)
    found = float(statistic(calls.requests[None], calls.base, calls.other)[0])
    if n < _calls_needed(metric):
        return Gain(100.0 * found, None)
    rng = np.random.default_rng(seed)
    drawn = np.empty(RESAMPLES)
    chunk = max(1, _CHUNK_ELEMENTS // n)
    for start in range(0, RESAMPLES, chunk):
        rows = min(chunk, RESAMPLES - start)
        picks = rng.integers(0, n, size=(rows, n)) + n * np.arange(rows)[:, None]
        counts = np.bincount(picks.ravel(), minlength=rows * n).reshape(rows, n)
        drawn[start : start + rows] = statistic(counts * calls.requests, calls.base, calls.other)
    wider, degrees = _dependence(calls, metric)
    tail = 100.0 * _tail_beyond(n, degrees)
    low, high = (float(100.0 * (found + wider * (end - found))) for end in np.percentile(drawn, (tail, 100.0 - tail)))
    return Gain(100.0 * found, (low, high), _without_few(calls, found) if metric == "mean" else None)


def _without_few(calls: Calls, found: float) -> float:
    """What is left of the improvement of a mean, in percent, without few calls that may have made it."""
    sign = math.copysign(1.0, found)
    fewer = calls.without(np.argsort(calls.residuals * sign, kind="stable")[:_FEW])
    left = [_trimmed_gain(calls.requests[None], calls.base, calls.other)[0]]
    if fewer.n:
        left.append(_mean_gain(fewer.requests[None], fewer.base, fewer.other)[0])
    return float(100.0 * max(left, key=lambda gain: gain * sign))


def min_samples(q: float) -> int:
    """Number of samples from which three of them lie above the `q`-th percentile (300 for P99)."""
    return math.ceil(_OBSERVATIONS_ABOVE / (1.0 - q / 100.0) - 1e-9)


def _calls_needed(metric: Metric) -> int:
    return max(MIN_PAIRS, min_samples(_PERCENTILE_OF[metric]) if metric in _PERCENTILE_OF else 0)


def _tail_beyond(n: int, degrees: float) -> float:
    """Share of the resamples beyond each end of a 95 % interval of n calls: a resample spreads too little by
    sqrt((n - 1) / n), and a normal quantile is too small where the spread itself is estimated (Student)."""
    normal = NormalDist()
    z = normal.inv_cdf(1.0 - _TAIL)
    # Quantile of Student's distribution, expanded in 1 / degrees (Abramowitz and Stegun 26.7.5).
    student = z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
    return normal.cdf(-student * math.sqrt(n / (n - 1)))


def _dependence(calls: Calls, metric: Metric) -> tuple[float, float]:
    """How much wider an interval is where calls that follow each other are alike, and so tell less than independent
    ones; and of how many degrees of freedom its spread is, which fewer calls decide where they are far off."""
    ratios = calls.other / calls.base - np.median(calls.other / calls.base)
    reach = _FAR_OFF * float(np.median(np.abs(ratios)))
    inflation, deciding = _variance_inflation(_beyond_size(np.clip(ratios, -reach, reach), calls.base)), float(calls.n)
    if metric in _OF_EVERY_CALL:
        residuals = calls.residuals
        inflation = max(inflation, _variance_inflation(_beyond_size(residuals, calls.base)))
        if residuals.any():
            # Of normal noise, whose kurtosis is 3, all of them.
            deciding = 3.0 * float((residuals**2).sum() ** 2 / (residuals**4).sum())
    degrees = max(min(calls.n, deciding) / inflation - 1.0, _LEAST_DEGREES)
    return math.sqrt(inflation), degrees


def _variance_inflation(values: FloatArray) -> float:
    """The larger of two estimates of 1 + 2 x the sum of all autocorrelations; 1 where the first is within its error.

    Of a first-order autoregression, (1 + r) / (1 - r), which few calls suffice for; and the sum itself under a flat-top
    window that reaches twice as far as correlations are found (Politis and White, Econometric Reviews 23(1), 2004).
    """
    n, energy = values.size, float(values @ values)
    if not energy > 0.0:
        return 1.0
    most = min(n // 3, 10 * math.isqrt(n))
    found = np.array([values[lag:] @ values[: n - lag] for lag in range(1, most + 1)]) / energy
    # Calls next in size were taken off each value, and with them a share of its energy that has no correlation.
    found *= 1.0 + 0.5 / _SIZE_NEIGHBOURS
    # A correlation about a mean that is estimated too comes out smaller by (1 + 3 r) / n (Marriott and Pope 1954).
    first = min((n * float(found[0]) + 1.0) / (n - 3), _LARGEST_CORRELATION)
    if first <= 1.0 / math.sqrt(n):
        return 1.0
    noise, quiet = 2.0 * math.sqrt(math.log10(n) / n), 5
    reach = next((lag for lag in range(most) if (np.abs(found[lag : lag + quiet]) < noise).all()), most)
    lags = np.arange(1, min(2 * reach, most) + 1)
    window = np.minimum(1.0, 2.0 * (1.0 - lags / (2 * reach + 1)))
    return max((1.0 + first) / (1.0 - first), 1.0 + 2.0 * float(window @ found[: lags.size]))


def _beyond_size(values: npt.NDArray[Any], sizes: FloatArray) -> FloatArray:
    """What differs from the calls next in size: calls in order of size are no reason to take noise for alike."""
    order = np.argsort(sizes, kind="stable")
    window = np.ones(2 * _SIZE_NEIGHBOURS + 1)
    counts = np.convolve(np.ones(values.size), window, mode="same")
    left = np.empty(values.size)
    left[order] = values[order] - np.convolve(values[order], window, mode="same") / counts
    return left


# -- repeated runs -----------------------------------------------------------------------------------------------------

_NORMAL = 1.959964
_STUDENT = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)
"""97.5 % quantiles of Student's distribution with 1, 2, … degrees of freedom."""


def compare_samples(
    first: FloatArray, second: FloatArray, requests: npt.NDArray[np.int64], metric: Metric
) -> tuple[Gain, float]:
    """Compares two sides, of which one at least has several runs.

    Args:
        first: Times of the base, `[runs, n]`, milliseconds a request of each call.
        second: The same of the other, of the same calls.
        requests: Requests of each call, `[n]`.

    Returns:
        What the second gains, and the standard deviation of the metric between runs of a side in percent.
    """
    n, sizes = requests.size, (len(first), len(second))
    freedom = sum(size - 1 for size in sizes)
    base, other = (_values(requests[None], side, metric)[0] for side in (first, second))
    found = 1.0 - other.mean() / base.mean()
    spread = 100.0 * math.sqrt(sum(((side / side.mean() - 1.0) ** 2).sum() for side in (base, other)) / freedom)
    if n < _calls_needed(metric):
        return Gain(100.0 * found, None), spread
    rng = np.random.default_rng(0)
    counts = rng.multinomial(n, np.full(n, 1.0 / n), size=RESAMPLES) * requests
    drawn = [_values(counts, side, metric) for side in (first, second)]
    means = [values.mean(axis=1, keepdims=True) for values in drawn]
    scales = [math.sqrt(size / (size - 1)) if size > 1 else 0.0 for size in sizes]
    pool = np.concatenate(
        [
            scale * (values / mean - 1.0)
            for values, mean, scale, size in zip(drawn, means, scales, sizes, strict=True)
            if size > 1
        ],
        axis=1,
    )
    moved = []
    for mean, size in zip(means, sizes, strict=True):
        picks = rng.integers(0, pool.shape[1], size=(RESAMPLES, size))
        moved.append(mean[:, 0] * (1.0 + np.take_along_axis(pool, picks, axis=1).mean(axis=1)))
    gains = 1.0 - moved[1] / moved[0]
    wider = (_STUDENT[freedom - 1] if freedom <= len(_STUDENT) else _NORMAL * (1 + 1.2 / freedom)) / _NORMAL
    low, high = (float(100.0 * (found + wider * (end - found))) for end in np.percentile(gains, (2.5, 97.5)))
    return Gain(100.0 * found, (low, high)), spread


def _values(weights: npt.NDArray[np.int64], side: FloatArray, metric: Metric) -> FloatArray:
    """The metric of every run for each row of weights: `[rows, runs]`."""
    if metric == "mean":
        means: FloatArray = weights @ side.T / weights.sum(axis=1, keepdims=True)
        return means
    return np.stack([percentiles(weights, times, _PERCENTILE_OF[metric]) for times in side], axis=1)
