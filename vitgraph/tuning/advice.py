"""The answer of `tune-budgets`: settings, whether to use them, for which calls that holds, and what to paste."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vitgraph.errors import InputError
from vitgraph.measure.calls import EncoderCall
from vitgraph.models.registry import ModelSource, resolve_preset
from vitgraph.planning.items import VIDEO
from vitgraph.predict.engine_rules import ENGINE, LIMITS, WITHOUT_GRAPHS, EngineRules
from vitgraph.predict.profile import CalibrationProfile
from vitgraph.predict.targets import VITGRAPH, VLLM, Settings
from vitgraph.predict.traffic import Traffic
from vitgraph.records.kinds.tune import (
    Measured,
    OtherTraffic,
    TuneResult,
    TuneVerdict,
    UsedProfile,
)
from vitgraph.records.sample_table import Sample
from vitgraph.specs import WorkloadSpec
from vitgraph.tuning.common_list import advised_calls, common_list, outcome_fields
from vitgraph.tuning.describe import describe, describe_vllm
from vitgraph.tuning.held_out import predicted_times
from vitgraph.tuning.objective import Limits, Objective
from vitgraph.tuning.tune import Searched, Tuned, TuneTask, make_task, search_calls
from vitgraph.tuning.verdict import (
    DEPENDS,
    TUNED,
    USE_GRAPHS,
    measured_verdict,
)
from vitgraph.workloads.registry import build_workload
from vitgraph.workloads.trace import SHIPPED_TRACES

CALL_SIZES = (1, 2, 4, 8)
"""Requests a call that the advice is given for where nobody said how many there are."""

SIDE_REQUESTS = 1000
"""Requests that the advice for other numbers a call is made from at most."""

OTHER_REQUESTS = 300
"""Requests of every other shipped trace that a list is tried on."""


@dataclass(slots=True)
class Advice:
    """The answer of `tune-budgets`, and what measuring it takes.

    Attributes:
        result: The answer; `result.measured` is None until `verify_tuning` fills it.
        tuned: What was found for the target.
        calls: Calls that the search has not seen.
        paste: What to paste.
        most_slower: Share of the requests that may become slower.
        samples: What was measured.
    """

    result: TuneResult
    tuned: Tuned
    calls: list[EncoderCall]
    paste: Paste
    most_slower: float
    samples: list[Sample] = field(default_factory=list)
    _predicted: tuple[TuneVerdict, str] | None = None

    def note(self, *notes: str) -> None:
        """Adds what a reader should know."""
        self.result = self.result.model_copy(update={"notes": (*self.result.notes, *notes)})

    def take(self, measured: Measured) -> None:
        """Takes in what was measured: the verdict, and what to paste, follow it.

        How many requests a call has is not settled by measuring calls of one.
        """
        update: dict[str, Any] = {"measured": measured}
        judged = measured_verdict(measured, self.most_slower)
        if judged is not None:
            verdict, text = judged
            if self._predicted is None:
                self._predicted = self.result.verdict, self.result.verdict_text
            predicted, said = self._predicted
            if predicted == DEPENDS:
                verdict = DEPENDS
            elif self.result.by_requests_per_call and verdict != predicted:
                verdict, text = DEPENDS, f"{text} (of one request a call)"
            update |= {"verdict": verdict, "verdict_text": f"{text}. Predicted: {said}"}
            theirs = self.result.vllm
            if self.result.target == VLLM:
                update["vllm"] = theirs = theirs.model_copy(update={"verdict": verdict})
            update |= self.paste.where(theirs.verdict if verdict == USE_GRAPHS else verdict)
        self.result = self.result.model_copy(update=update)


def tune_budgets(
    calls: Sequence[EncoderCall],
    source: ModelSource,
    profile: CalibrationProfile,
    *,
    max_call_tokens: int,
    objective: Objective | None = None,
    limits: Limits | None = None,
    target: str = VITGRAPH,
    workload_name: str | None = None,
    regroup: Callable[[int], Sequence[EncoderCall]] | None = None,
    share: float = 0.5,
    seed: int = 0,
    doubts: Sequence[str] = (),
    host_factor: float = 1.0,
) -> Advice:
    """Finds the best settings for a workload; needs neither a GPU nor torch.

    Args:
        calls: The encoder calls of the workload.
        source: The model.
        profile: Measured with that model on the device in question.
        max_call_tokens: Output tokens that a call may hold.
        objective: What to minimise; the mean by default.
        limits: What to stay within.
        target: `vitgraph` or `vllm`.
        workload_name: The workload, which is not tried once more among the shipped traces.
        regroup: Makes the same requests into calls of so many; given where nobody chose how many a call has, and then
            the advice is given for each of `CALL_SIZES`.
        share: Share of the calls to search on; the settings are judged on the others.
        seed: Seed of that choice.
        doubts: Reasons not to act on predictions.
        host_factor: How many times as long as the profile's host this one takes; short eager calls scale with it.

    Raises:
        UsageError: The profile is of another model, or nothing is within the limits.
    """
    task = make_task(
        source,
        profile,
        max_call_tokens=max_call_tokens,
        objective=objective,
        limits=limits,
        share=share,
        seed=seed,
        doubts=doubts,
        host_factor=host_factor,
    )
    by_size = {1: search_calls(task, calls, (target, VLLM))}
    if regroup is not None:
        for size in CALL_SIZES[1:]:
            by_size[size] = search_calls(task, regroup(size)[: SIDE_REQUESTS // size], (target, VLLM))
    found = by_size[1]
    common = {name: common_list(task, by_size, name) for name in dict.fromkeys((target, VLLM))}
    found.targets |= {name: one.tuned for name, one in common.items()}
    own, theirs = common[target], common[VLLM]
    has_videos = any(spec.modality == VIDEO for call in calls for spec in call.specs)
    backend, _ = _engine_backend(task, found)
    paste = Paste(task, theirs.tuned.best.settings, has_videos, backend)
    result = TuneResult(
        target=target,
        objective=str(task.objective),
        limits=task.limits.as_dict(),
        profile=UsedProfile(
            label=profile.label,
            created_at=profile.created_at,
            is_synthetic=profile.is_synthetic,
            is_cpu=profile.is_cpu,
            environment=profile.environment,
        ),
        notes=tuple(_notes(task, found)),
        other_traffic=tuple(other_traffic(task, own.tuned, workload_name)),
        verdict=own.verdict,
        verdict_text=str(own),
        settings_for=own.sizes_text,
        vllm=describe_vllm(theirs.tuned, theirs.verdict, paste.config, backend),
        **describe(task, found, target),
        **advised_calls(by_size, own),
        **paste.where(theirs.verdict),
    )
    return Advice(result, own.tuned, found.reported_calls, paste, task.limits.most_slower)


def _notes(task: TuneTask, found: Searched) -> list[str]:
    profile, source = task.profile, task.source
    notes = list(profile.notes)
    name = profile.name or source.name
    measured = resolve_preset(name)
    is_it = name == source.name or (measured is not None and measured.weights == source.weights is not None)
    if not is_it:
        notes.append(f"the profile was measured with {name}, the model asked for is {source.name}")
    if profile.is_cpu:
        notes.append("the profile was measured on a CPU, where a replay saves no launches: it says nothing about a GPU")
    if profile.is_synthetic:
        notes.append("the profile is synthetic: nothing in it was measured")
    most = max(sum(spec.output_tokens for spec in call.specs) for call in found.calls)
    if most > profile.max_tokens:
        notes.append(
            f"calls have up to {most} tokens, the profile measured up to {profile.max_tokens}; beyond, predictions are "
            "extrapolated"
        )
    backend, ratio = _engine_backend(task, found)
    if ratio is not None:
        notes.append(
            f"{ENGINE} has one attention backend for all graphs, the profile's tower the fastest for each: {backend} "
            f"is the best alone for these calls, its attention takes {ratio:.2f} times as long, and predictions for "
            f"{ENGINE} leave that out; `vitgraph calibrate --mm-encoder-attn-backend {backend}` measures it"
        )
    return notes + _engine_notes(found.targets[VLLM].rules)


def _engine_backend(task: TuneTask, found: Searched) -> tuple[str | None, float | None]:
    return task.profile.engine_backend(Counter(call.input_rows for call in found.calls))


def _engine_notes(rules: EngineRules | None) -> list[str]:
    """Which of the engine's rules kept the search from lists that it would have tried."""
    if rules is None:
        return []
    file = WITHOUT_GRAPHS.get(rules.tower.architecture)
    if file is not None:
        return [f"{ENGINE} runs the encoder of {rules.tower.architecture} without graphs, whatever is set ({file})"]
    if rules.family is None:
        return [
            f"{ENGINE} has no encoder graphs for {rules.tower.architecture} whose rules were read: what is printed for "
            "it keeps the manager's own rules only"
        ]
    return [
        f"{ENGINE} ({rules.family.file}) rules out some lists by its rule {name}"
        + (f": {LIMITS[name][0]}" if name in LIMITS else "")
        for name in rules.ruled_out
    ]


def other_traffic(task: TuneTask, tuned: Tuned, name: str | None) -> list[OtherTraffic]:
    """What the settings do on the other shipped traces, one request a call: traffic changes, a list does not."""
    rule = task.source.rule()
    plan, policy = tuned.plans[TUNED]
    rows: list[OtherTraffic] = []
    for trace in SHIPPED_TRACES:
        if trace == name:
            continue
        spec = WorkloadSpec(dataset_name="trace", dataset_path=trace, num_prompts=OTHER_REQUESTS, num_warmups=0)
        calls = []
        for request in build_workload(spec).requests:
            try:
                specs = [rule.item_spec(rule.geometry(i.width, i.height, i.frames, i.fps)) for i in request.items]
            except InputError:
                continue
            calls.append(
                tuple(spec for spec in specs if tuned.rules is None or plan.max_frames or spec.modality != VIDEO)
            )
        calls = [call for call in calls if call]
        if not calls:
            text = f"{trace}: nothing that is served"
            rows.append(OtherTraffic(name=trace, requests=0, verdict=None, text=text))
            continue
        times = predicted_times(Traffic(calls), tuned.cost, {TUNED: (plan, policy)})
        outcome = task.outcome(times)
        gain, slower = outcome.improvement_pct, outcome.kept.slower_share
        text = f"if your traffic turns into {trace}: {gain:+.1f}%, {slower:.0%} slower"
        rows.append(OtherTraffic(name=trace, requests=len(calls), text=text, **outcome_fields(outcome)))
    return rows


@dataclass(frozen=True, slots=True)
class Paste:
    """What to paste into vLLM.

    Attributes:
        task: What was tuned for.
        settings: The list for vLLM.
        has_videos: Whether the workload has videos.
        attn_backend: The engine's attention backend; None where nothing is known.
    """

    task: TuneTask
    settings: Settings
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
