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
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch

from vitgraph.attention.base import AttentionBackend, GraphContents, Lengths, Packed, Tiles
from vitgraph.attention.measure import (
    QUEUE_CYCLES,
    AttentionCase,
    CallShape,
    Candidate,
    Reading,
    graph_reading,
    likely_lengths,
    queued_times,
    typical,
)
from vitgraph.attention.padding import zero_rows_past_end
from vitgraph.errors import first_line

logger = logging.getLogger(__name__)

MEASURE_LIMIT_S = 30.0
"""After so much measuring, shapes that were not met before take the choice of the nearest one that was."""

CLOSE = 1.01
"""Of backends whose times lie so near to the fastest, the first is taken: noise is no reason to mix them."""

CALLS, ROUNDS = 8, 5
"""Calls of one reading, and rounds in which every backend is read once: a clock that changes does so for all."""

HOPELESS = 1.5
"""What takes so many times the fastest is not read again."""

LONG_MS = 1.0
"""A call that takes the GPU so long is read by itself, without a graph, and in `LONG_ROUNDS`: launches hide behind it.
The first one, after the warm-up, tells already which backends are hopeless there."""

LONG_ROUNDS = 2

CYCLES_A_MS = QUEUE_CYCLES
"""Device cycles that last about a millisecond."""

MOST_CASES = 3
"""Inputs that stand for all that a shape will hold; each is weighted with the calls that are like it."""

MOST_ROUTES = 8192
"""Shapes whose backend is looked up by their exact sizes; a layer of an eager call pays one look into a table."""


class Layer(NamedTuple):
    """What an eager layer of the tower takes besides attention, which host and GPU do side by side.

    Attributes:
        host_ms: On the host.
        device_ms_a_row: On the GPU, for each packed row.
    """

    host_ms: float = 0.0
    device_ms_a_row: float = 0.0

    def added_ms(self, host_ms: float, device_ms: float, rows: int) -> float:
        """How much longer the layer takes with an attention call of those times."""
        beside = self.device_ms_a_row * rows
        return max(self.host_ms + host_ms, beside + device_ms) - max(self.host_ms, beside)


@dataclass(frozen=True, slots=True)
class Choice:
    """The backend of a shape.

    Attributes:
        label: The fastest.
        milliseconds: Time of a mean call by the label of each backend that could run it, eagerly what it adds to a
            layer; empty where a near shape decided.
        calls: How many calls of this shape are expected.
    """

    label: str
    milliseconds: Mapping[str, float]
    calls: int = 0


class Trial(NamedTuple):
    """One backend at one shape, warmed up.

    Attributes:
        first_ms: GPU time of the first call after the warm-up.
        reading: Makes what takes a reading of the call, in a graph where the shape is one's and the call is short.
    """

    first_ms: float
    reading: Callable[[], Reading]


_T = TypeVar("_T")

Timer = Callable[[AttentionBackend, Packed, bool], Trial]
"""`(backend, arguments, is_graph)` to its trial."""


class PerShapeBackend(AttentionBackend):
    """Several backends behind one name.

    A shape is timed when it is first met outside a capture: in `prepare`, or in the warm-up of the graph that has it.
    Within a capture, for graphs that no expected call replays, and once `MEASURE_LIMIT_S` is used up, the nearest known
    shape decides.

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
        super().__init__()
        self._backends = dict(backends)
        self._heads, self._head_width, self._dtype, self._device = heads, head_width, dtype, device
        self._timer = timer or partial(_trial, device)
        self._layer = Layer()
        self._left_out: int | None = None
        # Rows that a kernel skips are read by the next layer, whichever backend that one has: they share what it keeps.
        for backend in self._backends.values():
            backend.outputs = self.outputs
        self._deriving = [one for one in backends.values() if type(one).one_forward is not AttentionBackend.one_forward]
        self._choices: dict[CallShape, Choice] = {}
        self._routes: dict[tuple[int, int, int, bool], AttentionBackend] = {}
        self._calls: dict[CallShape, Counter[Lengths]] = {}
        self._replays: Sequence[GraphContents] = ()
        self.selection = tuple(candidate.as_record() for candidate in tried)

    # -- what the backends share -----------------------------------------------------------------------------------

    @contextmanager
    def graph_path(self) -> Iterator[None]:
        with ExitStack() as stack:
            for backend in self._backends.values():
                stack.enter_context(backend.graph_path())
            stack.enter_context(super().graph_path())
            yield

    def one_forward(self) -> AbstractContextManager[object]:
        stack = ExitStack()
        stack.enter_context(super().one_forward())
        for backend in self._deriving:
            stack.enter_context(backend.one_forward())
        return stack

    @classmethod
    def unavailable_reason(cls, device: torch.device) -> str | None:
        return None

    def unsupported_reason(self, head_width: int, dtype: torch.dtype) -> str | None:
        reasons = [backend.unsupported_reason(head_width, dtype) for backend in self._backends.values()]
        return None if None in reasons else reasons[0]

    # -- calls -----------------------------------------------------------------------------------------------------

    def varlen(self, *packed: *Packed) -> torch.Tensor:
        query, _, _, cu_seqlens, max_seqlen, _ = packed
        if self._left_out is not None:
            self._left_out += 1
            return query.new_empty(query.shape)
        rows, is_graph = query.shape[0], self.is_on_graph_path
        route = rows, cu_seqlens.shape[0] - 1, max_seqlen, is_graph
        backend = self._routes.get(route)
        if backend is None:
            if len(self._routes) >= MOST_ROUTES:
                self._routes.clear()
            backend = self._routes[route] = self.backend_for(CallShape(*route))
        out = backend.varlen(*packed)
        if is_graph and not backend.needs_finite_padding and self._has_whole_tiles(rows):
            # Another layer of this graph loads whole tiles, and would find there what this one left in its padding.
            return zero_rows_past_end(out, cu_seqlens)
        return out

    def _has_whole_tiles(self, rows: int) -> bool:
        """Whether a graph of so many rows may hold calls of a backend that needs the padding of others finite."""
        return any(
            shape.is_graph and shape.rows == rows and self._backends[choice.label].needs_finite_padding
            for shape, choice in self._choices.items()
        )

    def dense(self, *tiles: *Tiles) -> torch.Tensor:
        count, _, length, _ = tiles[0].shape
        # Tiles leave no row unused, in a graph either.
        backend = self.backend_for(CallShape(count * length, count, length, False))
        return backend.dense(*tiles)

    def expect(self, calls: Mapping[Lengths, int], replays: Sequence[GraphContents] = ()) -> None:
        # What was chosen before, while blocks were compiled say, was judged by other segments.
        self._choices, self._routes, self._calls = {}, {}, {}
        for lengths, count in calls.items():
            bucket = CallShape(sum(lengths), len(lengths), max(lengths, default=0), False).bucket
            self._calls.setdefault(bucket, Counter())[lengths] += count
        self._replays = replays

    def prepare(self, shapes: Iterable[tuple[int, int, int]]) -> None:
        known = sorted(shapes)
        for backend in self._backends.values():
            backend.prepare(known)
        for shape in known:
            self.backend_for(CallShape(*shape, False))

    def learn_layer(self, smallest: Callable[[], object], largest: Callable[[], object], rows: int) -> None:
        """Measures what a layer takes besides attention, which decides how much of a call's time is hidden by it.

        Args:
            smallest: An eager forward of the tower that the host is slowest in.
            largest: One that the GPU is slowest in.
            rows: Packed rows of that one.
        """
        self._left_out = 0
        try:
            smallest()
            layers, _ = self._left_out, largest()
            host_ms = min(queued_times(smallest, self._device, 1)[0] for _ in range(ROUNDS))
            cycles = round(1.5 * host_ms * CYCLES_A_MS)
            device_ms = min(queued_times(largest, self._device, 1, cycles)[1] for _ in range(2))
        finally:
            self._left_out = None
        if layers:
            self._layer = Layer(host_ms / layers, device_ms / layers / rows)
            # Calls that were checked before were chosen for without it.
            self._choices = {shape: choice for shape, choice in self._choices.items() if shape.is_graph}
            self._routes.clear()

    def backend_for(self, shape: CallShape) -> AttentionBackend:
        """The backend that a call of this shape goes to."""
        bucket = shape.bucket
        choice = self._choices.get(bucket)
        if choice is None:
            is_capturing = self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()
            is_late = bool(self._choices) and self.plan_build_ms > MEASURE_LIMIT_S * 1e3
            is_unused = bool(self._replays) and bucket.is_graph and not self._replays_of(bucket)
            choice = self._nearest(bucket) if is_capturing or is_late or is_unused else self._choose(bucket)
            self._choices[bucket] = choice
            taken = {choice.label for choice in self._choices.values()}
            self.implementation = "fastest at each shape of: " + "; ".join(
                backend.implementation for label, backend in self._backends.items() if label in taken
            )
        return self._backends[choice.label]

    def _nearest(self, shape: CallShape) -> Choice:
        known = [other for other, choice in self._choices.items() if choice.milliseconds]
        if not known:
            return Choice(next(iter(self._backends)), {})
        return Choice(self._choices[min(known, key=shape.distance)].label, {})

    def _choose(self, shape: CallShape) -> Choice:
        started = time.perf_counter()
        contents, is_expected = self._contents(shape)
        found = [(self._times(shape, lengths), count) for lengths, count in typical(contents, MOST_CASES).items()]
        total = sum(contents.values())
        times = {
            label: sum(milliseconds[label] * count for milliseconds, count in found) / total
            for label in self._backends
            if all(label in milliseconds for milliseconds, _ in found)
        }
        self.plan_build_ms += (time.perf_counter() - started) * 1e3
        fast_enough = CLOSE * min(times.values(), default=math.inf)
        # Where none could be timed alone, the call itself says why.
        best = next((label for label, milliseconds in times.items() if milliseconds <= fast_enough), None)
        return Choice(best or next(iter(self._backends)), times, total if is_expected else 0)

    def _times(self, shape: CallShape, lengths: Lengths) -> dict[str, float]:
        """Milliseconds of one call that holds these segments, by the label of each backend that can run it."""
        bound = shape.longest if shape.is_graph else max(lengths)
        padding = max(shape.rows - sum(lengths), 0) if shape.is_graph else 0
        slots = shape.slots if shape.is_graph else len(lengths)
        case = AttentionCase(self._heads, self._head_width, self._dtype, lengths, slots, padding, bound)
        arguments = case.arguments(self._device)
        trials = {
            label: trial
            for label, backend in self._backends.items()
            if (trial := _if_it_runs(label, shape, partial(self._timer, backend, arguments, shape.is_graph)))
        }
        fastest_ms = min((trial.first_ms for trial in trials.values()), default=0.0)
        worth_ms = max(LONG_MS, HOPELESS * fastest_ms)
        found = {label: [(0.0, trial.first_ms)] for label, trial in trials.items() if trial.first_ms > worth_ms}
        readings = {
            label: read
            for label, trial in trials.items()
            if label not in found and (read := _if_it_runs(label, shape, trial.reading))
        }
        found |= {label: [] for label in readings}
        for _ in range(ROUNDS if fastest_ms < LONG_MS else LONG_ROUNDS):
            for label, read in readings.items():
                found[label].append(read())
            costs = {label: self._cost(shape, found[label]) for label in readings}
            readings = {label: readings[label] for label in costs if costs[label] <= HOPELESS * min(costs.values())}
        return {label: self._cost(shape, taken) for label, taken in found.items()}

    def _cost(self, shape: CallShape, readings: Sequence[tuple[float, float]]) -> float:
        host_ms, device_ms = zip(*readings, strict=True)
        # What disturbs a host only ever adds to its time.
        return median(device_ms) if shape.is_graph else self._layer.added_ms(min(host_ms), min(device_ms), shape.rows)

    def _contents(self, shape: CallShape) -> tuple[Mapping[Lengths, int], bool]:
        """What calls of a shape will hold, and whether that is known; else what a tower may bring there."""
        if not shape.is_graph:
            known = self._calls.get(shape)
            return (known, True) if known else ({likely_lengths(shape.rows, shape.slots, shape.longest): 1}, False)
        if replays := self._replays_of(shape):
            return replays, True
        bound = min(shape.longest, shape.rows)
        even = max(shape.rows // shape.slots, 1)
        return Counter({(min(even, bound),) * min(shape.slots, shape.rows): 1, (bound,): 1}), False

    def _replays_of(self, shape: CallShape) -> Mapping[Lengths, int]:
        """What a graph is expected to hold; empty where nothing is known, or no call will replay it."""
        graphs = [
            graph
            for graph in self._replays
            if (graph.slots, graph.longest) == (shape.slots, shape.longest) and 0 < graph.most_rows <= shape.rows
        ]
        # Graphs of several budgets may have the same slots; the fullest that fits is this one's.
        return max(graphs, key=lambda graph: graph.most_rows).replays if graphs else {}

    def choices(self) -> list[dict[str, Any]]:
        return [
            shape._asdict() | {"backend": choice.label, "milliseconds": choice.milliseconds, "calls": choice.calls}
            for shape, choice in sorted(self._choices.items())
        ]


def _if_it_runs(label: str, shape: CallShape, make: Callable[[], _T]) -> _T | None:
    """What `make` gives; None where it fails: whatever a package raises at a shape, the others may still run it."""
    try:
        return make()
    except Exception as error:
        logger.info("auto: %s cannot run %s: %s", label, shape, first_line(error))
        return None


def _trial(device: torch.device, backend: AttentionBackend, arguments: Packed, is_graph: bool) -> Trial:
    """Warms a call up, as in a graph or eagerly, and times one."""

    def call() -> None:
        with backend.graph_path() if is_graph else nullcontext(), backend.one_forward():
            backend.varlen(*arguments)

    call()
    _, first_ms = queued_times(call, device, 1)
    alone = partial(backend.varlen, *arguments)
    if is_graph and first_ms < LONG_MS:
        return Trial(first_ms, partial(graph_reading, backend, alone, device, CALLS))
    calls = max(1, min(CALLS, round(CALLS * LONG_MS / max(first_ms, 1e-9))))
    return Trial(first_ms, lambda: partial(queued_times, call if is_graph else alone, device, calls))
