"""Predicted latency of a whole workload under some settings, packed for all calls at once.

Equal calls are counted once, and calls with equally many items are packed side by side. The vectorised packers do what
`vitgraph.planning.packing` does call by call; the tests hold them to it.

Shape legend: N calls of m items each, in at most m groups; F feature columns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from vitgraph.planning.budgets import IMAGE, VIDEO, BudgetPlan, EncoderItemSpec
from vitgraph.planning.graph_tables import (
    ITEMS,
    TOKENS,
    BoolArray,
    FloatArray,
    GraphTables,
    Groups,
    IntArray,
    PackingCost,
    call_items,
    graph_tables,
    path_fits,
    path_replay_costs,
)
from vitgraph.planning.optimal import best_packing
from vitgraph.predict.targets import OPTIMAL, TargetCost

SEARCH_EXACT_ITEMS = 6
"""Items up to which the search weighs every partition of a call under `optimal`; the final prediction goes further."""


Specs = tuple[EncoderItemSpec, ...]


def spec_signature(spec: EncoderItemSpec) -> Hashable:
    """What decides how an item is packed and what it costs."""
    return (
        spec.modality,
        spec.output_tokens,
        spec.segments,
        tuple(sorted(spec.path_output_tokens.items())),
        tuple(sorted(spec.axis_sizes.items())),
    )


MOST_ITEMS_APART = 8
"""Items up to which calls of each number are weighed by themselves; larger calls are few of each number."""


class CallBucket(NamedTuple):
    """Items `[N, m]` of calls with about as many, ascending by tokens, and the calls' places in their traffic."""

    items: Groups
    calls: IntArray


class Traffic:
    """The calls of a workload, as the search weighs them.

    Args:
        calls: Planner facts of each call's items.
        requests: Requests in each call; None for one each.

    Attributes:
        distinct: The distinct calls, items ascending by tokens.
        counts: How often each occurs.
        requests: Requests in each distinct call.
        source: For each call given, its place in `distinct`.
    """

    def __init__(self, calls: Sequence[Specs], requests: Sequence[int] | None = None) -> None:
        if not calls:
            raise ValueError("a workload needs at least one call")
        places: dict[Hashable, int] = {}
        self.distinct: list[Specs] = []
        source = []
        for index, specs in enumerate(calls):
            # Stable, as the packing is: items of equal tokens stay in input order.
            ordered = tuple(sorted(specs, key=lambda spec: spec.output_tokens))
            number = requests[index] if requests is not None else 1
            signature = (number, *map(spec_signature, ordered))
            if signature not in places:
                places[signature] = len(self.distinct)
                self.distinct.append(ordered)
            source.append(places[signature])
        self.source = np.array(source)
        self.counts = np.bincount(self.source, minlength=len(self.distinct))
        self.requests = np.ones(len(self.distinct), dtype=np.int64)
        if requests is not None:
            self.requests[self.source] = requests
        self._buckets: dict[bool, list[CallBucket]] = {}

    @property
    def max_items(self) -> int:
        """Items of the largest call."""
        return max(map(len, self.distinct))

    @property
    def has_videos(self) -> bool:
        """Whether any call has a video."""
        return any(spec.modality == VIDEO for specs in self.distinct for spec in specs)

    @property
    def max_tokens(self) -> int:
        """Output tokens of the largest call."""
        return max(sum(spec.output_tokens for spec in specs) for specs in self.distinct)

    def buckets(self, plan: BudgetPlan, cost: PackingCost, *, is_filled: bool = True) -> list[CallBucket]:
        """The distinct calls by their number of items; made once, since features do not depend on the budgets.

        Args:
            is_filled: Large calls of about as many items are filled up to the same number.
        """
        if is_filled not in self._buckets:
            by_count: dict[int, list[int]] = defaultdict(list)
            for place, specs in enumerate(self.distinct):
                count = len(specs)
                is_apart = not is_filled or count <= MOST_ITEMS_APART
                by_count[count if is_apart else 1 << (count - 1).bit_length()].append(place)
            self._buckets[is_filled] = [
                CallBucket(
                    call_items(_filled([self.distinct[place] for place in places]), plan, cost), np.array(places)
                )
                for _, places in sorted(by_count.items())
            ]
        return self._buckets[is_filled]

    def totals(self, plan: BudgetPlan, cost: PackingCost) -> dict[str, FloatArray]:
        """Summed features `[calls, F]` of each distinct call, by path."""
        found: dict[str, FloatArray] = {}
        for bucket in self.buckets(plan, cost):
            for path, features in bucket.items.features.items():
                if path not in found:
                    found[path] = np.zeros((len(self.distinct), features.shape[-1]))
                found[path][bucket.calls] = features.sum(axis=1)
        return found

    def per_request(self, calls_ms: FloatArray) -> FloatArray:
        """One value a request, as the bench reports: a call's latency over its requests."""
        return np.repeat(calls_ms / self.requests, self.counts * self.requests)


def _filled(calls: Sequence[Specs]) -> list[Specs]:
    """The calls with as many items as the largest, of no tokens where they have fewer."""
    most = max(map(len, calls))
    nothing = replace(calls[0][0], modality=IMAGE, output_tokens=0, segments=0, path_output_tokens={})
    return [(*specs, *[nothing] * (most - len(specs))) for specs in calls]


@dataclass(slots=True)
class ReplayGroups:
    """Groups that are replayed under some packing, flattened over all calls.

    Attributes:
        features: `[k, F]` on the only path.
        segments: `[k]`.
        needs: `[k, A]`.
        counts: How often each group occurs.
        eager_ms: Where the group is all of its call: what the group may cost until eager is faster. Infinite
            elsewhere.
    """

    features: FloatArray
    segments: IntArray
    needs: IntArray
    counts: FloatArray
    eager_ms: FloatArray

    @property
    def tokens(self) -> IntArray:
        """Output rows `[k]`."""
        return self.features[:, TOKENS].astype(np.int64)


def predict_calls(
    traffic: Traffic, cost: TargetCost, plan: BudgetPlan, policy: str, *, exact_items: int = SEARCH_EXACT_ITEMS
) -> FloatArray:
    """Predicted latency of each distinct call.

    Args:
        exact_items: Items up to which `optimal` weighs every partition.
    """
    tables = graph_tables(plan)
    found = np.zeros(len(traffic.distinct))
    for bucket in traffic.buckets(plan, cost, is_filled=policy != OPTIMAL):
        found[bucket.calls] = _latency(bucket.items, tables, cost, policy, exact_items)
    return found


def eager_calls(traffic: Traffic, cost: TargetCost, plan: BudgetPlan) -> FloatArray:
    """Predicted latency of each distinct call run eagerly, no manager around it."""
    return cost.model.eager_calls_ms(traffic.totals(plan, cost))


def oracle_calls(traffic: Traffic, cost: TargetCost, plan: BudgetPlan) -> FloatArray:
    """For each distinct call the faster of eager and an exact-size graph without overhead."""
    totals = traffic.totals(plan, cost)
    return np.minimum(cost.model.eager_calls_ms(totals), cost.model.exact_calls_ms(totals))


def _latency(items: Groups, tables: GraphTables, cost: TargetCost, policy: str, exact_items: int) -> FloatArray:
    if policy == OPTIMAL:
        return best_packing(items, tables, cost, exact_items=exact_items).latency_ms
    groups = grouped(items, group_ids(items, tables, policy))
    calls = len(items.segments)
    replays, host, device = np.zeros(calls), np.zeros(calls), np.zeros(calls)
    for path, features in groups.features.items():
        times = _group_times(tables, cost, groups, path, policy)
        is_miss = np.isinf(times)
        replays += np.where(is_miss, 0.0, times).sum(axis=1)
        left = np.where(is_miss[..., None], features, 0.0)
        if cost.target.joins_misses:
            more_host, more_device = cost.eager_parts(path, left.sum(axis=1))
        else:
            parts = cost.eager_parts(path, left)
            more_host, more_device = parts[0].sum(axis=1), parts[1].sum(axis=1)
        host, device = host + more_host, device + more_device
    return cost.join_ms(replays, host, device)


def _group_times(tables: GraphTables, cost: TargetCost, groups: Groups, path: str, policy: str) -> FloatArray:
    times = path_replay_costs(tables, cost, groups, path)
    if policy != "exact":
        return times
    tokens = groups.features[path][..., TOKENS].astype(np.int64)
    return np.where((tokens == 0) | np.isin(tokens, tables.budgets[path]), times, np.inf)


def group_ids(items: Groups, tables: GraphTables, policy: str) -> IntArray:
    """The group `[N, m]` of each item under `greedy`, `greedy-defer` or `exact`; items ascend by tokens."""
    if policy == "exact":
        return _exact_ids(items, tables)
    return _greedy_ids(items, tables, defer=policy == "greedy-defer")


def _greedy_ids(items: Groups, tables: GraphTables, *, defer: bool) -> IntArray:
    """A group is named by the place of its first item; items that no graph holds are groups of their own."""
    plan, budgets = tables.plan, tables.budgets
    calls, count = items.shape
    ids = np.zeros((calls, count), dtype=np.int64)
    tokens = {path: items.tokens(path) for path in items.features}
    is_alone = _is_alone(items, tables, defer=defer)
    open_tokens = {path: np.zeros(calls, dtype=np.int64) for path in tokens}
    open_id, open_items, open_segments = (np.zeros(calls, dtype=np.int64) for _ in range(3))
    open_video, open_needs = np.zeros(calls, dtype=bool), np.zeros((calls, items.needs.shape[-1]), dtype=np.int64)
    for place in range(count):
        segments, has_video = open_segments + items.segments[:, place], open_video | items.has_video[:, place]
        needs = np.maximum(open_needs, items.needs[:, place])
        fits = (open_items > 0) & (open_items < plan.max_items) & (tables.axis_index(needs) >= 0)
        fits &= tables.segments_fit(segments, has_video)
        for path, values in tokens.items():
            fits &= open_tokens[path] + values[:, place] <= budgets[path][-1]
            if defer:
                fits &= ~_is_cheaper_apart(budgets[path], open_tokens[path], values[:, place])
        apart = is_alone[:, place]
        fits &= ~apart
        ids[:, place] = np.where(fits, open_id, place)
        open_id = np.where(apart, open_id, ids[:, place])
        for path, values in tokens.items():
            joined = np.where(fits, open_tokens[path], 0) + values[:, place]
            open_tokens[path] = np.where(apart, open_tokens[path], joined)
        open_items = np.where(apart, open_items, np.where(fits, open_items, 0) + 1)
        open_segments = np.where(apart, open_segments, np.where(fits, segments, items.segments[:, place]))
        open_video = np.where(apart, open_video, np.where(fits, has_video, items.has_video[:, place]))
        open_needs = np.where(apart[:, None], open_needs, np.where(fits[:, None], needs, items.needs[:, place]))
    return ids


def _is_alone(items: Groups, tables: GraphTables, *, defer: bool = False) -> BoolArray:
    """Items that are judged by themselves: no graph holds them. Deferring, too many tokens are no reason."""
    is_held = items.counts > 0
    is_too_large = np.zeros(items.shape, dtype=bool)
    for path in items.features:
        is_held &= path_fits(tables, items, path)
        is_too_large |= items.tokens(path) > tables.budgets[path][-1]
    if tables.plan.max_frames == 0:
        is_too_large &= ~items.has_video
    return ~is_held & ~is_too_large if defer else ~is_held


def _is_cheaper_apart(budgets: IntArray, opened: IntArray, tokens: IntArray) -> BoolArray:
    def budget_of(amount: IntArray) -> IntArray:
        place = np.searchsorted(budgets, amount)
        held = np.where(place < len(budgets), budgets[np.minimum(place, len(budgets) - 1)], amount)
        return np.where(amount == 0, 0, held)

    own, before = budget_of(tokens), budget_of(opened)
    return (own >= before) & (own + before < budget_of(opened + tokens))


def _exact_ids(items: Groups, tables: GraphTables) -> IntArray:
    """All items that a graph holds in the first one's group where their tokens are a budget, else each in its own."""
    count = items.shape[1]
    is_held = ~_is_alone(items, tables)
    held = is_held.sum(axis=1)
    is_whole = (held > 1) & (held <= tables.plan.max_items)
    has_video = np.asarray((items.has_video & is_held).any(axis=1))
    is_whole &= tables.segments_fit(np.where(is_held, items.segments, 0).sum(axis=1), has_video)
    is_whole &= tables.axis_index(np.where(is_held[..., None], items.needs, 0).max(axis=1)) >= 0
    for path in items.features:
        total = np.where(is_held, items.tokens(path), 0).sum(axis=1)
        is_whole &= (total == 0) | np.isin(total, tables.budgets[path])
    return np.where(is_whole[:, None] & is_held, is_held.argmax(axis=1)[:, None], np.arange(count))


def grouped(items: Groups, ids: IntArray) -> Groups:
    """The groups `[N, m]` of packed calls; those that no item is in have no rows."""
    calls, count = items.shape
    rows = np.arange(calls)
    features = {path: np.zeros(values.shape) for path, values in items.features.items()}
    counts, segments = np.zeros((calls, count), dtype=np.int64), np.zeros((calls, count), dtype=np.int64)
    has_video = np.zeros((calls, count), dtype=bool)
    needs = np.zeros((calls, count, items.needs.shape[-1]), dtype=np.int64)
    for place in range(count):
        group = ids[:, place]
        for path, values in items.features.items():
            features[path][rows, group] += values[:, place]
        counts[rows, group] += items.counts[:, place]
        segments[rows, group] += items.segments[:, place]
        has_video[rows, group] |= items.has_video[:, place]
        needs[rows, group] = np.maximum(needs[rows, group], items.needs[:, place])
    return Groups(features, counts, segments, has_video, needs)


# -- groups, for the budget search -------------------------------------------------------------------------------------


def replayed_groups(traffic: Traffic, cost: TargetCost, plan: BudgetPlan, policy: str) -> ReplayGroups:
    """The groups of a single-path workload that are replayed under a packing policy."""
    tables = graph_tables(plan)
    parts: list[tuple[Any, ...]] = []
    for bucket in traffic.buckets(plan, cost, is_filled=policy != OPTIMAL):
        groups = _packed_groups(bucket, tables, cost, policy)
        (path,) = groups.features
        times = path_replay_costs(tables, cost, groups, path)
        is_replayed = np.isfinite(times) & (groups.counts > 0)
        is_whole = is_replayed & (groups.counts == bucket.items.counts.sum(axis=1)[:, None])
        eager = np.where(is_whole, _eager_alone(cost, groups.features), np.inf)
        weights = np.broadcast_to(traffic.counts[bucket.calls][:, None], times.shape)
        picked = (groups.features[path], groups.segments, groups.needs, weights, eager)
        parts.append(tuple(values[is_replayed] for values in picked))
    features, segments, needs, counts, eager = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    return ReplayGroups(features, segments, needs, counts.astype(np.float64), eager)


def _eager_alone(cost: TargetCost, features: Mapping[str, FloatArray]) -> FloatArray:
    (path,) = features
    host, device = cost.eager_parts(path, features[path])
    alone = cost.join_ms(np.zeros(()), host, device) - cost.overheads.call_ms
    return np.where(features[path][..., ITEMS] > 0, alone, np.inf)


def _packed_groups(bucket: CallBucket, tables: GraphTables, cost: TargetCost, policy: str) -> Groups:
    if policy != OPTIMAL:
        return grouped(bucket.items, group_ids(bucket.items, tables, policy))
    packing = best_packing(bucket.items, tables, cost, exact_items=SEARCH_EXACT_ITEMS, with_groups=True)
    calls, count = bucket.items.shape
    ids = np.zeros((calls, count), dtype=np.int64)
    is_eager = np.zeros((calls, count), dtype=bool)
    for call, (groups, eager, _) in enumerate(packing.chosen):
        for number, places in enumerate([*groups, *((place,) for place in eager)]):
            ids[call, list(places)] = number
            is_eager[call, number] = number >= len(groups)
    found = grouped(bucket.items, ids)
    found.counts[is_eager] = 0
    return found
