"""What was found for a workload, in the shape of a tuning record: settings, predictions, misses, baselines."""

from __future__ import annotations

from typing import Any

import numpy as np

from vitgraph.planning.accounting import GraphCounters
from vitgraph.planning.graph_tables import FloatArray
from vitgraph.predict.targets import TARGETS, VITGRAPH, VLLM, VLLM_OVERHEAD_SOURCE, Settings, TargetCost
from vitgraph.tuning.held_out import SEEN
from vitgraph.tuning.misses import break_even_tokens, collect_misses
from vitgraph.tuning.search_result import Evaluation, SearchResult
from vitgraph.tuning.tune import AUTOMATIC, Searched, Tuned, TuneTask
from vitgraph.tuning.verdict import EAGER, SLOWER_THRESHOLD, TUNED

RUNNERS_UP = 5


def describe(task: TuneTask, found: Searched, target: str) -> dict[str, Any]:
    """What was found for one target."""
    tuned = found.targets[target]
    plan, policy = tuned.plans[TUNED]
    counters, misses = collect_misses(found.reported, tuned.cost, plan, policy)
    return {
        "best": tuned.best.settings.as_dict(),
        "unseen": _unseen(task, found, tuned),
        "runners_up": [_evaluation(entry) for entry in _runners_up(tuned.result)],
        "predicted": {**_evaluation(tuned.best), **_against_eager(tuned, TUNED), **_errors(task)},
        "baselines": _baselines(tuned),
        "by_budget": _by_budget(counters, tuned.cost),
        "hits": counters.hits,
        "items": counters.items,
        "waste": counters.waste,
        "misses": misses,
        "pareto": [_evaluation(entry) for entry in pareto_fronts(tuned.result)],
        "search": {
            "evaluations": tuned.result.evaluations,
            "is_exact": tuned.result.is_exact,
            "is_exhaustive": tuned.result.is_exhaustive,
        },
        "error": task.error.as_dict(),
        "what_vllm_cannot_express": _beyond_vllm(found) if target != VLLM else None,
    }


def _errors(task: TuneTask) -> dict[str, Any]:
    return {"error": task.error.as_dict(), "error_text": str(task.error)}


def _unseen(task: TuneTask, found: Searched, tuned: Tuned) -> dict[str, Any]:
    """What the settings lose on calls that the search has not seen."""
    split = found.split
    seen, unseen = task.outcome(tuned.seen), tuned.outcome
    lost = (
        "" if split.method == SEEN else f"; the gain is {seen.improvement_pct:.1f}% on the calls that were searched on"
    )
    return {
        "method": split.method,
        "share": split.share,
        "seed": split.seed,
        "calls": len(found.reported_calls),
        "improvement_seen_pct": seen.improvement_pct,
        "improvement_pct": unseen.improvement_pct,
        "text": f"{split}: {unseen.improvement_pct:.1f}% there{lost}",
    }


def describe_vllm(tuned: Tuned, settings: Settings, verdict: str, config: str) -> dict[str, Any]:
    """What vLLM can express of it."""
    return {
        "verdict": verdict,
        "best": settings.as_dict(),
        "predicted": _evaluation(tuned.best),
        "baselines": {name: _evaluation(found) for name, found in tuned.baselines.items()},
        "compilation_config": config,
        "assumed_overheads": VLLM_OVERHEAD_SOURCE,
    }


def _baselines(tuned: Tuned) -> dict[str, Any]:
    found: dict[str, Any] = {
        name: {**_evaluation(evaluation), **_against_eager(tuned, name)}
        for name, evaluation in tuned.baselines.items()
        if name in tuned.times
    }
    return {**found, EAGER: _latencies(tuned.times[EAGER]), "oracle": _latencies(tuned.times["oracle"])}


def _evaluation(found: Evaluation) -> dict[str, Any]:
    return {
        **found.settings.as_dict(),
        "mean_ms": found.mean_ms,
        "p50_ms": found.p50_ms,
        "p99_ms": found.p99_ms,
        "score": found.score,
        "graphs": found.graphs,
        "memory_bytes": found.memory_bytes,
        "capture_s": found.capture_s,
        "is_within_limits": found.is_allowed,
    }


def _latencies(times: FloatArray) -> dict[str, float]:
    p50, p99 = np.percentile(times, (50, 99))
    return {"n": len(times), "mean_ms": float(times.mean()), "p50_ms": float(p50), "p99_ms": float(p99)}


def _against_eager(tuned: Tuned, name: str) -> dict[str, float | None]:
    """Latencies of a plan on the calls reported, what it gains over eager, and how many requests it makes slower."""
    times, eager, oracle = tuned.times[name], tuned.times[EAGER], tuned.times["oracle"]
    base = tuned.times.get(AUTOMATIC, eager)
    return {
        **_latencies(times),
        "gain_over_eager_pct": float(1 - times.sum() / eager.sum()) * 100,
        "slower_than_eager_share": float((times > eager * (1 + SLOWER_THRESHOLD)).mean()),
        "closed_to_oracle_mean": closed_share(float(base.mean()), float(times.mean()), float(oracle.mean())),
        "closed_to_oracle_median": closed_share(*(float(np.median(values)) for values in (base, times, oracle))),
    }


def closed_share(automatic: float, tuned: float, oracle: float) -> float | None:
    """How much of the way from the automatic list to the oracle is gone; None where there is no way to go."""
    return (automatic - tuned) / (automatic - oracle) if automatic > oracle else None


def _runners_up(result: SearchResult) -> list[Evaluation]:
    """The next best, one for each policy and number of graphs."""
    seen: set[tuple[str, int, int]] = set()
    found = []
    for evaluation in result.evaluated:
        settings = evaluation.settings
        kind = settings.packing, settings.max_items, evaluation.graphs
        if kind not in seen and evaluation is not result.best:
            seen.add(kind)
            found.append(evaluation)
        if len(found) == RUNNERS_UP:
            break
    return found


def pareto_fronts(result: SearchResult) -> list[Evaluation]:
    """Settings of which none has both fewer graphs (or both less memory) and a better score, by graphs."""
    found: dict[int, Evaluation] = {}
    for sizes in ([e.graphs for e in result.evaluated], [e.memory_bytes for e in result.evaluated]):
        least = float("inf")
        for place in np.lexsort(([e.score for e in result.evaluated], sizes)):
            if result.evaluated[place].score < least:
                least = result.evaluated[place].score
                found[int(place)] = result.evaluated[place]
    return sorted(found.values(), key=lambda evaluation: (evaluation.graphs, evaluation.score))


def _by_budget(counters: GraphCounters, cost: TargetCost) -> list[dict[str, Any]]:
    rows = counters.as_dict()["per_budget"]
    for row in rows:
        row["break_even_tokens"] = break_even_tokens(cost, row["path"], row["token_budget"], row["segment_slots"])
    return rows


def _beyond_vllm(found: Searched) -> dict[str, Any]:
    """What the best settings need that vLLM's manager has not, and what its own best loses to them."""
    own, theirs = found.targets[VITGRAPH], found.targets[VLLM]
    points = ["buffers that all budgets share", "one eager run for all misses of a call"]
    if own.best.settings.packing not in TARGETS[VLLM].policies:
        points.insert(0, f"packing policy {own.best.settings.packing} (it packs greedy-defer)")
    if max(own.best.settings.max_items, own.best.settings.max_frames) > 1:
        points.append("several segment-slot counts of one budget (it has one)")
    mean_ms, own_ms = float(theirs.times[TUNED].mean()), float(own.times[TUNED].mean())
    return {"points": points, "loss_pct": (mean_ms / own_ms - 1.0) * 100.0, "mean_ms": mean_ms}
