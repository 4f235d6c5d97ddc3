"""The result of `vitgraph profile`: where the time of one call goes."""

from __future__ import annotations

from pydantic import Field

from vitgraph.records.sections import Count, Finite, GraphKey, Section, Time


class ProfiledCall(Section):
    """The call."""

    items: tuple[tuple[Count, Count, Count], ...] = Field(description="Width, height and frames of each item.")
    tokens: Count = Field(description="Its output tokens.")
    input_rows: Count = Field(description="Its rows of the pixel tensors.")
    replays: tuple[GraphKey, ...] = Field(description="The graphs that it replays, in order.")
    eager_items: Count = Field(description="Items of it that run eagerly in graph mode too.")


class KernelTime(Section):
    """Kernels of one kind."""

    ms: Time = Field(description="Their time, in ms a call.")
    kernels: Finite = Field(description="How many there are in a call, a mean over the traces.")


class NamedKernel(KernelTime):
    """One kernel, or operator on a CPU."""

    name: str = Field(description="Its name.")
    kind: str = Field(description="Its kind.")


class ModeTrace(Section):
    """One mode, a mean over several traces."""

    wall_ms: Time = Field(description="Wall time of the call when nobody traces it, in ms.")
    kernels: Finite = Field(description="Kernels of a call.")
    busy_ms: Time = Field(description="Time in which the device computed, in ms.")
    span_ms: Time = Field(description="From the first kernel to the end of the last, in ms.")
    gap_ms: Finite = Field(description="`span_ms` without `busy_ms`, in ms.")
    kinds: dict[str, KernelTime] = Field(description="By kind of kernel; more than `busy_ms` where they overlap.")
    top: tuple[NamedKernel, ...] = Field(description="The kernels that took longest.")


class SpeedOfLight(Section):
    """The arithmetic of the unpadded call at the rate of a large matrix product."""

    matrix_rate_tflops: Time = Field(description="That rate, measured, in TFLOP/s.")
    total_ms: Time = Field(description="All of it, in ms.")
    product_ms: Time | None = Field(default=None, description="Matrix products and convolutions, in ms.")
    attention_ms: Time | None = Field(default=None, description="Attention, in ms.")


class ProfileResult(Section):
    """Where the time of one call goes, in both modes."""

    call: ProfiledCall = Field(description="The call.")
    traced: str = Field(description="What the times are of: kernels of a GPU, or operators of a CPU.")
    speed_of_light: SpeedOfLight | None = Field(default=None, description="Its arithmetic's time; null on a CPU.")
    modes: dict[str, ModeTrace] = Field(description="By mode: `eager` and `graph`.")
    trace_files: tuple[str, ...] = Field(default=(), description="Traces for chrome://tracing or Perfetto beside it.")
