"""What decides how long an attention call takes, and which few calls stand for many."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from vitgraph.attention.base import Lengths


class CallShape(NamedTuple):
    """What of a varlen call decides how long it takes.

    Attributes:
        rows: Packed rows.
        slots: Segment slots.
        longest: Upper bound of the segment lengths, in rows.
        is_graph: In a graph the slots and the bound are capacities, of which a replay may use any part.
    """

    rows: int
    slots: int
    longest: int
    is_graph: bool

    @property
    def bucket(self) -> CallShape:
        """The shape whose timing stands for this one: half powers of two, whole ones for slots; a graph's own."""
        if self.is_graph:
            return self
        longest = _half_power(min(self.longest, self.rows))
        return CallShape(max(longest, _half_power(self.rows)), 1 << (self.slots - 1).bit_length(), longest, False)

    def distance(self, other: CallShape) -> float:
        """How far apart two shapes are; lengths decide most, and graphs stand for graphs."""
        parts = zip(self[:3], other[:3], (1.0, 0.5, 2.0), strict=True)
        return sum(weight * abs(math.log2(max(a, 1) / max(b, 1))) for a, b, weight in parts) + (
            4.0 if self.is_graph != other.is_graph else 0.0
        )


def _half_power(value: int) -> int:
    return round(2 ** (math.ceil(2 * math.log2(max(value, 1)) - 1e-9) / 2))


def typical(contents: Mapping[Lengths, int], most: int) -> dict[Lengths, int]:
    """At most `most` of the contents, each with the number of calls that it stands for.

    In the order of their work, a group of equal size is each represented by its middle.
    """
    ordered = sorted(contents.items(), key=lambda pair: (sum(length * length for length in pair[0]), pair[0]))
    total, seen = sum(contents.values()), 0
    groups: list[list[tuple[Lengths, int]]] = [[] for _ in range(most)]
    for lengths, count in ordered:
        groups[min(most - 1, (2 * seen + count) * most // (2 * total))].append((lengths, count))
        seen += count
    found: Counter[Lengths] = Counter()
    for group in filter(None, groups):
        half, seen = sum(count for _, count in group) / 2, 0
        for lengths, count in group:
            seen += count
            if seen >= half:
                found[lengths] += sum(count for _, count in group)
                break
    return found


def likely_lengths(rows: int, slots: int, longest: int) -> tuple[int, ...]:
    """Segments of a call that is known by its rows, their number and the longest: the others share the rest evenly."""
    longest = max(1, min(longest, rows))
    rest, others = rows - longest, max(slots - 1, 0)
    if not others or rest <= 0:
        return (longest,)
    count = min(others, rest)
    return (longest, *([rest // count] * count))
