"""The result of `vitgraph profile`: where the time of one call goes."""

from __future__ import annotations

from vitgraph.records.sections import Count, Finite, GraphKey, Section, Time


class ProfiledCall(Section):
    """The call."""

    items: tuple[tuple[Count, Count, Count], ...]
    """Width, height and frames of each item."""
    tokens: Count
    """Its output tokens."""
    input_rows: Count
    """Its rows of the pixel tensors."""
    replays: tuple[GraphKey, ...]
    """The graphs that it replays, in order."""
    eager_items: Count
    """Items of it that run eagerly in graph mode too."""


class KernelTime(Section):
    """Kernels of one kind."""

    ms: Time
    """Their time, in ms a call."""
    kernels: Finite
    """How many there are in a call, a mean over the traces."""


class NamedKernel(KernelTime):
    """One kernel, or operator on a CPU."""

    name: str
    """Its name."""
    kind: str
    """Its kind."""


class ModeTrace(Section):
    """One mode, a mean over several traces."""

    wall_ms: Time
    """Wall time of the call when nobody traces it, in ms."""
    kernels: Finite
    """Kernels of a call."""
    busy_ms: Time
    """Time in which the device computed, in ms."""
    span_ms: Time
    """From the first kernel to the end of the last, in ms."""
    gap_ms: Finite
    """`span_ms` without `busy_ms`, in ms."""
    kinds: dict[str, KernelTime]
    """By kind of kernel; where kernels overlap they add up to more than `busy_ms`."""
    top: tuple[NamedKernel, ...]
    """The kernels that took longest."""


class SpeedOfLight(Section):
    """The arithmetic of the unpadded call at the rate of a large matrix product."""

    matrix_rate_tflops: Time
    """That rate, measured, in TFLOP/s."""
    total_ms: Time
    """All of it, in ms."""
    product_ms: Time | None = None
    """Matrix products and convolutions, in ms."""
    attention_ms: Time | None = None
    """Attention, in ms."""


class ProfileResult(Section):
    """Where the time of one call goes, in both modes."""

    call: ProfiledCall
    """The call."""
    traced: str
    """What the times are of: kernels of a GPU, or operators of a CPU."""
    speed_of_light: SpeedOfLight | None = None
    """The arithmetic of the call at the matrix rate; null on a CPU."""
    modes: dict[str, ModeTrace]
    """By mode: `eager` and `graph`."""
    trace_files: tuple[str, ...] = ()
    """Traces for chrome://tracing or Perfetto beside the record."""
