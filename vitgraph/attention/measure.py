"""Attention alone: which few calls stand for many, whether a backend is right, and what it takes, queued or as a graph.

Shape legend: N packed rows, S segment slots, H heads, E head width.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from statistics import median
from typing import Any, NamedTuple

import torch

from vitgraph.attention.base import AttentionBackend, Lengths, Packed
from vitgraph.attention.padding import segment_endpoints
from vitgraph.errors import BackendError, first_line


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

    def tensors(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Random query, key and value `[N, H, E]`; the global generators are left alone."""
        generator = torch.Generator(device).manual_seed(0)
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


def queued_ms(call: Callable[[], object], device: torch.device) -> float:
    """GPU time of one call in ms, the least of three rounds of ten launches; wall clock on a CPU."""
    return min(queued_times(call, device, 10)[1] for _ in range(3))


def graph_ms(backend: AttentionBackend, call: Callable[[], object], device: torch.device) -> float:
    """The median of five readings of a graph of twenty calls."""
    read = graph_reading(backend, call, device, 20)
    return median(read()[1] for _ in range(5))


def segments_of(length: int, rows: int) -> tuple[int, ...]:
    """Equal segments of `length` rows that together have about `rows`, at least one."""
    return (length,) * max(1, round(rows / length))


logger = logging.getLogger(__name__)

CHECKED_LENGTHS = (64, 400, 3072)
"""Segment lengths that every candidate must be right at: a window, one small image, one large image."""

CHECKED_ROWS = 3072
"""Packed rows of each checked case."""

TOLERANCE = 2e-2
"""Largest relative error against float32; half-precision attention is near 2e-3."""

OK, INCORRECT, UNSUPPORTED, CAPTURE_FAILED = "ok", "incorrect", "unsupported", "capture_failed"
OUT_OF_MEMORY, ERROR = "out_of_memory", "error"


@dataclass(frozen=True, slots=True)
class Candidate:
    """What `auto` found out about one implementation.

    Attributes:
        name: Registry name.
        variant: Which of a backend's implementations, for those that have several.
        status: `ok`, `incorrect`, `unsupported`, `out_of_memory` or `error`.
        reason: Why it is not `ok`.
        implementation: What ran.
        relative_error: The largest against float32.
        seconds: What finding out took, plans and compilation included.
        backend: The backend itself, where it is `ok`.
    """

    name: str
    variant: str | None
    status: str
    reason: str | None = None
    implementation: str | None = None
    relative_error: float | None = None
    seconds: float = 0.0
    backend: AttentionBackend | None = None

    @property
    def label(self) -> str:
        """The name, with the variant where it is not the default."""
        return self.name if self.variant is None else f"{self.name}:{self.variant}"

    def as_record(self) -> dict[str, Any]:
        """The finding as plain values."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "backend"}


def try_candidates(
    device: torch.device,
    head_width: int,
    heads: int,
    dtype: torch.dtype,
    *,
    backends: Mapping[str, type[AttentionBackend]],
) -> list[Candidate]:
    """Makes every backend that can run here and checks it against float32.

    Args:
        device: Where the encoder will run.
        head_width: Width of one head.
        heads: Heads.
        dtype: Dtype of the encoder.
        backends: Name to class, in order of preference.

    Raises:
        BackendError: Nothing can run these heads here; every reason is named.
    """
    cases = [AttentionCase(heads, head_width, dtype, segments_of(length, CHECKED_ROWS)) for length in CHECKED_LENGTHS]
    tried = [
        _try_candidate(backend, variant, cases, device)
        for backend in backends.values()
        # One without any that is usable is tried all the same, so that its reason is recorded.
        for variant in backend.variants(device) or (None,)
    ]
    if not any(candidate.status == OK for candidate in tried):
        reasons = "; ".join(f"{candidate.name}: {candidate.reason}" for candidate in tried)
        raise BackendError(f"no attention backend can run these heads here ({reasons}); use TORCH_SDPA and eager mode")
    return tried


def _try_candidate(
    backend_class: type[AttentionBackend], variant: str | None, cases: Sequence[AttentionCase], device: torch.device
) -> Candidate:
    started = time.perf_counter()
    name = backend_class.name
    reason = backend_class.unavailable_reason(device)
    if reason is None and not backend_class.is_capture_safe:
        reason = "its call cannot be captured"
    if reason is not None:
        return Candidate(name, variant, UNSUPPORTED, reason)
    try:
        backend = backend_class.for_device(device, variant)
    except BackendError as error:
        return Candidate(name, variant, UNSUPPORTED, str(error))
    found = check_backend(backend, cases, device)
    kept = backend if found["status"] == OK else None
    candidate = Candidate(name, variant, seconds=time.perf_counter() - started, backend=kept, **found)
    logger.info("auto: %s", candidate.as_record())
    return candidate


def check_backend(backend: AttentionBackend, cases: Sequence[AttentionCase], device: torch.device) -> dict[str, Any]:
    """Checks a backend on every case, as `Candidate`'s fields; failures keep a reason."""
    outcome: dict[str, Any] = {"implementation": backend.implementation, "status": ERROR}
    reason = backend.unsupported_reason(cases[0].head_width, cases[0].dtype)
    if reason is not None:
        return {**outcome, "status": UNSUPPORTED, "reason": reason}
    try:
        errors = [check_case(backend, case, device) for case in cases]
    except torch.OutOfMemoryError as error:
        return {**outcome, "status": OUT_OF_MEMORY, "reason": first_line(error)}
    except Exception as error:  # whatever a package raises, the others are still to be tried
        return {**outcome, "reason": first_line(error)}
    worst = max(errors, key=lambda error: math.inf if math.isnan(error) else error)
    outcome["relative_error"] = worst
    if not worst <= TOLERANCE:
        return {**outcome, "status": INCORRECT, "reason": f"relative error {worst:.3g} against float32"}
    return {**outcome, "status": OK}


def check_case(backend: AttentionBackend, case: AttentionCase, device: torch.device) -> float:
    """Relative error of a backend against float32 attention of the same case."""
    query, key, value, offsets, _, scale = packed = case.arguments(device)
    actual = backend.varlen(*packed)
    return relative_error(actual, reference_attention(query, key, value, offsets, scale), offsets)
