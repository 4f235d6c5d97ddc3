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
