"""The captured graphs of a plan: how the forward is recorded at each capacity, what they share, and how they go.

On a CPU a call on the same static buffers stands in for a CUDA Graph. Nothing here encodes a call; see
`vitgraph.graphs.manager`.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from vitgraph.errors import CaptureError, NothingReplayedError
from vitgraph.graphs.buffers import MetadataWriter, StaticBuffers, total_bytes
from vitgraph.models.base import MetadataLayout, PixelField, SupportsEncoderCudaGraph
from vitgraph.planning.budgets import BudgetPlan, GraphKey

WARMUP_RUNS = 2
"""Eager runs before a capture, with its very shapes and dtypes: libraries initialise and kernels compile here."""


class HostGraph:
    """Stands in for a CUDA Graph on a CPU: a replay calls the forward again. It saves no launches."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run: Callable[[], None] | None = run

    def replay(self) -> None:
        if self._run is None:
            raise CaptureError("this graph was cleared; capture again before replaying")
        self._run()

    def reset(self) -> None:
        self._run = None


@dataclass(slots=True)
class BudgetGraphMetadata:
    """One captured graph with everything that it reads and writes; strong references keep its memory alive.

    Attributes:
        input_buffers: Prefix views of the shared buffers, by name.
        output_buffer: Prefix view `[token budget, D]` of the shared output.
        scalars: Host integers frozen at capture.
        pointers: Addresses of the inputs and the output at capture; a replay asserts them.
        capture_ms: Time of warm-up, capture and first replay.
        pool_bytes: Bytes that the graph added to the shared pool.
        buffer_bytes: Bytes of the static buffers that the graph uses (shared with the others).
    """

    key: GraphKey
    graph: torch.cuda.CUDAGraph | HostGraph
    input_buffers: dict[str, torch.Tensor]
    output_buffer: torch.Tensor
    scalars: dict[str, int]
    writer: MetadataWriter
    pixel_capacity: dict[str, int]
    pointers: tuple[int, ...]
    capture_ms: float
    pool_bytes: int
    buffer_bytes: int
    replay_count: int = 0

    def current_pointers(self) -> tuple[int, ...]:
        # A list is built faster than a generator is run, and this is asked before every replay.
        return (*[tensor.data_ptr() for tensor in self.input_buffers.values()], self.output_buffer.data_ptr())


def capture_budget(
    model: SupportsEncoderCudaGraph, key: GraphKey, buffers: StaticBuffers, pool: Any, stream: Any
) -> BudgetGraphMetadata:
    """Warms up, captures and, on a GPU, replays one graph.

    Args:
        pool: CUDA graph pool shared by all graphs; None on a CPU.
        stream: Side stream of the captures; None on a CPU.

    Raises:
        CaptureError: The forward did something that cannot be captured; the message names the call site.
        torch.OutOfMemoryError: The graph does not fit.
    """
    started = time.perf_counter()
    wanted = model.prepare_encoder_cudagraph_capture_inputs(key)
    layout = MetadataLayout(wanted.metadata)
    writer = MetadataWriter(layout, buffers.staging)
    inputs = {name: buffers.pixels[name][: field.rows] for name, field in wanted.pixels.items()}
    inputs.update(layout.device_views(buffers.arena))
    writer.send(wanted.dummy, buffers.arena)

    output: list[torch.Tensor] = []
    config = model.get_encoder_cudagraph_config()
    # Paths of equal tiles round a budget down to whole tiles, which is all that can be packed into it.
    policy = config.paths[key.path]
    unit = 1 if policy.has_segments else policy.min_token_budget

    def run() -> None:
        parts = model.encoder_cudagraph_forward(dict(inputs), wanted.scalars, key.path)
        if not output:
            rows, width = parts[0].shape[0], sum(part.shape[1] for part in parts)
            if rows < key.token_budget - key.token_budget % unit:
                raise CaptureError(
                    f"the forward of budget {key.token_budget} gave {rows} rows; its pixel buffer is too small"
                )
            output.append(buffers.reserve_output(key.path, rows, width, parts[0].dtype)[:rows])
        if len(parts) == 1:
            output[0].copy_(parts[0])
        else:
            torch.cat(list(parts), dim=-1, out=output[0])

    reserved = _reserved_bytes(model.device)
    with model.graph_path():
        graph: torch.cuda.CUDAGraph | HostGraph
        if model.device.type == "cuda":
            graph, reserved = _capture_cuda(run, pool, stream, key)
        else:
            run()
            graph = HostGraph(run)
    captured = BudgetGraphMetadata(
        key=key,
        graph=graph,
        input_buffers=inputs,
        output_buffer=output[0],
        scalars=wanted.scalars,
        writer=writer,
        pixel_capacity={name: field.rows for name, field in wanted.pixels.items()},
        pointers=(),
        capture_ms=(time.perf_counter() - started) * 1e3,
        pool_bytes=_reserved_bytes(model.device) - reserved,
        buffer_bytes=total_bytes([*inputs.values(), output[0]]),
    )
    captured.pointers = captured.current_pointers()
    return captured


def _capture_cuda(run: Callable[[], None], pool: Any, stream: Any, key: GraphKey) -> tuple[torch.cuda.CUDAGraph, int]:
    """Captures `run`; returns the graph and the bytes reserved just before the capture."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARMUP_RUNS):
            run()
        stream.synchronize()
        with _workspaces_in_pool():
            # What the warm-up left cached would otherwise be charged to no graph and kept for nothing.
            torch.cuda.empty_cache()
            reserved = _reserved_bytes(stream.device)
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                run()
            except BaseException as error:
                with suppress(RuntimeError):
                    graph.capture_end()
                if isinstance(error, torch.OutOfMemoryError) or not isinstance(error, RuntimeError):
                    raise
                site = traceback.extract_tb(error.__traceback__)[-1]
                raise CaptureError(
                    f"budget {key.token_budget} of path {key.path!r} cannot be captured: {error} "
                    f"(at {site.filename}:{site.lineno}, in {site.name}); a capture allows no host synchronisation"
                ) from error
            graph.capture_end()
        # The first launch of a graph uploads it to the device, which must not be in a request's call.
        graph.replay()
        stream.synchronize()
    torch.cuda.current_stream().wait_stream(stream)
    return graph, reserved


@contextmanager
def _workspaces_in_pool() -> Iterator[None]:
    """Captures within it take the memory that matrix products work in from their graph's pool.

    torch keeps one such workspace for each stream, and a graph writes to the address it was captured with. The one of
    the warm-up is not the graph's own: it is freed whenever anyone clears torch's workspaces, and in newer releases as
    soon as any graph of that stream is reset; the others would then write to memory of somebody else. So the capture
    must find none and make one, which its pool keeps for as long as the graph lives, and torch must forget it.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


def _reserved_bytes(device: torch.device) -> int:
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


def reserve_together(managers: Sequence[CapturedGraphs]) -> None:
    """To be called before managers of one encoder capture, where their graphs live side by side.

    What an attention backend keeps for all graphs must be large enough from the first capture on: a later, larger
    reservation would be made beside the one that earlier graphs write to. The managers share it until the last of their
    graphs was replayed, so that none may be cleared before.
    """
    fields = [field for manager in managers for field in manager.pixel_fields(manager.plan.graph_keys()).values()]
    managers[0].model.reserve_for_capture(max(field.rows for field in fields))


@dataclass(frozen=True, slots=True)
class DroppedGraph:
    """A graph that was planned and is not there."""

    key: GraphKey
    reason: str


class CapturedGraphs:
    """Graphs of one plan, which share a pool and one set of static buffers."""

    def __init__(self, model: SupportsEncoderCudaGraph, plan: BudgetPlan) -> None:
        self.model = model
        self.plan = plan
        self.graphs: dict[GraphKey, BudgetGraphMetadata] = {}
        self.dropped: list[DroppedGraph] = []
        self._buffers: StaticBuffers | None = None
        self._pool: Any = None
        self._stream: Any = None
        self._capture = object()

    @property
    def is_cuda(self) -> bool:
        return self.model.device.type == "cuda"

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the static buffers, which all graphs share."""
        return self._buffers.nbytes if self._buffers is not None else 0

    @property
    def pool_bytes(self) -> int:
        """Bytes of the graph pool, which all graphs share."""
        return sum(graph.pool_bytes for graph in self.graphs.values())

    def pixel_fields(self, keys: Iterable[GraphKey]) -> dict[str, PixelField]:
        """The largest pixel buffer of each name."""
        pixels: dict[str, PixelField] = {}
        for key in keys:
            for name, pixel_field in self.model.prepare_encoder_cudagraph_capture_inputs(key).pixels.items():
                if name not in pixels or pixels[name].rows < pixel_field.rows:
                    pixels[name] = pixel_field
        return pixels

    @torch.inference_mode()
    def capture(self, progress: Callable[[int, int, GraphKey], None] | None = None) -> None:
        """Captures every graph of the plan, the largest first; those that do not fit are dropped and reported.

        Args:
            progress: Called with (done, total, key) before each capture.

        Raises:
            NothingReplayedError: Not one graph could be captured.
            CaptureError: The encoder's forward cannot be captured, or graphs exist already.
        """
        if self.graphs:
            raise CaptureError("graphs are captured already; clear() before capturing again")
        self.capture_some(self.plan.graph_keys(), progress)
        if not self.graphs:
            why = self.dropped[0].reason if self.dropped else "the plan has no budgets"
            raise NothingReplayedError(f"0 graphs captured of {len(self.plan.graph_keys())} planned: {why}")

    @torch.inference_mode()
    def capture_some(
        self, wanted: Iterable[GraphKey], progress: Callable[[int, int, GraphKey], None] | None = None
    ) -> None:
        """Captures those of the plan's graphs that are wanted and not there yet, the largest first.

        The first call makes the buffers for the whole plan, so that further calls may add any of its graphs.

        Raises:
            CaptureError: The encoder's forward cannot be captured.
        """
        planned = self.plan.graph_keys()
        if self._buffers is None:
            refusal = self.model.capture_refusal()
            if refusal is not None:
                raise CaptureError(refusal)
            self.dropped = []
            self._capture = object()
            self._allocate(planned)
            if self.is_cuda:
                self._pool = torch.cuda.graph_pool_handle()
                self._stream = torch.cuda.Stream(self.model.device)
        lost = {dropped.key for dropped in self.dropped}
        missing = set(wanted) - self.graphs.keys() - lost
        keys = [key for key in planned if key in missing]
        for done, key in enumerate(keys):
            if progress is not None:
                progress(done, len(keys), key)
            assert self._buffers is not None
            try:
                self.graphs[key] = capture_budget(self.model, key, self._buffers, self._pool, self._stream)
            except torch.OutOfMemoryError as error:
                self._drop(key, error)

    def _allocate(self, keys: Sequence[GraphKey]) -> None:
        """Makes the shared buffers for the largest of `keys` that fits, and drops those above it."""
        remaining = list(keys)
        while remaining:
            pixels = self.pixel_fields(remaining)
            wanted = map(self.model.prepare_encoder_cudagraph_capture_inputs, remaining)
            arena_bytes = max(MetadataLayout(each.metadata).nbytes for each in wanted)
            try:
                self._buffers = StaticBuffers(pixels, arena_bytes, self.model.device, self.model.dtype)
            except torch.OutOfMemoryError as error:
                largest = remaining[0].token_budget
                for key in [key for key in remaining if key.token_budget == largest]:
                    self._drop(key, error)
                remaining = [key for key in remaining if key.token_budget < largest]
                continue
            self.model.reserve_for_capture(max(pixel.rows for pixel in pixels.values()))
            return

    def _drop(self, key: GraphKey, error: Exception) -> None:
        self.dropped.append(DroppedGraph(key, f"out of memory: {str(error).splitlines()[0]}"))
        if self.is_cuda:
            torch.cuda.empty_cache()

    def clear(self) -> None:
        """Releases every graph, the pool and the buffers; capturing again is allowed.

        Other managers' graphs are left as they are, unless they share an encoder; see `reserve_together`.
        """
        if self.is_cuda:
            torch.cuda.synchronize(self.model.device)
        for graph in self.graphs.values():
            graph.graph.reset()
        self.graphs.clear()
        self._buffers = None
        self._pool = self._stream = None
        self.model.release_capture()
        if self.is_cuda:
            torch.cuda.empty_cache()
