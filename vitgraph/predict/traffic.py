"""The workload as arrays: equal calls counted once, calls with equally many items side by side."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from vitgraph.planning.budgets import BudgetPlan
from vitgraph.planning.graph_tables import CallItems, FloatArray, IntArray, PackingCost, call_items
from vitgraph.planning.items import VIDEO, EncoderItemSpec

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


@dataclass(slots=True)
class CallBucket:
    """Distinct calls with equally many items, each call's items ascending by tokens.

    Attributes:
        items: Their numbers.
        calls: Places of the calls in the traffic's list of distinct calls.
    """

    items: CallItems
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
        self._buckets: list[CallBucket] | None = None

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

    def buckets(self, plan: BudgetPlan, cost: PackingCost) -> list[CallBucket]:
        """The distinct calls by their number of items; made once, since features do not depend on the budgets."""
        if self._buckets is None:
            by_count: dict[int, list[int]] = defaultdict(list)
            for place, specs in enumerate(self.distinct):
                by_count[len(specs)].append(place)
            self._buckets = [
                CallBucket(call_items([self.distinct[place] for place in places], plan, cost), np.array(places))
                for _, places in sorted(by_count.items())
            ]
        return self._buckets

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
