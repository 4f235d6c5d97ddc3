"""The answer of `tune-budgets`: settings, whether to use them, for which calls that holds, and what to paste."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vitgraph.errors import InputError
from vitgraph.measure.calls import EncoderCall
from vitgraph.models.registry import ModelSource, resolve_preset
from vitgraph.planning.items import VIDEO
from vitgraph.predict.engine_families import ENGINE, WITHOUT_GRAPHS
from vitgraph.predict.engine_rules import EngineRules
from vitgraph.predict.profile import CalibrationProfile
from vitgraph.predict.targets import VITGRAPH, VLLM, Settings, compilation_config, make_plan
from vitgraph.predict.traffic import Traffic
from vitgraph.records.kinds.tune import AdvisedCalls, GraphSettings, OtherTraffic, TuneResult, UsedProfile
from vitgraph.records.sample_table import Sample
from vitgraph.specs import WorkloadSpec
from vitgraph.tuning.describe import describe, describe_vllm
from vitgraph.tuning.held_out import predicted_times
from vitgraph.tuning.objective import Limits, Objective
from vitgraph.tuning.tune import Searched, Tuned, TuneTask, make_task, search_calls
from vitgraph.tuning.verdict import DEPENDS, NO_GRAPHS, TUNED, USE_GRAPHS, Outcome, joint_verdict
from vitgraph.workloads.registry import build_workload
from vitgraph.workloads.trace import SHIPPED_TRACES

CALL_SIZES = (1, 2, 4, 8)
"""Requests a call that the advice is given for where nobody said how many there are."""

SIDE_REQUESTS = 1000
"""Requests that the advice for other numbers a call is made from at most."""

OTHER_REQUESTS = 300
"""Requests of every other shipped trace that a list is tried on."""

GRAPHS_OFF = '{"cudagraph_mm_encoder": false}'


@dataclass(slots=True)
class Advice:
    """The answer of `tune-budgets`, and what measuring it takes.

    Attributes:
        result: The answer; `result.measured` is None until `verify_tuning` fills it.
        tuned: What was found for the target.
        calls: Calls that the search has not seen.
        samples: What was measured.
    """

    result: TuneResult
    tuned: Tuned
    calls: list[EncoderCall]
    samples: list[Sample] = field(default_factory=list)

    def note(self, *notes: str) -> None:
        """Adds what a reader should know."""
        self.result = self.result.model_copy(update={"notes": (*self.result.notes, *notes)})


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
    )
    found = search_calls(task, calls, (target, VLLM))
    by_size = {1: found}
    if regroup is not None:
        for size in CALL_SIZES[1:]:
            by_size[size] = search_calls(task, regroup(size)[: SIDE_REQUESTS // size], (target, VLLM))
    tuned = found.targets[target]
    result = TuneResult(
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
        other_traffic=tuple(other_traffic(task, tuned, workload_name)),
        **describe(task, found, target),
        **_advice(task, by_size, target),
    )
    return Advice(result, tuned, found.reported_calls)


def _notes(task: TuneTask, found: Searched) -> list[str]:
    profile, source = task.profile, task.source
    notes = list(profile.notes)
    name = str(profile.model.get("name") or source.name)
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
    texts = {limit.name: limit.text for limit in rules.family.limits}
    found = []
    for name in rules.ruled_out:
        why = f": {texts[name]}" if name in texts else ""
        found.append(f"{ENGINE} ({rules.family.file}) rules out some lists by its rule {name}{why}")
    return found


# -- for which calls it holds ------------------------------------------------------------------------------------------


def _advice(task: TuneTask, by_size: Mapping[int, Searched], target: str) -> dict[str, Any]:
    """Verdict, what to paste, and both for every number of requests a call."""
    own = {size: found.targets[target] for size, found in by_size.items()}
    verdict = joint_verdict([tuned.outcome.verdict for tuned in own.values()])
    settings, outcomes = _list_for_all(task, by_size)
    theirs = joint_verdict([outcome.verdict for outcome in outcomes.values()])
    if theirs == DEPENDS and all(found.targets[VLLM].outcome.verdict == NO_GRAPHS for found in by_size.values()):
        theirs = NO_GRAPHS
    if task.source.architecture in WITHOUT_GRAPHS:
        theirs = NO_GRAPHS
    if target == VLLM:
        verdict = theirs
    has_videos = any(spec.modality == VIDEO for call in by_size[1].calls for spec in call.specs)
    takes_videos = VIDEO in task.profile.encoder.modalities
    config = compilation_config(settings, takes_videos=takes_videos)
    pasted = {USE_GRAPHS: config, NO_GRAPHS: GRAPHS_OFF}.get(theirs)
    turns_videos_off = theirs == USE_GRAPHS and takes_videos and not has_videos
    backend, _ = _engine_backend(task, by_size[1])
    line = None if pasted is None else serve_line(task, pasted, backend, turns_videos_off=turns_videos_off)
    return {
        "target": target,
        "verdict": verdict,
        "verdict_text": _verdict_text(verdict, {size: tuned.outcome for size, tuned in own.items()}, target),
        "by_requests_per_call": tuple(
            AdvisedCalls(
                requests_per_call=size,
                calls=len(by_size[size].calls),
                best=GraphSettings(**tuned.best.settings.as_dict()),
                **_outcome(tuned.outcome),
            )
            for size, tuned in own.items()
            if len(own) > 1
        ),
        "list_for_all": tuple(
            AdvisedCalls(requests_per_call=size, **_outcome(outcome))
            for size, outcome in outcomes.items()
            if len(outcomes) > 1
        ),
        "compilation_config": pasted,
        "serve_line": line,
        "vllm": describe_vllm(by_size[1].targets[VLLM], theirs, config, backend),
    }


def _list_for_all(task: TuneTask, by_size: Mapping[int, Searched]) -> tuple[Settings, dict[int, Outcome]]:
    """Of the engine's lists for each number of requests, the one whose least gain over all of them is the largest."""
    tried = {}
    for found in by_size.values():
        settings = found.targets[VLLM].best.settings
        if settings not in tried:
            tried[settings] = {size: _try_list(task, settings, other) for size, other in by_size.items()}
    best = max(tried, key=lambda settings: min(outcome.improvement_pct for outcome in tried[settings].values()))
    return best, tried[best]


def _try_list(task: TuneTask, settings: Settings, found: Searched) -> Outcome:
    tuned = found.targets[VLLM]
    if settings == tuned.best.settings:
        return tuned.outcome
    plan = make_plan(tuned.cost.target, task.profile.encoder, settings)
    return task.outcome(predicted_times(found.reported, tuned.cost, {TUNED: (plan, settings.packing)}))


def _verdict_text(verdict: str, outcomes: Mapping[int, Outcome], target: str) -> str:
    if verdict != DEPENDS:
        return str(next(iter(outcomes.values())))
    parts = [
        f"{size} a call: {outcome.improvement_pct:+.1f}%, {_SHORT[outcome.verdict]}"
        for size, outcome in outcomes.items()
    ]
    return (
        f"it depends on how many requests a call has ({'; '.join(parts)}): say so with --requests-per-call or "
        f"--request-rate, which replays arrivals; no list for {target} holds for all of them"
    )


_SHORT = {USE_GRAPHS: "use graphs", NO_GRAPHS: "leave them off", "measure_first": "measure it first"}


def _outcome(outcome: Outcome) -> dict[str, Any]:
    return {
        "verdict": outcome.verdict,
        "improvement_pct": outcome.improvement_pct,
        "slower_share": outcome.slower_share,
    }


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
        text = f"if your traffic turns into {trace}: {outcome.improvement_pct:+.1f}%, {outcome.slower_share:.0%} slower"
        rows.append(OtherTraffic(name=trace, requests=len(calls), text=text, **_outcome(outcome)))
    return rows


def serve_line(task: TuneTask, config: str, attn_backend: str | None, *, turns_videos_off: bool) -> str:
    """A whole `vllm serve` command with the settings.

    A list that was chosen for images alone has no room for a video's frames, so that its line turns videos off.
    """
    source = task.source
    parts = ["vllm", "serve", source.weights or source.name, "--compilation-config", config]
    if turns_videos_off:
        parts += ["--limit-mm-per-prompt", json.dumps({VIDEO: 0})]
    if attn_backend is not None:
        parts += ["--mm-encoder-attn-backend", attn_backend]
    return shlex.join(parts)
