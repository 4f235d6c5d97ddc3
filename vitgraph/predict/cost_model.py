"""The cost model: predicted times of replays and of eager runs, fitted to a calibration profile.

A replay is `g(budget)`, what the padded rows cost outside attention; plus attention over the real segments; plus what
the empty segment slots cost. Eager is the smooth maximum of a host part (launches) and a device part (the replay of an
exact-size graph), corrected where the measurements say so. Needs no torch.

Shape legend: `[..., F]` features of groups of items, F columns as in `FEATURES`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vitgraph.planning.budgets import DEFAULT_PATH, EncoderItemSpec
from vitgraph.planning.graph_tables import ITEMS, SEGMENTS, TOKENS, FloatArray, IntArray
from vitgraph.predict.fitting import (
    MonotoneCurve,
    median_of_three,
    nonnegative_least_squares,
    nonnegative_line,
    smooth_max,
)
from vitgraph.predict.profile import CalibrationProfile, check_profile
from vitgraph.records.calibrate_result import ReplayPoint

PAIR_LENGTHS = (64.0, 256.0, 1024.0, np.inf)
"""Segment lengths, in output tokens, at which the cost of an attention pair may change: short rows use a GPU badly."""

FEATURES = ("items", "tokens", "segments", *(f"pairs_{length:g}" for length in PAIR_LENGTHS))
_FITTED = slice(TOKENS, len(FEATURES))

MOST_CORRECTION = 0.25
"""Largest share by which measured points correct the eager formula."""

_CORRECTION_STEP = 1.6
_SHARPNESS_RANGE = (1.5, 24.0)
_SEARCH_STEPS = (1.3, 1.1, 1.03, 1.01)


def item_features(specs: Sequence[EncoderItemSpec], path: str = DEFAULT_PATH) -> FloatArray:
    """Additive features `[n, F]` of items on a path; all zero where an item has no rows there."""
    tokens = np.array([spec.tokens_on(path) for spec in specs], dtype=np.float64)
    segments = np.where(tokens > 0, np.array([spec.segments for spec in specs], dtype=np.float64), 0.0)
    length = tokens / np.maximum(segments, 1.0)
    pairs = [tokens * np.minimum(length, most) for most in PAIR_LENGTHS]
    return np.stack([(tokens > 0).astype(np.float64), tokens, segments, *pairs], axis=-1)


def _sum_features(specs: Sequence[EncoderItemSpec], path: str) -> FloatArray:
    return item_features(specs, path).sum(axis=0)


@dataclass(frozen=True, slots=True)
class SlotCost:
    """What empty segment slots add to a replay: a curve over their number at a small and at a large budget.

    Attributes:
        low_budget, high_budget: The two budgets; equal where only one was measured.
        low, high: Milliseconds over empty slots at those.
    """

    low_budget: float
    high_budget: float
    low: MonotoneCurve
    high: MonotoneCurve

    def __call__(self, empty: npt.ArrayLike, budgets: npt.ArrayLike) -> FloatArray:
        if not np.any(empty):
            return np.zeros(())
        span = self.high_budget - self.low_budget
        at_low, at_high = self.low(empty), self.high(empty)
        if span <= 0:
            return at_low
        share = np.maximum((np.asarray(budgets, dtype=np.float64) - self.low_budget) / span, 0.0)
        return np.maximum(at_low + share * (at_high - at_low), 0.0)


class ReplayModel:
    """Replay times of one path."""

    def __init__(self, points: Sequence[ReplayPoint], path: str) -> None:
        self.features = np.array([_sum_features(point.items, path) for point in points])
        self.budgets = np.array([point.token_budget for point in points], dtype=np.float64)
        self.empty = np.array([point.segment_slots for point in points]) - self.features[:, SEGMENTS]
        self.times = np.array([point.time.ms for point in points])
        self.keys = [point.axis_key for point in points]
        self.slots = self._fit_slots()
        self.rates = self._fit_rates()
        self.padded = {key: self._fit_padded([other == key for other in self.keys]) for key in dict.fromkeys(self.keys)}

    def _fit_slots(self) -> SlotCost:
        """From points that differ in nothing but their slots."""
        alike: dict[tuple[Hashable, ...], list[int]] = defaultdict(list)
        for index, key in enumerate(self.keys):
            alike[(key, self.budgets[index], *self.features[index])].append(index)
        rows: dict[float, list[tuple[float, float]]] = defaultdict(list)
        for members in alike.values():
            base = min(members, key=lambda index: self.empty[index])
            for index in members:
                if self.empty[index] > self.empty[base]:
                    rows[self.empty[index]].append((self.budgets[index], self.times[index] - self.times[base]))
        budgets = [budget for level in rows.values() for budget, _ in level]
        low, high = min(budgets, default=0.0), max(budgets, default=0.0)
        at_low, at_high = [0.0], [0.0]
        for level in sorted(rows):
            constant, slope = nonnegative_line(*zip(*rows[level], strict=True))
            at_low.append(float(constant + slope * low))
            at_high.append(float(constant + slope * high))
        levels = [0.0, *sorted(rows)]
        return SlotCost(low, high, MonotoneCurve(levels, at_low), MonotoneCurve(levels, at_high))

    def _fit_rates(self) -> FloatArray:
        """What real rows, segments and attention pairs cost, from batches that met the same budget."""
        without_slots = self.times - self.slots(self.empty, self.budgets)
        rows, targets, weights = [], [], []
        alike: dict[tuple[Hashable, float], list[int]] = defaultdict(list)
        for index, key in enumerate(self.keys):
            alike[key, self.budgets[index]].append(index)
        for members in alike.values():
            base = max(members, key=lambda index: self.features[index, -1])
            for index in members:
                if index != base:
                    rows.append(self.features[index, _FITTED] - self.features[base, _FITTED])
                    targets.append(without_slots[index] - without_slots[base])
                    weights.append(1.0 / self.times[base])
        rates = np.zeros(len(FEATURES))
        if rows:
            rates[_FITTED] = nonnegative_least_squares(np.array(rows), np.array(targets), np.array(weights))
        return rates

    def _fit_padded(self, chosen: Sequence[bool]) -> MonotoneCurve:
        mask = np.array(chosen)
        rest = self.times - self.slots(self.empty, self.budgets) - self.features @ self.rates
        # The batch that fills a budget best, in the fewest slots, is the one that the least was subtracted from.
        places, values = [], []
        for budget in np.unique(self.budgets[mask]):
            members = np.flatnonzero(mask & (self.budgets == budget))
            best = members[np.lexsort((self.empty[members], -self.features[members, TOKENS]))[0]]
            places.append(budget)
            values.append(max(rest[best], 0.02 * self.times[best]))
        return MonotoneCurve(places, values)

    def curve(self, axis_key: tuple[int, ...]) -> MonotoneCurve:
        """`g` of an axis key; of one that was not measured, the most expensive that was."""
        known = self.padded.get(axis_key)
        return known if known is not None else max(self.padded.values(), key=lambda curve: float(curve(curve.x[-1])))

    def replay_ms(
        self, axis_key: tuple[int, ...], budgets: npt.ArrayLike, slots: npt.ArrayLike, features: FloatArray
    ) -> FloatArray:
        """Predicted wall clock of replays; all arguments broadcast."""
        empty = np.maximum(np.asarray(slots) - features[..., SEGMENTS], 0.0)
        return self.curve(axis_key)(budgets) + features @ self.rates + self.slots(empty, budgets)

    def exact_ms(self, features: FloatArray) -> FloatArray:
        """Replay of a graph of exactly the group's size."""
        key = next(iter(self.padded))
        return self.replay_ms(key, features[..., TOKENS], features[..., SEGMENTS], features)


class CostModel:
    """Predicted times and bytes, fitted to a profile.

    Args:
        host_factor: How many times as long as the profile's host the one to predict for takes.

    Attributes:
        replay: Replay times by path.
        launch_ms: Host time of one eager run.
        launch_item_ms: Host time of each further item in it.
        device_factor: Device time of eager over that of an exact-size replay.
        sharpness: How sharply eager turns from host-bound to device-bound.

    Raises:
        ProfileError: The profile has too few points.
    """

    def __init__(self, profile: CalibrationProfile, host_factor: float = 1.0) -> None:
        check_profile(profile)
        self.profile = profile
        self.replay = {
            path: ReplayModel([point for point in profile.replays if point.path == path], path)
            for path in profile.encoder.path_minimums
        }
        self._correction_at, self._correction = np.array([0.0]), np.array([0.0])
        self._fit_eager()
        self.launch_ms *= host_factor
        self.launch_item_ms *= host_factor
        self._fit_memory()

    # -- eager ---------------------------------------------------------------------------------------------------------

    def _fit_eager(self) -> None:
        points = self.profile.eager
        measured = np.log(np.array([point.time.ms for point in points]))
        totals = {path: np.array([_sum_features(point.items, path) for point in points]) for path in self.replay}
        device = self.exact_calls_ms(totals)
        order = np.argsort(device)
        third = max(1, len(points) // 3)
        self.launch_ms = float(np.exp(np.median(measured[order[:third]])))
        self.device_factor = float(np.median(np.exp(measured[order[-third:]]) / device[order[-third:]]))
        self.launch_item_ms, self.sharpness = 0.0, 4.0

        def error() -> float:
            return float(np.abs(np.log(self.eager_calls_ms(totals)) - measured).mean())

        self._descend(error)
        self._fit_correction(totals, measured)

    def _descend(self, error: Callable[[], float]) -> None:
        """Coordinate search over the four numbers of the eager formula."""
        best = error()
        for step in _SEARCH_STEPS:
            has_improved = True
            while has_improved:
                has_improved = False
                for name, value in self._moves(step):
                    kept = getattr(self, name)
                    setattr(self, name, value)
                    now = error()
                    if now < best - 1e-6:
                        best, has_improved = now, True
                    else:
                        setattr(self, name, kept)

    def _moves(self, step: float) -> list[tuple[str, float]]:
        low, high = _SHARPNESS_RANGE
        grain = (step - 1.0) * 0.1 * self.launch_ms
        return [
            *(("launch_ms", self.launch_ms * factor) for factor in (step, 1 / step)),
            *(("device_factor", self.device_factor * factor) for factor in (step, 1 / step)),
            *(("sharpness", float(np.clip(self.sharpness * factor, low, high))) for factor in (step, 1 / step)),
            *(("launch_item_ms", max(0.0, self.launch_item_ms + change)) for change in (grain, -grain)),
        ]

    def _fit_correction(self, totals: Mapping[str, FloatArray], measured: FloatArray) -> None:
        """What the formula is off by, in the median of neighbouring sizes."""
        residuals = measured - np.log(self.eager_calls_ms(totals))
        tokens = sum((features[:, TOKENS] for features in totals.values()), np.zeros(len(measured)))
        steps = np.floor(np.log(tokens) / np.log(_CORRECTION_STEP))
        bins = [steps == step for step in np.unique(steps)]
        places = np.array([np.log(tokens[chosen]).mean() for chosen in bins])
        offsets = np.array([np.median(residuals[chosen]) for chosen in bins])
        self._correction_at = places
        self._correction = np.clip(median_of_three(offsets), np.log1p(-MOST_CORRECTION), np.log1p(MOST_CORRECTION))

    def eager_parts(self, path: str, features: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Host and device time of eager runs on a path, 0 for runs of no items."""
        items, tokens = features[..., ITEMS], features[..., TOKENS]
        factor = np.exp(np.interp(np.log(np.maximum(tokens, 1.0)), self._correction_at, self._correction))
        factor = np.where(items > 0, factor, 0.0)
        host = self.launch_ms + self.launch_item_ms * np.maximum(items - 1.0, 0.0)
        return host * factor, self.device_factor * self.replay[path].exact_ms(features) * factor

    def join_ms(self, replays_ms: FloatArray, host_ms: FloatArray, device_ms: FloatArray) -> FloatArray:
        """Replays are launched before the eager run, so that its launches overlap with them on the device."""
        return smooth_max(np.asarray(host_ms), np.asarray(replays_ms + device_ms), self.sharpness)

    def eager_calls_ms(self, totals: Mapping[str, FloatArray]) -> FloatArray:
        """Predicted latency of eager calls from their summed features `[..., F]` on each path."""
        host, device = np.sum([self.eager_parts(path, features) for path, features in totals.items()], axis=0)
        return self.join_ms(np.zeros(()), host, device)

    def eager_ms(self, specs: Sequence[EncoderItemSpec]) -> float:
        """Predicted latency of a call that is run eagerly as a whole."""
        return float(self.eager_calls_ms({path: _sum_features(specs, path) for path in self.replay}))

    def exact_calls_ms(self, totals: Mapping[str, FloatArray]) -> FloatArray:
        """Predicted replay of exact-size graphs, nothing else: what no manager can beat."""
        parts = [np.where(f[..., ITEMS] > 0, self.replay[path].exact_ms(f), 0.0) for path, f in totals.items()]
        return sum(parts, np.zeros(()))

    @property
    def eager_spread(self) -> float | None:
        """Half the distance of the 10th and 90th percentile of eager calls over their median, in the median."""
        spreads = [(p.time.high_ms - p.time.low_ms) / 2 / p.time.ms for p in self.profile.eager if p.time.repeats > 1]
        return float(np.median(spreads)) if spreads else None

    # -- memory and capture --------------------------------------------------------------------------------------------

    def _fit_memory(self) -> None:
        """Bytes as lines over the budget, and capture time as a curve."""
        memory, captures = self.profile.memory, self.profile.captures
        largest, budgets = [point.max_budget for point in memory], [point.token_budget for point in captures]
        self._pool_line = nonnegative_line(largest, [point.first_pool_bytes for point in memory])
        self._shared_line = nonnegative_line(largest, [point.buffer_bytes for point in memory])
        self._own_line = nonnegative_line(budgets, [point.buffer_bytes for point in captures])
        further = [(p.pool_bytes - p.first_pool_bytes, p.graphs - 1) for p in memory if p.graphs > 1]
        self._graph_bytes = max(0.0, sum(b for b, _ in further) / sum(n for _, n in further)) if further else 0.0
        self._capture_curve = MonotoneCurve(budgets or [1.0], [point.capture_ms for point in captures] or [0.0])

    def capture_ms(self, budgets: npt.ArrayLike) -> FloatArray:
        """Predicted time to capture one graph of each budget."""
        return self._capture_curve(budgets)

    def _pool_bytes(self, max_budget: int, graphs: int) -> float:
        return float(self._pool_line @ (1.0, max_budget)) + self._graph_bytes * (graphs - 1)

    def shared_bytes(self, max_budget: int, graphs: int) -> float:
        """Predicted pool and buffers of `graphs` graphs that share one set of buffers."""
        return self._pool_bytes(max_budget, graphs) + float(self._shared_line @ (1.0, max_budget))

    def separate_bytes(self, budgets: IntArray) -> float:
        """Predicted pool and buffers of one graph a budget, each with buffers of its own."""
        own = sum(float(self._own_line @ (1.0, budget)) for budget in budgets)
        return self._pool_bytes(int(max(budgets)), len(budgets)) + own
