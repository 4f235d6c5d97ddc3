"""Budget lists for the groups that a packing has made, at a target's predicted costs and within the limits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from vitgraph.planning.budgets import BudgetPlan
from vitgraph.planning.graph_tables import FloatArray, IntArray, graph_tables
from vitgraph.planning.items import DEFAULT_PATH
from vitgraph.predict.targets import OPTIMAL, Settings, TargetCost, make_plan
from vitgraph.predict.workload_cost import ReplayGroups
from vitgraph.records.kinds.calibrate import EncoderFacts
from vitgraph.tuning.budget_lists import BudgetList, ListProblem, best_lists
from vitgraph.tuning.objective import SLOWER_THRESHOLD, Limits

MOST_GRAPHS = 96
"""Graphs that a list may have where no limit is given: about ten seconds of capture on a large GPU."""

SLOWER_PRICE = 0.1
"""Share of its eager time that a call is priced at where it becomes slower than eager: few may."""

LIMIT_PRICES = (0.003, 0.03, 0.3)
"""Shares of eager's time that a whole memory or capture limit is priced at, to make lists that stay within it."""


class ListMaker:
    """Makes the best lists for given groups.

    Args:
        cost: Predicted times of the target.
        facts: The encoder.
        limits: What to stay within.
        eager_total_ms: Predicted eager time of the whole workload.
    """

    def __init__(self, cost: TargetCost, facts: EncoderFacts, limits: Limits, eager_total_ms: float) -> None:
        self.cost, self.facts, self.limits, self.eager_total_ms = cost, facts, limits, eager_total_ms

    def make(
        self,
        groups: ReplayGroups,
        candidates: IntArray,
        settings: Settings,
        *,
        above: FloatArray | None = None,
        threshold: float | None = None,
        keep: int | None = None,
    ) -> list[BudgetList]:
        """The best lists, by number of graphs, for groups that a packing has made.

        Args:
            groups: What is replayed.
            candidates: Budgets to choose from.
            settings: Items, frames and policy.
            above: Cost of each group that no budget holds; None where each needs one.
            threshold: Counts the groups above this latency first, and their latency second.
            keep: Lists to return at most for each price of the limits.
        """
        base = make_plan(
            self.cost.target, self.facts, replace(settings, token_budgets=tuple(int(c) for c in candidates))
        )
        axis_keys = len(graph_tables(base).axis_keys)
        graphs = np.array([len(base.slot_tiers[DEFAULT_PATH, int(c)]) for c in candidates]) * axis_keys
        costs = self._group_costs(groups, candidates, base)
        eager = groups.eager_ms[:, None]
        if settings.packing == OPTIMAL:
            costs = np.where(costs * (1.0 + self.cost.doubt) < eager, costs, eager)
        else:
            costs = costs + self._losses(costs, eager)
        weights = groups.counts
        tails = np.full(len(weights), np.inf) if above is None else above
        if threshold is not None:
            most_ms = self.eager_total_ms
            costs, tails = costs + most_ms * (costs > threshold), tails + most_ms * (tails > threshold)
        tails = tails * weights
        problem = ListProblem(candidates, groups.tokens, costs * weights[:, None], tails, graphs, np.zeros(len(graphs)))
        most = min(self.limits.max_graphs or MOST_GRAPHS, int(graphs.sum()))
        found = []
        for price in (0.0, *LIMIT_PRICES) if self.limits.needs_penalty else (0.0,):
            found += best_lists(replace(problem, prices=self._prices(candidates, graphs, price)), most, keep)
        return found

    def _losses(self, costs: FloatArray, eager: FloatArray) -> FloatArray:
        """What each group may lose to eager, and a price for each that becomes slower by more than what counts."""
        if not self.cost.doubt:
            return np.zeros(())
        doubted = costs * (1.0 + self.cost.doubt)
        slower = doubted > eager * (1.0 + SLOWER_THRESHOLD)
        return np.maximum(doubted - eager, 0.0) + np.where(slower, SLOWER_PRICE * eager, 0.0)

    def _prices(self, candidates: IntArray, graphs: IntArray, price: float) -> FloatArray:
        """What each candidate takes of the memory and of the capture time allowed, as a share of eager's time."""
        shares = np.zeros(len(candidates))
        if self.limits.max_capture_s is not None:
            shares += self.cost.model.capture_ms(candidates) * graphs / 1e3 / self.limits.max_capture_s
        if self.limits.max_memory_bytes is not None:
            own = [self.cost.model.separate_bytes(np.array([budget])) for budget in candidates]
            shares += np.array(own) / self.limits.max_memory_bytes
        return shares * price * self.eager_total_ms

    def _group_costs(self, groups: ReplayGroups, candidates: IntArray, plan: BudgetPlan) -> FloatArray:
        """Cost `[groups, candidates]` of replaying each group on each candidate, as if no smaller one existed."""
        tables = graph_tables(plan)
        slots = tables.slots_of(DEFAULT_PATH, groups.segments)
        axis = tables.axis_index(groups.needs)[:, None]
        total = np.full((len(groups.segments), len(candidates)), np.inf)
        for index, key in enumerate(tables.axis_keys):
            times = self.cost.group_ms(DEFAULT_PATH, key, candidates, slots, groups.features[:, None, :])
            total = np.where(axis == index, times, total)
        return np.where(slots > 0, total, np.inf)
