"""The graphs of a plan as arrays: selects graphs and sums predicted times for many groups of items at once.

Shape legend: N calls of m items each, F feature columns, A axis needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from vitgraph.planning.budgets import VIDEO, BudgetPlan, EncoderItemSpec

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

ITEMS, TOKENS, SEGMENTS = 0, 1, 2
"""The first feature columns; a cost may add columns, as long as those of a group are the sum of its items'."""


class PackingCost(Protocol):
    """Predicted times that a packing is weighed with; every array may have leading dimensions.

    Attributes:
        doubt: Share by which replays are taken to be slower than predicted where they are weighed against eager.
    """

    doubt: float

    def item_features(self, specs: Sequence[EncoderItemSpec], path: str) -> FloatArray:
        """Additive features `[n, F]` of items on a path; the first columns are items, tokens and segments."""

    def group_ms(
        self, path: str, axis_key: tuple[int, ...], budgets: IntArray, slots: IntArray, features: FloatArray
    ) -> FloatArray:
        """What each group adds to a call when it is replayed on a graph of that budget and those slots."""

    def eager_parts(self, path: str, features: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Host time and device time of running each group's items eagerly; 0 and 0 for a group of no items."""

    def join_ms(self, replays_ms: FloatArray, host_ms: FloatArray, device_ms: FloatArray) -> FloatArray:
        """Latency of a call whose replays take `replays_ms` and whose eager run has those two parts."""


@dataclass(slots=True)
class Groups:
    """Groups of items that are encoded together, in numbers of any leading shape; an item alone is a group too.

    Attributes:
        features: For each path, summed features `[..., F]`.
        counts: Items `[...]`; 0 where a call is filled up.
        segments: Attention segments `[...]`.
        has_video: Whether a video is in the group.
        needs: Largest needs of the capture axes, all axes side by side, `[..., A]`.
    """

    features: dict[str, FloatArray]
    counts: IntArray
    segments: IntArray
    has_video: BoolArray
    needs: IntArray

    @property
    def shape(self) -> tuple[int, int]:
        """N and m, of the items of calls."""
        calls, items = self.counts.shape
        return calls, items

    def tokens(self, path: str) -> IntArray:
        """Output rows `[...]` on a path."""
        return self.features[path][..., TOKENS].astype(np.int64)

    def each(self, change: Callable[[Any], Any]) -> Groups:
        """With every array changed alike; all but the features and needs lack their last dimension."""
        features = {path: change(values) for path, values in self.features.items()}
        return Groups(features, *map(change, (self.counts, self.segments, self.has_video, self.needs)))

    def take(self, order: IntArray) -> Groups:
        """The items of every call in another order, or a choice of them; `order` is `[N, k]`."""

        def taken(values: Any) -> Any:
            return np.take_along_axis(values, order if values.ndim == order.ndim else order[..., None], axis=1)

        return self.each(taken)


def call_items(calls: Sequence[Sequence[EncoderItemSpec]], plan: BudgetPlan, cost: PackingCost) -> Groups:
    """Each item `[N, m]` of calls that have equally many; one without output tokens fills a call up and is none."""
    shape = len(calls), len(calls[0])
    flat = [spec for call in calls for spec in call]
    needs = [[size for axis in plan.axes for size in spec.axis_sizes[axis.name]] for spec in flat]
    return Groups(
        {path: cost.item_features(flat, path).reshape(*shape, -1) for path in plan.paths},
        np.array([spec.output_tokens > 0 for spec in flat], dtype=np.int64).reshape(shape),
        np.array([spec.segments for spec in flat], dtype=np.int64).reshape(shape),
        np.array([spec.modality == VIDEO for spec in flat]).reshape(shape),
        np.array(needs, dtype=np.int64).reshape(*shape, -1),
    )


class GraphTables:
    """The graphs of a plan as arrays, to select them for many groups at once."""

    def __init__(self, plan: BudgetPlan) -> None:
        self.plan = plan
        self.budgets = {path: np.array(budgets, dtype=np.int64) for path, budgets in plan.path_budgets.items()}
        self._tiers = {path: self._tier_table(path) for path in plan.paths}
        self.axis_keys = plan.axis_keys

    def _tier_table(self, path: str) -> IntArray:
        rows = [self.plan.slot_tiers[path, budget] for budget in self.plan.path_budgets[path]]
        table = np.zeros((len(rows), max(map(len, rows))), dtype=np.int64)
        for row, tiers in enumerate(rows):
            # Repeating the last tier keeps the rows ascending, so that counting the smaller ones finds the first fit.
            table[row] = (*tiers, *[tiers[-1]] * (table.shape[1] - len(tiers)))
        return table

    def select(self, path: str, tokens: IntArray, segments: IntArray) -> tuple[IntArray, IntArray]:
        """Smallest budget and fewest slots that hold each group; slots are 0 where no graph does."""
        budgets, tiers = self.budgets[path], self._tiers[path]
        place = np.searchsorted(budgets, tokens)
        row = np.minimum(place, len(budgets) - 1)
        if path in self.plan.segment_free_paths:
            return budgets[row], np.where(place < len(budgets), tiers[row, -1], 0)
        column = (tiers[row] < segments[..., None]).sum(axis=-1)
        fits = (place < len(budgets)) & (column < tiers.shape[1])
        slots = np.where(fits, tiers[row, np.minimum(column, tiers.shape[1] - 1)], 0)
        return budgets[row], slots

    def slots_of(self, path: str, segments: IntArray) -> IntArray:
        """Fewest slots `[..., budgets]` that each budget offers for groups of that many segments; 0 where too few."""
        tiers = self._tiers[path]
        if path in self.plan.segment_free_paths:
            return np.broadcast_to(tiers[:, -1], (*segments.shape, len(tiers)))
        column = (tiers < segments[..., None, None]).sum(axis=-1)
        slots = np.take_along_axis(
            np.broadcast_to(tiers, (*segments.shape, *tiers.shape)),
            np.minimum(column, tiers.shape[1] - 1)[..., None],
            axis=-1,
        )[..., 0]
        return np.where(column < tiers.shape[1], slots, 0)

    def segments_fit(self, segments: IntArray, has_video: BoolArray) -> BoolArray:
        """Whether each group keeps the plan's limit of segments, which is another one with a video in it."""
        frames, most = self.plan.max_frames, self.plan.max_segments
        return np.where(has_video, (segments <= frames) & (frames > 0), True if most is None else segments <= most)

    def axis_index(self, needs: IntArray) -> IntArray:
        """Place in `axis_keys` of the key that covers each group's needs `[..., A]`, or -1."""
        if not self.plan.axes:
            return np.zeros(needs.shape[:-1], dtype=np.int64)
        index = np.zeros(needs.shape[:-1], dtype=np.int64)
        is_covered = np.ones(needs.shape[:-1], dtype=bool)
        start = 0
        for axis in self.plan.axes:
            keys = np.array(axis.keys, dtype=np.int64)
            stop = start + keys.shape[1]
            covers = (keys >= needs[..., None, start:stop]).all(axis=-1)
            is_covered &= covers.any(axis=-1)
            index = index * len(keys) + covers.argmax(axis=-1)
            start = stop
        return np.where(is_covered, index, -1)


@lru_cache(maxsize=8)
def graph_tables(plan: BudgetPlan) -> GraphTables:
    """The tables of a plan; those of the last few plans are kept."""
    return GraphTables(plan)


def path_fits(tables: GraphTables, groups: Groups, path: str) -> BoolArray:
    """Which groups a graph of the path holds, or have no rows there."""
    tokens = groups.features[path][..., TOKENS].astype(np.int64)
    fits = (tables.select(path, tokens, groups.segments)[1] > 0) & (tables.axis_index(groups.needs) >= 0)
    return fits & tables.segments_fit(groups.segments, groups.has_video) | (tokens == 0)


def path_replay_costs(tables: GraphTables, cost: PackingCost, groups: Groups, path: str) -> FloatArray:
    """Predicted replay of each group on one path: 0 where it has no rows there, infinite where no graph fits."""
    features = groups.features[path]
    tokens = features[..., TOKENS].astype(np.int64)
    budgets, slots = tables.select(path, tokens, groups.segments)
    axis = tables.axis_index(groups.needs)
    fits = path_fits(tables, groups, path)
    times = np.full(tokens.shape, np.inf)
    for index, key in enumerate(tables.axis_keys):
        times = np.where(fits & (axis == index), cost.group_ms(path, key, budgets, slots, features), times)
    return np.where(tokens == 0, 0.0, times)


def replay_costs(tables: GraphTables, cost: PackingCost, groups: Groups) -> FloatArray:
    """Predicted time of replaying each group on all its paths; infinite where the plan does not allow that."""
    total = np.zeros(groups.counts.shape)
    for path in groups.features:
        total = total + path_replay_costs(tables, cost, groups, path)
    return np.where(groups.counts <= tables.plan.max_items, total, np.inf)


def eager_costs(cost: PackingCost, features: Mapping[str, FloatArray]) -> tuple[FloatArray, FloatArray]:
    """Host and device time of running groups eagerly, over all paths."""
    parts = [cost.eager_parts(path, values) for path, values in features.items()]
    return sum((host for host, _ in parts), np.zeros(())), sum((device for _, device in parts), np.zeros(()))
