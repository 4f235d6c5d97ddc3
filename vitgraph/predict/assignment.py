"""Which rank encodes which items of a call: by input size, or by predicted latency. Pure arithmetic, no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vitgraph.planning.budgets import EncoderItemSpec
from vitgraph.predict.cost_model import CostModel, item_features

_NANOSECONDS_PER_MS = 1e6

Shares = tuple[tuple[int, ...], ...]
"""Item indices of each rank, ascending; every item of the call is in exactly one share, and a share may be empty."""

Assigner = Callable[[Sequence[EncoderItemSpec], int], Shares]
"""From the items of a call and the number of ranks to their shares; the same on every rank."""


def share_by_size(specs: Sequence[EncoderItemSpec], ranks: int) -> Shares:
    """Largest input first, each to the rank with the fewest pixel rows so far, as vLLM does."""
    return assign_load_balanced([spec.input_size for spec in specs], ranks)


def share_by_cost(model: CostModel, specs: Sequence[EncoderItemSpec], ranks: int) -> Shares:
    """Longest predicted latency first, each to the rank with the least so far."""
    costs = predicted_item_ms(model, specs, ranks)
    return assign_load_balanced([round(cost * _NANOSECONDS_PER_MS) for cost in costs], ranks)


def assign_load_balanced(sizes: Sequence[int], ranks: int) -> Shares:
    """Gives the items, largest first, each to the rank with the least size so far (ties: the lowest rank)."""
    loads = [0] * ranks
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        rank = loads.index(min(loads))
        shares[rank].append(index)
        loads[rank] += sizes[index]
    # Pixels of neighbouring items are copied in one piece, so a share keeps the input order.
    return tuple(tuple(sorted(share)) for share in shares)


def predicted_item_ms(model: CostModel, specs: Sequence[EncoderItemSpec], ranks: int) -> list[float]:
    """What each item adds to the latency of a rank, in milliseconds.

    An item alone is mostly launch and idle hardware, so it is priced in company: as its part of a rank that encodes
    nothing but items like it, as many as make an even share of the call.
    """
    if not specs:
        return []
    tokens = np.array([spec.output_tokens for spec in specs], dtype=np.float64)
    copies = np.maximum(tokens.sum() / ranks / np.maximum(tokens, 1.0), 1.0)
    features = {path: item_features(specs, path) * copies[:, None] for path in model.replay}
    return [float(cost) for cost in model.exact_calls_ms(features) / copies]


def predicted_rank_ms(model: CostModel, specs: Sequence[EncoderItemSpec], shares: Shares) -> list[float]:
    """Predicted time of each rank's share in graphs of exactly its size; 0 for an empty one."""
    features = {path: item_features(specs, path) for path in model.replay}
    totals = {path: np.array([rows[list(share)].sum(axis=0) for share in shares]) for path, rows in features.items()}
    return [float(cost) for cost in model.exact_calls_ms(totals)]


def assignment_effect(
    calls: Sequence[Sequence[EncoderItemSpec]], ranks: int, model: CostModel
) -> dict[str, Any] | None:
    """What assigning by cost changes on some calls, as predicted; None where there are no calls.

    Returns:
        `calls`, `changed_calls` in which some rank gets other items, and means over the calls by `size` and by `cost`:
        `predicted_slowest_ms`, the slowest rank's time; `predicted_imbalance`, that over the ranks' mean; and
        `input_imbalance`, the same of their pixel rows.
    """
    if not calls:
        return None
    shared = [(share_by_size(specs, ranks), share_by_cost(model, specs, ranks)) for specs in calls]
    times = [
        [predicted_rank_ms(model, specs, shares) for shares in both] for specs, both in zip(calls, shared, strict=True)
    ]
    loads = [[input_loads(specs, shares) for shares in both] for specs, both in zip(calls, shared, strict=True)]

    def means(
        found: Sequence[Sequence[Sequence[float]]], figure: Callable[[Sequence[float]], float]
    ) -> dict[str, float]:
        size, cost = np.mean([[figure(each) for each in both] for both in found], axis=0)
        return {"size": float(size), "cost": float(cost)}

    return {
        "calls": len(calls),
        "changed_calls": sum(sorted(size) != sorted(cost) for size, cost in shared),
        "predicted_slowest_ms": means(times, max),
        "predicted_imbalance": means(times, imbalance_of),
        "input_imbalance": means(loads, imbalance_of),
    }


def input_loads(specs: Sequence[EncoderItemSpec], shares: Shares) -> list[int]:
    """Pixel rows of each rank's share."""
    return [sum(specs[index].input_size for index in share) for share in shares]


def imbalance_of(loads: Sequence[float]) -> float:
    """Largest load over the mean; 1 is even, and the number of ranks is the most."""
    total = sum(loads)
    return max(loads) * len(loads) / total if total else 1.0
