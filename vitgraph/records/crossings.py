"""Where one attention backend overtakes another, from the times of attention alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Literal

from vitgraph.records.kinds.micro import Crossing, MicroRow

CLEAR = 1.02
"""A backend stays the fastest until another is faster by so much: less is within the noise of these timings."""

_SWEPT = {"length": ("segments", "segment_length"), "slots": ("segment_length", "slots")}
"""What is kept, and what is varied, by sweep."""


def crossings(rows: Sequence[MicroRow]) -> tuple[Crossing, ...]:
    """The sizes at which the fastest backend changes, in the order of the rows.

    Between the two measured sizes that it lies between, the times are taken for powers of the size.
    """
    sweeps: dict[tuple[Literal["length", "slots"], int], dict[int, dict[str, float]]] = {}
    for row in rows:
        if row.sweep is not None and row.milliseconds:
            kept, varied = (getattr(row, name) for name in _SWEPT[row.sweep])
            sweeps.setdefault((row.sweep, kept), {}).setdefault(varied, {})[row.backend] = row.milliseconds
    return tuple(
        Crossing(sweep=sweep, **{_SWEPT[sweep][0]: kept}, below=below, above=above, equal_at=at, low=low, high=high)
        for (sweep, kept), times in sweeps.items()
        for below, above, at, low, high in _changes(times)
    )


def _changes(times: Mapping[int, Mapping[str, float]]) -> Iterator[tuple[str, str, float, int, int]]:
    sizes = sorted(times)
    fastest = min(times[sizes[0]], key=times[sizes[0]].__getitem__)
    for low, high in pairwise(sizes):
        now = times[high]
        best = min(now, key=now.__getitem__)
        if best == fastest or now.get(fastest, math.inf) <= CLEAR * now[best]:
            continue
        yield fastest, best, _meeting(times, fastest, best, low, high), low, high
        fastest = best


def _meeting(times: Mapping[int, Mapping[str, float]], below: str, above: str, low: int, high: int) -> float:
    """Where the times of two backends are equal; the middle where one was not timed at both ends."""
    ends = [(times[size].get(above), times[size].get(below)) for size in (low, high)]
    if not all(mine and other for mine, other in ends):
        return math.sqrt(low * high)
    before, after = (math.log(mine / other) for mine, other in ends if mine and other)
    share = min(max(before / (before - after), 0.0), 1.0)
    return low * (high / low) ** share
