"""The answer of `tune-budgets`: settings, whether to use them, for which calls that holds, and what to paste."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from vitgraph.errors import InputError, UsageError
from vitgraph.measure.calls import EncoderCall, make_calls
from vitgraph.models.registry import ModelSource, resolve_preset
from vitgraph.planning.budgets import VIDEO, BudgetSettings, EncoderItemSpec
from vitgraph.predict.cost_model import CostModel
from vitgraph.predict.doubt import model_error, profile_doubts
from vitgraph.predict.engine_rules import ENGINE, LIMITS, EngineRules
from vitgraph.predict.profile import CalibrationProfile, is_same_network, stands_for
from vitgraph.predict.targets import VITGRAPH, VLLM, make_plan
from vitgraph.predict.workload_cost import Traffic
from vitgraph.records.sample_table import Sample
from vitgraph.records.tune_result import (
    AdvisedCalls,
    GraphSettings,
    Measured,
    OtherTraffic,
    TuneResult,
    TuneVerdict,
    UsedProfile,
)
from vitgraph.specs.parts import WorkloadSpec
from vitgraph.tuning.describe import Paste, describe, describe_vllm
from vitgraph.tuning.objective import (
    DEPENDS,
    MEASURE_FIRST,
    NO_GRAPHS,
    TUNED,
    USE_GRAPHS,
    Limits,
    Objective,
    Outcome,
    measured_verdict,
)
from vitgraph.tuning.tune import Searched, Tuned, TuneTask, predicted_times, search_calls
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
        result: The answer; `result.measured` is None until a `Verification` fills it.
        calls: Calls that the search has not seen.
        most_slower: Share of the requests that may become slower.
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
        if judged is not None and refusal_of(self.tuned) is None:
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
    video_limit: int | None = None,
    asked: Mapping[str, Any] | None = None,
) -> Advice:
    """Finds the best settings for a workload; needs neither a GPU nor torch.

    Args:
        calls: The encoder calls of the workload.
        profile: Measured with that model on the device in question.
        max_call_tokens: Output tokens that a call may hold.
        objective: What to minimise; the mean by default.
        target: `vitgraph` or `vllm`.
        workload_name: The workload, which is not tried once more among the shipped traces.
        regroup: Makes the same requests into calls of so many; given where nobody chose how many a call has, and then
            the advice is given for each of `CALL_SIZES`.
        share: Share of the calls to search on; the settings are judged on the others.
        seed: Seed of that choice.
        doubts: Reasons not to act on predictions.
        host_factor: How many times as long as the profile's host this one takes; short eager calls scale with it.
        video_limit: Videos that the server takes in a prompt; None: as the workload has.
        asked: Options of the server's own that were asked for, by key; those of `SERVED` are in the line to paste.

    Raises:
        UsageError: The profile is of another model, or nothing is within the limits.
    """
    row = profile.row
    if row is not None and not is_same_network(row, source.row):
        raise UsageError(
            f"the profile was measured with {profile.name} ({row}), but the model is {source.name} "
            f"({source.row.name}); calibrate that model, or tune this one"
        )
    error = model_error(CostModel(profile))
    found_doubts = [*profile_doubts(profile, error), *doubts]
    if stands_for(profile, source) is False:
        found_doubts.append(f"the profile is of the tower of {profile.name}, and {source.name} has another")
    task = TuneTask(
        source,
        CostModel(profile, host_factor),
        objective or Objective(),
        limits or Limits(),
        max_call_tokens,
        share,
        seed,
        error,
        tuple(found_doubts),
        video_limit,
    )
    by_size = {1: search_calls(task, calls, (target, VLLM))}
    if regroup is not None:
        for size in CALL_SIZES[1:]:
            by_size[size] = search_calls(task, regroup(size)[: SIDE_REQUESTS // size], (target, VLLM))
    found = by_size[1]
    common = {name: common_list(task, by_size, name) for name in dict.fromkeys((target, VLLM))}
    found.targets |= {name: one.tuned for name, one in common.items()}
    own, theirs = common[target], common[VLLM]
    has_videos = task.may_have_videos(any(spec.modality == VIDEO for call in calls for spec in call.specs))
    backend, _ = _engine_backend(task, found)
    paste = Paste(task, theirs.tuned.best.settings, has_videos, backend, asked or {})
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
        **paste.where(theirs.verdict if own.verdict == USE_GRAPHS else own.verdict),
    )
    return Advice(result, own.tuned, found.reported_calls, paste, task.limits.most_slower)


@dataclass(slots=True)
class CommonList:
    """One list for every number of requests a call.

    Attributes:
        tuned: It on the calls of the workload.
        outcomes: What it does, by number of requests a call.
        own: What the list made for each number does.
        verdict: Whether to use graphs, for all of them.
    """

    tuned: Tuned
    outcomes: dict[int, Outcome]
    own: dict[int, Outcome]
    verdict: TuneVerdict

    @property
    def sizes_text(self) -> str:
        """Which calls its settings are for, in words."""
        if len(self.outcomes) == 1:
            return "the calls of this workload"
        if self.verdict == USE_GRAPHS:
            return f"calls of {', '.join(map(str, self.outcomes))} requests, one list for all of them"
        return "calls of one request"

    def __str__(self) -> str:
        if (refusal := refusal_of(self.tuned)) is not None:
            return f"leave graphs off: {refusal}"
        if self.verdict != DEPENDS:
            # Where no list is good enough, another size's may still look so for one request a call.
            return str(self.outcomes[1] if self.verdict == USE_GRAPHS else self.own[1])
        parts = [
            f"{size} a call: {outcome.improvement_pct:+.1f}%, {_SHORT[outcome.verdict]}"
            for size, outcome in self.own.items()
        ]
        return (
            f"it depends on how many requests a call has ({'; '.join(parts)}): say so with --requests-per-call or "
            f"--request-rate, which replays arrivals; no list for {self.tuned.cost.target.name} holds for all of them"
        )


_SHORT = {USE_GRAPHS: "use graphs", NO_GRAPHS: "leave them off", MEASURE_FIRST: "measure it first"}


def common_list(task: TuneTask, by_size: Mapping[int, Searched], target: str) -> CommonList:
    """Of the lists for each number of requests, the one that keeps most and whose least gain is the largest.

    Where none holds for all of them, the settings are those of one request a call.
    """
    own = {size: found.targets[target] for size, found in by_size.items()}
    tried: dict[BudgetSettings, dict[int, Outcome]] = {}
    for tuned in own.values():
        settings = tuned.best.settings
        if settings not in tried:
            tried[settings] = {size: _try_list(task, settings, other, target) for size, other in by_size.items()}

    def worth(settings: BudgetSettings) -> tuple[bool, float]:
        outcomes = tried[settings].values()
        return all(outcome.is_kept for outcome in outcomes), min(outcome.improvement_pct for outcome in outcomes)

    best = max(tried, key=worth)
    verdicts = {outcome.verdict for outcome in tried[best].values()}
    verdict: TuneVerdict = verdicts.pop() if len(verdicts) == 1 else DEPENDS
    if verdict in (DEPENDS, NO_GRAPHS):
        verdict = NO_GRAPHS if all(tuned.outcome.verdict == NO_GRAPHS for tuned in own.values()) else DEPENDS
    shown, first = own[1], by_size[1]
    if refusal_of(shown) is not None:
        verdict = NO_GRAPHS
    if verdict == USE_GRAPHS and best != shown.best.settings:
        shown = _with_settings(task, shown, first, best)
    return CommonList(shown, tried[best], {size: tuned.outcome for size, tuned in own.items()}, verdict)


def refusal_of(tuned: Tuned) -> str | None:
    """Why no settings of its target can be used; None where some can."""
    return None if tuned.search.rules is None else tuned.search.rules.refusal


def _try_list(task: TuneTask, settings: BudgetSettings, found: Searched, target: str) -> Outcome:
    tuned = found.targets[target]
    if settings == tuned.best.settings:
        return tuned.outcome
    plan = make_plan(tuned.cost.target, task.profile.encoder, settings)
    return task.outcome(predicted_times(found.reported, tuned.cost, {TUNED: (plan, settings.packing)}))


def _with_settings(task: TuneTask, tuned: Tuned, found: Searched, settings: BudgetSettings) -> Tuned:
    """What was found, with other settings than its own best."""
    scored = tuned.search.predict(settings)
    assert scored is not None
    plans = {**tuned.plans, TUNED: (make_plan(tuned.cost.target, task.profile.encoder, settings), settings.packing)}
    times = predicted_times(found.reported, tuned.cost, plans)
    seen = predicted_times(found.searched, tuned.cost, plans)
    result = replace(tuned.result, best=scored)
    return replace(tuned, result=result, plans=plans, times=times, seen=seen, outcome=task.outcome(times))


def advised_calls(found: Mapping[int, Searched], common: CommonList) -> dict[str, Any]:
    """The rows for each number of requests a call; none where the number was chosen."""
    if len(found) == 1:
        return {}
    target = common.tuned.cost.target.name
    rows = [
        AdvisedCalls(
            requests_per_call=size,
            calls=len(searched.calls),
            best=GraphSettings(**searched.targets[target].best.settings.as_dict()),
            **outcome_fields(common.own[size]),
        )
        for size, searched in found.items()
    ]
    lists = [AdvisedCalls(requests_per_call=size, **outcome_fields(one)) for size, one in common.outcomes.items()]
    return {"by_requests_per_call": tuple(rows), "list_for_all": tuple(lists)}


def outcome_fields(outcome: Outcome) -> dict[str, Any]:
    return {
        "verdict": outcome.verdict,
        "improvement_pct": outcome.improvement_pct,
        "slower_share": outcome.kept.slower_share,
    }


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
    return notes + _engine_notes(found.targets[VLLM].search.rules)


def _engine_backend(task: TuneTask, found: Searched) -> tuple[str | None, float | None]:
    return task.profile.engine_backend(Counter(call.input_rows for call in found.calls))


def _engine_notes(rules: EngineRules | None) -> list[str]:
    """Which of the engine's rules kept the search from lists that it would have tried."""
    if rules is None:
        return []
    if rules.refusal is not None:
        return [rules.refusal]
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
    plan, policy = tuned.plans[TUNED]
    takes_videos = tuned.search.rules is None or plan.max_frames > 0
    rows: list[OtherTraffic] = []
    for trace in SHIPPED_TRACES:
        if trace == name:
            continue
        spec = WorkloadSpec(dataset_name="trace", dataset_path=trace, num_prompts=OTHER_REQUESTS, num_warmups=0)
        served: list[tuple[EncoderItemSpec, ...]] = []
        with suppress(InputError):
            for call in make_calls(build_workload(spec).requests, task.source.rule(), 1)[0]:
                served.append(tuple(spec for spec in call.specs if takes_videos or spec.modality != VIDEO))
        served = [call for call in served if call]
        if not served:
            text = f"{trace}: nothing that is served"
            rows.append(OtherTraffic(name=trace, requests=0, verdict=None, text=text))
            continue
        outcome = task.outcome(predicted_times(Traffic(served), tuned.cost, {TUNED: (plan, policy)}))
        gain, slower = outcome.improvement_pct, outcome.kept.slower_share
        text = f"if your traffic turns into {trace}: {gain:+.1f}%, {slower:.0%} slower"
        rows.append(OtherTraffic(name=trace, requests=len(served), text=text, **outcome_fields(outcome)))
    return rows
