"""`EncoderCudaGraphManager`: packs a call, replays graphs, runs the rest eagerly, returns rows in input order.

The manager knows no model and no backend; all of that is behind `SupportsEncoderCudaGraph`.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from vitgraph.errors import CaptureError, NothingReplayedError
from vitgraph.graphs.buffers import StaticBuffers
from vitgraph.graphs.call_plan import CallPlan, PreparedReplay
from vitgraph.graphs.capture import BudgetGraphMetadata, capture_budget
from vitgraph.models.base import (
    EncoderCudaGraphCaptureInputs,
    EncoderInputs,
    GraphCapacity,
    PixelField,
    PixelRows,
    SupportsEncoderCudaGraph,
)
from vitgraph.models.geometry import ItemGeometry
from vitgraph.models.metadata import MetadataLayout
from vitgraph.planning.budgets import BudgetPlan, GraphKey
from vitgraph.planning.graph_tables import PackingCost
from vitgraph.planning.packing import NOT_CAPTURED, PackedBatch, PathRun, pack_items

logger = logging.getLogger(__name__)

BUFFER_OVERFLOW = "buffer_overflow"
"""Miss reason of a batch that the packing let through and a buffer cannot hold."""

PLAN_CACHE_ENTRIES = 16384


def reserve_together(managers: Sequence[EncoderCudaGraphManager]) -> None:
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

    def as_dict(self) -> dict[str, Any]:
        return {
            "path": self.key.path,
            "token_budget": self.key.token_budget,
            "segment_slots": self.key.segment_slots,
            "axis_key": list(self.key.axis_key),
            "reason": self.reason,
        }


class EncoderCudaGraphManager:
    """Captures the graphs of a plan and encodes calls with them.

    Args:
        model: The encoder.
        plan: Which graphs exist, and the limits of a replay.
        policy: Packing policy.
        cost: Predicted times, for the policy `optimal`.

    Attributes:
        graphs: Captured graphs by key.
        dropped: Planned graphs that could not be captured, with the reason.
    """

    def __init__(
        self,
        model: SupportsEncoderCudaGraph,
        plan: BudgetPlan,
        *,
        policy: str = "greedy",
        cost: PackingCost | None = None,
    ) -> None:
        self.model = model
        self.plan = plan
        self.policy = policy
        self.cost = cost
        self.graphs: dict[GraphKey, BudgetGraphMetadata] = {}
        self.dropped: list[DroppedGraph] = []
        self._buffers: StaticBuffers | None = None
        self._pool: Any = None
        self._stream: Any = None
        self._capture = object()
        self._plans: OrderedDict[tuple[ItemGeometry, ...], CallPlan] = OrderedDict()
        self._warned: set[str] = set()

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
        capacity = GraphCapacity(key.path, key.token_budget, key.segment_slots, key.axis_key)
        return self.model.prepare_encoder_cudagraph_capture_inputs(capacity)

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
        self._plans.clear()
        self._buffers = None
        self._pool = self._stream = None
        self.model.release_capture()
        if self.is_cuda:
            torch.cuda.empty_cache()

    # -- encoding --------------------------------------------------------------------------------------------------

    def plan_call(self, mm_kwargs: EncoderInputs) -> CallPlan:
        """Packs a call and selects its graphs; cached by the items' geometries."""
        items = mm_kwargs.chosen
        cached = self._plans.get(items)
        if cached is not None:
            return cached
        specs = self.model.get_encoder_cudagraph_item_specs(mm_kwargs)
        batches = pack_items(specs, self.plan, self.policy, self.cost)
        for batch in batches:
            for run in batch.runs.values():
                if run.key is not None and run.key not in self.graphs:
                    self._use_captured_graph(run)
        plan = CallPlan.of(batches, specs, self.plan.paths)
        self._plans[items] = plan
        if len(self._plans) > PLAN_CACHE_ENTRIES:
            self._plans.popitem(last=False)
        return plan

    def _use_captured_graph(self, run: PathRun) -> None:
        """A planned graph was dropped: takes the smallest captured one that holds the batch, else goes eager."""
        assert run.key is not None
        wanted = run.key
        fitting = [
            key
            for key in self.graphs
            if key.path == wanted.path
            and key.axis_key == wanted.axis_key
            and key.token_budget >= run.tokens
            and (wanted.path in self.plan.segment_free_paths or key.segment_slots >= run.segments)
        ]
        run.key = min(fitting, default=None)
        if run.key is None or (self.policy == "exact" and run.key.token_budget != run.tokens):
            run.key, run.miss_reason = None, NOT_CAPTURED

    def execute(self, mm_kwargs: EncoderInputs) -> list[torch.Tensor]:
        """Encodes one call.

        Args:
            mm_kwargs: The call's items and pixels.

        Returns:
            The final embedding of each item, in input order; none shares memory with a graph's buffers.
        """
        return self.execute_planned(mm_kwargs, self.plan_call(mm_kwargs))

    @torch.inference_mode()
    def load_planned(self, mm_kwargs: EncoderInputs, plan: CallPlan) -> None:
        """Puts the pixels and metadata of each replay into its graph's buffers, and replays nothing.

        What the host computes for the call is kept in the plan, so that its first run costs what later ones do; and the
        last batch's graphs can be replayed by themselves.
        """
        for batch in plan.batches:
            for path, run in batch.runs.items():
                if run.key is not None:
                    graph = self.graphs[run.key]
                    values = self._replay_values(mm_kwargs, plan, batch, path, run, graph)
                    if values is not None:
                        self._copy_in(graph, *values)

    @torch.inference_mode()
    def execute_planned(self, mm_kwargs: EncoderInputs, plan: CallPlan) -> list[torch.Tensor]:
        """`execute` with a plan that `plan_call` made for the same geometries."""
        rows: dict[str, torch.Tensor | None] = dict.fromkeys(plan.tokens)
        for batch in plan.batches:
            for path, run in batch.runs.items():
                if run.key is not None:
                    self._replay(mm_kwargs, plan, batch, path, run, rows)
        for path, indices in plan.eager_items.items():
            self._run_eagerly(mm_kwargs, plan, path, indices, rows)
        return self._split_items(mm_kwargs, plan, rows)

    def _split_items(
        self, mm_kwargs: EncoderInputs, plan: CallPlan, rows: Mapping[str, torch.Tensor | None]
    ) -> list[torch.Tensor]:
        outputs: dict[str, Sequence[torch.Tensor | None]] = {}
        for path, counts in plan.tokens.items():
            result = rows[path]
            if result is None:
                outputs[path] = [None] * len(counts)
            elif len(counts) == 1:
                outputs[path] = [result]
            else:
                pieces = result.split_with_sizes(counts)
                outputs[path] = [piece if count else None for piece, count in zip(pieces, counts, strict=True)]
        return self.model.postprocess_encoder_output(mm_kwargs, outputs)

    def _replay(
        self,
        mm_kwargs: EncoderInputs,
        plan: CallPlan,
        batch: PackedBatch,
        path: str,
        run: PathRun,
        rows: dict[str, torch.Tensor | None],
    ) -> None:
        assert run.key is not None
        graph = self.graphs[run.key]
        values = self._replay_values(mm_kwargs, plan, batch, path, run, graph)
        if values is None:
            return
        if graph.current_pointers() != graph.pointers:
            raise CaptureError(f"a buffer of the graph of budget {graph.token_budget} moved after the capture")
        self._copy_in(graph, *values)
        self._launch(graph)
        self._clone_out(graph.output_buffer, plan, path, batch.items, run.tokens, rows)

    def _replay_values(
        self,
        mm_kwargs: EncoderInputs,
        plan: CallPlan,
        batch: PackedBatch,
        path: str,
        run: PathRun,
        graph: BudgetGraphMetadata,
    ) -> tuple[Mapping[str, PixelRows], Mapping[str, np.ndarray]] | None:
        """Pixel rows and metadata of a replay; None where the batch does not fit the buffers and was sent to eager.

        What a graph can hold is checked when a batch's sizes are first met; later calls of the same plan only bring
        other pixels.
        """
        prepared = plan.prepared.get((path, batch.items))
        if prepared is not None:
            known = prepared.values_for(self._capture, mm_kwargs)
            if known is not None:
                return known
        key = graph.key
        capacity = GraphCapacity(path, key.token_budget, key.segment_slots, key.axis_key)
        selected = self.model.select_encoder_cudagraph_items(mm_kwargs, batch.items)
        values = self.model.prepare_encoder_cudagraph_replay_buffers(selected, capacity)
        overflow = graph.writer.layout.overflow(values.metadata) or self._pixel_overflow(graph, values.pixels)
        if overflow is not None:
            self._reroute_overflow(plan, batch, path, run, overflow)
            return None
        for name, value in values.scalars.items():
            if value > graph.scalars[name]:
                raise CaptureError(
                    f"{name} is {value} in this batch, above the {graph.scalars[name]} that the graph of budget "
                    f"{key.token_budget} froze at capture; the model's capture_scalars is not an upper bound"
                )
        prepared = PreparedReplay.of(self._capture, mm_kwargs, values)
        if prepared is not None:
            plan.prepared[path, batch.items] = prepared
        return values.pixels, values.metadata

    def _copy_in(
        self, graph: BudgetGraphMetadata, pixels: Mapping[str, PixelRows], metadata: Mapping[str, np.ndarray]
    ) -> None:
        assert self._buffers is not None
        for name, pixel_rows in pixels.items():
            self._buffers.load_pixels(name, pixel_rows, graph.pixel_capacity[name])
        graph.writer.send(metadata, self._buffers.arena)

    def _launch(self, graph: BudgetGraphMetadata) -> None:
        graph.graph.replay()
        graph.replay_count += 1

    def _pixel_overflow(self, graph: BudgetGraphMetadata, pixels: Mapping[str, PixelRows]) -> str | None:
        for name, pixel_rows in pixels.items():
            if pixel_rows.num_rows > graph.pixel_capacity[name]:
                return f"{name}: {pixel_rows.num_rows} rows into {graph.pixel_capacity[name]}"
        return None

    def _reroute_overflow(self, plan: CallPlan, batch: PackedBatch, path: str, run: PathRun, overflow: str) -> None:
        """The packing let a batch through that a buffer cannot hold: a counted miss and one warning, never a crash."""
        message = f"{path}: {overflow}"
        if message not in self._warned:
            self._warned.add(message)
            logger.warning("a batch does not fit its graph's buffers and runs eagerly (%s)", message)
        batch.runs[path] = replace(run, key=None, miss_reason=BUFFER_OVERFLOW)
        plan.collect_eager()

    def _clone_out(
        self,
        output: torch.Tensor,
        plan: CallPlan,
        path: str,
        items: tuple[int, ...],
        tokens: int,
        rows: dict[str, torch.Tensor | None],
    ) -> None:
        """Copies a replay's real rows to where the call's result holds them; the next replay may overwrite `output`."""
        total = plan.offsets[path][-1]
        result = rows[path]
        if result is None and tokens == total:
            rows[path] = output[:tokens].clone()
            return
        if result is None:
            result = rows[path] = output.new_empty((total, output.shape[1]))
        plan.rows_of(path, items).scatter(output, result)

    def _run_eagerly(
        self,
        mm_kwargs: EncoderInputs,
        plan: CallPlan,
        path: str,
        indices: Sequence[int],
        rows: dict[str, torch.Tensor | None],
    ) -> None:
        selected = self.model.select_encoder_cudagraph_items(mm_kwargs, indices)
        output = self.model.encoder_eager_forward(selected, path)
        total = plan.offsets[path][-1]
        result = rows[path]
        if result is None and len(output) == total:
            rows[path] = output
            return
        if result is None:
            result = rows[path] = output.new_empty((total, output.shape[1]))
        plan.rows_of(path, tuple(indices)).scatter(output, result)
