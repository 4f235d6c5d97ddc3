"""How the items of calls would be shared among ranks: who encodes what, and what that leaves idle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vitgraph.models.registry import ModelSource
from vitgraph.planning.items import EncoderItemSpec
from vitgraph.predict.assignment import (
    Assigner,
    ShareByCost,
    assignment_effect,
    imbalance_of,
    input_loads,
    share_by_size,
)
from vitgraph.predict.cost_model import CostModel
from vitgraph.predict.find_profile import find_profile
from vitgraph.specs import BenchSpec

MOST_EFFECT_CALLS = 200
"""Calls, spread over the workload, on which both assignments are predicted."""


def choose_assigner(spec: BenchSpec, source: ModelSource) -> tuple[Assigner, CostModel | None]:
    """Who encodes what, by `--dp-assignment`, with the cost model behind it.

    Raises:
        UsageError: It goes by cost, and there is no calibration of the model.
    """
    if spec.parallel.assignment == "size":
        return share_by_size, None
    cost = CostModel(find_profile(spec.graph.calibration, source))
    return ShareByCost(cost), cost


def describe_sharing(
    calls: Sequence[Sequence[EncoderItemSpec]], ranks: int, assign: Assigner, cost: CostModel | None
) -> dict[str, Any]:
    """How the calls would be shared, for `--dry-run`: idle ranks, imbalance, and what assigning by cost changes."""
    shared = [assign(specs, ranks) for specs in calls]
    loads = [input_loads(specs, shares) for specs, shares in zip(calls, shared, strict=True)]
    chosen = calls[:: max(1, len(calls) // MOST_EFFECT_CALLS)][:MOST_EFFECT_CALLS]
    return {
        "ranks": ranks,
        "calls_with_idle_ranks": sum(not all(shares) for shares in shared),
        "input_imbalance": sum(imbalance_of(each) for each in loads) / len(loads) if loads else None,
        "by_cost": assignment_effect(chosen, ranks, cost) if cost is not None else None,
    }


def sharing_notes(described: Mapping[str, Any]) -> list[str]:
    """The description in words."""
    ranks, idle = described["ranks"], described["calls_with_idle_ranks"]
    notes = [f"{ranks} ranks share the items of each call; the heaviest has {described['input_imbalance']:.3f} times "
             "the mean of the pixel rows"]  # fmt: skip
    if idle:
        notes.append(f"{idle} calls have fewer items than ranks, so some ranks only take part in their gather")
    by_cost = described["by_cost"]
    if by_cost is not None:
        slowest, imbalance = by_cost["predicted_slowest_ms"], by_cost["predicted_imbalance"]
        notes.append(
            f"sharing by cost instead of size changes {by_cost['changed_calls']} of {by_cost['calls']} calls; "
            f"predicted slowest rank {slowest['size']:.3f} ms by size, {slowest['cost']:.3f} ms by cost (imbalance "
            f"{imbalance['size']:.3f} and {imbalance['cost']:.3f})"
        )
    return notes
