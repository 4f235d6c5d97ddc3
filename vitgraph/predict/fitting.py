"""The small numeric tools of cost models: non-negative least squares, monotone curves, robust medians."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import TypeVar

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
Value = TypeVar("Value")


def nonnegative_least_squares(
    features: FloatArray, target: FloatArray, weights: FloatArray | None = None
) -> FloatArray:
    """The non-negative coefficients with the least weighted squared error, exactly.

    The constrained optimum is the unconstrained one over the features that it uses, so each subset is solved and the
    best feasible one taken; there must be few.

    Args:
        features: `[n, f]`.
        target: `[n]`.
        weights: `[n]`, multiplying the residuals; None for equal ones.

    Returns:
        `[f]`; zeros where there are no rows.
    """
    rows, count = features.shape
    best = np.zeros(count)
    if not rows:
        return best
    scale = np.ones(rows) if weights is None else np.asarray(weights, dtype=np.float64)
    matrix, goal = features * scale[:, None], target * scale
    # Columns of very different sizes (tokens squared, items) would drown each other in the solver's tolerance.
    norms = np.linalg.norm(matrix, axis=0)
    usable = [column for column in range(count) if norms[column] > 0]
    least = float(goal @ goal)
    for size in range(1, len(usable) + 1):
        for chosen in combinations(usable, size):
            columns = list(chosen)
            scaled = matrix[:, columns] / norms[columns]
            solution = np.linalg.lstsq(scaled, goal, rcond=None)[0]
            if (solution < 0).any():
                continue
            error = float(((scaled @ solution - goal) ** 2).sum())
            if error < least * (1 - 1e-12):
                least = error
                best = np.zeros(count)
                best[columns] = solution / norms[columns]
    return best


def nonnegative_line(x: Sequence[float] | FloatArray, y: Sequence[float] | FloatArray) -> FloatArray:
    """Constant and slope, neither negative, of the line closest to some points; zeros without any."""
    places = np.asarray(x, dtype=np.float64)
    return nonnegative_least_squares(np.stack([np.ones_like(places), places], axis=1), np.asarray(y, dtype=np.float64))


def isotonic(values: Sequence[float] | FloatArray, weights: Sequence[float] | FloatArray) -> FloatArray:
    """The non-decreasing sequence closest to `values` in weighted least squares (pool adjacent violators)."""
    blocks: list[list[float]] = []
    for value, weight in zip(values, weights, strict=True):
        blocks.append([float(value), float(weight), 1.0])
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            mean, total, count = blocks.pop()
            blocks[-1][0] = (blocks[-1][0] * blocks[-1][1] + mean * total) / (blocks[-1][1] + total)
            blocks[-1][1] += total
            blocks[-1][2] += count
    return np.repeat([block[0] for block in blocks], [int(block[2]) for block in blocks])


class MonotoneCurve:
    """A non-decreasing piecewise-linear function through measured points.

    Below the first knot it keeps the first value: a smaller input is never predicted to be faster than anything
    that was measured. Above the last it goes on with the slope of the upper half.

    Args:
        x: Places, in any order; equal ones are joined by their median.
        y: Positive values.

    Raises:
        ValueError: There is no point.
    """

    def __init__(self, x: Sequence[float], y: Sequence[float]) -> None:
        if not len(x):
            raise ValueError("a curve needs at least one point")
        places = np.asarray(x, dtype=np.float64)
        values = np.asarray(y, dtype=np.float64)
        self.x = np.unique(places)
        medians = np.array([np.median(values[places == place]) for place in self.x])
        # Relative errors count: a point of 300 ms must not pull one of 3 ms.
        self.y = isotonic(medians, 1.0 / np.maximum(np.abs(medians), 1e-9) ** 2)
        self.slope = self._last_slope()

    def _last_slope(self) -> float:
        if len(self.x) == 1:
            return max(0.0, float(self.y[0] / self.x[0])) if self.x[0] > 0 else 0.0
        base = min(int(np.searchsorted(self.x, self.x[-1] / 2)), len(self.x) - 2)
        return float((self.y[-1] - self.y[base]) / (self.x[-1] - self.x[base]))

    def __call__(self, x: npt.ArrayLike) -> FloatArray:
        """Values at `x`, of any shape."""
        places = np.asarray(x, dtype=np.float64)
        beyond = np.maximum(places - self.x[-1], 0.0)
        return np.interp(places, self.x, self.y) + self.slope * beyond


def smooth_max(first: FloatArray, second: FloatArray, sharpness: float) -> FloatArray:
    """A smooth maximum of two non-negative arrays: their `sharpness`-norm, which is either one where the other is 0."""
    larger = np.maximum(first, second)
    smaller = np.minimum(first, second)
    ratio = np.divide(smaller, larger, out=np.zeros(np.broadcast(first, second).shape), where=larger > 0)
    return larger * (1.0 + ratio**sharpness) ** (1.0 / sharpness)


def spread(values: list[Value], most: int) -> list[Value]:
    """At most `most` of the values, evenly, the last included."""
    if len(values) <= most:
        return values
    return [values[int(place)] for place in np.unique(np.linspace(0, len(values) - 1, most).round().astype(int))]


def median_of_three(values: FloatArray) -> FloatArray:
    """Each value replaced by the median of itself and its neighbours; the ends keep theirs."""
    if len(values) < 3:
        return values.copy()
    inner = np.median(np.stack([values[:-2], values[1:-1], values[2:]]), axis=0)
    return np.concatenate([values[:1], inner, values[-1:]])
