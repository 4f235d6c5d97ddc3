"""The result of `vitgraph compare-backends --micro`: attention alone."""

from __future__ import annotations

from typing import Literal

from vitgraph.records.kinds.compare import Outcome
from vitgraph.records.sections import Count, Number, Section, Time


class MicroRow(Outcome):
    """One call of one backend; a backend that cannot run has one row, with the reason."""

    backend: str
    """Backend."""
    implementation: str | None = None
    """What stands behind it: package and version."""
    sweep: Literal["length", "slots"] | None = None
    """Whether the rows of a segment or the empty slots beside it are varied."""
    segment_length: Count | None = None
    """Rows of a segment."""
    segments: Count | None = None
    """Segments of the call."""
    slots: Count | None = None
    """Segment slots of the call."""
    rows: Count | None = None
    """Rows of the call."""
    timed_as: Literal["graph", "eager"] | None = None
    """Whether a graph of many calls was timed, or calls one by one."""
    milliseconds: Time | None = None
    """Time of one call on the device, in ms; wall clock on a CPU."""
    first_call_ms: Time | None = None
    """Time of the first call in ms: plans, tuning and compilation included."""
    relative_error: Number | None = None
    """Relative distance from attention in float32."""
    limit_ms: Time | None = None
    """Time of the arithmetic at the matrix rate, in ms; null on a CPU."""
    limit_share: Number | None = None
    """`limit_ms` over `milliseconds`."""


class Crossing(Section):
    """Where the fastest backend changes as segments get longer, or empty slots more."""

    sweep: Literal["length", "slots"]
    """Whether the rows of a segment or the empty slots beside it are varied."""
    segments: Count | None = None
    """Segments of the calls, where their length is varied."""
    segment_length: Count | None = None
    """Rows of the segment, where the slots are varied."""
    below: str
    """The fastest backend before it."""
    above: str
    """The fastest backend from there on."""
    equal_at: Number
    """Rows of a segment, or slots, at which both take the same time; interpolated."""
    low: Count
    """The measured size before it."""
    high: Count
    """The measured size after it."""


class MicroResult(Section):
    """Attention alone with the heads of a model's tower."""

    heads: Count
    """Heads of the tower."""
    head_width: Count
    """Width of one head."""
    dtype: str
    """Dtype."""
    rows: tuple[MicroRow, ...] = ()
    """One entry a backend and call."""
    crossings: tuple[Crossing, ...] = ()
    """Where one backend overtakes another."""
