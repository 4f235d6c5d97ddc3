"""Records the encoder's forward at one capacity, as a CUDA Graph or, on a CPU, as a call on the same static buffers."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from vitgraph.errors import CaptureError
from vitgraph.graphs.buffers import MetadataWriter, StaticBuffers
from vitgraph.models.base import SupportsEncoderCudaGraph
from vitgraph.models.metadata import MetadataLayout
from vitgraph.planning.budgets import BudgetPlan, GraphKey

WARMUP_RUNS = 2
"""Eager runs before a capture, with its very shapes and dtypes: libraries initialise and kernels compile here."""


class Replayable(Protocol):
    """What a captured graph does."""

    def replay(self) -> None: ...

    def reset(self) -> None: ...


class HostGraph:
    """Stands in for a CUDA Graph on a CPU: a replay calls the forward again. It saves no launches.

    Args:
        run: The forward on the static buffers.
    """

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
        key: Path, token budget, segment slots and axis key.
        max_batch_size: Items that a replay may hold.
        max_frames_per_batch: Video frames that a replay may hold.
        graph: The captured graph.
        input_buffers: Prefix views of the shared buffers, by name.
        output_buffer: Prefix view `[token budget, D]` of the shared output.
        scalars: Host integers frozen at capture.
        writer: Sends the metadata of a replay.
        pixel_capacity: Rows of each pixel buffer.
        pointers: Addresses of the inputs and the output at capture; a replay asserts them.
        capture_ms: Time of warm-up, capture and first replay.
        pool_bytes: Bytes that the graph added to the shared pool.
        buffer_bytes: Bytes of the static buffers that the graph uses (shared with the others).
    """

    key: GraphKey
    max_batch_size: int
    max_frames_per_batch: int
    graph: Replayable
    input_buffers: dict[str, torch.Tensor]
    output_buffer: torch.Tensor
    scalars: dict[str, int]
    writer: MetadataWriter
    pixel_capacity: dict[str, int]
    pointers: tuple[int, ...]
    capture_ms: float
    pool_bytes: int
    buffer_bytes: int
    replay_count: int = field(default=0)

    @property
    def token_budget(self) -> int:
        return self.key.token_budget

    def current_pointers(self) -> tuple[int, ...]:
        # A list is built faster than a generator is run, and this is asked before every replay.
        return (*[tensor.data_ptr() for tensor in self.input_buffers.values()], self.output_buffer.data_ptr())


def capture_budget(
    model: SupportsEncoderCudaGraph,
    key: GraphKey,
    plan: BudgetPlan,
    buffers: StaticBuffers,
    pool: Any,
    stream: Any,
) -> BudgetGraphMetadata:
    """Warms up, captures and, on a GPU, replays one graph.

    Args:
        model: The encoder.
        key: What to capture.
        plan: Item and frame limits, for the record.
        buffers: The shared buffers.
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
        graph: Replayable
        if model.device.type == "cuda":
            graph, reserved = _capture_cuda(run, pool, stream, key)
        else:
            run()
            graph = HostGraph(run)
    captured = BudgetGraphMetadata(
        key=key,
        max_batch_size=plan.max_items,
        max_frames_per_batch=plan.max_frames,
        graph=graph,
        input_buffers=inputs,
        output_buffer=output[0],
        scalars=wanted.scalars,
        writer=writer,
        pixel_capacity={name: field.rows for name, field in wanted.pixels.items()},
        pointers=(),
        capture_ms=(time.perf_counter() - started) * 1e3,
        pool_bytes=_reserved_bytes(model.device) - reserved,
        buffer_bytes=_total_bytes(inputs) + output[0].numel() * output[0].element_size(),
    )
    captured.pointers = captured.current_pointers()
    return captured


def _capture_cuda(run: Callable[[], None], pool: Any, stream: Any, key: GraphKey) -> tuple[Replayable, int]:
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


def _total_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
