"""The budget-list programme against trying every list."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest

from vitgraph.tuning.budget_lists import BudgetList, ListProblem, best_lists, candidate_budgets


def every_list(problem: ListProblem, most_graphs: int) -> float:
    """The least cost of any list with at most `most_graphs` graphs."""
    best = np.inf
    places = range(len(problem.candidates))
    for size in range(1, len(problem.candidates) + 1):
        for chosen in combinations(places, size):
            if sum(problem.graphs[place] for place in chosen) > most_graphs:
                continue
            total = sum(problem.prices[place] for place in chosen)
            for row, tokens in enumerate(problem.tokens):
                place = next((place for place in chosen if problem.candidates[place] >= tokens), None)
                total += problem.above[row] if place is None else problem.costs[row, place]
            best = min(best, float(total))
    return best


def random_problem(seed: int, *, may_miss: bool = True) -> ListProblem:
    rng = np.random.default_rng(seed)
    candidates = np.unique(rng.integers(10, 200, size=7))
    tokens = rng.integers(5, 220 if may_miss else int(candidates[-1]), size=12)
    costs = rng.uniform(1, 2, size=(12, 1)) + candidates * rng.uniform(0.01, 0.1)
    above = rng.uniform(2, 15, size=12) if may_miss else np.full(12, np.inf)
    prices = rng.uniform(0, 3, size=len(candidates))
    return ListProblem(candidates, tokens, costs, above, rng.integers(1, 4, size=len(candidates)), prices)


@pytest.mark.parametrize("may_miss", [True, False])
def test_equals_trying_every_list(may_miss: bool) -> None:
    for seed in range(60):
        problem = random_problem(seed, may_miss=may_miss)
        found = best_lists(problem, 12)
        for most in (3, 5, 8, 12):
            least = min((entry.cost for entry in found if entry.graphs <= most), default=np.inf)
            assert least == pytest.approx(every_list(problem, most))


def test_lists_cost_what_they_say_and_get_better_with_every_graph() -> None:
    problem = random_problem(3)
    found = best_lists(problem, 12)
    assert all(better.cost < worse.cost for worse, better in pairwise(found))
    for entry in found:
        places = np.searchsorted(problem.candidates, entry.budgets)
        assert entry.graphs == problem.graphs[places].sum()


def test_one_budget_serves_all_where_a_second_saves_nothing() -> None:
    problem = ListProblem(
        np.array([10, 20]), np.array([10, 20]), np.ones((2, 2)), np.full(2, 9.0), np.array([1, 1]), np.zeros(2)
    )
    assert best_lists(problem, 2) == [BudgetList((20,), 2.0, 1)]


def test_largest_budget_may_stop_short_of_the_largest_group() -> None:
    """What eager does better is left above the list."""
    costs = np.array([[1.0, 1.0], [9.0, 30.0]])
    problem = ListProblem(
        np.array([10, 100]), np.array([10, 100]), costs, np.array([5.0, 8.0]), np.array([1, 1]), np.zeros(2)
    )
    assert best_lists(problem, 2) == [BudgetList((10,), 9.0, 1)]


def test_candidates_are_the_sizes_below_the_limit() -> None:
    found = candidate_budgets(np.array([300, 64, 64, 900]), np.ones(4), high=500, most=10)
    assert found.tolist() == [64, 300]


def test_candidates_keep_the_largest_and_the_frequent_where_there_are_too_many() -> None:
    sizes = np.arange(64, 1064)
    counts = np.where(sizes == 577, 1e6, 1.0)
    found = candidate_budgets(sizes, counts, high=5000, most=20)
    assert len(found) <= 20
    assert {577, 1063} <= set(found.tolist())
    assert max(np.diff(found) / found[:-1]) < 0.5
