"""What was found for a workload, as sections of a tuning record: settings, predictions, misses, baselines."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from typing import Any

import numpy as np

from vitgraph.planning.budgets import VIDEO, BudgetSettings
from vitgraph.predict.targets import TARGETS, VITGRAPH, VLLM, VLLM_OVERHEAD_SOURCE
from vitgraph.records.graph_facts import GraphUse
from vitgraph.records.tune_result import (
    AgainstEager,
    Baselines,
    BeyondVllm,
    Evaluation,
    GraphSettings,
    TuneVerdict,
    Unseen,
    VllmAnswer,
)
from vitgraph.tuning.explain import break_even_tokens, collect_misses
from vitgraph.tuning.objective import AUTOMATIC, EAGER, ORACLE, TUNED, USE_GRAPHS, Kept, ScoredSettings, latency_of
from vitgraph.tuning.search import SearchResult
from vitgraph.tuning.tune import SEEN, Searched, Tuned, TuneTask

RUNNERS_UP = 5


def describe(task: TuneTask, found: Searched, target: str) -> dict[str, Any]:
    """What was found for one target, by field of the result."""
    tuned = found.targets[target]
    plan, policy = tuned.plans[TUNED]
    counters, misses = collect_misses(found.reported, plan, policy, tuned.cost)
    return {
        "best": _evaluation(tuned.best, tuned, TUNED),
        "unseen": _unseen(task, found, tuned),
        "runners_up": tuple(map(_evaluation, _runners_up(tuned.result))),
        "baselines": _baselines(tuned),
        "by_budget": tuple(
            GraphUse(
                **row,
                break_even_tokens=break_even_tokens(tuned.cost, row["path"], row["token_budget"], row["segment_slots"]),
            )
            for row in counters.as_dict()["per_budget"]
        ),
        "hits": counters.hits,
        "items": counters.items,
        "waste": counters.waste,
        "misses": tuple(misses),
        "pareto": tuple(map(_evaluation, pareto_fronts(tuned.result))),
        "search": {
            "evaluations": tuned.result.evaluations,
            "is_exact": tuned.result.is_exact,
            "is_exhaustive": tuned.result.is_exhaustive,
        },
        "error": task.error,
        "error_text": str(task.error),
        "beyond_vllm": _beyond_vllm(found) if target != VLLM else None,
    }


def _unseen(task: TuneTask, found: Searched, tuned: Tuned) -> Unseen:
    """What the settings lose on calls that the search has not seen."""
    split = found.split
    seen, unseen = task.outcome(tuned.seen), tuned.outcome
    lost = (
        "" if split.method == SEEN else f"; the gain is {seen.improvement_pct:.1f}% on the calls that were searched on"
    )
    return Unseen(
        method=split.method,
        share=split.share,
        seed=split.seed,
        calls=len(found.reported_calls),
        improvement_seen_pct=seen.improvement_pct,
        improvement_pct=unseen.improvement_pct,
        text=f"{split}: {unseen.improvement_pct:.1f}% there{lost}",
    )


def describe_vllm(tuned: Tuned, verdict: TuneVerdict, config: str, attn_backend: str | None) -> VllmAnswer:
    """What vLLM can express of it."""
    return VllmAnswer(
        verdict=verdict,
        best=_evaluation(tuned.best),
        baselines={name: _evaluation(found) for name, found in tuned.baselines.items()},
        compilation_config=config,
        assumed_overheads=VLLM_OVERHEAD_SOURCE,
        attn_backend=attn_backend,
    )


def _baselines(tuned: Tuned) -> Baselines:
    found = {name: _evaluation(scored, tuned, name) for name, scored in tuned.baselines.items() if name in tuned.times}
    bounds = {name: latency_of(tuned.times[name], len(tuned.times[name])) for name in (EAGER, ORACLE)}
    return Baselines.model_validate(bounds | found)


def _evaluation(found: ScoredSettings, tuned: Tuned | None = None, name: str = "") -> Evaluation:
    """The section of some settings; of a plan called `name` also what it does on the calls that are reported on."""
    return Evaluation(
        settings=GraphSettings(**found.settings.as_dict()),
        latency=found.latency,
        score=found.score,
        graphs=found.graphs,
        memory_bytes=found.memory_bytes,
        capture_s=found.capture_s,
        is_within_limits=found.is_allowed,
        against_eager=None if tuned is None else _against_eager(tuned, name),
    )


def _against_eager(tuned: Tuned, name: str) -> AgainstEager:
    times, eager, oracle = tuned.times[name], tuned.times[EAGER], tuned.times[ORACLE]
    base = tuned.times.get(AUTOMATIC, eager)
    return AgainstEager(
        latency=latency_of(times, len(times)),
        improvement_pct=float(1 - times.sum() / eager.sum()) * 100,
        slower_share=Kept.of(times, eager).slower_share,
        closed_to_oracle_mean=closed_share(float(base.mean()), float(times.mean()), float(oracle.mean())),
        closed_to_oracle_median=closed_share(*(float(np.median(values)) for values in (base, times, oracle))),
    )


def closed_share(automatic: float, tuned: float, oracle: float) -> float | None:
    """How much of the way from the automatic list to the oracle is gone; None where there is no way to go."""
    return (automatic - tuned) / (automatic - oracle) if automatic > oracle else None


def _runners_up(result: SearchResult) -> list[ScoredSettings]:
    """The next best, one for each policy and number of graphs."""
    found: dict[tuple[str, int, int], ScoredSettings] = {}
    for evaluation in result.evaluated:
        if evaluation is not result.best:
            settings = evaluation.settings
            found.setdefault((settings.packing, settings.max_items, evaluation.graphs), evaluation)
    return list(found.values())[:RUNNERS_UP]


def pareto_fronts(result: SearchResult) -> list[ScoredSettings]:
    """Settings of which none has both fewer graphs (or both less memory) and a better score, by graphs."""
    found: dict[int, ScoredSettings] = {}
    for sizes in ([e.graphs for e in result.evaluated], [e.memory_bytes for e in result.evaluated]):
        least = float("inf")
        for place in np.lexsort(([e.score for e in result.evaluated], sizes)):
            if result.evaluated[place].score < least:
                least = result.evaluated[place].score
                found[int(place)] = result.evaluated[place]
    return sorted(found.values(), key=lambda evaluation: (evaluation.graphs, evaluation.score))


def _beyond_vllm(found: Searched) -> BeyondVllm:
    """What the best settings need that vLLM's manager has not, and what its own best loses to them."""
    own, theirs = found.targets[VITGRAPH], found.targets[VLLM]
    points = ["buffers that all budgets share", "one eager run for all misses of a call"]
    if own.best.settings.packing not in TARGETS[VLLM].policies:
        points.insert(0, f"packing policy {own.best.settings.packing} (it packs greedy-defer)")
    if max(own.best.settings.max_items, own.best.settings.max_frames) > 1:
        points.append("several segment-slot counts of one budget (it has one)")
    mean_ms, own_ms = float(theirs.times[TUNED].mean()), float(own.times[TUNED].mean())
    return BeyondVllm(points=tuple(points), loss_pct=(mean_ms / own_ms - 1.0) * 100.0, mean_ms=mean_ms)


@dataclass(frozen=True, slots=True)
class Paste:
    """What to paste into vLLM.

    Attributes:
        settings: The list for vLLM.
        attn_backend: The engine's attention backend; None where nothing is known.
    """

    task: TuneTask
    settings: BudgetSettings
    has_videos: bool
    attn_backend: str | None

    @property
    def _takes_videos(self) -> bool:
        return VIDEO in self.task.profile.encoder.modalities

    @property
    def config(self) -> str:
        """The JSON of `--compilation-config`."""
        config: dict[str, Any] = {
            "cudagraph_mm_encoder": True,
            "encoder_cudagraph_token_budgets": list(self.settings.token_budgets),
            "encoder_cudagraph_max_vision_items_per_batch": self.settings.max_items,
        }
        if self.task.profile.is_compiled:
            # vLLM leaves its encoder uncompiled unless told.
            config["compile_mm_encoder"] = True
        if self._takes_videos:
            # Left unset, vLLM reserves the longest video's frames for every item.
            config["encoder_cudagraph_max_frames_per_batch"] = self.settings.max_frames
        return json.dumps(config)

    def where(self, verdict: TuneVerdict) -> dict[str, Any]:
        """The fields of a result: without `use_graphs` there is nothing to paste, graphs are off by default."""
        if verdict != USE_GRAPHS:
            return {"compilation_config": None, "serve_line": None}
        return {"compilation_config": self.config, "serve_line": self.serve_line()}

    def serve_line(self) -> str:
        """A whole `vllm serve` command with the settings.

        A list that was chosen for images alone has no room for a video's frames, so that its line turns videos off.
        """
        source = self.task.source
        parts = ["vllm", "serve", source.weights or source.name, "--compilation-config", self.config]
        if self._takes_videos and not self.has_videos:
            parts += ["--limit-mm-per-prompt", json.dumps({VIDEO: 0})]
        if self.attn_backend is not None:
            parts += ["--mm-encoder-attn-backend", self.attn_backend]
        return shlex.join(parts)
