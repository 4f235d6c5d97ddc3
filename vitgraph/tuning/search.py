"""Searches budgets, items, frames and packing policy for the least predicted score within the limits.

With one item a call the best list is found exactly, by dynamic programming. With several, the packing depends on the
largest budget and the limits, so that each of these is tried with the list that is exact for the groups it makes.
Spaces that are small enough are tried in full. Settings that the engine cannot run are never evaluated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, combinations, product

import numpy as np

from vitgraph.errors import BudgetError, UsageError
from vitgraph.planning.budgets import BudgetSettings, generate_budgets, geometric_budgets
from vitgraph.planning.graph_tables import FloatArray, IntArray
from vitgraph.predict.engine_rules import EngineRules
from vitgraph.predict.fitting import spread
from vitgraph.predict.targets import OPTIMAL, SEED_BUDGETS, SEED_ITEMS, Target, TargetCost, make_plan
from vitgraph.predict.workload_cost import ReplayGroups, Traffic, eager_calls, predict_calls, replayed_groups
from vitgraph.records.calibrate_result import EncoderFacts
from vitgraph.tuning.budget_lists import MOST_GRAPHS, ListMaker, candidate_budgets
from vitgraph.tuning.objective import Kept, Limits, Objective, ScoredSettings, latency_of

EXHAUSTIVE_EVALUATIONS = 1500
SINGLE_ITEM_CANDIDATES = 384
CANDIDATES = 128
TOPS = 8
BEAM = 5
STARTS = 12
REPACKINGS = 4
TAIL_THRESHOLDS = 9
PARSIMONY = 0.002
"""Graphs that together gain less than this share of the score are not worth having."""

PARSIMONY_OF_GAIN = 0.01
"""Nor are those that gain less than this share of the gain over eager, which is the stricter where the gain is small.

It is small with several requests a call; with one, `PARSIMONY` is the stricter. On two towers' profiles, screenshots of
four requests a call were predicted to bring the median request 81 % of the way from the automatic list to the oracle at
0.02 and above, and 91 % at 0.01, of the 93 % that the manager's own time leaves. Elsewhere it moves the mean by less
than 1 % of the way, for up to 58 graphs more than at 0.05; memory stays below the automatic list's.
"""


@dataclass(slots=True)
class SearchResult:
    """What a search found.

    Attributes:
        best: The winner; None where nothing is within the limits.
        evaluated: Every evaluation within the limits, the best first; without a limit on graphs, those of up to
            `MOST_GRAPHS` where there are any.
        is_exhaustive: All settings of the space were tried.
        is_exact: The winner is the optimum over the candidates.
    """

    best: ScoredSettings | None
    evaluated: list[ScoredSettings]
    is_exhaustive: bool
    is_exact: bool
    evaluations: int


class Search:
    """One search over one workload for one target.

    Args:
        max_call_tokens: Largest budget allowed.
        rules: What the engine can run; None where everything can be captured.
        has_video_graphs: Whether a graph may hold videos; without, they are left to eager.
        parsimony: Share of the score up to which fewer graphs are preferred; 0 takes the least score.
    """

    def __init__(
        self,
        traffic: Traffic,
        cost: TargetCost,
        facts: EncoderFacts,
        objective: Objective,
        limits: Limits,
        max_call_tokens: int,
        *,
        rules: EngineRules | None = None,
        has_video_graphs: bool = True,
        parsimony: float = PARSIMONY,
    ) -> None:
        self.traffic, self.cost, self.facts, self.rules = traffic, cost, facts, rules
        self.objective, self.limits, self.parsimony = objective, limits, parsimony
        self.has_videos = has_video_graphs and traffic.has_videos
        self.low = min(spec.output_tokens for specs in traffic.distinct for spec in specs)
        self.high = max_call_tokens
        if self.high < self.low:
            raise UsageError(
                f"a call may hold {self.high} tokens, but the smallest item of the workload has {self.low}; raise "
                "--max-model-len and --max-num-batched-tokens"
            )
        self._known: dict[BudgetSettings, ScoredSettings | None] = {}
        self._most_graphs = limits.max_graphs or MOST_GRAPHS
        some_plan = make_plan(cost.target, facts, BudgetSettings((self.high,), 1, 0, cost.target.policies[0]))
        self._eager_calls = eager_calls(traffic, cost, some_plan)
        self.eager_ms = traffic.per_request(self._eager_calls)
        self._maker = ListMaker(cost, facts, limits, float(self.eager_ms.sum()))
        self.only: set[tuple[int, int]] | None = None
        # One, as many as the largest call has, and steps between.
        steps = (size for size in (2, 3, 4, 6, 8, 12, 16, 24, 32, 64) if size < traffic.max_items)
        self.item_options = sorted({1, traffic.max_items, *steps})
        if rules is not None:
            # A graph may need room for more items than a call has, for its buffers to have another shape.
            most = rules.least_items(min(self.high, traffic.max_tokens))
            self.item_options = sorted({*self.item_options, *range(1, most + 1)})

    @property
    def target(self) -> Target:
        """Whose manager the settings are for."""
        return self.cost.target

    def frame_options(self, items: int, largest: int) -> list[int]:
        """Frames to try with a limit of items and a largest budget: as many as the engine needs; without its rules 0,
        which leaves videos to eager, those of a median video, of the longest, and of the longest call.
        """
        if self.rules is not None:
            return [self.rules.least_frames(items, largest)]
        segments = [[spec.segments for spec in specs] for specs in self.traffic.distinct]
        single = [count for call in segments for count in call]
        most = {int(np.median(single)), max(single), max(map(sum, segments))} if self.has_videos else set()
        return sorted({0, *most})

    def high_for(self, items: int) -> int:
        """The largest budget that can be captured with that many items."""
        if self.rules is None:
            return self.high
        return min(self.high, self.rules.largest_budget(items, self.rules.least_frames(items, self.high)))

    def usable(self, candidates: IntArray, items: int) -> IntArray:
        """The candidates that a graph of that many items can have, each raised to what its buffers hold."""
        fitting = candidates[candidates >= items]
        if self.rules is None:
            return fitting
        raised = np.unique([self.rules.usable(int(budget), items) for budget in fitting]).astype(np.int64)
        return raised[raised <= self.high_for(items)]

    def evaluate(self, settings: BudgetSettings) -> ScoredSettings | None:
        """Evaluates settings once, as near to them as the engine can run; None where that is nowhere."""
        conforming = settings if self.rules is None else self.rules.conform(settings)
        return self.predict(conforming) if conforming is not None else None

    def predict(self, settings: BudgetSettings) -> ScoredSettings | None:
        """Evaluates settings once, whatever the engine makes of them; None where they contradict each other."""
        if settings not in self._known:
            self._known[settings] = self._evaluate(settings)
        return self._known[settings]

    def _evaluate(self, settings: BudgetSettings) -> ScoredSettings | None:
        if settings.max_items > settings.token_budgets[0]:
            return None
        try:
            plan = make_plan(self.target, self.facts, settings)
        except BudgetError:
            return None
        calls = predict_calls(self.traffic, self.cost, plan, settings.packing)
        times = self.traffic.per_request(calls)
        graphs, memory, capture = self.cost.graph_count(plan), self.cost.memory_bytes(plan), self.cost.capture_s(plan)
        return ScoredSettings(
            settings,
            self.objective.score(times, self.eager_ms),
            *self._losses(calls),
            latency_of(times),
            graphs,
            memory,
            capture,
            self.limits.allow(graphs, memory, capture),
        )

    def _losses(self, calls: FloatArray) -> tuple[float, float]:
        """`loss` and `excess`; a search that does not doubt its predictions takes them at their mean."""
        if not self.cost.doubt:
            return 0.0, 0.0
        doubted = self.traffic.per_request(self.cost.doubted_ms(calls, self._eager_calls))
        loss = np.maximum(doubted - self.eager_ms, 0.0).sum() / self.eager_ms.sum()
        return float(loss), Kept.of(doubted, self.eager_ms).excess(self.limits.most_slower)

    # -- running -------------------------------------------------------------------------------------------------------

    def run(self, seeds: Iterable[BudgetSettings] = ()) -> SearchResult:
        """Searches, starting from what it makes itself and from `seeds`."""
        candidates = self.all_candidates(CANDIDATES)
        choices = len(self.item_options) * len(self.frame_options(1, self.high)) * len(self.target.policies)
        is_small = ((1 << len(candidates)) - 1) * choices <= EXHAUSTIVE_EVALUATIONS
        return self.exhaustive(candidates, seeds) if is_small and not self.facts.is_multi_path else self.guided(seeds)

    def exhaustive(self, candidates: IntArray, seeds: Iterable[BudgetSettings] = ()) -> SearchResult:
        """Tries every list of the candidates with every limit and policy."""
        for settings in (*seeds, *self._all_settings(candidates)):
            self.evaluate(settings)
        return self._result(is_exhaustive=True, is_exact=True)

    def _all_settings(self, candidates: IntArray) -> Iterator[BudgetSettings]:
        for size in range(1, len(candidates) + 1):
            for budgets in combinations(candidates.tolist(), size):
                for items, policy in product(self.item_options, self.target.policies):
                    for frames in self.frame_options(items, budgets[-1]):
                        yield BudgetSettings(budgets, items, frames, policy)

    def again(self, better: Sequence[ScoredSettings], seeds: Iterable[BudgetSettings]) -> SearchResult:
        """Searches with other limits than an earlier search had, around what that one found to be good."""
        starts = dict.fromkeys((e.settings.max_items, e.settings.token_budgets[-1]) for e in better)
        self.only = set(list(starts)[:STARTS])
        return self.run(seeds)

    def guided(self, seeds: Iterable[BudgetSettings] = ()) -> SearchResult:
        """Exact lists for given packings."""
        for settings in (*seeds, *self._fixed_seeds()):
            self.evaluate(settings)
        if self.facts.is_multi_path:
            self._try_tops()
            return self._result(is_exhaustive=False, is_exact=False)
        if self.traffic.max_items == 1:
            self._try_single_items()
        else:
            self._try_packings()
        # Of one item a call, a score that is a sum over calls is optimised exactly.
        is_sum = self.traffic.max_items == 1 and "p99" not in self.objective.weights
        is_exact = is_sum and not self.limits.needs_penalty
        if not is_exact:
            # The packing of a list with more graphs than wanted is a good one to make a shorter list for.
            for start in self._allowed()[:BEAM]:
                self._repack(start)
            self._prune()
        return self._result(is_exhaustive=False, is_exact=is_exact)

    def _prune(self) -> None:
        """Tries the best settings, and the frugal ones, without the budgets that nothing is replayed on."""
        ranked = self._ranked()
        for found in [*ranked[:BEAM], self._frugal(ranked)] if ranked else []:
            groups = self._groups(found.settings)
            if groups is None:
                continue
            budgets = np.array(found.settings.token_budgets)
            places = np.unique(np.searchsorted(budgets, groups.tokens))
            self.evaluate(replace(found.settings, token_budgets=tuple(int(budget) for budget in budgets[places])))

    def _result(self, *, is_exhaustive: bool, is_exact: bool) -> SearchResult:
        ranked = self._ranked()
        best = self._frugal(ranked) if ranked else None
        return SearchResult(best, ranked, is_exhaustive, is_exact, len(self._known))

    def _allowed(self) -> list[ScoredSettings]:
        found = [evaluation for evaluation in self._known.values() if evaluation is not None and evaluation.is_allowed]
        return sorted(found, key=lambda e: (*e.order, e.graphs, self._plainness(e), e.settings.max_items))

    def _plainness(self, found: ScoredSettings) -> int:
        """Place of the policy among those of the target, the simplest first."""
        return self.target.policies.index(found.settings.packing)

    def _ranked(self) -> list[ScoredSettings]:
        """Without those of so many graphs that they take minutes to capture, where there are others."""
        allowed = self._allowed()
        return [evaluation for evaluation in allowed if evaluation.graphs <= self._most_graphs] or allowed

    def _frugal(self, ranked: list[ScoredSettings]) -> ScoredSettings:
        """The fewest graphs, and of equal ones the simplest policy, that lose next to nothing to the best."""
        best = ranked[0]
        gain = 1.0 - best.rank
        slack = min(self.parsimony * best.rank, PARSIMONY_OF_GAIN * gain if gain > 0 else np.inf)
        alike = [e for e in ranked if e.order[0] == best.order[0]]
        near = [e for e in alike if e.rank <= best.rank + slack] if self.parsimony else [best]
        return min(near, key=lambda e: (e.graphs, self._plainness(e), e.rank))

    # -- lists ---------------------------------------------------------------------------------------------------------

    def all_candidates(self, most: int) -> IntArray:
        """Budgets worth considering: sizes of items, and of calls that fit."""
        counts: Counter[int] = Counter()
        for specs, count in zip(self.traffic.distinct, self.traffic.counts.tolist(), strict=True):
            tokens = [spec.output_tokens for spec in specs]
            counts.update(dict.fromkeys({*tokens, *accumulate(tokens)}, count))
        return candidate_budgets(np.array(list(counts)), np.array(list(counts.values()), float), self.high, most)

    def _fixed_seeds(self) -> Iterator[BudgetSettings]:
        lists = [
            tuple(generate_budgets(self.low, self.high)),
            tuple(budget for budget in SEED_BUDGETS if self.low <= budget <= self.high),
            tuple(geometric_budgets(self.low, min(self.high, max(self.low, self.traffic.max_tokens)), 1.25)),
        ]
        for budgets, items, policy in product(filter(None, lists), self.item_options, self.target.policies):
            for frames in self.frame_options(items, budgets[-1]):
                yield BudgetSettings(budgets, min(items, SEED_ITEMS, budgets[0]), frames, policy)

    def _groups(self, settings: BudgetSettings) -> ReplayGroups | None:
        plan = make_plan(self.target, self.facts, settings)
        groups = replayed_groups(self.traffic, self.cost, plan, settings.packing)
        return groups if len(groups.counts) else None

    def _lists(self, groups: ReplayGroups | None, settings: BudgetSettings, keep: int) -> list[BudgetSettings]:
        """Exact lists for groups that a packing has made, as settings that are otherwise the same."""
        candidates = self._candidates_for(groups, settings, CANDIDATES)
        if groups is None or not len(candidates):
            return []
        lists = self._maker.make(groups, candidates, settings, keep=keep)
        return [replace(settings, token_budgets=budgets) for budgets in lists]

    def _candidates_for(self, groups: ReplayGroups | None, settings: BudgetSettings, most: int) -> IntArray:
        if groups is None:
            return np.zeros(0, dtype=np.int64)
        found = candidate_budgets(groups.tokens, groups.counts, settings.token_budgets[-1], most)
        return self.usable(found, settings.max_items)

    # -- one item a call -----------------------------------------------------------------------------------------------

    def _try_single_items(self) -> None:
        """Exact lists, with and without the choice of eager below the largest budget."""
        for items in self.item_options:
            for frames in self.frame_options(items, self.high_for(items)):
                for policies in ([name for name in self.target.policies if name != OPTIMAL], [OPTIMAL]):
                    if set(policies) <= set(self.target.policies):
                        self._try_single(BudgetSettings((self.high_for(items),), items, frames, "greedy"), policies)

    def _try_single(self, settings: BudgetSettings, policies: Sequence[str]) -> None:
        groups = self._groups(settings)
        candidates = self._candidates_for(groups, settings, SINGLE_ITEM_CANDIDATES)
        if groups is None or not len(candidates):
            return
        settings = replace(settings, packing=policies[-1])
        lists = self._maker.make(groups, candidates, settings, above=groups.eager_ms)
        if "p99" in self.objective.weights:
            # The fewest requests above a threshold of latency, for thresholds up to eager's P99.
            for threshold in np.percentile(self.eager_ms, 99) * np.linspace(0.4, 1.0, TAIL_THRESHOLDS):
                lists += self._maker.make(
                    groups, candidates, settings, above=groups.eager_ms, threshold=float(threshold), keep=8
                )
        for budgets, policy in product(lists, policies):
            self.evaluate(replace(settings, token_budgets=budgets, packing=policy))

    # -- several items a call ------------------------------------------------------------------------------------------

    def _try_packings(self) -> None:
        found = self.all_candidates(CANDIDATES)
        for items in self.item_options:
            candidates = self.usable(found, items)
            tops = spread(candidates.tolist(), TOPS) if self.only is None else [t for i, t in self.only if i == items]
            for top in tops:
                for frames in self.frame_options(items, top):
                    self._try_packing(BudgetSettings((top,), items, frames, "greedy"), candidates)

    def _try_packing(self, settings: BudgetSettings, candidates: IntArray) -> None:
        groups = self._groups(settings)
        if groups is None:
            return
        # Where the packing itself depends on the list, the densest one is a good place to prune from.
        densest = tuple(candidates[candidates <= settings.token_budgets[-1]].tolist())
        found = [*self._lists(groups, settings, 3), *([replace(settings, token_budgets=densest)] if densest else [])]
        for tried, policy in product(found, self.target.policies):
            self.evaluate(replace(tried, packing=policy))

    def _try_tops(self) -> None:
        """Paths have lists of their own, made from the largest budget alone."""
        tops = spread(self.all_candidates(CANDIDATES).tolist(), TOPS)
        for top, items, policy in product(tops, self.item_options, self.target.policies):
            for frames in self.frame_options(items, top):
                self.evaluate(BudgetSettings((top,), items, frames, policy))

    def _repack(self, current: ScoredSettings) -> None:
        """Alternates: pack with the list, take the exact list for that packing, until nothing improves."""
        for _ in range(REPACKINGS):
            tried = map(self.evaluate, self._lists(self._groups(current.settings), current.settings, 4))
            most = max(self._most_graphs, current.graphs)
            better = [
                e for e in tried if e is not None and e.is_allowed and e.graphs <= most and e.order < current.order
            ]
            if not better:
                return
            current = min(better, key=lambda e: e.order)
