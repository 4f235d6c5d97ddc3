"""The protocol between a vision encoder and the graph manager, and the data that crosses it.

A model implements `SupportsEncoderCudaGraph`; the manager, the bench and the planner know nothing else of it. Method
names are those of vLLM's protocol
(https://github.com/vllm-project/vllm/blob/main/docs/design/cuda_graphs_multimodal.md). Two things are stricter here:

- All metadata (offsets, positions, gather indices, weights) is computed on the host as numpy arrays by **one**
  function, `compute_metadata`, which eager, capture and replay share. Only the padding differs.
- Pixels are never gathered for a sub-batch: `PixelRows` names the rows, and they are copied once, straight into the
  graph's buffer.

Shape legend: N patches (pixel rows), M output tokens (graph rows), S attention segments, D output width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from vitgraph.models.geometry import EncoderCudaGraphConfig, ItemGeometry
from vitgraph.planning.items import DEFAULT_PATH, EncoderItemSpec

if TYPE_CHECKING:
    import torch


class PixelRows:
    """Rows of a packed pixel tensor that belong to chosen items, as few contiguous ranges.

    Attributes:
        source: The call's packed tensor `[rows, ...]` on the device.
        ranges: `(start, stop)` row ranges in the order of the items; neighbours are merged.
    """

    __slots__ = ("ranges", "source")

    def __init__(self, source: torch.Tensor, ranges: Sequence[tuple[int, int]]) -> None:
        merged: list[tuple[int, int]] = []
        for start, stop in ranges:
            if start == stop:
                continue
            if merged and merged[-1][1] == start:
                merged[-1] = (merged[-1][0], stop)
            else:
                merged.append((start, stop))
        self.source = source
        self.ranges = tuple(merged)

    @property
    def num_rows(self) -> int:
        return sum(stop - start for start, stop in self.ranges)

    def materialize(self) -> torch.Tensor:
        """The rows as one tensor; a view where they are contiguous."""
        if len(self.ranges) == 1:
            start, stop = self.ranges[0]
            return self.source[start:stop]
        if not self.ranges:
            return self.source[:0]
        import torch

        return torch.cat([self.source[start:stop] for start, stop in self.ranges])

    def copy_into(self, destination: torch.Tensor) -> int:
        """Copies the rows to the head of `destination`; returns how many there are."""
        if len(self.ranges) == 1:
            start, stop = self.ranges[0]
            destination[: stop - start].copy_(self.source[start:stop])
            return stop - start
        row = 0
        targets, sources = [], []
        for start, stop in self.ranges:
            targets.append(destination[row : row + stop - start])
            sources.append(self.source[start:stop])
            row += stop - start
        if targets:
            import torch

            torch._foreach_copy_(targets, sources)
        return row


@dataclass(slots=True)
class EncoderInputs:
    """One encoder call, what vLLM's protocol calls `mm_kwargs`.

    Attributes:
        items: Geometry of each item, in input order.
        pixels: Packed pixel tensors by buffer name, for example `{"pixel_values": [N, 1536]}`, on the device, items in
            input order.
        row_offsets: For each buffer name, the first row of each item and the end (`len(items) + 1` entries).
        indices: Which items of the packed tensors this object speaks of; all of them unless it was selected.
    """

    items: tuple[ItemGeometry, ...]
    pixels: dict[str, torch.Tensor]
    row_offsets: dict[str, tuple[int, ...]]
    indices: tuple[int, ...]

    @property
    def chosen(self) -> tuple[ItemGeometry, ...]:
        """Geometry of the items that this object speaks of."""
        if len(self.indices) == len(self.items):
            return self.items
        return tuple(self.items[index] for index in self.indices)

    def rows(self, name: str) -> PixelRows:
        """Rows of buffer `name` that belong to the chosen items."""
        offsets = self.row_offsets[name]
        return PixelRows(self.pixels[name], [(offsets[i], offsets[i + 1]) for i in self.indices])


@dataclass(frozen=True, slots=True)
class GraphCapacity:
    """What one captured graph can hold.

    Attributes:
        path: Encoder path.
        token_budget: Output rows M.
        segment_slots: Attention segments S.
        axis_key: Values of the model's capture axes.
    """

    path: str
    token_budget: int
    segment_slots: int
    axis_key: tuple[int, ...] = ()


PAD_ZERO = "zero"
PAD_REPEAT_LAST = "repeat_last"
PAD_IDENTITY = "identity"
PAD_ONE = "one"
PAD_MINUS_ONE = "minus_one"


@dataclass(frozen=True, slots=True)
class MetadataField:
    """One metadata buffer of a graph.

    Attributes:
        shape: Shape at full capacity; the first dimension is the padded one.
        dtype: numpy dtype name (`int32`, `int64`, `float32`, `bool`).
        padding: What the rows past the real ones hold: `zero`; `repeat_last` (offsets: empty segments at the end);
            `identity` (row r holds r: permutations); `one`; `minus_one`.
    """

    shape: tuple[int, ...]
    dtype: str
    padding: str = PAD_ZERO


@dataclass(frozen=True, slots=True)
class PixelField:
    """One pixel buffer of a graph: `[rows, *row_shape]` in the tower's dtype."""

    rows: int
    row_shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EncoderCudaGraphCaptureInputs:
    """Buffers of one graph, and a valid dummy batch to capture it with.

    Attributes:
        pixels: Pixel buffers.
        metadata: Metadata buffers at full capacity.
        dummy: Unpadded metadata of the dummy batch, as `compute_metadata` makes it.
        scalars: Host integers that the capture freezes (for example `max_seqlen`); each must be an upper bound of
            every later replay's value, which the manager checks.
    """

    pixels: dict[str, PixelField]
    metadata: dict[str, MetadataField]
    dummy: dict[str, np.ndarray]
    scalars: dict[str, int]


@dataclass(frozen=True, slots=True)
class EncoderCudaGraphReplayBuffers:
    """Values of one replay: rows to copy and unpadded metadata, with the scalars that eager would use."""

    pixels: dict[str, PixelRows]
    metadata: Mapping[str, np.ndarray]
    scalars: Mapping[str, int]


@runtime_checkable
class SupportsEncoderCudaGraph(Protocol):
    """What a vision encoder implements to be planned, captured, replayed, verified and benchmarked."""

    device: torch.device
    dtype: torch.dtype

    def capture_refusal(self) -> str | None:
        """Why this encoder cannot be captured on its device (its attention backend, say); None where it can."""

    def graph_path(self) -> AbstractContextManager[None]:
        """Entered around the warm-up and the capture of a graph, whose inputs have padded rows."""

    def reserve_for_capture(self, rows: int) -> None:
        """Called before the first capture with the most pixel rows of any graph."""

    def release_capture(self) -> None:
        """Called when the graphs are cleared."""

    def get_encoder_cudagraph_config(self) -> EncoderCudaGraphConfig:
        """Static facts: modalities, output width, paths, axes, segment bounds."""

    def get_encoder_cudagraph_budget_range(self, max_call_tokens: int) -> tuple[int, int]:
        """`(smallest, largest)` budget where a call may hold `max_call_tokens` output tokens."""

    def get_encoder_cudagraph_item_specs(self, mm_kwargs: EncoderInputs) -> list[EncoderItemSpec]:
        """Size, tokens and segments of each item, in order."""

    def select_encoder_cudagraph_items(self, mm_kwargs: EncoderInputs, indices: Sequence[int]) -> EncoderInputs:
        """The same call restricted to some of its items; pixels are not copied."""

    def prepare_encoder_cudagraph_capture_inputs(self, capacity: GraphCapacity) -> EncoderCudaGraphCaptureInputs:
        """Buffers of a graph of that capacity, with a dummy batch."""

    def prepare_encoder_cudagraph_replay_buffers(
        self, mm_kwargs: EncoderInputs, capacity: GraphCapacity
    ) -> EncoderCudaGraphReplayBuffers:
        """Values for one replay of a graph of that capacity."""

    def encoder_cudagraph_forward(
        self, inputs: dict[str, torch.Tensor], scalars: Mapping[str, int], path: str = DEFAULT_PATH
    ) -> Sequence[torch.Tensor]:
        """The captured forward: fixed-shape tensors in, output parts `[M, D_i]` out (joined along the width)."""

    def encoder_eager_forward(self, mm_kwargs: EncoderInputs, path: str = DEFAULT_PATH) -> torch.Tensor:
        """The same encoder on unpadded input, all chosen items at once: `[M, D]` in item order."""

    def postprocess_encoder_output(
        self, mm_kwargs: EncoderInputs, outputs: Mapping[str, Sequence[torch.Tensor | None]]
    ) -> list[torch.Tensor]:
        """Final embedding of each item from its rows on each path (None where the path is absent)."""
