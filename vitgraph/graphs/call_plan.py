"""How a call is encoded, and what of it depends on geometry alone: made once, used for every call of the same sizes."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from vitgraph.models.base import EncoderCudaGraphReplayBuffers, EncoderInputs, PixelRows, RowRanges
from vitgraph.planning.budgets import GraphKey
from vitgraph.planning.items import EncoderItemSpec
from vitgraph.planning.packing import NOT_CAPTURED, PackedBatch, PathRun


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
