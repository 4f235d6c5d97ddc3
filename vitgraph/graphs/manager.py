"""`EncoderCudaGraphManager`: packs a call, replays graphs, runs the rest eagerly, returns rows in input order.

The manager knows no model and no backend; all of that is behind `SupportsEncoderCudaGraph`.
"""

from __future__ import annotations

import logging
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np
import torch

from vitgraph.errors import CaptureError
from vitgraph.graphs.capture import BudgetGraphMetadata, CapturedGraphs
from vitgraph.models.base import (
    EncoderCudaGraphReplayBuffers,
    EncoderInputs,
    PixelRows,
    RowRanges,
    SupportsEncoderCudaGraph,
)
from vitgraph.models.geometry import ItemGeometry
from vitgraph.planning.budgets import BudgetPlan, EncoderItemSpec, GraphKey
from vitgraph.planning.graph_tables import PackingCost
from vitgraph.planning.packing import NOT_CAPTURED, PackedBatch, PathRun, pack_items


@dataclass(slots=True)
class PreparedReplay:
    """What a replay of one batch needs besides the pixels, kept after it was checked against the graph's limits.

    It holds no device memory and no metadata, so a plan that outlives its graphs keeps neither alive.

    Attributes:
        capture: Stands for one capture of the manager; another one may have other graphs and other limits.
        indices: `EncoderInputs.indices` of the call that the rows were taken from.
        row_offsets: Its `row_offsets`; a call with others has its pixels elsewhere.
        rows: Rows of each pixel buffer that belong to the batch.
        metadata: The batch's metadata, for as long as the model's cache keeps it.
    """

    capture: object
    indices: tuple[int, ...]
    row_offsets: Mapping[str, tuple[int, ...]]
    rows: dict[str, RowRanges]
    metadata: weakref.ref[Mapping[str, np.ndarray]]

    @classmethod
    def of(
        cls, capture: object, mm_kwargs: EncoderInputs, values: EncoderCudaGraphReplayBuffers
    ) -> PreparedReplay | None:
        """Keeps what was prepared for a replay; None where the model's metadata cannot be referred to weakly."""
        try:
            metadata = weakref.ref(values.metadata)
        except TypeError:
            return None
        rows = {name: pixels.rows for name, pixels in values.pixels.items()}
        return cls(capture, mm_kwargs.indices, mm_kwargs.row_offsets, rows, metadata)

    def values_for(
        self, capture: object, mm_kwargs: EncoderInputs
    ) -> tuple[dict[str, PixelRows], Mapping[str, np.ndarray]] | None:
        """Pixels and metadata of a replay for another call of the same sizes; None where they must be prepared anew."""
        if self.capture is not capture or self.indices != mm_kwargs.indices:
            return None
        metadata = self.metadata()
        if metadata is None or self.row_offsets != mm_kwargs.row_offsets:
            return None
        return {name: PixelRows(mm_kwargs.pixels[name], rows) for name, rows in self.rows.items()}, metadata


@dataclass(slots=True)
class CallPlan:
    """How a call with certain geometries is encoded; made once for each combination and reused.

    Attributes:
        tokens: For each path, output rows of each item.
        offsets: For each path, the first output row of each item in input order, and the end.
        eager_items: For each path, the items that run eagerly on it, in input order.
        prepared: What earlier replays of a path and a batch's items have left.
        output_rows: For each path and items, their rows of the call's result.
    """

    batches: list[PackedBatch]
    tokens: dict[str, list[int]]
    offsets: dict[str, list[int]]
    eager_items: dict[str, list[int]] = field(default_factory=dict)
    prepared: dict[tuple[str, tuple[int, ...]], PreparedReplay] = field(default_factory=dict, repr=False)
    output_rows: dict[tuple[str, tuple[int, ...]], RowRanges] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, batches: list[PackedBatch], specs: Sequence[EncoderItemSpec], paths: Iterable[str]) -> CallPlan:
        """The plan of a call that is packed in a given way."""
        tokens = {path: [spec.tokens_on(path) for spec in specs] for path in paths}
        offsets = {path: [0, *accumulate(counts)] for path, counts in tokens.items()}
        plan = cls(batches, tokens, offsets)
        plan.collect_eager()
        return plan

    def collect_eager(self) -> None:
        """Gathers the items that no graph of their batch encodes; again, after a batch was changed."""
        self.eager_items = {}
        for batch in self.batches:
            for path, run in batch.runs.items():
                if run.key is None:
                    with_rows = [index for index in batch.items if self.tokens[path][index]]
                    self.eager_items.setdefault(path, []).extend(with_rows)
        for indices in self.eager_items.values():
            indices.sort()

    def rows_of(self, path: str, items: tuple[int, ...]) -> RowRanges:
        """Rows of the call's result on a path that belong to some items."""
        rows = self.output_rows.get((path, items))
        if rows is None:
            offsets = self.offsets[path]
            rows = RowRanges([(offsets[index], offsets[index + 1]) for index in items])
            self.output_rows[path, items] = rows
        return rows


def forced_batch(
    members: Sequence[int], specs: Sequence[EncoderItemSpec], paths: Iterable[str], keys: Mapping[str, GraphKey]
) -> PackedBatch:
    """A batch that replays the given graph on each path named, and runs the others eagerly."""
    segments = sum(specs[index].segments for index in members)
    batch = PackedBatch(tuple(members))
    for path in paths:
        present = tuple(index for index in members if specs[index].tokens_on(path))
        if present:
            tokens, key = sum(specs[index].tokens_on(path) for index in present), keys.get(path)
            batch.runs[path] = PathRun(tokens, segments, key, None if key is not None else NOT_CAPTURED, present)
    return batch


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
