"""Ties a workload, a profile, an objective and limits to the settings that are predicted to be best, and says why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from vitgraph.errors import BudgetError, UsageError
from vitgraph.measure.calls import EncoderCall
from vitgraph.models.registry import ModelSource
from vitgraph.planning.budgets import BudgetPlan, CaptureAxis
from vitgraph.planning.items import VIDEO
from vitgraph.predict.cost_model import CostModel
from vitgraph.predict.doubt import profile_doubts
from vitgraph.predict.engine_rules import EngineRules, engine_tower
from vitgraph.predict.find_profile import stands_for
from vitgraph.predict.holdout import model_error
from vitgraph.predict.profile import CalibrationProfile
from vitgraph.predict.targets import (
    DOUBT,
    TARGETS,
    VLLM,
    Settings,
    TargetCost,
    automatic_settings,
    make_plan,
    seed_settings,
    target_named,
)
from vitgraph.predict.towers import is_same_network
from vitgraph.predict.traffic import Traffic
from vitgraph.records.kinds.calibrate import EncoderFacts
from vitgraph.records.kinds.tune import ModelError
from vitgraph.tuning.held_out import DEFAULT_SHARE, Split, Times, pooled, predicted_times, split_calls
from vitgraph.tuning.objective import Limits, Objective, ScoredSettings
from vitgraph.tuning.search import Search, SearchResult
from vitgraph.tuning.verdict import AUTOMATIC, SEED_NINE, TUNED, Outcome, outcome_of


@dataclass(frozen=True, slots=True)
class TuneTask:
    """What is tuned for what.

    Attributes:
        source: The model.
        model: Cost model of its profile.
        objective: What to minimise.
        limits: What to stay within.
        max_call_tokens: Output tokens that a call may hold.
        share: Share of the calls to search on.
        seed: Seed of that choice.
        error: The cost model's error on its held-out calls.
        doubts: Why predictions are not to be acted on.
    """

    source: ModelSource
    model: CostModel
    objective: Objective
    limits: Limits
    max_call_tokens: int
    share: float
    seed: int
    error: ModelError
    doubts: tuple[str, ...]

    @property
    def profile(self) -> CalibrationProfile:
        """What was measured."""
        return self.model.profile

    def outcome(self, times: Times) -> Outcome:
        """What predicted times of settings amount to."""
        noise = 100.0 * (self.model.eager_spread or 0.0)
        return outcome_of(times, self.objective, self.error, noise, self.limits.most_slower, self.doubts)


@dataclass(slots=True)
class Tuned:
    """What was found for one target.

    Attributes:
        cost: Predicted times of the target.
        result: The search.
        baselines: Evaluations of the automatic list and of the documented nine budgets, by name.
        plans: Plan and policy by name (`tuned`, `automatic`, `seed_nine`), for measuring them.
        times: Predicted times on the calls that are reported on.
        seen: The same on those that were searched on.
        outcome: What the former amount to.
        rules: The engine's rules that the search kept; None without any.
        predict: Scores other settings as the search did; None for those that contradict each other.
    """

    cost: TargetCost
    result: SearchResult
    baselines: dict[str, ScoredSettings]
    plans: dict[str, tuple[BudgetPlan, str]]
    times: Times
    seen: Times
    outcome: Outcome
    rules: EngineRules | None
    predict: Callable[[Settings], ScoredSettings | None]

    @property
    def best(self) -> ScoredSettings:
        """The winner."""
        assert self.result.best is not None
        return self.result.best


@dataclass(slots=True)
class Searched:
    """What was found for the calls of one workload.

    Attributes:
        calls: The calls.
        split: Which were searched on.
        targets: What was found for each target.
        reported: The traffic that is reported on.
        searched: The traffic that was searched on.
    """

    calls: Sequence[EncoderCall]
    split: Split
    targets: dict[str, Tuned]
    reported: Traffic
    searched: Traffic

    @property
    def reported_calls(self) -> list[EncoderCall]:
        """The calls that are reported on; the ones to measure."""
        places = sorted({place for _, reported in self.split.parts for place in reported})
        return [self.calls[place] for place in places]


def make_task(
    source: ModelSource,
    profile: CalibrationProfile,
    *,
    max_call_tokens: int,
    objective: Objective | None = None,
    limits: Limits | None = None,
    share: float = DEFAULT_SHARE,
    seed: int = 0,
    doubts: Sequence[str] = (),
    host_factor: float = 1.0,
) -> TuneTask:
    """A task, with the errors and doubts of its profile.

    Args:
        source: The model.
        profile: Measured with that model's tower on the device in question.
        max_call_tokens: Output tokens that a call may hold.
        objective: What to minimise; the mean by default.
        limits: What to stay within.
        share: Share of the calls to search on.
        seed: Seed of that choice.
        doubts: Further reasons not to act on predictions.
        host_factor: How many times as long as the profile's host this one takes.

    Raises:
        UsageError: The profile is of another family.
    """
    row = profile.row
    if row is not None and not is_same_network(row, source.row):
        raise UsageError(
            f"the profile was measured with {profile.name} ({row}), but the model is {source.name} "
            f"({source.row.name}); calibrate that model, or tune this one"
        )
    error = model_error(CostModel(profile))
    found = [*profile_doubts(profile, error), *doubts]
    if stands_for(profile, source) is False:
        found.append(f"the profile is of the tower of {profile.name}, and {source.name} has another")
    model = CostModel(profile, host_factor)
    return TuneTask(
        source, model, objective or Objective(), limits or Limits(), max_call_tokens, share, seed, error, tuple(found)
    )


def search_calls(task: TuneTask, calls: Sequence[EncoderCall], targets: Sequence[str]) -> Searched:
    """Finds the best settings of each target for some calls, and predicts them on those that it did not see.

    Raises:
        UsageError: Nothing is within the limits.
    """
    split = split_calls(len(calls), task.share, task.seed)
    everything = _traffic(calls, range(len(calls)))
    facts = replace(task.profile.encoder, axes=_needed_axes(task.profile.encoder, everything))
    reported = _traffic(calls, sorted({place for _, part in split.parts for place in part}))
    searched = _traffic(calls, sorted({place for part, _ in split.parts for place in part}))
    found = {}
    for name in dict.fromkeys(target_named(target).name for target in targets):
        cost = TargetCost(task.model, TARGETS[name], DOUBT)
        rules = EngineRules(engine_tower(task.source), everything.has_videos) if name == VLLM else None
        found[name] = _search_target(task, cost, facts, rules, calls, split)
    return Searched(calls, split, found, reported, searched)


def _search_target(
    task: TuneTask,
    cost: TargetCost,
    facts: EncoderFacts,
    rules: EngineRules | None,
    calls: Sequence[EncoderCall],
    split: Split,
) -> Tuned:
    has_videos = any(spec.modality == VIDEO for call in calls for spec in call.specs)
    parts, seen = [], []
    for searched, reported in split.parts:
        seen_traffic = _traffic(calls, searched)
        search, result, baselines, plans = _search(task, cost, facts, rules, seen_traffic, has_videos)
        parts.append(predicted_times(_traffic(calls, reported), cost, plans))
        seen.append(predicted_times(seen_traffic, cost, plans))
    if len(split.parts) > 1:
        everything = _traffic(calls, range(len(calls)))
        search, result, baselines, plans = _search(task, cost, facts, rules, everything, has_videos)
    times = pooled(parts)
    return Tuned(cost, result, baselines, plans, times, pooled(seen), task.outcome(times), rules, search.predict)


def _traffic(calls: Sequence[EncoderCall], places: Sequence[int]) -> Traffic:
    return Traffic([calls[place].specs for place in places], [len(calls[place].requests) for place in places])


def _needed_axes(facts: EncoderFacts, traffic: Traffic) -> tuple[CaptureAxis, ...]:
    """The axes without the keys above what any batch of this workload can need."""
    kept = []
    for axis in facts.axes:
        most = axis.covering_key(spec.axis_sizes[axis.name] for specs in traffic.distinct for spec in specs)
        kept.append(axis if most is None else CaptureAxis(axis.name, axis.keys[: axis.keys.index(most) + 1]))
    return tuple(kept)


def _search(
    task: TuneTask,
    cost: TargetCost,
    facts: EncoderFacts,
    rules: EngineRules | None,
    traffic: Traffic,
    has_videos: bool,
) -> tuple[Search, SearchResult, dict[str, ScoredSettings], dict[str, tuple[BudgetPlan, str]]]:
    """The winner on some traffic, and the lists that people use without tuning."""
    baselines = {
        AUTOMATIC: automatic_settings(cost.target, facts, task.max_call_tokens, has_videos),
        SEED_NINE: seed_settings(cost.target, facts, has_videos),
    }

    def search_within(limits: Limits) -> Search:
        return Search(traffic, cost, facts, task.objective, limits, task.max_call_tokens, rules=rules)

    search = search_within(task.limits)
    result = search.run(baselines.values())
    automatic = search.predict(baselines[AUTOMATIC])
    allowed = automatic.memory_bytes if automatic is not None else float("inf")
    if task.limits.max_memory_bytes is None and result.best is not None and result.best.memory_bytes > allowed:
        # Graphs must not take the memory that a server keeps for its requests, unless somebody says how much they may.
        search = search_within(replace(task.limits, max_memory_bytes=allowed))
        result = search.again(result.evaluated, baselines.values())
    if result.best is None:
        raise UsageError(f"no settings stay within the limits {task.limits.as_dict()}; raise one of them")
    evaluated = {name: search.predict(settings) for name, settings in baselines.items()}
    plans: dict[str, tuple[BudgetPlan, str]] = {}
    for name, settings in {TUNED: result.best.settings, **baselines}.items():
        try:
            plans[name] = make_plan(cost.target, facts, settings), settings.packing
        except BudgetError:
            continue
    return search, result, {name: found for name, found in evaluated.items() if found is not None}, plans
