"""What packing does with a batch or a workload, in words and numbers: the answer of `plan`. Needs no device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from vitgraph.planning.accounting import GraphCounters, count_calls
from vitgraph.planning.budgets import IMAGE, BudgetPlan, EncoderItemSpec
from vitgraph.planning.packing import (
    AXIS_NOT_CAPTURED,
    EAGER_IS_FASTER,
    NOT_CAPTURED,
    NOT_EXACT,
    TOO_MANY_FRAMES,
    TOO_MANY_TOKENS,
    VIDEO_DISABLED,
    PackedBatch,
    pack_items,
)
from vitgraph.predict.doubt import model_error
from vitgraph.predict.targets import TargetCost
from vitgraph.predict.workload_cost import Traffic, eager_calls, predict_calls
from vitgraph.records.tune_result import MissReason
from vitgraph.tuning.objective import Kept, latency_of

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


def explain_plan(
    specs: Sequence[EncoderItemSpec], plan: BudgetPlan, policy: str, cost: TargetCost | None = None
) -> dict[str, Any]:
    """Which items of one call go into which replay, and what that costs.

    Args:
        cost: Predicted times; None where there is no calibration, and then there are no times.

    Returns:
        `items`, `batches` (each with its replays or the reason of its miss), `counts` (of `GraphCounters`), and
        `predicted` (None without a calibration).

    Raises:
        UsageError: The policy needs a calibration.
    """
    predicted: dict[str, Any] | None = None
    if cost is None:
        batches = pack_items(specs, plan, policy)
        times: list[float | None] = [None] * len(batches)
    else:
        found = cost.predict_call(specs, plan, policy)
        batches, times = found.batches, found.replay_ms
        is_faster = found.graph_ms < found.eager_ms
        predicted = {"graph_ms": found.graph_ms, "eager_ms": found.eager_ms, "is_faster": is_faster, **_error(cost)}
    return {
        "policy": policy,
        "items": [
            {"index": index, "modality": spec.modality, "tokens": spec.output_tokens, "segments": spec.segments}
            for index, spec in enumerate(specs)
        ],
        "batches": [_batch(batch, specs, time) for batch, time in zip(batches, times, strict=True)],
        "counts": count_calls([batches]).as_dict(),
        "predicted": predicted,
    }


def explain_workload(
    calls: Sequence[Sequence[EncoderItemSpec]],
    plan: BudgetPlan,
    policy: str,
    cost: TargetCost | None = None,
    requests: Sequence[int] | None = None,
) -> dict[str, Any]:
    """What packing does with a whole workload.

    Args:
        requests: Requests in each call; None for one each.

    Returns:
        `counts`, `misses` by reason, and `predicted` latencies per request (None without a calibration).

    Raises:
        UsageError: The policy needs a calibration.
    """
    traffic = Traffic([tuple(specs) for specs in calls], requests)
    counters, missed = collect_misses(traffic, plan, policy, cost)
    predicted = None
    if cost is not None:
        graph = traffic.per_request(predict_calls(traffic, cost, plan, policy))
        eager = traffic.per_request(eager_calls(traffic, cost, plan))
        predicted = {
            "graph": latency_of(graph).model_dump(exclude_none=True),
            "eager": latency_of(eager).model_dump(exclude_none=True),
            "slower_than_eager_share": Kept.of(graph, eager).slower_share,
            **_error(cost),
        }
    return {
        "policy": policy,
        "calls": len(calls),
        "counts": counters.as_dict(),
        "misses": [miss.model_dump() for miss in missed],
        "predicted": predicted,
    }


def collect_misses(
    traffic: Traffic, plan: BudgetPlan, policy: str, cost: TargetCost | None = None
) -> tuple[GraphCounters, list[MissReason]]:
    """Counts hits, misses and waste of a workload as the bench does, and describes the misses by reason.

    Returns:
        The counters, and for each reason its items, their token sizes and what the reason means.
    """
    counters = GraphCounters()
    tokens: dict[str, list[int]] = defaultdict(list)
    for specs, count in zip(traffic.distinct, traffic.counts.tolist(), strict=True):
        batches = pack_items(specs, plan, policy, cost)
        for _ in range(count):
            counters.add(batches)
        for batch in batches:
            for item in batch.items:
                if (reason := batch.miss_reason_of(item)) is not None:
                    tokens[reason] += [specs[item].output_tokens] * count
    return counters, [
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


def break_even_tokens(cost: TargetCost, path: str, budget: int, slots: int) -> int | None:
    """Fewest tokens of a single image from which on replaying this graph is no slower than eager; None where never.

    Sizes below it would be faster eager: they lose more to padding than the graph saves in launches.
    """
    sizes = np.unique(np.geomspace(1, budget, _STEPS).round().astype(int))
    specs = [EncoderItemSpec(IMAGE, int(size), int(size), path_output_tokens={path: int(size)}) for size in sizes]
    features = cost.item_features(specs, path)
    axis_key = next(iter(cost.model.replay[path].padded))
    replays = cost.group_ms(path, axis_key, np.array(budget), np.array(slots), features)
    graph = cost.join_ms(replays, np.zeros(()), np.zeros(()))
    eager = cost.model.eager_calls_ms({path: features})
    slower = np.flatnonzero(graph > eager)
    if not len(slower):
        return 1
    return int(sizes[slower[-1] + 1]) if slower[-1] + 1 < len(sizes) else None


def _error(cost: TargetCost) -> dict[str, Any]:
    error = model_error(cost.model)
    return {"error": error.model_dump(), "error_text": str(error)}


def _batch(batch: PackedBatch, specs: Sequence[EncoderItemSpec], replay_ms: float | None) -> dict[str, Any]:
    runs = []
    for path, run in batch.runs.items():
        key = run.key
        runs.append(
            {
                "path": path,
                "tokens": run.tokens,
                "segments": run.segments,
                "token_budget": key.token_budget if key else None,
                "segment_slots": key.segment_slots if key else None,
                "axis_key": list(key.axis_key) if key else None,
                "waste": 1 - run.tokens / key.token_budget if key else None,
                "miss_reason": run.miss_reason,
                "miss_text": REASON_TEXTS.get(run.miss_reason, run.miss_reason) if run.miss_reason else None,
            }
        )
    return {
        "items": list(batch.items),
        "tokens": sum(specs[index].output_tokens for index in batch.items),
        "is_hit": batch.is_hit,
        "runs": runs,
        "replay_ms": replay_ms,
    }
