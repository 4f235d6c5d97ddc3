"""The budget list that serves given groups of items best: candidates, and an exact dynamic programme over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vitgraph.planning.graph_tables import FloatArray, IntArray
from vitgraph.predict.fitting import spread


def candidate_budgets(tokens: IntArray, counts: FloatArray, high: int, most: int) -> IntArray:
    """Budgets worth considering for groups of those sizes, ascending: the sizes themselves.

    Between two sizes a budget only adds padding. Where there are too many, half of those kept share the traffic
    evenly, and half the range of sizes, so that rare sizes are not left with a budget far above them.

    Args:
        tokens: Output rows of each group.
        counts: How often each occurs.
        high: Largest budget allowed.
        most: How many to return at most.
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


def geometric_budgets(low: int, high: int, ratio: float) -> tuple[int, ...]:
    """Budgets from `low` to `high` in steps of about `ratio`, a seed for the search."""
    budgets = [low]
    while budgets[-1] < high:
        budgets.append(min(high, max(budgets[-1] + 1, round(budgets[-1] * ratio))))
    return tuple(budgets)


def is_subset_space_small(candidates: Sequence[int] | IntArray, combinations: int, most: int) -> bool:
    """Whether all lists of the candidates, times other choices, are few enough to try every one."""
    return len(candidates) < 24 and ((1 << len(candidates)) - 1) * combinations <= most
