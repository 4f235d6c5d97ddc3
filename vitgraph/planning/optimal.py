"""The `optimal` packing policy: the packing of a call with the least predicted latency, eager items included.

Up to `EXACT_ITEMS` items every partition is weighed, by dynamic programming over subsets. Larger calls are sorted by
tokens and weighed over all partitions into neighbours, with one window of neighbours left to eager: no other partition
is looked at, and calls of equal items lose nothing by it. Nothing here knows where the costs come from.

Shape legend: N calls of m items each, F feature columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from vitgraph.planning.budgets import BudgetPlan, GraphKey, select_budget
from vitgraph.planning.graph_tables import (
    BoolArray,
    CallItems,
    FloatArray,
    GraphTables,
    Groups,
    IntArray,
    PackingCost,
    call_items,
    eager_costs,
    graph_tables,
    replay_costs,
)
from vitgraph.planning.items import VIDEO, EncoderItemSpec
from vitgraph.planning.packing import (
    AXIS_NOT_CAPTURED,
    EAGER_IS_FASTER,
    TOO_MANY_FRAMES,
    TOO_MANY_TOKENS,
    VIDEO_DISABLED,
    PackedBatch,
    PathRun,
)

EXACT_ITEMS = 10
"""Items up to which all partitions are weighed: 30,000 pairs of subsets, about a millisecond."""


@dataclass(slots=True)
class Packing:
    """The best packing of each of N calls.

    Attributes:
        latency_ms: Predicted latency.
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
    groups = Groups(
        features,
        np.broadcast_to(member.sum(axis=1), (calls, len(member))),
        items.segments @ member.T.astype(np.int64),
        np.asarray((items.is_video[:, None, :] & member).any(axis=-1)),
        needs,
    )
    groups_ms = replay_costs(tables, cost, groups)
    best = np.zeros((calls, len(member)))
    for layer in _layers(count):
        pairs = groups_ms[:, layer.first_groups] + best[:, layer.rests]
        best[:, layer.subsets] = np.minimum.reduceat(pairs, layer.starts, axis=1)
    # Subset s goes eager and its complement is replayed.
    replays, parts = best[:, ::-1], eager_costs(cost, features)
    eager = cost.join_ms(replays * (1.0 + cost.doubt), *parts).argmin(axis=1)
    latency = cost.join_ms(replays, *parts)[np.arange(calls), eager]
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
    total_tokens = sum((items.tokens(path) for path in items.features), np.zeros((calls, count), dtype=np.int64))
    alone = replay_costs(tables, cost, items.alone())
    # What no graph holds goes last, where it can be added to any window of eager items.
    order = np.lexsort((total_tokens, np.isinf(alone)), axis=1)
    fitting = np.isfinite(alone).sum(axis=1)
    ordered = items.take(order)
    ends = _prefix_sums(ordered)
    group_ms = np.full((calls, count + 1, count + 1), np.inf)
    for stop in range(1, count + 1):
        first = max(0, stop - tables.plan.max_items)
        group_ms[:, first:stop, stop] = _costs_of_windows_to(stop, first, ordered, ends, tables, cost)
    forward, came_from = _forward(group_ms)
    backward, goes_to = _backward(group_ms, fitting)
    rows = np.arange(calls)
    unfit = {path: values[:, -1] - values[rows, fitting] for path, values in ends.items()}
    best, latency = np.full(calls, np.inf), np.full(calls, np.inf)
    window = np.zeros((calls, 2), dtype=np.int64)
    for start in range(count + 1):
        eager = {path: values[:, start:] - (values[:, start] - unfit[path])[:, None] for path, values in ends.items()}
        replays, parts = forward[:, start, None] + backward[:, start:], eager_costs(cost, eager)
        totals = cost.join_ms(replays * (1.0 + cost.doubt), *parts)
        totals = np.where(np.arange(start, count + 1) <= fitting[:, None], totals, np.inf)
        nearest = totals.argmin(axis=1)
        least = totals[rows, nearest]
        is_better = least < best
        best = np.where(is_better, least, best)
        latency = np.where(is_better, cost.join_ms(replays, *parts)[rows, nearest], latency)
        window[is_better] = np.column_stack([np.full(calls, start), start + nearest])[is_better]
    if not with_groups:
        return Packing(latency)
    groups, eager_places = [], []
    for call in range(calls):
        first, last, end = int(window[call, 0]), int(window[call, 1]), int(fitting[call])
        bounds = [*_walk_back(came_from[call], first), *_walk_on(goes_to[call], last, end)]
        places = [int(place) for place in order[call]]
        groups.append([tuple(places[start:stop]) for start, stop in bounds])
        eager_places.append(tuple(sorted([*places[first:last], *places[end:]])))
    return Packing(latency, groups, eager_places)


def _forward(group_ms: FloatArray) -> tuple[FloatArray, IntArray]:
    """Least time of replaying the first k items, for every k, and where its last group begins."""
    calls, ends, _ = group_ms.shape
    best, came_from = np.full((calls, ends), np.inf), np.zeros((calls, ends), dtype=np.int64)
    best[:, 0] = 0.0
    for stop in range(1, ends):
        options = best[:, :stop] + group_ms[:, :stop, stop]
        came_from[:, stop] = options.argmin(axis=1)
        best[:, stop] = options.min(axis=1)
    return best, came_from


def _backward(group_ms: FloatArray, fitting: IntArray) -> tuple[FloatArray, IntArray]:
    """Least time of replaying from item k to the last one that fits, and where its first group ends."""
    calls, ends, _ = group_ms.shape
    best, goes_to = np.full((calls, ends), np.inf), np.zeros((calls, ends), dtype=np.int64)
    best[np.arange(calls), fitting] = 0.0
    for start in range(ends - 2, -1, -1):
        options = group_ms[:, start, start + 1 :] + best[:, start + 1 :]
        goes_to[:, start] = options.argmin(axis=1) + start + 1
        best[:, start] = np.minimum(options.min(axis=1), best[:, start])
    return best, goes_to


def _prefix_sums(items: CallItems) -> dict[str, FloatArray]:
    return {
        path: np.concatenate([np.zeros_like(values[:, :1]), np.cumsum(values, axis=1)], axis=1)
        for path, values in items.features.items()
    }


def _costs_of_windows_to(
    stop: int, first: int, items: CallItems, ends: Mapping[str, FloatArray], tables: GraphTables, cost: PackingCost
) -> FloatArray:
    """Predicted replay `[N, stop - first]` of the items from `first`, or from a later one, up to `stop`."""

    def backwards(combine: np.ufunc, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return np.flip(combine.accumulate(np.flip(values[:, first:stop], axis=1), axis=1), axis=1)

    groups = Groups(
        {path: values[:, stop, None] - values[:, first:stop] for path, values in ends.items()},
        np.broadcast_to(np.arange(stop - first, 0, -1), (len(items.segments), stop - first)),
        backwards(np.add, items.segments),
        backwards(np.logical_or, items.is_video),
        backwards(np.maximum, items.needs),
    )
    return replay_costs(tables, cost, groups)


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
    plan = tables.plan
    chosen = [specs[place] for place in members]
    segments = sum(spec.segments for spec in chosen)
    batch = PackedBatch(members)
    axis_key: tuple[int, ...] = ()
    for axis in plan.axes if miss_reason is None else ():
        axis_key += axis.covering_key(spec.axis_sizes[axis.name] for spec in chosen) or ()
    for path, budgets in plan.path_budgets.items():
        tokens = sum(spec.tokens_on(path) for spec in chosen)
        if not tokens:
            continue
        on_path = tuple(place for place in members if specs[place].tokens_on(path))
        run = batch.runs[path] = PathRun(tokens, segments, miss_reason=miss_reason, items=on_path)
        if miss_reason is None:
            budget = select_budget(budgets, tokens)
            slots = None if budget is None else plan.select_slots(path, budget, segments)
            assert budget is not None and slots is not None
            run.key = GraphKey(path, budget, slots, axis_key)
    return batch


def _unfit_reason(spec: EncoderItemSpec, tables: GraphTables) -> str | None:
    """Why no graph holds the item alone, or None where one does."""
    plan = tables.plan
    if plan.max_frames == 0 and spec.modality == VIDEO:
        return VIDEO_DISABLED
    if any(spec.tokens_on(path) > budgets[-1] for path, budgets in plan.path_budgets.items()):
        return TOO_MANY_TOKENS
    if any(axis.covering_key([spec.axis_sizes[axis.name]]) is None for axis in plan.axes):
        return AXIS_NOT_CAPTURED
    for path, budgets in plan.path_budgets.items():
        budget = select_budget(budgets, spec.tokens_on(path))
        if budget is not None and plan.select_slots(path, budget, spec.segments) is None:
            return TOO_MANY_FRAMES
    return TOO_MANY_FRAMES if plan.max_segments is not None and spec.segments > plan.max_segments else None
