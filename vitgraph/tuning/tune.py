"""Ties a workload, a profile, an objective and limits to the settings that are predicted to be best, and says why."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from vitgraph.errors import BudgetError, UsageError
from vitgraph.measure.calls import EncoderCall
from vitgraph.models.registry import ModelSource
from vitgraph.planning.accounting import GraphCounters
from vitgraph.planning.budgets import BudgetPlan, CaptureAxis
from vitgraph.planning.graph_tables import FloatArray
from vitgraph.planning.items import VIDEO
from vitgraph.planning.optimal import EXACT_ITEMS
from vitgraph.predict.cost_model import CostModel
from vitgraph.predict.engine_rules import ENGINE, EngineRules, engine_tower
from vitgraph.predict.holdout import ModelError, model_error
from vitgraph.predict.profile import CalibrationProfile
from vitgraph.predict.targets import (
    DOUBT,
    TARGETS,
    VITGRAPH,
    VLLM,
    VLLM_OVERHEAD_SOURCE,
    TargetCost,
    automatic_settings,
    compilation_config,
    make_plan,
    seed_settings,
    target_named,
)
from vitgraph.predict.traffic import Traffic
from vitgraph.predict.workload_cost import eager_calls, oracle_calls, predict_calls
from vitgraph.records.kinds.calibrate import EncoderFacts
from vitgraph.tuning.misses import break_even_tokens, collect_misses
from vitgraph.tuning.objective import Limits, Objective
from vitgraph.tuning.search import Search
from vitgraph.tuning.search_result import Evaluation, SearchResult

USE_GRAPHS, NO_GRAPHS, UNDECIDED = "use_graphs", "no_graphs", "undecided"
RUNNERS_UP = 5
SLOWER_THRESHOLD = 0.02
"""A request counts as slower than eager from this share on, as in the bench."""


@dataclass(slots=True)
class Tuned:
    """What was found for one target.

    Attributes:
        cost: Predicted times of the target.
        result: The search.
        baselines: Evaluations of the automatic list and of the documented nine budgets.
        plans: Plan and policy by name (`tuned`, `automatic`, `seed_nine`), for measuring them.
    """

    cost: TargetCost
    result: SearchResult
    baselines: dict[str, Evaluation]
    plans: dict[str, tuple[BudgetPlan, str]]


@dataclass(slots=True)
class TuneResult:
    """The answer of `tune-budgets`; `as_dict` is its JSON form.

    Attributes:
        data: Everything, as JSON has it; `data["measured"]` is None until `verify_tuning` fills it.
        tuned: What was found for the target, for measuring.
        traffic: The workload as arrays.
    """

    data: dict[str, Any]
    tuned: Tuned
    traffic: Traffic = field(repr=False)

    def as_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return self.data


def tune_budgets(
    calls: Sequence[EncoderCall],
    source: ModelSource,
    profile: CalibrationProfile,
    *,
    max_call_tokens: int,
    objective: Objective | None = None,
    limits: Limits | None = None,
    target: str = VITGRAPH,
    workload: Mapping[str, Any] | None = None,
) -> TuneResult:
    """Finds the best settings for a workload; needs neither a GPU nor torch.

    Args:
        calls: The encoder calls of the workload.
        source: The model.
        profile: Measured with that model on the device in question.
        max_call_tokens: Output tokens that a call may hold.
        objective: What to minimise; the mean by default.
        limits: What to stay within.
        target: `vitgraph` or `vllm`.
        workload: Facts of the workload, for the record.

    Raises:
        UsageError: The profile is of another model, or nothing is within the limits.
    """
    objective, limits = objective or Objective(), limits or Limits()
    notes = _check_match(profile, source)
    model = CostModel(profile)
    traffic = Traffic([call.specs for call in calls], [len(call.requests) for call in calls])
    facts = replace(profile.encoder, axes=_needed_axes(profile.encoder, traffic))
    if traffic.max_tokens > profile.max_tokens:
        notes.append(
            f"calls have up to {traffic.max_tokens} tokens, the profile measured up to {profile.max_tokens}; "
            "beyond, predictions are extrapolated"
        )
    rules = EngineRules(engine_tower(source), traffic.has_videos)
    searched = {
        name: _search(
            TargetCost(model, TARGETS[name], DOUBT),
            traffic,
            facts,
            objective,
            limits,
            max_call_tokens,
            rules if name == VLLM else None,
        )
        for name in dict.fromkeys((target_named(target).name, VLLM))
    }
    notes += _engine_notes(rules)
    error = model_error(model)
    data = _describe(searched, target, traffic, facts, error, source)
    data |= {
        "objective": str(objective),
        "limits": limits.as_dict(),
        "model": source.name,
        "profile": {
            "label": profile.label,
            "created_at": profile.created_at,
            "is_synthetic": profile.is_synthetic,
            "is_cpu": profile.is_cpu,
            "environment": profile.environment,
            "model": profile.model,
        },
        "workload": dict(workload or {}),
        "notes": notes,
    }
    return TuneResult(data, searched[target], traffic)


def _check_match(profile: CalibrationProfile, source: ModelSource) -> list[str]:
    row = profile.model.get("row")
    if row is not None and row != source.row.name:
        raise UsageError(
            f"the profile was measured with {profile.model.get('name')} ({row}), but the model is {source.name} "
            f"({source.row.name}); calibrate that model, or tune this one"
        )
    notes = list(profile.notes)
    if profile.model.get("name") not in (None, source.name):
        notes.append(f"the profile was measured with {profile.model['name']}, the model asked for is {source.name}")
    if profile.is_cpu:
        notes.append("the profile was measured on a CPU, where a replay saves no launches: it says nothing about a GPU")
    if profile.is_synthetic:
        notes.append("the profile is synthetic: nothing in it was measured")
    return notes


def _engine_notes(rules: EngineRules) -> list[str]:
    """Which of the engine's rules kept the search from lists that it would have tried."""
    if rules.family is None:
        return [
            f"{ENGINE} has no encoder graphs for {rules.tower.architecture} whose rules were read: what is printed for "
            "it keeps the manager's own rules only"
        ]
    texts = {limit.name: limit.text for limit in rules.family.limits}
    found = []
    for name in rules.ruled_out:
        why = f": {texts[name]}" if name in texts else ""
        found.append(f"{ENGINE} ({rules.family.file}) rules out some lists by its rule {name}{why}")
    return found


def _needed_axes(facts: EncoderFacts, traffic: Traffic) -> tuple[CaptureAxis, ...]:
    """The axes without the keys above what any batch of this workload can need."""
    kept = []
    for axis in facts.axes:
        most = axis.covering_key(spec.axis_sizes[axis.name] for specs in traffic.distinct for spec in specs)
        kept.append(axis if most is None else CaptureAxis(axis.name, axis.keys[: axis.keys.index(most) + 1]))
    return tuple(kept)


def _search(
    cost: TargetCost,
    traffic: Traffic,
    facts: EncoderFacts,
    objective: Objective,
    limits: Limits,
    max_call_tokens: int,
    rules: EngineRules | None,
) -> Tuned:
    has_videos = traffic.has_videos
    baselines = {
        "automatic": automatic_settings(cost.target, facts, max_call_tokens, has_videos),
        "seed_nine": seed_settings(cost.target, facts, has_videos),
    }
    search = Search(traffic, cost, facts, objective, limits, max_call_tokens, rules=rules)
    result = search.run(baselines.values())
    automatic = search.predict(baselines["automatic"])
    allowed = automatic.memory_bytes if automatic is not None else float("inf")
    if limits.max_memory_bytes is None and result.best is not None and result.best.memory_bytes > allowed:
        # Graphs must not take the memory that a server keeps for its requests, unless somebody says how much they may.
        limits = replace(limits, max_memory_bytes=allowed)
        search = Search(traffic, cost, facts, objective, limits, max_call_tokens, rules=rules)
        result = search.run(baselines.values())
    if result.best is None:
        raise UsageError(f"no settings stay within the limits {limits.as_dict()}; raise one of them")
    evaluated = {name: search.predict(settings) for name, settings in baselines.items()}
    plans: dict[str, tuple[BudgetPlan, str]] = {}
    for name, settings in {"tuned": result.best.settings, **baselines}.items():
        try:
            plans[name] = make_plan(cost.target, facts, settings), settings.packing
        except BudgetError:
            continue
    return Tuned(cost, result, {name: found for name, found in evaluated.items() if found is not None}, plans)


# -- the record --------------------------------------------------------------------------------------------------------


def _describe(
    searched: Mapping[str, Tuned],
    target: str,
    traffic: Traffic,
    facts: EncoderFacts,
    error: ModelError,
    source: ModelSource,
) -> dict[str, Any]:
    tuned, vllm = searched[target], searched[VLLM]
    best = tuned.result.best
    assert best is not None and vllm.result.best is not None
    plan, policy = tuned.plans["tuned"]
    eager = traffic.per_request(eager_calls(traffic, tuned.cost, plan))
    oracle = traffic.per_request(oracle_calls(traffic, tuned.cost, plan))
    counters, misses = collect_misses(traffic, tuned.cost, plan, policy)
    paste = vllm.result.best.settings
    verdicts = {name: verdict(found.result.best, error) for name, found in searched.items()}
    config = compilation_config(paste, takes_videos=VIDEO in facts.modalities)
    used = config if verdicts[VLLM] != NO_GRAPHS else '{"cudagraph_mm_encoder": false}'
    return {
        "kind": "tune",
        "schema_version": 1,
        "target": target,
        "verdict": verdicts[target],
        "verdict_text": verdict_text(verdicts[target], best, error),
        "best": best.settings.as_dict(),
        "runners_up": [_evaluation(found) for found in _runners_up(tuned.result)],
        "predicted": {
            **_evaluation(best),
            **_against_eager(traffic, tuned, "tuned", eager, oracle),
            "error": error.as_dict(),
            "error_text": str(error),
        },
        "measured": None,
        "baselines": _baselines(traffic, tuned, eager, oracle),
        "by_budget": _by_budget(counters, tuned.cost),
        "hits": counters.hits,
        "items": counters.items,
        "waste": counters.waste,
        "misses": misses,
        "pareto": [_evaluation(found) for found in pareto_fronts(tuned.result)],
        "search": {
            "evaluations": tuned.result.evaluations,
            "is_exact": tuned.result.is_exact,
            "is_exhaustive": tuned.result.is_exhaustive,
        },
        "error": error.as_dict(),
        "vllm": {
            "verdict": verdicts[VLLM],
            "best": paste.as_dict(),
            "predicted": _evaluation(vllm.result.best),
            "baselines": {name: _evaluation(found) for name, found in vllm.baselines.items()},
            "compilation_config": config,
            "assumed_overheads": VLLM_OVERHEAD_SOURCE,
        },
        "compilation_config": used,
        "serve_line": serve_line(source, used, tuned.cost.model.profile, has_videos=traffic.has_videos),
        "what_vllm_cannot_express": _beyond_vllm(searched) if target != VLLM else None,
    }


def _baselines(traffic: Traffic, tuned: Tuned, eager: FloatArray, oracle: FloatArray) -> dict[str, Any]:
    found: dict[str, Any] = {
        name: {**_evaluation(evaluation), **_against_eager(traffic, tuned, name, eager, oracle)}
        for name, evaluation in tuned.baselines.items()
    }
    return {**found, "eager": _latencies(eager), "oracle": _latencies(oracle)}


def verdict(best: Evaluation | None, error: ModelError) -> str:
    """`use_graphs`, `no_graphs`, or `undecided` where the gain is within the model's own error."""
    if best is None or best.score >= 1.0:
        return NO_GRAPHS
    margin = error.both.median_pct
    return UNDECIDED if margin is None or (1.0 - best.score) * 100.0 < margin else USE_GRAPHS


def verdict_text(name: str, best: Evaluation, error: ModelError) -> str:
    """The verdict in a sentence."""
    gain = (1.0 - best.score) * 100.0
    if name == NO_GRAPHS:
        return f"do not use graphs here: the best settings found are predicted {-gain:.1f}% slower than eager"
    if name == UNDECIDED:
        margin = "unknown" if error.both.median_pct is None else f"{error.both.median_pct:.1f}%"
        return f"predicted {gain:.1f}% faster than eager, which is within the model's error ({margin}): measure it"
    return f"use graphs: predicted {gain:.1f}% faster than eager"


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


def _against_eager(
    traffic: Traffic, tuned: Tuned, name: str, eager: FloatArray, oracle: FloatArray
) -> dict[str, float | None]:
    """Latencies of a plan, what it gains over eager, and how many requests it makes slower."""
    plan, policy = tuned.plans[name]
    automatic, automatic_policy = tuned.plans["automatic"]
    times = traffic.per_request(predict_calls(traffic, tuned.cost, plan, policy, exact_items=EXACT_ITEMS))
    base = traffic.per_request(predict_calls(traffic, tuned.cost, automatic, automatic_policy))
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


def _beyond_vllm(searched: Mapping[str, Tuned]) -> dict[str, Any]:
    """What the best settings need that vLLM's manager has not, and what its own best loses to them."""
    own, theirs = searched[VITGRAPH].result.best, searched[VLLM].result.best
    assert own is not None and theirs is not None
    points = ["buffers that all budgets share", "one eager run for all misses of a call"]
    if own.settings.packing not in TARGETS[VLLM].policies:
        points.insert(0, f"packing policy {own.settings.packing} (it packs greedy-defer)")
    if max(own.settings.max_items, own.settings.max_frames) > 1:
        points.append("several segment-slot counts of one budget (it has one)")
    return {"points": points, "loss_pct": (theirs.mean_ms / own.mean_ms - 1.0) * 100.0, "mean_ms": theirs.mean_ms}


def serve_line(source: ModelSource, config: str, profile: CalibrationProfile, *, has_videos: bool) -> str:
    """A whole `vllm serve` command with the settings.

    A list that was chosen for images alone has no room for a video's frames, so that the line turns videos off.
    """
    parts = ["vllm", "serve", source.weights or source.name, "--compilation-config", config]
    backend = profile.model.get("attn_backend")
    if VIDEO in profile.encoder.modalities and not has_videos:
        parts += ["--limit-mm-per-prompt", '{"video": 0}']
    if backend and not profile.is_cpu:
        parts += ["--mm-encoder-attn-backend", str(backend)]
    return shlex.join(parts)
