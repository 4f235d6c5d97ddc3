"""One list for every number of requests a call: which holds for all of them, and what each number says by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from vitgraph.predict.engine_rules import WITHOUT_GRAPHS
from vitgraph.predict.targets import VLLM, Settings, make_plan
from vitgraph.records.kinds.tune import AdvisedCalls, GraphSettings, TuneVerdict
from vitgraph.tuning.held_out import predicted_times
from vitgraph.tuning.tune import Searched, Tuned, TuneTask
from vitgraph.tuning.verdict import DEPENDS, MEASURE_FIRST, NO_GRAPHS, TUNED, USE_GRAPHS, Outcome, joint_verdict


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
        if self.verdict != DEPENDS:
            return str(self.outcomes[1])
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
    tried: dict[Settings, dict[int, Outcome]] = {}
    for tuned in own.values():
        settings = tuned.best.settings
        if settings not in tried:
            tried[settings] = {size: _try_list(task, settings, other, target) for size, other in by_size.items()}

    def worth(settings: Settings) -> tuple[bool, float]:
        outcomes = tried[settings].values()
        return all(outcome.is_kept for outcome in outcomes), min(outcome.improvement_pct for outcome in outcomes)

    best = max(tried, key=worth)
    verdict = joint_verdict([outcome.verdict for outcome in tried[best].values()])
    if verdict in (DEPENDS, NO_GRAPHS):
        verdict = NO_GRAPHS if all(tuned.outcome.verdict == NO_GRAPHS for tuned in own.values()) else DEPENDS
    if target == VLLM and task.source.architecture in WITHOUT_GRAPHS:
        verdict = NO_GRAPHS
    shown, first = own[1], by_size[1]
    if verdict == USE_GRAPHS and best != shown.best.settings:
        shown = _with_settings(task, shown, first, best)
    return CommonList(shown, tried[best], {size: tuned.outcome for size, tuned in own.items()}, verdict)


def _try_list(task: TuneTask, settings: Settings, found: Searched, target: str) -> Outcome:
    tuned = found.targets[target]
    if settings == tuned.best.settings:
        return tuned.outcome
    plan = make_plan(tuned.cost.target, task.profile.encoder, settings)
    return task.outcome(predicted_times(found.reported, tuned.cost, {TUNED: (plan, settings.packing)}))


def _with_settings(task: TuneTask, tuned: Tuned, found: Searched, settings: Settings) -> Tuned:
    """What was found, with other settings than its own best."""
    scored = tuned.predict(settings)
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
