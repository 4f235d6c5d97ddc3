"""Compares repeated runs: a bootstrap over runs and calls, whose interval holds the noise between processes.

The calls are drawn once for all runs, since every run has the same; the runs' deviations from their side's mean are
drawn for each side, scaled for the few that there are, and the interval is widened by Student's quantile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vitgraph.records.resampling import MIN_PAIRS, RESAMPLES, FloatArray, Improvement, Metric, min_samples, percentiles

_PERCENTILES: dict[str, float] = {"p50": 50.0, "p99": 99.0}
_NORMAL = 1.959964
_STUDENT = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)
"""97.5 % quantiles of Student's distribution with 1, 2, … degrees of freedom."""


@dataclass(frozen=True, slots=True)
class SidesCompared:
    """One metric of repeated runs on two sides.

    Attributes:
        base_ms: Mean over the first side's runs of the metric, milliseconds a request.
        other_ms: The same of the second side.
        improvement: What the second gains.
        spread_pct: Standard deviation of the metric between runs of a side, in percent.
    """

    base_ms: float
    other_ms: float
    improvement: Improvement
    spread_pct: float


def compare_samples(
    first: FloatArray, second: FloatArray, requests: npt.NDArray[np.int64], metric: Metric, seed: int = 0
) -> SidesCompared:
    """Compares two sides, of which one at least has several runs.

    Args:
        first: Times of the base, `[runs, n]`, milliseconds a request of each call.
        second: The same of the other, of the same calls.
        requests: Requests of each call, `[n]`.
        metric: `mean`, `p50` or `p99`.
        seed: Seed of the resampling.
    """
    n, sizes = requests.size, (len(first), len(second))
    freedom = sum(size - 1 for size in sizes)
    base, other = (_values(requests[None], side, metric)[0] for side in (first, second))
    found = 1.0 - other.mean() / base.mean()
    spread = 100.0 * math.sqrt(sum(((side / side.mean() - 1.0) ** 2).sum() for side in (base, other)) / freedom)
    if n < max(MIN_PAIRS, min_samples(_PERCENTILES[metric]) if metric in _PERCENTILES else 0):
        return SidesCompared(float(base.mean()), float(other.mean()), Improvement(100.0 * found, None), spread)
    rng = np.random.default_rng(seed)
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
    return SidesCompared(float(base.mean()), float(other.mean()), Improvement(100.0 * found, (low, high)), spread)


def _values(weights: npt.NDArray[np.int64], side: FloatArray, metric: Metric) -> FloatArray:
    """The metric of every run for each row of weights: `[rows, runs]`."""
    if metric == "mean":
        means: FloatArray = weights @ side.T / weights.sum(axis=1, keepdims=True)
        return means
    return np.stack([percentiles(weights, times, _PERCENTILES[metric]) for times in side], axis=1)
