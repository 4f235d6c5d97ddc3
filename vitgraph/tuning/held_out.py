"""Calls that a search has not seen: how a workload is split, and what settings are predicted to do with the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from vitgraph.errors import UsageError
from vitgraph.planning.budgets import BudgetPlan
from vitgraph.planning.graph_tables import FloatArray
from vitgraph.planning.optimal import EXACT_ITEMS
from vitgraph.predict.targets import TargetCost
from vitgraph.predict.traffic import Traffic
from vitgraph.predict.workload_cost import eager_calls, oracle_calls, predict_calls
from vitgraph.tuning.verdict import EAGER, ORACLE, TUNED

SPLIT: Final = "split"
CROSS_VALIDATED: Final = "cross-validation"
SEEN: Final = "none"
Method = Literal["split", "cross-validation", "none"]

FEW_CALLS = 64
"""Below this many calls half of them would say too little: every call is held out once instead."""

FOLDS = 4
FEWEST_CALLS = 2 * FOLDS
DEFAULT_SHARE = 0.5

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
        seed: Seed of the choice.
    """

    method: Method
    parts: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    share: float
    seed: int

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


def split_calls(calls: int, share: float = DEFAULT_SHARE, seed: int = 0) -> Split:
    """Splits calls at random.

    Args:
        calls: How many there are.
        share: Share to search on; 1 holds none back.
        seed: Seed of the choice.

    Raises:
        UsageError: The share is not above 0 and at most 1.
    """
    if not 0.0 < share <= 1.0:
        raise UsageError(f"--search-share is {share}; it must be above 0 and at most 1, which holds no calls back")
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


def pooled(parts: Sequence[Times]) -> Times:
    """The times of several held-out parts as one."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
