"""What was found for a workload, and what measuring it came to, as sections of a tuning record."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from vitgraph.planning.budgets import VIDEO, BudgetSettings, EncoderItemSpec
from vitgraph.predict.doubt import summarize_errors
from vitgraph.predict.targets import TARGETS, VITGRAPH, VLLM, VLLM_OVERHEAD_SOURCE
from vitgraph.records.sample_table import PairedTimes, Samples
from vitgraph.records.series import GraphUse
from vitgraph.records.stats import METRICS, FloatArray, Judge, noise_of, summarize
from vitgraph.records.tune_result import (
    AgainstEager,
    Baselines,
    BeyondVllm,
    Closed,
    Evaluation,
    GraphSettings,
    Measured,
    Strategy,
    TuneVerdict,
    Unseen,
    VllmAnswer,
)
from vitgraph.tuning.explain import break_even_tokens, collect_misses
from vitgraph.tuning.objective import AUTOMATIC, EAGER, ORACLE, TUNED, USE_GRAPHS, Kept, ScoredSettings, latency_of
from vitgraph.tuning.search import SearchResult
from vitgraph.tuning.tune import SEEN, Searched, Tuned, TuneTask

if TYPE_CHECKING:
    from vitgraph.tuning.judge import Verification

RUNNERS_UP = 5

SERVED = ("revision", "dtype", "max_model_len", "max_num_batched_tokens", "mm_processor_kwargs")
"""Options that decide what the encoder of a server is given, under its own names; the settings are for these."""


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
        has_videos: Videos may come.
        attn_backend: The engine's attention backend; None where nothing is known.
        asked: Options of the server's own that were asked for, by key: the settings are for what they make of traffic.
    """

    task: TuneTask
    settings: BudgetSettings
    has_videos: bool
    attn_backend: str | None
    asked: Mapping[str, Any]

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
        if self._takes_videos and (not self.has_videos or self.task.video_limit is not None):
            limit = self.task.video_limit if self.has_videos else 0
            parts += ["--limit-mm-per-prompt", json.dumps({VIDEO: limit})]
        for key in SERVED:
            if key in self.asked:
                value = self.asked[key]
                parts += [f"--{key.replace('_', '-')}", value if isinstance(value, str) else json.dumps(value)]
        if self.attn_backend is not None:
            parts += ["--mm-encoder-attn-backend", self.attn_backend]
        return shlex.join(parts)


EXACT, EXACT_CALL = "exact_graph", "exact_call"
"""A graph of exactly the call's size: replayed alone, and as a whole call through the manager."""

RESAMPLES = 1000


def measured_answer(run: Verification) -> Measured:
    """What is known by now of a verification; calls count that were measured in every strategy."""
    from vitgraph.measure.environment import validity_problems

    samples = Samples.of(run.samples)
    paired = samples.paired([EAGER, *run.managers])
    times, requests = paired.times, paired.requests
    exact = _beside(samples, EXACT, paired)
    # Where the exact graph did not fit the memory, eager is all there is.
    times[ORACLE] = np.fmin(times[EAGER], exact)
    noise, request_noise = noise_of(samples, [EAGER], 0)
    problems = validity_problems(run.experiment.gpu_states)
    if run.is_wrong:
        problems.append(f"replay and eager differ by {run.max_rel_l2:.3g} (relative L2), more than both round")

    judge = Judge(paired, bool(problems))
    by_index = {call.index: call for call in run.calls}
    specs = [by_index[int(index)].specs for index in paired.calls]

    def predicted(name: str, predict: Callable[[Sequence[EncoderItemSpec]], float]) -> dict[str, Any]:
        expected = [predict(items) for items in specs]
        return {
            "predicted_mean_ms": float(np.mean(expected / requests)) if specs else None,
            "prediction_error": summarize_errors(expected, list(times[name] * requests)),
        }

    more: dict[str, dict[str, Any]] = {EAGER: predicted(EAGER, run.cost.model.eager_ms), ORACLE: {}}
    for name, manager in run.managers.items():
        more[name] = {
            "against_eager": judge.pair(EAGER, name, noise, METRICS, request_noise),
            "graphs": len(manager.plan.graph_keys()),
            "graphs_captured": len(manager.graphs),
            "dropped": len(manager.dropped),
            "memory_bytes": manager.pool_bytes + manager.buffer_bytes,
            "capture_s": sum(graph.capture_ms for graph in manager.graphs.values()) / 1e3,
            **predicted(name, partial(run.graph_ms, manager)),
        }
    added = _beside(samples, EXACT_CALL, paired) - exact
    return Measured(
        mode="cuda" if run.exact.is_cuda else "cpu-replay",
        manager="vitgraph's" if run.cost.target.name == VITGRAPH else "vitgraph's; it stands in for the target's",
        calls=len(requests),
        calls_left_out=len(run.calls) - len(requests),
        calls_of_workload=len(run.workload),
        choice="small and large calls in the workload's shares, by steps of the golden ratio over their ranks",
        is_interrupted=run.experiment.is_interrupted,
        max_rel_l2=run.max_rel_l2,
        request_noise_pct=request_noise,
        strategies={name: Strategy(latency=summarize(times[name], requests), **facts) for name, facts in more.items()},
        closed=_closed(times, run.seed),
        # What the manager adds to a replay: no list of budgets can close this part of the way.
        overhead_ms=float(np.nanmedian(added)) if np.isfinite(added).any() else None,
        problems=tuple(problems),
        attn_choices=run.encoder.attention.choices() or None,  # type: ignore[arg-type]
        elapsed_s=run.elapsed_s,
    )


def _beside(samples: Samples, name: str, paired: PairedTimes) -> FloatArray:
    """Times of a series that not every call has, one for each of some calls; NaN where it has none."""
    some = samples.paired([name])
    known = dict(zip(some.calls.tolist(), some.times[name], strict=True))
    return np.array([known.get(index, np.nan) for index in paired.calls.tolist()])


def _closed(times: Mapping[str, FloatArray], seed: int) -> Closed:
    """The share of the way closed, with 95 % intervals over resampled calls."""
    arms = np.stack([times[name] for name in (AUTOMATIC, TUNED, ORACLE)])
    if not arms.shape[1]:
        return Closed()
    picks = np.random.default_rng(seed).integers(0, arms.shape[1], size=(RESAMPLES, arms.shape[1]))
    answer: dict[str, Any] = {}
    for name, statistic in (("mean", np.mean), ("median", np.median)):
        answer[name] = closed_share(*(float(value) for value in statistic(arms, axis=-1)))
        drawn = [closed_share(*(float(v) for v in column)) for column in statistic(arms[:, picks], axis=-1).T]
        known = [share for share in drawn if share is not None]
        answer[f"{name}_ci95"] = tuple(float(v) for v in np.percentile(known, (2.5, 97.5))) if known else None
    return Closed(**answer)
