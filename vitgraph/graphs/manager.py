"""`EncoderCudaGraphManager`: packs a call, replays graphs, runs the rest eagerly, returns rows in input order.

The manager knows no model and no backend; all of that is behind `SupportsEncoderCudaGraph`.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from vitgraph.errors import CaptureError
from vitgraph.graphs.call_plan import CallPlan, PreparedReplay
from vitgraph.graphs.capture import BudgetGraphMetadata, CapturedGraphs
from vitgraph.models.base import EncoderInputs, PixelRows, SupportsEncoderCudaGraph
from vitgraph.models.geometry import ItemGeometry
from vitgraph.planning.budgets import BudgetPlan
from vitgraph.planning.graph_tables import PackingCost
from vitgraph.planning.packing import NOT_CAPTURED, PackedBatch, PathRun, pack_items

logger = logging.getLogger(__name__)

BUFFER_OVERFLOW = "buffer_overflow"
"""Miss reason of a batch that the packing let through and a buffer cannot hold."""

PLAN_CACHE_ENTRIES = 16384

Rows = dict[str, torch.Tensor | None]
"""Output rows of a call by path; None where nothing of it was encoded yet."""


class EncoderCudaGraphManager(CapturedGraphs):
    """Captures the graphs of a plan and encodes calls with them.

    Args:
        cost: Predicted times, for the policy `optimal`.
    """

    def __init__(
        self,
        model: SupportsEncoderCudaGraph,
        plan: BudgetPlan,
        *,
        policy: str = "greedy",
        cost: PackingCost | None = None,
    ) -> None:
        super().__init__(model, plan)
        self.policy = policy
        self.cost = cost
        self._plans: OrderedDict[tuple[ItemGeometry, ...], CallPlan] = OrderedDict()
        self._warned: set[str] = set()

    def clear(self) -> None:
        self._plans.clear()
        super().clear()

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
                    values = self._replay_values(mm_kwargs, plan, batch, path, graph)
                    if values is not None:
                        self._copy_in(graph, *values)

    @torch.inference_mode()
    def execute_planned(self, mm_kwargs: EncoderInputs, plan: CallPlan) -> list[torch.Tensor]:
        """`execute` with a plan that `plan_call` made for the same geometries."""
        rows: Rows = dict.fromkeys(plan.tokens)
        for batch in plan.batches:
            for path, run in batch.runs.items():
                if run.key is not None:
                    self._replay(mm_kwargs, plan, batch, path, run, rows)
        for path, indices in plan.eager_items.items():
            self._run_eagerly(mm_kwargs, plan, path, indices, rows)
        return self._split_items(mm_kwargs, plan, rows)

    def _split_items(self, mm_kwargs: EncoderInputs, plan: CallPlan, rows: Rows) -> list[torch.Tensor]:
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
        self, mm_kwargs: EncoderInputs, plan: CallPlan, batch: PackedBatch, path: str, run: PathRun, rows: Rows
    ) -> None:
        assert run.key is not None
        graph = self.graphs[run.key]
        values = self._replay_values(mm_kwargs, plan, batch, path, graph)
        if values is None:
            return
        if graph.current_pointers() != graph.pointers:
            raise CaptureError(f"a buffer of the graph of budget {graph.key.token_budget} moved after the capture")
        self._copy_in(graph, *values)
        self._launch(graph)
        self._clone_out(graph.output_buffer, plan, path, batch.items, run.tokens, rows)

    def _replay_values(
        self, mm_kwargs: EncoderInputs, plan: CallPlan, batch: PackedBatch, path: str, graph: BudgetGraphMetadata
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
        selected = self.model.select_encoder_cudagraph_items(mm_kwargs, batch.items)
        values = self.model.prepare_encoder_cudagraph_replay_buffers(selected, key)
        overflow = graph.writer.layout.overflow(values.metadata) or next(
            (
                f"{name}: {pixels.num_rows} rows into {graph.pixel_capacity[name]}"
                for name, pixels in values.pixels.items()
                if pixels.num_rows > graph.pixel_capacity[name]
            ),
            None,
        )
        if overflow is not None:
            self._reroute_overflow(plan, batch, path, overflow)
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

    def _reroute_overflow(self, plan: CallPlan, batch: PackedBatch, path: str, overflow: str) -> None:
        """The packing let a batch through that a buffer cannot hold: a counted miss and one warning, never a crash."""
        message = f"{path}: {overflow}"
        if message not in self._warned:
            self._warned.add(message)
            logger.warning("a batch does not fit its graph's buffers and runs eagerly (%s)", message)
        batch.runs[path] = replace(batch.runs[path], key=None, miss_reason=BUFFER_OVERFLOW)
        plan.collect_eager()

    def _clone_out(
        self, output: torch.Tensor, plan: CallPlan, path: str, items: tuple[int, ...], tokens: int, rows: Rows
    ) -> None:
        """Copies a replay's real rows to where the call's result holds them; the next replay may overwrite `output`."""
        if rows[path] is None and tokens == plan.offsets[path][-1]:
            rows[path] = output[:tokens].clone()
        else:
            self._scatter(output, plan, path, items, rows)

    def _run_eagerly(
        self, mm_kwargs: EncoderInputs, plan: CallPlan, path: str, indices: Sequence[int], rows: Rows
    ) -> None:
        selected = self.model.select_encoder_cudagraph_items(mm_kwargs, indices)
        output = self.model.encoder_eager_forward(selected, path)
        if rows[path] is None and len(output) == plan.offsets[path][-1]:
            rows[path] = output
        else:
            self._scatter(output, plan, path, tuple(indices), rows)

    def _scatter(self, output: torch.Tensor, plan: CallPlan, path: str, items: tuple[int, ...], rows: Rows) -> None:
        result = rows[path]
        if result is None:
            result = rows[path] = output.new_empty((plan.offsets[path][-1], output.shape[1]))
        plan.rows_of(path, items).scatter(output, result)
