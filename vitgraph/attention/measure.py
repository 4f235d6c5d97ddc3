"""Attention alone: inputs of a case, a reference, and GPU time of a call, queued or as a captured graph.

Shape legend: N packed rows, S segment slots, H heads, E head width.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch

from vitgraph.attention.base import AttentionBackend
from vitgraph.attention.padding import segment_endpoints

QUEUE_CYCLES = 2_000_000
"""Device cycles (about a millisecond) that launches queue up behind, so that no gap between them is measured."""

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
    """

    heads: int
    head_width: int
    dtype: torch.dtype
    lengths: tuple[int, ...]
    slots: int = 0
    padding_rows: int = 0

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


def queued_ms(call: Callable[[], object], device: torch.device, calls: int = 10, repeats: int = 3) -> float:
    """GPU time of one call in ms, the least of `repeats` rounds of `calls` launches that queue up before they run.

    On a CPU it is wall clock.
    """
    times = []
    for _ in range(repeats):
        if device.type != "cuda":
            started = time.perf_counter()
            for _ in range(calls):
                call()
            times.append((time.perf_counter() - started) * 1e3 / calls)
            continue
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(QUEUE_CYCLES)
        start.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / calls)
    return min(times)


def capture_calls(backend: AttentionBackend, call: Callable[[], object], calls: int) -> torch.cuda.CUDAGraph:
    """Warms `call` up on a side stream and captures it `calls` times, as the layers of one forward."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with backend.graph_path():
        with torch.cuda.stream(stream):
            for _ in range(GRAPH_WARMUPS):
                call()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream), backend.one_forward():
            for _ in range(calls):
                call()
    return graph


def graph_ms(
    backend: AttentionBackend, call: Callable[[], object], device: torch.device, calls: int = 20, repeats: int = 5
) -> float:
    """GPU time of one call in ms, from replays of a graph that holds `calls` of them; median of `repeats`."""
    with torch.cuda.device(device):
        graph = capture_calls(backend, call, calls)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        graph.replay()
        times = []
        for _ in range(repeats):
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / calls)
        graph.reset()
    return sorted(times)[len(times) // 2]


def segments_of(length: int, rows: int) -> tuple[int, ...]:
    """Equal segments of `length` rows that together have about `rows`, at least one."""
    return (length,) * max(1, round(rows / length))
