"""Shares the items of one encoder call among data-parallel ranks by their size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankAssignment:
    """Which items each rank encodes.

    Attributes:
        order: Item indices, rank by rank; inverting it restores the input order after the gather.
        items_per_rank: How many of `order` belong to each rank.
        size_per_rank: Summed input size of each rank's items.
    """

    order: tuple[int, ...]
    items_per_rank: tuple[int, ...]
    size_per_rank: tuple[int, ...]


def assign_load_balanced(sizes: Sequence[int], ranks: int) -> RankAssignment:
    """Gives the items, largest first, each to the rank with the least size so far (ties: the lowest rank)."""
    loads = [0] * ranks
    members: list[list[int]] = [[] for _ in range(ranks)]
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        rank = loads.index(min(loads))
        members[rank].append(index)
        loads[rank] += sizes[index]
    return RankAssignment(
        order=tuple(index for rank in members for index in rank),
        items_per_rank=tuple(len(rank) for rank in members),
        size_per_rank=tuple(loads),
    )
