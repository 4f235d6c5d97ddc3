"""The `optimal` packing policy: the packing of a call with the least predicted latency, eager items included.

Up to `EXACT_ITEMS` items every partition is weighed, by dynamic programming over subsets. Larger calls are sorted by
tokens and weighed over all partitions into neighbours, with one window of neighbours left to eager; that is a bound,
and calls of equal items lose nothing by it. Nothing here knows where the costs come from.

Shape legend: N calls of m items each, G candidate groups, F feature columns.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from vitgraph.planning.budgets import BudgetPlan, GraphKey
from vitgraph.planning.items import VIDEO, EncoderItemSpec
from vitgraph.planning.packing import (
    AXIS_NOT_CAPTURED,
    TOO_MANY_FRAMES,
    TOO_MANY_TOKENS,
    VIDEO_DISABLED,
    PackedBatch,
    PathRun,
)

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

EAGER_IS_FASTER = "eager_is_faster"
"""Miss reason of an item that a graph could hold and whose eager run is predicted to be faster."""

EXACT_ITEMS = 10
"""Items up to which all partitions are weighed: 30,000 pairs of subsets, well below a millisecond."""

ITEMS, TOKENS, SEGMENTS = 0, 1, 2
"""The first feature columns; a cost may add columns, as long as those of a group are the sum of its items'."""

_TABLES_KEPT = 8


class PackingCost(Protocol):
    """Predicted times that a packing is weighed with; every array may have leading dimensions."""

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
class CallItems:
    """N calls with m items each, in numbers.

    Attributes:
        features: For each path, `[N, m, F]`.
        segments: Attention segments `[N, m]`.
        is_video: `[N, m]`.
        needs: What the items need of the capture axes, all axes side by side, `[N, m, A]`.
    """

    features: dict[str, FloatArray]
    segments: IntArray
    is_video: BoolArray
    needs: IntArray

    @property
    def shape(self) -> tuple[int, int]:
        """N and m."""
        calls, items = self.segments.shape
        return calls, items

    def tokens(self, path: str) -> IntArray:
        """Output rows `[N, m]` on a path."""
        return self.features[path][..., TOKENS].astype(np.int64)

    def take(self, order: IntArray) -> CallItems:
        """The items of every call in another order, or a choice of them; `order` is `[N, k]`."""
        wide = order[..., None]
        return CallItems(
            {path: np.take_along_axis(values, wide, axis=1) for path, values in self.features.items()},
            np.take_along_axis(self.segments, order, axis=1),
            np.take_along_axis(self.is_video, order, axis=1),
            np.take_along_axis(self.needs, wide, axis=1),
        )


def call_items(calls: Sequence[Sequence[EncoderItemSpec]], plan: BudgetPlan, cost: PackingCost) -> CallItems:
    """The numbers of calls that have equally many items."""
    shape = len(calls), len(calls[0])
    flat = [spec for call in calls for spec in call]
    needs = [[size for axis in plan.axes for size in spec.axis_sizes[axis.name]] for spec in flat]
    return CallItems(
        {path: cost.item_features(flat, path).reshape(*shape, -1) for path in plan.paths},
        np.array([spec.segments for spec in flat], dtype=np.int64).reshape(shape),
        np.array([spec.modality == VIDEO for spec in flat]).reshape(shape),
        np.array(needs, dtype=np.int64).reshape(*shape, -1),
    )


class GraphTables:
    """The graphs of a plan as arrays, to select them for many groups at once.

    Args:
        plan: Budgets, slots, limits and axes.
    """

    def __init__(self, plan: BudgetPlan) -> None:
        self.plan = plan
        self.budgets = {path: np.array(budgets, dtype=np.int64) for path, budgets in plan.path_budgets.items()}
        self._tiers = {path: self._tier_table(path) for path in plan.paths}
        self.axis_keys: list[tuple[int, ...]] = [
            tuple(part for key in keys for part in key) for keys in product(*(axis.keys for axis in plan.axes))
        ]

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
        column = (tiers[row] < segments[..., None]).sum(axis=-1)
        fits = (place < len(budgets)) & (column < tiers.shape[1])
        slots = np.where(fits, tiers[row, np.minimum(column, tiers.shape[1] - 1)], 0)
        return budgets[row], slots

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


_tables: OrderedDict[int, GraphTables] = OrderedDict()


def graph_tables(plan: BudgetPlan) -> GraphTables:
    """The tables of a plan; those of the last few plans are kept."""
    found = _tables.get(id(plan))
    # The kept tables hold their plan, so that its identity cannot be another's.
    if found is None or found.plan is not plan:
        found = _tables[id(plan)] = GraphTables(plan)
        if len(_tables) > _TABLES_KEPT:
            _tables.popitem(last=False)
    return found


def replay_costs(
    tables: GraphTables,
    cost: PackingCost,
    features: Mapping[str, FloatArray],
    segments: IntArray,
    has_video: BoolArray,
    needs: IntArray,
) -> FloatArray:
    """Predicted time of replaying each group; infinite where the plan has no graph for it.

    Args:
        tables: The plan's graphs.
        cost: Predicted times.
        features: For each path, summed features `[..., F]` of the groups.
        segments: Segments `[...]`.
        has_video: Whether a video is in the group.
        needs: Largest axis needs `[..., A]`.
    """
    plan = tables.plan
    count = next(iter(features.values()))[..., ITEMS]
    axis = tables.axis_index(needs)
    fits = (axis >= 0) & (segments <= plan.max_segments)
    if plan.max_frames == 0:
        fits &= ~has_video
    total = np.zeros(segments.shape)
    for path, values in features.items():
        count = np.maximum(count, values[..., ITEMS])
        tokens = values[..., TOKENS].astype(np.int64)
        budgets, slots = tables.select(path, tokens, segments)
        is_empty = tokens == 0
        fits &= is_empty | (slots > 0)
        for index, key in enumerate(tables.axis_keys):
            times = cost.group_ms(path, key, budgets, slots, values)
            total += np.where(is_empty | (axis != index), 0.0, times)
    return np.where(fits & (count <= plan.max_items), total, np.inf)


def eager_costs(cost: PackingCost, features: Mapping[str, FloatArray]) -> tuple[FloatArray, FloatArray]:
    """Host and device time of running groups eagerly, over all paths."""
    parts = [cost.eager_parts(path, values) for path, values in features.items()]
    return sum((host for host, _ in parts), np.zeros(())), sum((device for _, device in parts), np.zeros(()))


@dataclass(slots=True)
class Packing:
    """The best packing of each of N calls.

    Attributes:
        latency_ms: Predicted latency, without what every packing of the call costs alike.
        groups: For each call, the replayed groups as tuples of item places; None unless asked for.
        eager: For each call, the places left to eager; None unless asked for.
    """

    latency_ms: FloatArray
    groups: list[list[tuple[int, ...]]] | None = None
    eager: list[tuple[int, ...]] | None = None


def best_packing(
    items: CallItems,
    tables: GraphTables,
    cost: PackingCost,
    *,
    exact_items: int = EXACT_ITEMS,
    with_groups: bool = False,
) -> Packing:
    """The packing with the least predicted latency of each call.

    Args:
        items: Calls with equally many items.
        tables: The plan's graphs.
        cost: Predicted times.
        exact_items: Items up to which every partition is weighed.
        with_groups: Whether to return the groups, and not the latency alone.
    """
    if items.shape[1] <= exact_items:
        return _pack_subsets(items, tables, cost, with_groups)
    return _pack_neighbours(items, tables, cost, with_groups)


# -- all partitions ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _SubsetLayer:
    """Subsets of one size with the ways to split a first group off: flat pairs, and where each subset's begin."""

    subsets: IntArray
    first_groups: IntArray
    rests: IntArray
    starts: IntArray


@lru_cache(maxsize=16)
def _membership(items: int) -> BoolArray:
    return (np.arange(1 << items)[:, None] >> np.arange(items) & 1).astype(bool)


@lru_cache(maxsize=16)
def _layers(items: int) -> tuple[_SubsetLayer, ...]:
    by_size: list[list[tuple[int, list[int]]]] = [[] for _ in range(items + 1)]
    for subset in range(1, 1 << items):
        lowest = subset & -subset
        others = subset ^ lowest
        part, groups = others, []
        while True:
            groups.append(part | lowest)
            if not part:
                break
            part = (part - 1) & others
        by_size[subset.bit_count()].append((subset, groups))
    layers = []
    for entries in by_size[1:]:
        subsets = np.array([subset for subset, _ in entries])
        counts = np.array([len(groups) for _, groups in entries])
        first = np.array([group for _, groups in entries for group in groups])
        layers.append(_SubsetLayer(subsets, first, np.repeat(subsets, counts) ^ first, np.cumsum(counts) - counts))
    return tuple(layers)


def _pack_subsets(items: CallItems, tables: GraphTables, cost: PackingCost, with_groups: bool) -> Packing:
    calls, count = items.shape
    member = _membership(count)
    weights = member.astype(np.float64)
    features = {path: np.matmul(weights, values) for path, values in items.features.items()}
    needs = np.zeros((calls, len(member), items.needs.shape[-1]), dtype=np.int64)
    for place in range(count) if needs.shape[-1] else ():
        np.maximum(needs, items.needs[:, place, None, :], out=needs, where=member[None, :, place, None])
    groups_ms = replay_costs(
        tables,
        cost,
        features,
        items.segments @ member.T.astype(np.int64),
        (items.is_video[:, None, :] & member).any(axis=-1),
        needs,
    )
    best = np.zeros((calls, len(member)))
    for layer in _layers(count):
        pairs = groups_ms[:, layer.first_groups] + best[:, layer.rests]
        best[:, layer.subsets] = np.minimum.reduceat(pairs, layer.starts, axis=1)
    # Subset s goes eager and its complement is replayed.
    totals = cost.join_ms(best[:, ::-1], *eager_costs(cost, features))
    eager = totals.argmin(axis=1)
    latency = totals[np.arange(calls), eager]
    if not with_groups:
        return Packing(latency)
    chosen = [_split(groups_ms[call], best[call], int(eager[call]), count) for call in range(calls)]
    return Packing(latency, chosen, [_places(int(subset)) for subset in eager])


def _split(groups_ms: FloatArray, best: FloatArray, eager: int, count: int) -> list[tuple[int, ...]]:
    """The groups whose times sum to `best` of everything that is not eager."""
    rest = ((1 << count) - 1) ^ eager
    found = []
    while rest:
        layer = _layers(count)[rest.bit_count() - 1]
        place = int(np.searchsorted(layer.subsets, rest))
        start = layer.starts[place]
        stop = layer.starts[place + 1] if place + 1 < len(layer.starts) else len(layer.first_groups)
        first = layer.first_groups[start:stop]
        group = int(first[np.argmin(groups_ms[first] + best[rest ^ first])])
        found.append(_places(group))
        rest ^= group
    return found


def _places(subset: int) -> tuple[int, ...]:
    return tuple(place for place in range(subset.bit_length()) if subset >> place & 1)


# -- partitions into neighbours ----------------------------------------------------------------------------------------


def _pack_neighbours(items: CallItems, tables: GraphTables, cost: PackingCost, with_groups: bool) -> Packing:
    calls, count = items.shape
    total_tokens = sum(items.tokens(path) for path in items.features)
    alone = replay_costs(tables, cost, items.features, items.segments, items.is_video, items.needs)
    # What no graph holds goes last, where it can be added to any window of eager items.
    order = np.lexsort((total_tokens, np.isinf(alone)), axis=1)
    ordered = items.take(order)
    fitting = np.isfinite(alone).sum(axis=1)
    ends = _prefix_sums(ordered)
    forward = np.full((calls, count + 1), np.inf)
    forward[:, 0] = 0.0
    came_from = np.zeros((calls, count + 1), dtype=np.int64)
    group_ms = np.full((calls, count + 1, count + 1), np.inf)
    for stop in range(1, count + 1):
        for start in range(max(0, stop - tables.plan.max_items), stop):
            group_ms[:, start, stop] = _window_cost(ordered, ends, tables, cost, start, stop)
        options = forward[:, :stop] + group_ms[:, :stop, stop]
        came_from[:, stop] = options.argmin(axis=1)
        forward[:, stop] = options.min(axis=1)
    rows = np.arange(calls)
    backward = np.full((calls, count + 1), np.inf)
    backward[rows, fitting] = 0.0
    goes_to = np.zeros((calls, count + 1), dtype=np.int64)
    for start in range(count - 1, -1, -1):
        options = group_ms[:, start, start + 1 :] + backward[:, start + 1 :]
        goes_to[:, start] = options.argmin(axis=1) + start + 1
        backward[:, start] = np.minimum(options.min(axis=1), backward[:, start])
    best = np.full(calls, np.inf)
    window = np.zeros((calls, 2), dtype=np.int64)
    unfit = {path: values[:, -1] - values[rows, fitting] for path, values in ends.items()}
    for start in range(count + 1):
        for stop in range(start, count + 1) if start else range(count + 1):
            eager = {path: values[:, stop] - values[:, start] + unfit[path] for path, values in ends.items()}
            totals = cost.join_ms(forward[:, start] + backward[:, stop], *eager_costs(cost, eager))
            totals = np.where((stop <= fitting) & np.isfinite(totals), totals, np.inf)
            is_better = totals < best
            best = np.where(is_better, totals, best)
            window[is_better] = start, stop
    if not with_groups:
        return Packing(best)
    groups, eager_places = [], []
    for call in range(calls):
        first, last = (int(value) for value in window[call])
        bounds = [*_walk_back(came_from[call], first), *_walk_on(goes_to[call], last, int(fitting[call]))]
        groups.append([tuple(int(place) for place in order[call, start:stop]) for start, stop in bounds])
        left = [*order[call, first:last], *order[call, fitting[call] :]]
        eager_places.append(tuple(sorted(int(place) for place in left)))
    return Packing(best, groups, eager_places)


def _prefix_sums(items: CallItems) -> dict[str, FloatArray]:
    return {
        path: np.concatenate([np.zeros_like(values[:, :1]), np.cumsum(values, axis=1)], axis=1)
        for path, values in items.features.items()
    }


def _window_cost(
    items: CallItems,
    ends: Mapping[str, FloatArray],
    tables: GraphTables,
    cost: PackingCost,
    start: int,
    stop: int,
) -> FloatArray:
    features = {path: values[:, stop] - values[:, start] for path, values in ends.items()}
    return replay_costs(
        tables,
        cost,
        features,
        items.segments[:, start:stop].sum(axis=1),
        items.is_video[:, start:stop].any(axis=1),
        items.needs[:, start:stop].max(axis=1),
    )


def _walk_back(came_from: IntArray, stop: int) -> list[tuple[int, int]]:
    bounds = []
    while stop:
        start = int(came_from[stop])
        bounds.append((start, stop))
        stop = start
    return bounds[::-1]


def _walk_on(goes_to: IntArray, start: int, end: int) -> list[tuple[int, int]]:
    bounds = []
    while start < end:
        stop = int(goes_to[start])
        bounds.append((start, stop))
        start = stop
    return bounds


# -- as batches --------------------------------------------------------------------------------------------------------


def pack_optimally(specs: Sequence[EncoderItemSpec], plan: BudgetPlan, cost: PackingCost) -> list[PackedBatch]:
    """Packs one call with the least predicted latency.

    Args:
        specs: Items of the call, in input order.
        plan: Budgets, limits and axes.
        cost: Predicted times.

    Returns:
        Batches of which every item is in exactly one; an eager batch says whether a graph could have held it.
    """
    if not specs:
        return []
    tables = graph_tables(plan)
    packing = best_packing(call_items([specs], plan, cost), tables, cost, with_groups=True)
    assert packing.groups is not None and packing.eager is not None
    batches = [_batch(specs, tuple(sorted(group)), tables) for group in packing.groups[0]]
    by_choice = [place for place in packing.eager[0] if _unfit_reason(specs[place], tables) is None]
    if by_choice:
        batches.append(_batch(specs, tuple(by_choice), tables, EAGER_IS_FASTER))
    for place in packing.eager[0]:
        reason = _unfit_reason(specs[place], tables)
        if reason is not None:
            batches.append(_batch(specs, (place,), tables, reason))
    return batches


def _batch(
    specs: Sequence[EncoderItemSpec], members: tuple[int, ...], tables: GraphTables, miss_reason: str | None = None
) -> PackedBatch:
    chosen = [specs[place] for place in members]
    segments = sum(spec.segments for spec in chosen)
    batch = PackedBatch(members)
    axis_key: tuple[int, ...] = ()
    for axis in tables.plan.axes if miss_reason is None else ():
        axis_key += axis.covering_key(spec.axis_sizes[axis.name] for spec in chosen) or ()
    for path in tables.plan.paths:
        tokens = sum(spec.tokens_on(path) for spec in chosen)
        if not tokens:
            continue
        run = batch.runs[path] = PathRun(tokens, segments, miss_reason=miss_reason)
        if miss_reason is None:
            budget, slots = tables.select(path, *_as_arrays(tokens, segments))
            run.key = GraphKey(path, int(budget), int(slots), axis_key)
    return batch


def _unfit_reason(spec: EncoderItemSpec, tables: GraphTables) -> str | None:
    """Why no graph holds the item alone, or None where one does."""
    plan = tables.plan
    if plan.max_frames == 0 and spec.modality == VIDEO:
        return VIDEO_DISABLED
    for path in plan.paths:
        tokens = spec.tokens_on(path)
        if tokens > plan.path_budgets[path][-1]:
            return TOO_MANY_TOKENS
    for axis in plan.axes:
        if axis.covering_key([spec.axis_sizes[axis.name]]) is None:
            return AXIS_NOT_CAPTURED
    for path in plan.paths:
        tokens = spec.tokens_on(path)
        if tokens and not tables.select(path, *_as_arrays(tokens, spec.segments))[1]:
            return TOO_MANY_FRAMES
    return TOO_MANY_FRAMES if spec.segments > plan.max_segments else None


def _as_arrays(*values: int) -> Any:
    return tuple(np.array(value, dtype=np.int64) for value in values)
