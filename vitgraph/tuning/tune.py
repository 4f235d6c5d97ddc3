"""Ties a workload, a profile, an objective and limits to the settings that are predicted to be best.

The settings are judged on calls that the search has not seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np

from vitgraph.errors import BudgetError, UsageError
from vitgraph.measure.calls import EncoderCall
from vitgraph.models.registry import ModelSource
from vitgraph.planning.budgets import BudgetPlan
from vitgraph.planning.graph_tables import FloatArray
from vitgraph.planning.optimal import EXACT_ITEMS
from vitgraph.predict.cost_model import CostModel
from vitgraph.predict.engine_rules import EngineRules, engine_tower
from vitgraph.predict.profile import CalibrationProfile
from vitgraph.predict.targets import DOUBT, TARGETS, VLLM, TargetCost, automatic_settings, make_plan, seed_settings
from vitgraph.predict.workload_cost import Traffic, eager_calls, oracle_calls, predict_calls
from vitgraph.records.calibrate_result import EncoderFacts
from vitgraph.records.tune_result import ModelError
from vitgraph.tuning.objective import (
    AUTOMATIC,
    EAGER,
    ORACLE,
    SEED_NINE,
    TUNED,
    Kept,
    Limits,
    Objective,
    Outcome,
    ScoredSettings,
)
from vitgraph.tuning.search import Search, SearchResult

SPLIT: Final = "split"
CROSS_VALIDATED: Final = "cross-validation"
SEEN: Final = "none"
Method = Literal["split", "cross-validation", "none"]

FEW_CALLS = 64
"""Below this many calls half of them would say too little: every call is held out once instead."""

FOLDS = 4
FEWEST_CALLS = 2 * FOLDS
Plans = Mapping[str, tuple[BudgetPlan, str]]
"""Plan and packing policy by name (`tuned`, `automatic`, `seed_nine`)."""

Times = dict[str, FloatArray]
"""Predicted milliseconds of each request, by name; `eager` and `oracle` among them."""


@dataclass(frozen=True, slots=True)
class Split:
    """Which calls are searched on and which are reported on.

    Attributes:
        method: `split`, `cross-validation`, or `none` where there are too few calls to hold any back.
        parts: Places of the calls searched on and of those reported on, one pair a search.
        share: Share of the calls that one search sees.
    """

    method: Method
    parts: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    share: float
    seed: int

    @property
    def reported(self) -> list[int]:
        """Places of all calls that are reported on."""
        return sorted({place for _, part in self.parts for place in part})

    def __str__(self) -> str:
        if self.method == SPLIT:
            (searched, reported), *_ = self.parts
            return (
                f"searched on {len(searched)} calls (share {self.share:g}, seed {self.seed}), reported on the "
                f"{len(reported)} others"
            )
        if self.method == CROSS_VALIDATED:
            return (
                f"few calls: each was held out of one of {len(self.parts)} searches, and the figures are of those; the "
                "settings are those of a search on all"
            )
        return "too few calls to hold any back: the figures are of the calls that the settings were made for"


def split_calls(calls: int, share: float, seed: int) -> Split:
    """Splits calls at random; the share that is searched on is above 0 and at most 1."""
    order = np.random.default_rng(seed).permutation(calls)
    everything = tuple(range(calls))
    if share == 1.0 or calls < FEWEST_CALLS:
        return Split(SEEN, ((everything, everything),), 1.0, seed)
    if calls < FEW_CALLS:
        folds = [set(order[fold::FOLDS].tolist()) for fold in range(FOLDS)]
        parts = tuple((tuple(i for i in everything if i not in fold), tuple(sorted(fold))) for fold in folds)
        return Split(CROSS_VALIDATED, parts, 1.0 - 1.0 / FOLDS, seed)
    cut = min(calls - 1, max(1, round(share * calls)))
    searched, reported = tuple(sorted(order[:cut].tolist())), tuple(sorted(order[cut:].tolist()))
    return Split(SPLIT, ((searched, reported),), share, seed)


def predicted_times(traffic: Traffic, cost: TargetCost, plans: Plans) -> Times:
    """What each plan, eager and the oracle are predicted to take on some calls."""
    some_plan, _ = plans[TUNED]
    found = {
        name: traffic.per_request(predict_calls(traffic, cost, plan, policy, exact_items=EXACT_ITEMS))
        for name, (plan, policy) in plans.items()
    }
    found[EAGER] = traffic.per_request(eager_calls(traffic, cost, some_plan))
    found[ORACLE] = traffic.per_request(oracle_calls(traffic, cost, some_plan))
    return found


@dataclass(frozen=True, slots=True)
class TuneTask:
    """What is tuned for what.

    Attributes:
        model: Cost model of its profile.
        max_call_tokens: Output tokens that a call may hold.
        share: Share of the calls to search on.
        error: The cost model's error on its held-out calls.
        doubts: Why predictions are not to be acted on.
        video_limit: Videos that the server takes in a prompt; None: as the workload has.
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
    video_limit: int | None = None

    def may_have_videos(self, has_videos: bool) -> bool:
        """Whether graphs need room for videos, with or without any in the workload."""
        return has_videos if self.video_limit is None else self.video_limit > 0

    @property
    def profile(self) -> CalibrationProfile:
        """What was measured."""
        return self.model.profile

    def outcome(self, times: Times) -> Outcome:
        """What predicted times of settings amount to; a gain must exceed the model's error and eager's noise."""
        graph, eager = times[TUNED], times[EAGER]
        margin_pct = max(100.0 * (self.model.eager_spread or 0.0), self.error.both.median_pct or 0.0)
        gain_pct = (1.0 - self.objective.score(graph, eager)) * 100.0
        is_by_sum = "p99" not in self.objective.weights
        return Outcome(
            *(gain_pct, Kept.of(graph, eager), margin_pct, self.limits.most_slower, self.doubts),
            objective="" if is_by_sum else str(self.objective),
        )


@dataclass(frozen=True, slots=True)
class Tuned:
    """What was found for one target.

    Attributes:
        baselines: Evaluations of the automatic list and of the documented nine budgets, by name.
        plans: Plan and policy by name (`tuned`, `automatic`, `seed_nine`), for measuring them.
        times: Predicted times on the calls that are reported on.
        seen: The same on those that were searched on.
        outcome: What the former amount to.
    """

    search: Search
    result: SearchResult
    baselines: dict[str, ScoredSettings]
    plans: Plans
    times: Times
    seen: Times
    outcome: Outcome

    @property
    def cost(self) -> TargetCost:
        """Predicted times of the target."""
        return self.search.cost

    @property
    def best(self) -> ScoredSettings:
        """The winner."""
        assert self.result.best is not None
        return self.result.best


@dataclass(slots=True)
class Searched:
    """What was found for the calls of one workload.

    Attributes:
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
        return [self.calls[place] for place in self.split.reported]


def search_calls(task: TuneTask, calls: Sequence[EncoderCall], targets: Sequence[str]) -> Searched:
    """Finds the best settings of each target for some calls, and predicts them on those that it did not see.

    Raises:
        UsageError: Nothing is within the limits.
    """
    split = split_calls(len(calls), task.share, task.seed)
    everything = _traffic(calls, range(len(calls)))
    specs = [spec for distinct in everything.distinct for spec in distinct]
    axes = (axis.for_items(specs) for axis in task.profile.encoder.axes)
    facts = replace(task.profile.encoder, axes=tuple(axes))
    seen = _traffic(calls, sorted({place for part, _ in split.parts for place in part}))
    found, has_videos = {}, task.may_have_videos(everything.has_videos)
    for name in dict.fromkeys(targets):
        cost = TargetCost(task.model, TARGETS[name], DOUBT)
        rules = EngineRules(engine_tower(task.source), has_videos) if name == VLLM else None
        folds = [_search(task, cost, facts, rules, _traffic(calls, part), has_videos) for part, _ in split.parts]
        parts = zip(split.parts, folds, strict=True)
        times = _pooled(predicted_times(_traffic(calls, part), cost, plans) for (_, part), (*_, plans) in parts)
        seen_times = _pooled(predicted_times(search.traffic, cost, plans) for search, *_, plans in folds)
        whole = folds[0] if len(folds) == 1 else _search(task, cost, facts, rules, everything, has_videos)
        found[name] = Tuned(*whole, times, seen_times, task.outcome(times))
    return Searched(calls, split, found, _traffic(calls, split.reported), seen)


def _traffic(calls: Sequence[EncoderCall], places: Sequence[int]) -> Traffic:
    return Traffic([calls[place].specs for place in places], [len(calls[place].requests) for place in places])


def _pooled(parts: Iterable[Times]) -> Times:
    """The times of several held-out parts as one."""
    pooled = list(parts)
    return {name: np.concatenate([part[name] for part in pooled]) for name in pooled[0]}


def _search(
    task: TuneTask, cost: TargetCost, facts: EncoderFacts, rules: EngineRules | None, traffic: Traffic, has_videos: bool
) -> tuple[Search, SearchResult, dict[str, ScoredSettings], Plans]:
    """The winner on some traffic, and the lists that people use without tuning."""
    baselines = {
        AUTOMATIC: automatic_settings(cost.target, facts, task.max_call_tokens, has_videos),
        SEED_NINE: seed_settings(cost.target, facts, has_videos),
    }

    def search_within(limits: Limits) -> Search:
        return Search(
            *(traffic, cost, facts, task.objective, limits, task.max_call_tokens),
            rules=rules,
            has_video_graphs=has_videos,
        )

    search = search_within(task.limits)
    result = search.run(baselines.values())
    automatic = search.predict(baselines[AUTOMATIC])
    allowed = automatic.memory_bytes if automatic is not None else float("inf")
    if task.limits.max_memory_bytes is None and result.best is not None and result.best.memory_bytes > allowed:
        # Graphs must not take the memory that a server keeps for its requests, unless somebody says how much they may.
        search = search_within(replace(task.limits, max_memory_bytes=allowed))
        result = search.again(result.evaluated, baselines.values())
    if result.best is None:
        raise UsageError(f"no settings stay within the limits {search.limits}; raise one of them")
    evaluated = {name: search.predict(settings) for name, settings in baselines.items()}
    plans: dict[str, tuple[BudgetPlan, str]] = {}
    for name, settings in {TUNED: result.best.settings, **baselines}.items():
        try:
            plans[name] = make_plan(cost.target, facts, settings), settings.packing
        except BudgetError:
            continue
    return search, result, {name: found for name, found in evaluated.items() if found is not None}, plans
