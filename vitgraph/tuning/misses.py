"""Which sizes miss, why, and from which fill on a replay is faster than eager."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from vitgraph.planning.accounting import GraphCounters
from vitgraph.planning.budgets import BudgetPlan
from vitgraph.planning.items import IMAGE, EncoderItemSpec
from vitgraph.planning.packing import (
    AXIS_NOT_CAPTURED,
    EAGER_IS_FASTER,
    NOT_CAPTURED,
    NOT_EXACT,
    TOO_MANY_FRAMES,
    TOO_MANY_TOKENS,
    VIDEO_DISABLED,
)
from vitgraph.predict.targets import TargetCost
from vitgraph.predict.traffic import Traffic
from vitgraph.records.kinds.tune import MissReason

REASON_TEXTS = {
    TOO_MANY_TOKENS: "more tokens than the largest budget",
    TOO_MANY_FRAMES: "more segments than a replay may hold",
    AXIS_NOT_CAPTURED: "a size of a capture axis that no graph covers",
    NOT_EXACT: "no budget of exactly these tokens",
    NOT_CAPTURED: "the graph could not be captured",
    VIDEO_DISABLED: "videos are left to eager",
    EAGER_IS_FASTER: "a graph could hold it, but eager is predicted to be faster",
}

_STEPS = 48


def collect_misses(
    traffic: Traffic, cost: TargetCost, plan: BudgetPlan, policy: str
) -> tuple[GraphCounters, list[MissReason]]:
    """Counts hits, misses and waste of a workload as the bench does, and describes the misses by reason.

    Returns:
        The counters, and for each reason its items, their token sizes and what the reason means.
    """
    counters = GraphCounters()
    tokens: dict[str, list[int]] = defaultdict(list)
    for specs, count in zip(traffic.distinct, traffic.counts, strict=True):
        batches = cost.pack(specs, plan, policy)
        for _ in range(int(count)):
            counters.add(batches)
        for batch in batches:
            if batch.miss_reason is not None:
                tokens[batch.miss_reason] += [specs[index].output_tokens for index in batch.items] * int(count)
    rows = [
        MissReason(
            reason=reason,
            text=REASON_TEXTS.get(reason, reason),
            items=len(sizes),
            share=len(sizes) / counters.items,
            smallest_tokens=min(sizes),
            median_tokens=float(np.median(sizes)),
            largest_tokens=max(sizes),
        )
        for reason, sizes in sorted(tokens.items(), key=lambda entry: -len(entry[1]))
    ]
    return counters, rows


def break_even_tokens(cost: TargetCost, path: str, budget: int, slots: int) -> int | None:
    """Fewest tokens of a single image from which on replaying this graph is no slower than eager; None where never.

    Sizes below it would be faster eager: they lose more to padding than the graph saves in launches.
    """
    sizes = np.unique(np.geomspace(1, budget, _STEPS).round().astype(int))
    specs = [EncoderItemSpec(IMAGE, int(size), int(size), path_output_tokens={path: int(size)}) for size in sizes]
    features = cost.item_features(specs, path)
    replays = cost.group_ms(path, _axis_key(cost, path), np.array(budget), np.array(slots), features)
    graph = cost.join_ms(replays, np.zeros(()), np.zeros(()))
    eager = cost.model.eager_calls_ms({path: features})
    slower = np.flatnonzero(graph > eager)
    if not len(slower):
        return 1
    return int(sizes[slower[-1] + 1]) if slower[-1] + 1 < len(sizes) else None


def _axis_key(cost: TargetCost, path: str) -> tuple[int, ...]:
    return next(iter(cost.model.replay[path].padded))
