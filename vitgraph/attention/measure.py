"""Attention alone: inputs of a case, a reference, and GPU time of a call, queued or as a captured graph.

Shape legend: N packed rows, S segment slots, H heads, E head width.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from statistics import median

import torch

from vitgraph.attention.base import AttentionBackend, Packed
from vitgraph.attention.padding import segment_endpoints

QUEUE_CYCLES = 2_000_000
"""Device cycles (about a millisecond) that launches queue up behind, so that no gap between them is measured."""

GRAPH_QUEUE_CYCLES = 200_000
"""The same for one replay, whose launch would otherwise be part of what is read."""

GRAPH_WARMUPS = 2


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """One input of a varlen call.

    Attributes:
        heads: Heads.
        head_width: Width of one head.
        dtype: Dtype of query, key and value.
        lengths: Rows of each segment.
        slots: Segment slots; those past the lengths are empty. 0 takes one for each length.
        padding_rows: Rows past the last segment.
        bound: Upper bound of the lengths that the call is given; 0 is the longest of them. A graph's is its capacity.
    """

    heads: int
    head_width: int
    dtype: torch.dtype
    lengths: tuple[int, ...]
    slots: int = 0
    padding_rows: int = 0
    bound: int = 0

    @property
    def longest(self) -> int:
        """Upper bound of the lengths, as the call is given it."""
        return self.bound or max(self.lengths)

    @property
    def rows(self) -> int:
        return sum(self.lengths) + self.padding_rows

    @property
    def flops(self) -> float:
        """Floating-point operations of the two products, without padding."""
        return 4.0 * self.heads * self.head_width * sum(length * length for length in self.lengths)

    def offsets(self, device: torch.device) -> torch.Tensor:
        """`[S + 1]` int32 offsets; unused slots repeat the last one."""
        ends = [0, *accumulate(self.lengths)]
        ends += [ends[-1]] * (max(self.slots, len(self.lengths)) - len(self.lengths))
        return torch.tensor(ends, dtype=torch.int32, device=device)

    def tensors(self, device: torch.device, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Random query, key and value `[N, H, E]`; the global generators are left alone."""
        generator = torch.Generator(device).manual_seed(seed)
        shape = (self.rows, self.heads, self.head_width)
        query, key, value = (
            torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(self.dtype) for _ in range(3)
        )
        return query, key, value

    def arguments(self, device: torch.device) -> Packed:
        """What `AttentionBackend.varlen` takes, on tensors of its own."""
        return (*self.tensors(device), self.offsets(device), self.longest, self.head_width**-0.5)


def reference_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    scale: float,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Attention of each segment by its definition, in `dtype`: `[N, H, E]`; rows past the last segment are zeros."""
    out = torch.zeros(query.shape, dtype=dtype, device=query.device)
    start = 0
    for stop in segment_endpoints(cu_seqlens, query.shape[0]):
        for head in range(query.shape[1]):
            scores = query[start:stop, head].to(dtype) @ key[start:stop, head].to(dtype).T
            out[start:stop, head] = torch.softmax(scores * scale, dim=-1) @ value[start:stop, head].to(dtype)
        start = stop
    return out


def relative_error(actual: torch.Tensor, expected: torch.Tensor, cu_seqlens: torch.Tensor) -> float:
    """L2 norm of the difference over that of `expected`, over the rows of segments; NaN where either holds one."""
    rows = int(cu_seqlens[-1])
    wanted = expected[:rows].double()
    difference = torch.linalg.vector_norm(actual[:rows].double() - wanted)
    return float(difference / torch.linalg.vector_norm(wanted))


Reading = Callable[[], tuple[float, float]]
"""Takes one reading of what a call takes on the host and on the GPU, in ms."""


def queued_times(
    call: Callable[[], object], device: torch.device, calls: int, cycles: int = QUEUE_CYCLES
) -> tuple[float, float]:
    """Host and GPU time of one of `calls` launches in ms, which queue up before they run; equal on a CPU.

    Args:
        call: What is launched.
        device: Where.
        calls: How often.
        cycles: Device cycles that the launches queue up behind.
    """
    start, end = (torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None for _ in range(2))
    if start is not None:
        torch.cuda._sleep(cycles)
        start.record()
    started = time.perf_counter()
    for _ in range(calls):
        call()
    host_ms = (time.perf_counter() - started) * 1e3 / calls
    if start is None or end is None:
        return host_ms, host_ms
    end.record()
    end.synchronize()
    return host_ms, start.elapsed_time(end) / calls


def capture_calls(backend: AttentionBackend, call: Callable[[], object], calls: int) -> torch.cuda.CUDAGraph:
    """Warms `call` up on a side stream and captures it `calls` times, as the layers of one forward."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with backend.graph_path():
        # As a forward of its own: outputs that the forward around it has zeroed are not written to by a graph that
        # outlives it, and it is left none that were zeroed on this stream.
        with torch.cuda.stream(stream), backend.one_forward():
            for _ in range(GRAPH_WARMUPS):
                call()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream), backend.one_forward():
            for _ in range(calls):
                call()
    return graph


def graph_reading(backend: AttentionBackend, call: Callable[[], object], device: torch.device, calls: int) -> Reading:
    """A call in replays of a graph that holds `calls` of them, in which the host has no part; it keeps the graph."""
    with torch.cuda.device(device):
        graph = capture_calls(backend, call, calls)
        graph.replay()

    def read() -> tuple[float, float]:
        with torch.cuda.device(device):
            _, device_ms = queued_times(graph.replay, device, 1, GRAPH_QUEUE_CYCLES)
        return 0.0, device_ms / calls

    return read


def queued_ms(call: Callable[[], object], device: torch.device, calls: int = 10, repeats: int = 3) -> float:
    """GPU time of one call in ms, the least of `repeats` rounds of `calls` launches; wall clock on a CPU."""
    return min(queued_times(call, device, calls)[1] for _ in range(repeats))


def graph_ms(
    backend: AttentionBackend, call: Callable[[], object], device: torch.device, calls: int = 20, repeats: int = 5
) -> float:
    """The median of `repeats` readings of a graph."""
    read = graph_reading(backend, call, device, calls)
    return median(read()[1] for _ in range(repeats))


def segments_of(length: int, rows: int) -> tuple[int, ...]:
    """Equal segments of `length` rows that together have about `rows`, at least one."""
    return (length,) * max(1, round(rows / length))
