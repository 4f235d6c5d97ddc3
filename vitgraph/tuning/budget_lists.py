"""Budget lists that serve given groups of items best: candidates, an exact dynamic programme, and what it weighs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from vitgraph.planning.budgets import DEFAULT_PATH, BudgetPlan, BudgetSettings
from vitgraph.planning.graph_tables import FloatArray, IntArray, graph_tables
from vitgraph.predict.fitting import spread
from vitgraph.predict.targets import OPTIMAL, TargetCost, make_plan
from vitgraph.predict.workload_cost import ReplayGroups
from vitgraph.records.calibrate_result import EncoderFacts
from vitgraph.tuning.objective import SLOWER_THRESHOLD, Limits

MOST_GRAPHS = 96
"""Graphs that a list may have where no limit is given: about ten seconds of capture on a large GPU."""

SLOWER_PRICE = 0.1
"""Share of its eager time that a call is priced at where it becomes slower than eager: few may."""

LIMIT_PRICES = (0.003, 0.03, 0.3)
"""Shares of eager's time that a whole memory or capture limit is priced at, to make lists that stay within it."""


def candidate_budgets(tokens: IntArray, counts: FloatArray, high: int, most: int) -> IntArray:
    """Budgets worth considering for groups of those sizes, ascending: the sizes themselves.

    Between two sizes a budget only adds padding. Where there are too many, half of those kept share the traffic
    evenly, and half the range of sizes, so that rare sizes are not left with a budget far above them.

    Args:
        tokens: Output rows of each group.
        counts: How often each occurs.
    """
    inside = tokens <= high
    sizes, places = np.unique(tokens[inside], return_inverse=True)
    if len(sizes) <= most:
        return sizes.astype(np.int64)
    shares = np.cumsum(np.bincount(places, weights=counts[inside]))
    half = most // 2
    by_traffic = np.searchsorted(shares, np.linspace(0, shares[-1], half + 1)[1:] * (1 - 1e-12))
    by_size = np.searchsorted(sizes, np.geomspace(sizes[0], sizes[-1], most - half) * (1 - 1e-9))
    kept = np.minimum(np.concatenate([by_traffic, by_size]), len(sizes) - 1)
    return sizes[np.unique(kept)].astype(np.int64)


@dataclass(slots=True)
class ListProblem:
    """Groups to serve with some of the candidates, each by the smallest that holds it.

    Attributes:
        candidates: Ascending budgets.
        tokens: Rows of each group.
        costs: Cost `[groups, candidates]` of serving a group with a budget; only those that hold it are read.
        above: Cost `[groups]` of a group that no chosen budget holds; infinite where that is not allowed.
        graphs: Graphs that each candidate takes.
        prices: What choosing each candidate costs by itself.
    """

    candidates: IntArray
    tokens: IntArray
    costs: FloatArray
    above: FloatArray
    graphs: IntArray
    prices: FloatArray


@dataclass(frozen=True, slots=True)
class BudgetList:
    """A list with its summed cost and the graphs that it takes."""

    budgets: tuple[int, ...]
    cost: float
    graphs: int


def best_lists(problem: ListProblem, most_graphs: int, keep: int | None = None) -> list[BudgetList]:
    """For every number of graphs up to `most_graphs` the list with the least summed cost, exactly.

    Only numbers for which a list is better than all shorter ones are returned, and of these at most `keep`, evenly. The
    programme runs over the candidates in ascending order; its state is the last budget chosen and the graphs used.
    """
    spans = _span_costs(problem)
    places, graphs = len(problem.candidates), problem.graphs
    best = np.full((most_graphs + 1, places), np.inf)
    came_from = np.full((most_graphs + 1, places), -1, dtype=np.int64)
    for used in range(1, most_graphs + 1):
        for size in np.unique(graphs):
            columns = np.flatnonzero(graphs == size)
            if size > used:
                continue
            if size == used:
                best[used, columns] = spans[0, columns]
                continue
            options = best[used - size][:, None] + spans[1:, columns]
            rows = options.argmin(axis=0)
            best[used, columns] = options[rows, np.arange(len(columns))]
            came_from[used, columns] = rows
    tails = np.array([problem.above[problem.tokens > budget].sum() for budget in problem.candidates])
    found: list[tuple[int, int, float]] = []
    least = np.inf
    for used in range(1, most_graphs + 1):
        totals = best[used] + tails
        last = int(np.argmin(totals))
        if totals[last] < least:
            least = float(totals[last])
            found.append((used, last, least))
    kept = found if keep is None else spread(found, keep)
    return [BudgetList(_trace(problem, came_from, used, last), cost, used) for used, last, cost in kept]


def _span_costs(problem: ListProblem) -> FloatArray:
    """`[i, j]`: cost of the groups above candidate i - 1 (all, for i = 0) and up to candidate j, served by j."""
    candidates, count = problem.candidates, len(problem.candidates)
    bins = np.searchsorted(candidates, problem.tokens)
    in_bin = np.zeros((count + 1, count))
    np.add.at(in_bin, bins, np.where(problem.tokens[:, None] <= candidates, problem.costs, 0.0))
    # Sums up to and including bin j of what j serves, less those up to and including bin i - 1.
    upto = np.cumsum(in_bin[:count], axis=0)
    served = upto[np.arange(count), np.arange(count)]
    before = np.concatenate([np.zeros((1, count)), upto[:-1]])
    spans = served - before + problem.prices
    first, last = np.meshgrid(np.arange(count), np.arange(count), indexing="ij")
    return np.concatenate([np.where(first <= last, spans, np.inf), np.full((1, count), np.inf)])


def _trace(problem: ListProblem, came_from: IntArray, used: int, last: int) -> tuple[int, ...]:
    budgets = [int(problem.candidates[last])]
    while came_from[used, last] >= 0:
        previous = int(came_from[used, last])
        used -= int(problem.graphs[last])
        last = previous
        budgets.append(int(problem.candidates[last]))
    return tuple(reversed(budgets))


class ListMaker:
    """Makes the best lists for given groups."""

    def __init__(self, cost: TargetCost, facts: EncoderFacts, limits: Limits, eager_total_ms: float) -> None:
        self.cost, self.facts, self.limits, self.eager_total_ms = cost, facts, limits, eager_total_ms

    def make(
        self,
        groups: ReplayGroups,
        candidates: IntArray,
        settings: BudgetSettings,
        *,
        above: FloatArray | None = None,
        threshold: float | None = None,
        keep: int | None = None,
    ) -> list[tuple[int, ...]]:
        """The best lists, by number of graphs, for groups that a packing has made.

        Args:
            above: Cost of each group that no budget holds; None where each needs one.
            threshold: Counts the groups above this latency first, and their latency second.
            keep: Lists to return at most for each price of the limits.
        """
        base = make_plan(self.cost.target, self.facts, replace(settings, token_budgets=tuple(candidates.tolist())))
        graphs = len(base.axis_keys) * np.array([len(tiers) for tiers in base.slot_tiers.values()])
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
        prices = (0.0, *LIMIT_PRICES) if self.limits.needs_penalty else (0.0,)
        return [
            found.budgets
            for price in prices
            for found in best_lists(replace(problem, prices=self._prices(candidates, graphs, price)), most, keep)
        ]

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
