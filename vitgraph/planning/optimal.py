"""The `optimal` packing policy: the packing of a call with the least predicted latency, eager items included.

Up to `EXACT_ITEMS` items every partition is weighed, by dynamic programming over subsets. Larger calls are sorted by
tokens and weighed over all partitions into neighbours, with one window of neighbours left to eager: no other partition
is looked at, and calls of equal items lose nothing by it. Above `NEIGHBOURS` items the window's ends are some of the
places only, and no group has more items than that. Nothing here knows where the costs come from.

A model of several paths may replay some of them and run the others eagerly: what no graph of a path holds is eager
there alone, and each packing is also weighed with a path left to eager for the whole call. Every packing that the
greedy policies make is among those that are weighed.

Shape legend: N calls of m items each, F feature columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations, pairwise
from operator import itemgetter
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from vitgraph.planning.budgets import BudgetPlan, EncoderItemSpec
from vitgraph.planning.graph_tables import (
    TOKENS,
    BoolArray,
    FloatArray,
    GraphTables,
    Groups,
    IntArray,
    PackingCost,
    call_items,
    eager_costs,
    graph_tables,
    path_fits,
    replay_costs,
)
from vitgraph.planning.packing import PackedBatch, is_held, make_batch

EXACT_ITEMS = 10
"""Items up to which all partitions are weighed: 30,000 pairs of subsets, about a millisecond."""
NEIGHBOURS = 256
"""Items up to which all windows of neighbours are weighed; a call of 200 takes a tenth of a second."""

_CHUNK_WINDOWS = 200_000

Number = TypeVar("Number", np.float64, np.int64)


class Chosen(NamedTuple):
    """How one call is packed: the replayed groups and the items left to eager, by their places, and the paths that no
    group replays though graphs hold some."""

    groups: list[tuple[int, ...]]
    eager: tuple[int, ...]
    eager_paths: tuple[str, ...]


class Packing(NamedTuple):
    """The best packing of each of N calls.

    Attributes:
        latency_ms: Predicted latency.
        doubted_ms: The same with the doubt in it, which decides.
        chosen: How each call is packed; empty unless asked for.
    """

    latency_ms: FloatArray
    doubted_ms: FloatArray
    chosen: list[Chosen]


@dataclass(slots=True)
class _Task:
    """Calls to pack, with what is eager in any case taken out of their items.

    Attributes:
        left: Paths that are left to eager for every item.
        items: The rows that may be replayed.
        always_eager: For each path, the summed features `[N, F]` of the rows that are not.
        pattern: Which paths of each item are eager in any case, as a number `[N, m]`; a group has one pattern.
        has_none: Items `[N, m]` without rows to replay.
    """

    left: tuple[str, ...]
    items: Groups
    always_eager: dict[str, FloatArray]
    pattern: IntArray
    has_none: BoolArray

    @classmethod
    def of(cls, items: Groups, tables: GraphTables, left: tuple[str, ...]) -> _Task:
        """The task with the paths of `left` eager for every item."""
        features, always, pattern = {}, {}, np.zeros(items.shape, dtype=np.int64)
        has_none = np.ones(items.shape, dtype=bool)
        for number, (path, values) in enumerate(items.features.items()):
            unfit = ~path_fits(tables, items, path)
            pattern += unfit << number
            is_replayed = ~unfit & (path not in left)
            features[path] = np.where(is_replayed[..., None], values, 0.0)
            always[path] = (values - features[path]).sum(axis=1)
            has_none &= features[path][..., TOKENS] == 0
        return cls(left, replace(items, features=features), always, pattern, has_none)

    def eager_parts(self, cost: PackingCost, chosen: dict[str, FloatArray]) -> tuple[FloatArray, FloatArray]:
        """Host and device time of eager runs of items with those features, `[N, ..., F]`, and of what is always so."""
        together = {}
        for path, values in chosen.items():
            always = self.always_eager[path]
            together[path] = values + always.reshape(len(always), *[1] * (values.ndim - 2), -1)
        return eager_costs(cost, together)


def best_packing(
    items: Groups, tables: GraphTables, cost: PackingCost, *, exact_items: int = EXACT_ITEMS, with_groups: bool = False
) -> Packing:
    """The packing with the least predicted latency of each call.

    Args:
        items: Calls with equally many items.
        exact_items: Items up to which every partition is weighed.
        with_groups: Whether to return the groups, and not the latency alone.
    """
    pack = _pack_subsets if items.shape[1] <= exact_items else _pack_neighbours
    calls, count = items.shape
    chunk = calls if count <= exact_items else max(1, _CHUNK_WINDOWS // count**2)
    # Paths to leave to eager for a whole call: none of them, and of several paths all but one or more.
    paths = tables.plan.paths
    lefts = [left for size in range(len(paths)) for left in combinations(paths, size)]
    latency, doubted, chosen = [], [], []
    for start in range(0, calls, chunk):
        some = items.each(itemgetter(slice(start, start + chunk)))
        options = [pack(_Task.of(some, tables, left), tables, cost, with_groups) for left in lefts]
        picks = np.argmin([option.doubted_ms for option in options], axis=0)
        for call, pick in enumerate(picks):
            latency.append(options[pick].latency_ms[call])
            doubted.append(options[pick].doubted_ms[call])
            chosen += options[pick].chosen[call : call + 1]
    return Packing(np.array(latency), np.array(doubted), chosen)


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


def _pack_subsets(task: _Task, tables: GraphTables, cost: PackingCost, with_groups: bool) -> Packing:
    items = task.items
    calls, count = items.shape
    member = _membership(count)
    weights = member.astype(np.float64)
    features = {path: np.matmul(weights, values) for path, values in items.features.items()}
    groups = Groups(
        features,
        np.broadcast_to(member.sum(axis=1), (calls, len(member))),
        items.segments @ member.T.astype(np.int64),
        np.asarray((items.has_video[:, None, :] & member).any(axis=-1)),
        _largest(items.needs, member),
    )
    groups_ms = replay_costs(tables, cost, groups)
    groups_ms[(task.has_none[:, None, :] & member).any(axis=-1)] = np.inf
    if len(items.features) > 1:
        most, least = (_largest(sign * task.pattern[..., None] + 64, member)[..., 0] for sign in (1, -1))
        groups_ms[most + least != 128] = np.inf
    best = np.zeros((calls, len(member)))
    for layer in _layers(count):
        pairs = groups_ms[:, layer.first_groups] + best[:, layer.rests]
        best[:, layer.subsets] = np.minimum.reduceat(pairs, layer.starts, axis=1)
    # Subset s goes eager and its complement is replayed.
    packing, eager = _weighed(best[:, ::-1], task.eager_parts(cost, features), cost)
    for call, subset in enumerate(map(int, eager) if with_groups else ()):
        replayed = _split(groups_ms[call], best[call], subset, count)
        packing.chosen.append(Chosen(replayed, _places(subset), task.left))
    return packing


def _weighed(
    replays_ms: FloatArray, parts: tuple[FloatArray, FloatArray], cost: PackingCost
) -> tuple[Packing, IntArray]:
    """The best of each call's ways `[N, ways]`, and which that is."""
    doubted = cost.join_ms(replays_ms * (1.0 + cost.doubt), *parts)
    best = doubted.argmin(axis=1)
    rows = np.arange(len(best))
    return Packing(cost.join_ms(replays_ms, *parts)[rows, best], doubted[rows, best], []), best


def _largest(values: IntArray, member: BoolArray) -> IntArray:
    """Largest of the members' values `[N, m, A]` in every subset, at least 0: `[N, subsets, A]`."""
    most = np.zeros((len(values), len(member), values.shape[-1]), dtype=np.int64)
    for place in range(values.shape[1]) if values.shape[-1] else ():
        np.maximum(most, values[:, place, None, :], out=most, where=member[None, :, place, None])
    return most


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


def _pack_neighbours(task: _Task, tables: GraphTables, cost: PackingCost, with_groups: bool) -> Packing:
    """As `_pack_subsets`, of partitions into neighbours."""
    items = task.items
    calls, count = items.shape
    total_tokens = np.sum([items.tokens(path) for path in items.features], axis=0)
    # What no graph holds goes last, where it can be added to any window of eager items.
    order = np.lexsort((total_tokens, task.pattern, task.has_none), axis=1)
    fitting = count - task.has_none.sum(axis=1)
    ordered = items.take(order)
    ends = {path: _prefix_sums(values) for path, values in ordered.features.items()}
    group_ms = _window_costs(ordered, ends, tables, cost)
    pattern = np.take_along_axis(task.pattern, order, axis=1)
    group_ms[:, :-1, 1:][(pattern[:, :, None] != pattern[:, None, :])] = np.inf
    group_ms[np.arange(count + 1) > fitting[:, None, None].repeat(count + 1, axis=1)] = np.inf
    forward, came_from = _forward(group_ms)
    backward, goes_to = _backward(group_ms, fitting)
    marks = np.unique([*range(0, count + 1, -(-count // NEIGHBOURS)), count, *fitting])
    first, last = (grid.ravel() for grid in np.meshgrid(marks, marks, indexing="ij"))
    first, last = first[first <= last], last[first <= last]
    # Rows that no graph holds are always eager; their items have no others.
    parts = task.eager_parts(cost, {path: values[:, last] - values[:, first] for path, values in ends.items()})
    replays = np.where(last <= fitting[:, None], forward[:, first] + backward[:, last], np.inf)
    packing, window = _weighed(replays, parts, cost)
    for call in range(calls) if with_groups else ():
        start, stop, end = int(first[window[call]]), int(last[window[call]]), int(fitting[call])
        bounds = [*_bounds(came_from[call], start, 0), *_bounds(goes_to[call], stop, end)]
        places = [int(place) for place in order[call]]
        groups = [tuple(places[low:high]) for low, high in bounds]
        packing.chosen.append(Chosen(groups, tuple(sorted([*places[start:stop], *places[end:]])), task.left))
    return packing


def _window_costs(items: Groups, ends: dict[str, FloatArray], tables: GraphTables, cost: PackingCost) -> FloatArray:
    """Predicted replay `[N, m + 1, m + 1]` of the items from one place up to another; infinite where it cannot be."""
    calls, count = items.shape
    longest = min(count, tables.plan.max_items, NEIGHBOURS)
    segments, videos = _prefix_sums(items.segments), _prefix_sums(items.has_video.astype(np.int64))
    group_ms = np.full((calls, count + 1, count + 1), np.inf)
    needs = items.needs
    starts = np.concatenate([np.arange(count - size + 1) for size in range(1, longest + 1)])
    stops = starts + np.repeat(np.arange(1, longest + 1), np.arange(count, count - longest, -1))
    largest = [needs]
    for size in range(1, longest if needs.shape[-1] else 1):
        largest.append(np.maximum(largest[-1][:, :-1], needs[:, size:]))
    groups = Groups(
        {path: values[:, stops] - values[:, starts] for path, values in ends.items()},
        np.broadcast_to(stops - starts, (calls, len(starts))),
        segments[:, stops] - segments[:, starts],
        videos[:, stops] > videos[:, starts],
        np.concatenate(largest, axis=1) if needs.shape[-1] else np.zeros((calls, len(starts), 0), dtype=np.int64),
    )
    group_ms[:, starts, stops] = replay_costs(tables, cost, groups)
    return group_ms


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


def _prefix_sums(values: npt.NDArray[Number]) -> npt.NDArray[Number]:
    """Sums of the first k along the second axis, for every k."""
    return np.concatenate([np.zeros_like(values[:, :1]), np.cumsum(values, axis=1)], axis=1)


def _bounds(leads_to: IntArray, place: int, end: int) -> list[tuple[int, int]]:
    """Neighbours of the places on the way from one to another, in whichever direction, ascending."""
    places = [place]
    while places[-1] != end:
        places.append(int(leads_to[places[-1]]))
    return list(pairwise(sorted(places)))


# -- as batches --------------------------------------------------------------------------------------------------------


def pack_optimally(specs: Sequence[EncoderItemSpec], plan: BudgetPlan, cost: PackingCost) -> list[PackedBatch]:
    """Packs one call with the least predicted latency.

    Returns:
        Batches of which every item is in exactly one; an eager batch says whether a graph could have held it.
    """
    if not specs:
        return []
    ((groups, eager, left),) = best_packing(
        call_items([specs], plan, cost), graph_tables(plan), cost, with_groups=True
    ).chosen
    by_choice = [place for place in eager if is_held(specs[place], plan)]
    unheld = [(place,) for place in eager if place not in by_choice]
    batches = [make_batch(specs, sorted(group), plan, eager_paths=left) for group in groups]
    return batches + [
        make_batch(specs, members, plan, eager_paths=plan.paths) for members in (by_choice, *unheld) if members
    ]
