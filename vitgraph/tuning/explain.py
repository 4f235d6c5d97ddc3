"""What packing does with a batch or a workload, in words and numbers: the answer of `plan`. Needs no device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vitgraph.errors import UsageError
from vitgraph.planning.accounting import count_calls
from vitgraph.planning.budgets import BudgetPlan
from vitgraph.planning.items import EncoderItemSpec
from vitgraph.planning.packing import PackedBatch, pack_items
from vitgraph.predict.holdout import model_error
from vitgraph.predict.targets import OPTIMAL, TargetCost
from vitgraph.predict.traffic import Traffic
from vitgraph.predict.workload_cost import eager_calls, predict_calls
from vitgraph.tuning.misses import REASON_TEXTS, collect_misses
from vitgraph.tuning.objective import Kept


def explain_plan(
    specs: Sequence[EncoderItemSpec], plan: BudgetPlan, policy: str, cost: TargetCost | None = None
) -> dict[str, Any]:
    """Which items of one call go into which replay, and what that costs.

    Args:
        specs: The call's items, in input order.
        plan: Graphs and limits.
        policy: Packing policy.
        cost: Predicted times; None where there is no calibration, and then there are no times.

    Returns:
        `items`, `batches` (each with its replays or the reason of its miss), `counts` (of `GraphCounters`), and
        `predicted` (None without a calibration).

    Raises:
        UsageError: The policy needs a calibration.
    """
    prediction = cost.predict_call(specs, plan, policy) if cost is not None else None
    batches = prediction.batches if prediction is not None else _pack(specs, plan, policy)
    times = prediction.replay_ms if prediction is not None else [None] * len(batches)
    predicted = None
    if prediction is not None and cost is not None:
        error = model_error(cost.model)
        predicted = {
            "graph_ms": prediction.graph_ms,
            "eager_ms": prediction.eager_ms,
            "is_faster": prediction.graph_ms < prediction.eager_ms,
            "error": error.model_dump(),
            "error_text": str(error),
        }
    return {
        "policy": policy,
        "items": [_item(index, spec) for index, spec in enumerate(specs)],
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
        calls: Items of each call.
        plan: Graphs and limits.
        policy: Packing policy.
        cost: Predicted times; None where there is no calibration.
        requests: Requests in each call; None for one each.

    Returns:
        `counts`, `misses` by reason, and `predicted` latencies per request (None without a calibration).

    Raises:
        UsageError: The policy needs a calibration.
    """
    if cost is None:
        counters = count_calls([_pack(specs, plan, policy) for specs in calls])
        misses = [
            {"reason": reason, "text": REASON_TEXTS.get(reason, reason), "items": count}
            for reason, count in counters.misses_by_reason.most_common()
        ]
        return {
            "policy": policy,
            "calls": len(calls),
            "counts": counters.as_dict(),
            "misses": misses,
            "predicted": None,
        }
    traffic = Traffic([tuple(specs) for specs in calls], requests)
    counters, missed = collect_misses(traffic, cost, plan, policy)
    graph = traffic.per_request(predict_calls(traffic, cost, plan, policy))
    eager = traffic.per_request(eager_calls(traffic, cost, plan))
    error = model_error(cost.model)
    return {
        "policy": policy,
        "calls": len(calls),
        "counts": counters.as_dict(),
        "misses": [miss.model_dump() for miss in missed],
        "predicted": {
            "graph": _summary(graph),
            "eager": _summary(eager),
            "slower_than_eager_share": Kept.of(graph, eager).slower_share,
            "error": error.model_dump(),
            "error_text": str(error),
        },
    }


def _pack(specs: Sequence[EncoderItemSpec], plan: BudgetPlan, policy: str) -> list[PackedBatch]:
    if policy == OPTIMAL:
        raise UsageError("packing `optimal` weighs predicted times; give a calibration, or use another policy")
    return pack_items(specs, plan, policy)


def _item(index: int, spec: EncoderItemSpec) -> dict[str, Any]:
    return {"index": index, "modality": spec.modality, "tokens": spec.output_tokens, "segments": spec.segments}


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


def _summary(times: np.ndarray) -> dict[str, float]:
    p50, p99 = np.percentile(times, (50, 99))
    return {"mean_ms": float(times.mean()), "p50_ms": float(p50), "p99_ms": float(p99)}
