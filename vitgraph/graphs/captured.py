"""The captured graphs of a plan: what they share, how they come to be, and how they go.

Nothing here encodes a call; see `vitgraph.graphs.manager`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vitgraph.errors import CaptureError, NothingReplayedError
from vitgraph.graphs.buffers import StaticBuffers
from vitgraph.graphs.capture import BudgetGraphMetadata, capture_budget
from vitgraph.models.base import EncoderCudaGraphCaptureInputs, PixelField, SupportsEncoderCudaGraph
from vitgraph.models.metadata import MetadataLayout
from vitgraph.planning.budgets import BudgetPlan, GraphKey


def reserve_together(managers: Sequence[CapturedGraphs]) -> None:
    """To be called before managers of one encoder capture, where their graphs live side by side.

    What an attention backend keeps for all graphs must be large enough from the first capture on: a later, larger
    reservation would be made beside the one that earlier graphs write to. The managers share it until the last of their
    graphs was replayed, so that none may be cleared before.
    """
    managers[0].model.reserve_for_capture(max(manager.most_pixel_rows() for manager in managers))


@dataclass(frozen=True, slots=True)
class DroppedGraph:
    """A graph that was planned and is not there."""

    key: GraphKey
    reason: str


class CapturedGraphs:
    """Graphs of one plan, which share a pool and one set of static buffers.

    Args:
        model: The encoder.
        plan: Which graphs exist, and the limits of a replay.

    Attributes:
        graphs: Captured graphs by key.
        dropped: Planned graphs that could not be captured, with the reason.
    """

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

    def most_pixel_rows(self) -> int:
        """Rows of the largest pixel buffer that any graph of the plan has."""
        return max(field.rows for field in self._pixel_fields(self.plan.graph_keys()).values())

    def _wanted(self, key: GraphKey) -> EncoderCudaGraphCaptureInputs:
        return self.model.prepare_encoder_cudagraph_capture_inputs(key)

    def _pixel_fields(self, keys: Iterable[GraphKey]) -> dict[str, PixelField]:
        """The largest pixel buffer of each name."""
        pixels: dict[str, PixelField] = {}
        for key in keys:
            for name, pixel_field in self._wanted(key).pixels.items():
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
                self.graphs[key] = capture_budget(self.model, key, self.plan, self._buffers, self._pool, self._stream)
            except torch.OutOfMemoryError as error:
                self._drop(key, error)

    def _allocate(self, keys: Sequence[GraphKey]) -> None:
        """Makes the shared buffers for the largest of `keys` that fits, and drops those above it."""
        remaining = list(keys)
        while remaining:
            pixels = self._pixel_fields(remaining)
            arena_bytes = max(MetadataLayout(self._wanted(key).metadata).nbytes for key in remaining)
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
