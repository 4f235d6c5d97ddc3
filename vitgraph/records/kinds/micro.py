"""The result of `vitgraph compare-backends --micro`: attention alone, and where one backend overtakes another."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Literal

from pydantic import Field

from vitgraph.records.kinds.compare import Outcome
from vitgraph.records.sections import Count, Number, Section, Time


class MicroRow(Outcome):
    """One call of one backend; a backend that cannot run has one row, with the reason."""

    backend: str = Field(description="Backend.")
    implementation: str | None = Field(default=None, description="What stands behind it: package and version.")
    sweep: Literal["length", "slots"] | None = Field(default=None, description="What is varied: rows, or empty slots.")
    segment_length: Count | None = Field(default=None, description="Rows of a segment.")
    segments: Count | None = Field(default=None, description="Segments of the call.")
    slots: Count | None = Field(default=None, description="Segment slots of the call.")
    rows: Count | None = Field(default=None, description="Rows of the call.")
    timed_as: Literal["graph", "eager"] | None = None
    """Whether a graph of many calls was timed, or calls one by one."""
    milliseconds: Time | None = Field(default=None, description="Time of one call in ms; wall clock on a CPU.")
    first_call_ms: Time | None = Field(default=None, description="Time of the first call in ms, compilation included.")
    relative_error: Number | None = Field(default=None, description="Relative distance from attention in float32.")
    limit_ms: Time | None = Field(default=None, description="Its arithmetic at the matrix rate, in ms; null on a CPU.")
    limit_share: Number | None = Field(default=None, description="`limit_ms` over `milliseconds`.")


class Crossing(Section):
    """Where the fastest backend changes as segments get longer, or empty slots more."""

    sweep: Literal["length", "slots"] = Field(description="What is varied: rows of a segment, or empty slots by it.")
    segments: Count | None = Field(default=None, description="Segments of the calls, where their length is varied.")
    segment_length: Count | None = Field(default=None, description="Rows of the segment, where the slots are varied.")
    below: str = Field(description="The fastest backend before it.")
    above: str = Field(description="The fastest backend from there on.")
    equal_at: Number = Field(description="Rows of a segment, or slots, at which both take the same time; interpolated.")
    low: Count = Field(description="The measured size before it.")
    high: Count = Field(description="The measured size after it.")


class MicroResult(Section):
    """Attention alone with the heads of a model's tower."""

    heads: Count = Field(description="Heads of the tower.")
    head_width: Count = Field(description="Width of one head.")
    dtype: str = Field(description="Dtype.")
    rows: tuple[MicroRow, ...] = Field(default=(), description="One entry a backend and call.")
    crossings: tuple[Crossing, ...] = Field(default=(), description="Where one backend overtakes another.")


# -- where one backend overtakes another -------------------------------------------------------------------------------

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
