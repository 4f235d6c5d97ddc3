"""`auto` on a GPU: each call goes to the backend that is fastest at its shape, measured with this tower's own heads.

A graph's shapes are fixed when it is captured, so every graph holds the kernels of the backend that is fastest for it;
eager calls are sent by their own lengths.

Shape legend: N packed rows, S segment slots, H heads, E head width, B tiles, L rows of a tile.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from vitgraph.attention.base import AttentionBackend
from vitgraph.attention.measure import AttentionCase, graph_ms, queued_ms
from vitgraph.attention.padding import zero_rows_past_end
from vitgraph.attention.selection import Candidate, case_call, first_line

logger = logging.getLogger(__name__)

MEASURE_LIMIT_S = 30.0
"""After so much measuring, shapes that were not met before take the choice of the nearest one that was."""

CLOSE = 1.03
"""Of backends whose times lie so near to the fastest, the first is taken: noise is no reason to mix them."""

GRAPH_CALLS, QUEUED_CALLS, REPEATS = 4, 4, 3
"""Calls and repeats of one timing; a choice needs the order of the backends, not their third digit."""


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


@dataclass(frozen=True, slots=True)
class Choice:
    """The backend of a shape.

    Attributes:
        backend: The fastest.
        milliseconds: Time of a call by the name of each backend that could run it; empty where a near shape decided.
    """

    backend: AttentionBackend
    milliseconds: Mapping[str, float]


Timer = Callable[[AttentionBackend, AttentionCase, bool], float]
"""`(backend, case, is_graph)` to milliseconds of a call."""


class PerShapeBackend(AttentionBackend):
    """Several backends behind one name.

    A shape is timed when it is first met outside a capture: in `prepare`, or in the warm-up of the graph that has it.
    Within a capture, and once `MEASURE_LIMIT_S` is used up, the nearest known shape decides.

    Args:
        backends: Backends that were found right on this device, by a label of their own; at least one.
        heads: Heads of the tower.
        head_width: Width of one head.
        dtype: Dtype of the tower.
        device: Where it runs.
        tried: What was found of every candidate, those that cannot be used included.
        timer: Times a case; replaced in tests.
    """

    name: ClassVar[str] = "auto"
    is_capture_safe: ClassVar[bool] = True
    writes_padding_rows: ClassVar[bool] = False

    def __init__(
        self,
        backends: Mapping[str, AttentionBackend],
        heads: int,
        head_width: int,
        dtype: torch.dtype,
        device: torch.device,
        tried: Sequence[Candidate] = (),
        timer: Timer | None = None,
    ) -> None:
        self._backends = dict(backends)
        self._is_fresh = False
        super().__init__()
        self._heads, self._head_width, self._dtype, self._device = heads, head_width, dtype, device
        self._timer = timer or (lambda backend, case, is_graph: _time_case(backend, case, is_graph, device))
        self._choices: dict[CallShape, Choice] = {}
        self._expected: Counter[int] = Counter()
        self._calls: Counter[CallShape] = Counter()
        self.selection = tuple(candidate.as_record() for candidate in tried)

    # -- what the backends share -----------------------------------------------------------------------------------

    @property
    def returns_fresh_output(self) -> bool:
        return self._is_fresh

    @returns_fresh_output.setter
    def returns_fresh_output(self, value: bool) -> None:
        self._is_fresh = value
        for backend in self._backends.values():
            backend.returns_fresh_output = value

    @contextmanager
    def graph_path(self) -> Iterator[None]:
        with ExitStack() as stack:
            for backend in self._backends.values():
                stack.enter_context(backend.graph_path())
            stack.enter_context(super().graph_path())
            yield

    @contextmanager
    def one_forward(self) -> Iterator[None]:
        with ExitStack() as stack:
            for backend in self._backends.values():
                stack.enter_context(backend.one_forward())
            yield

    def reserve_padding_safe_output(self, rows: int) -> None:
        for backend in self._backends.values():
            backend.reserve_padding_safe_output(rows)

    def release_padding_safe_output(self) -> None:
        for backend in self._backends.values():
            backend.release_padding_safe_output()

    @classmethod
    def unavailable_reason(cls, device: torch.device) -> str | None:
        return None

    def unsupported_reason(self, head_width: int, dtype: torch.dtype) -> str | None:
        reasons = [backend.unsupported_reason(head_width, dtype) for backend in self._backends.values()]
        return None if None in reasons else reasons[0]

    # -- calls -----------------------------------------------------------------------------------------------------

    def varlen(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_seqlen: int,
        scale: float,
    ) -> torch.Tensor:
        shape = CallShape(query.shape[0], cu_seqlens.shape[0] - 1, max_seqlen, self.is_on_graph_path)
        backend = self.backend_for(shape)
        out = backend.varlen(query, key, value, cu_seqlens, max_seqlen, scale)
        if shape.is_graph and not backend.needs_finite_padding and self._has_whole_tiles(shape.rows):
            # Another layer of this graph loads whole tiles, and would find there what this one left in its padding.
            return zero_rows_past_end(out, cu_seqlens)
        return out

    def _has_whole_tiles(self, rows: int) -> bool:
        """Whether a graph of so many rows may hold calls of a backend that needs the padding of others finite."""
        return any(
            shape.is_graph and shape.rows == rows and choice.backend.needs_finite_padding
            for shape, choice in self._choices.items()
        )

    def dense(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
    ) -> torch.Tensor:
        tiles, _, length, _ = query.shape
        # Tiles leave no row unused, in a graph either.
        backend = self.backend_for(CallShape(tiles * length, tiles, length, False))
        return backend.dense(query, key, value, mask, scale)

    def expect(self, shapes: Mapping[tuple[int, int, int], int]) -> None:
        self._calls.clear()
        self._expected.clear()
        for (rows, slots, longest), calls in shapes.items():
            self._calls[CallShape(rows, slots, longest, False)] += calls
            for length in _likely_lengths(rows, slots, longest):
                self._expected[length] += length * calls

    def prepare(self, shapes: Iterable[tuple[int, int, int]]) -> None:
        known = sorted(shapes)
        for backend in self._backends.values():
            backend.prepare(known)
        for shape in known:
            self.backend_for(CallShape(*shape, False))

    def backend_for(self, shape: CallShape) -> AttentionBackend:
        """The backend that a call of this shape goes to."""
        bucket = shape.bucket
        choice = self._choices.get(bucket)
        if choice is None:
            is_capturing = self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()
            if is_capturing or (self._choices and self.plan_build_ms > MEASURE_LIMIT_S * 1e3):
                choice = self._nearest(bucket)
            else:
                choice = self._choose(bucket)
            self._choices[bucket] = choice
            self.implementation = "fastest at each shape of: " + "; ".join(
                backend.implementation for backend in self._backends.values() if self._takes_a_shape(backend)
            )
        return choice.backend

    def _nearest(self, shape: CallShape) -> Choice:
        known = [other for other, choice in self._choices.items() if choice.milliseconds]
        if not known:
            return Choice(next(iter(self._backends.values())), {})
        return Choice(self._choices[min(known, key=shape.distance)].backend, {})

    def _takes_a_shape(self, backend: AttentionBackend) -> bool:
        return any(choice.backend is backend for choice in self._choices.values())

    def _choose(self, shape: CallShape) -> Choice:
        started = time.perf_counter()
        times: dict[str, float] = {}
        for label, backend in self._backends.items():
            try:
                times[label] = sum(self._timer(backend, case, shape.is_graph) for case in self._cases(shape))
            except Exception as error:  # whatever a package raises at a shape, the others may still run it
                logger.info("auto: %s cannot run %s: %s", label, shape, first_line(error))
        self.plan_build_ms += (time.perf_counter() - started) * 1e3
        # Where none could be timed alone, the call itself says why.
        fast_enough = CLOSE * min(times.values(), default=math.inf)
        best = next((label for label in self._backends if times.get(label, math.inf) <= fast_enough), None)
        best = best or next(iter(self._backends))
        return Choice(self._backends[best], times)

    def _cases(self, shape: CallShape) -> list[AttentionCase]:
        """Inputs that stand for a shape: in a graph what the calls to come will put into it, where they are known."""
        if not shape.is_graph:
            contents = [_likely_lengths(shape.rows, shape.slots, shape.longest)]
        else:
            bound = min(shape.longest, shape.rows)
            fitting = {length: rows for length, rows in self._expected.items() if length <= bound}
            typical = _weighted_median(fitting) if fitting else None
            lengths = [typical] if typical else [bound, max(shape.rows // shape.slots, 1)]
            contents = [(length,) * max(1, min(shape.slots, shape.rows // length)) for length in lengths]
        return [
            AttentionCase(
                self._heads, self._head_width, self._dtype, lengths, shape.slots, max(shape.rows - sum(lengths), 0)
            )
            for lengths in contents
        ]

    # -- what it took ----------------------------------------------------------------------------------------------

    def costs_ms(self) -> dict[str, float]:
        """Attention time of one layer over the expected calls: by backend where it alone took all, and `auto`.

        Empty where nothing was prepared for them; backends that could not run every shape are left out.
        """
        totals: dict[str, float] = {}
        timed = [
            (choice, calls)
            for shape, calls in self._calls.items()
            if (choice := self._choices.get(shape.bucket)) is not None and choice.milliseconds
        ]
        if not timed:
            return {}
        for label in self._backends:
            if all(label in choice.milliseconds for choice, _ in timed):
                totals[label] = sum(choice.milliseconds[label] * calls for choice, calls in timed)
        totals[self.name] = sum(min(choice.milliseconds.values()) * calls for choice, calls in timed)
        return totals

    def choices(self) -> list[dict[str, Any]]:
        labels = {id(backend): label for label, backend in self._backends.items()}
        return [
            {**shape._asdict(), "backend": labels[id(choice.backend)], "milliseconds": dict(choice.milliseconds)}
            for shape, choice in sorted(self._choices.items())
        ]

    def __str__(self) -> str:
        """In a line: who takes which lengths, and what the calls would have cost with each backend alone."""
        spans: dict[str, list[int]] = {}
        for row in self.choices():
            spans.setdefault(row["backend"], []).append(row["longest"])
        taken = ", ".join(f"{label} (segments of {min(span)} to {max(span)} rows)" for label, span in spans.items())
        costs = self.costs_ms()
        if not taken or not costs:
            return taken or "nothing measured yet"
        own = costs.pop(self.name)
        others = ", ".join(f"{label} {cost / own:.2f}x" for label, cost in sorted(costs.items(), key=lambda p: p[1]))
        return f"{taken}; attention of the calls with one backend alone: {others} of the time"


def _likely_lengths(rows: int, slots: int, longest: int) -> tuple[int, ...]:
    """Segments of a call that is known by its rows, their number and the longest: the others share the rest evenly."""
    longest = max(1, min(longest, rows))
    rest, others = rows - longest, max(slots - 1, 0)
    if not others or rest <= 0:
        return (longest,)
    count = min(others, rest)
    return (longest, *([rest // count] * count))


def _weighted_median(weights: Mapping[int, int]) -> int:
    half, seen = sum(weights.values()) / 2, 0
    for value in sorted(weights):
        seen += weights[value]
        if seen >= half:
            return value
    raise ValueError("no weights")


def _time_case(backend: AttentionBackend, case: AttentionCase, is_graph: bool, device: torch.device) -> float:
    """Milliseconds of one call: in a graph on the device alone, eagerly the longer of host and device."""
    call = case_call(backend, case, device)
    if is_graph:
        return graph_ms(backend, call, device, GRAPH_CALLS, REPEATS)
    call()
    torch.cuda.synchronize(device)
    started = time.perf_counter()
    for _ in range(QUEUED_CALLS):
        call()
    host_ms = (time.perf_counter() - started) * 1e3 / QUEUED_CALLS
    return max(host_ms, queued_ms(call, device, QUEUED_CALLS, REPEATS))
