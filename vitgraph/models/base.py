"""The protocol between a vision encoder and the graph manager, and the data that crosses it.

A model implements `SupportsEncoderCudaGraph`; the manager, the bench and the planner know nothing else of it. Method
names are those of vLLM's protocol
(https://github.com/vllm-project/vllm/blob/main/docs/design/cuda_graphs_multimodal.md). Two things are stricter here:

- All metadata (offsets, positions, gather indices, weights) is computed on the host as numpy arrays by **one**
  function, `compute_metadata`, which eager, capture and replay share. Only the padding differs.
- Pixels are never gathered for a sub-batch: `PixelRows` names the rows, and they are copied once, straight into the
  graph's buffer.

A graph reads its metadata from fixed places in one byte arena on the device; the layout depends on the graph's
capacity, the arena is shared by all graphs, and a replay overwrites exactly the bytes of its own layout. Eager uses
the same values, unpadded, in a buffer of its own.

Shape legend: N patches (pixel rows), M output tokens (graph rows), S attention segments, D output width.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, runtime_checkable

import numpy as np

from vitgraph.errors import CaptureError
from vitgraph.models import torch
from vitgraph.models.geometry import EncoderCudaGraphConfig, ItemGeometry
from vitgraph.planning.budgets import DEFAULT_PATH, EncoderItemSpec, GraphKey

Tensors = Mapping[str, "torch.Tensor"]
"""Tensors by buffer name."""

PathRows = Mapping[str, "Sequence[torch.Tensor | None]"]
"""Rows of each item by path; None where an item has none on it."""


class RowRanges:
    """Row ranges of a tensor, in order, from `(start, stop)` pairs; empty ones are left out, and those that follow each
    other are merged. They depend on geometry only, so they are made once and used for every call."""

    __slots__ = ("_cuts", "_lengths", "ranges", "total")

    def __init__(self, ranges: Sequence[tuple[int, int]]) -> None:
        merged: list[tuple[int, int]] = []
        for start, stop in ranges:
            if start == stop:
                continue
            if merged and merged[-1][1] == start:
                merged[-1] = (merged[-1][0], stop)
            else:
                merged.append((start, stop))
        self.ranges = tuple(merged)
        self._lengths = [stop - start for start, stop in merged]
        self.total = sum(self._lengths)
        # A gap and a range in turn: one split of the tensor gives every range, where a slice each would cost the host.
        self._cuts: list[int] | None = []
        end = 0
        for start, stop in merged:
            if start < end:
                self._cuts = None
                break
            self._cuts += [start - end, stop - start]
            end = stop

    def of(self, tensor: torch.Tensor) -> list[torch.Tensor] | tuple[torch.Tensor, ...]:
        """The ranges as views of `tensor`, in order."""
        if self.ranges == ((0, tensor.shape[0]),):
            return [tensor]
        if len(self.ranges) == 1 or self._cuts is None:
            return [tensor[start:stop] for start, stop in self.ranges]
        if not self.ranges:
            return []
        return tensor.split_with_sizes([*self._cuts, tensor.shape[0] - self.ranges[-1][1]])[1::2]

    def head_of(self, tensor: torch.Tensor) -> list[torch.Tensor] | tuple[torch.Tensor, ...]:
        """The head of `tensor` cut into pieces as long as the ranges."""
        if len(self.ranges) == 1:
            return [tensor[: self.total]]
        return tensor.split_with_sizes([*self._lengths, tensor.shape[0] - self.total])[:-1]

    def gather(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Copies the ranges of `source` to the head of `destination`; on a GPU in one kernel."""
        _copy(self.of(source), self.head_of(destination))

    def scatter(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Copies the head of `source` to the ranges of `destination`; on a GPU in one kernel."""
        _copy(self.head_of(source), self.of(destination))


def _copy(
    sources: list[torch.Tensor] | tuple[torch.Tensor, ...], destinations: list[torch.Tensor] | tuple[torch.Tensor, ...]
) -> None:
    if len(sources) == 1:
        destinations[0].copy_(sources[0])
    elif sources:
        torch._foreach_copy_(destinations, sources)


class PixelRows:
    """Rows of a call's packed pixel tensor `[rows, ...]` on the device that belong to chosen items, in their order, as
    few contiguous ranges."""

    __slots__ = ("rows", "source")

    def __init__(self, source: torch.Tensor, rows: RowRanges) -> None:
        self.source = source
        self.rows = rows

    @property
    def num_rows(self) -> int:
        return self.rows.total

    def materialize(self) -> torch.Tensor:
        """The rows as one tensor; a view where they are contiguous."""
        pieces = self.rows.of(self.source)
        if len(pieces) == 1:
            return pieces[0]
        if not pieces:
            return self.source[:0]
        return torch.cat(list(pieces))

    def copy_into(self, destination: torch.Tensor) -> int:
        """Copies the rows to the head of `destination`; returns how many there are."""
        self.rows.gather(self.source, destination)
        return self.rows.total


@lru_cache(maxsize=1024)
def _all_of(count: int) -> tuple[int, ...]:
    return tuple(range(count))


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
        if self.indices == _all_of(len(self.items)):
            return self.items
        return tuple(self.items[index] for index in self.indices)

    def rows(self, name: str) -> PixelRows:
        """Rows of buffer `name` that belong to the chosen items."""
        offsets = self.row_offsets[name]
        return PixelRows(self.pixels[name], RowRanges([(offsets[i], offsets[i + 1]) for i in self.indices]))


PAD_REPEAT_LAST = "repeat_last"
PAD_IDENTITY = "identity"


@dataclass(frozen=True, slots=True)
class MetadataField:
    """One metadata buffer of a graph.

    Attributes:
        shape: Shape at full capacity; the first dimension is the padded one.
        dtype: numpy dtype name (`int32`, `int64`, `float32`, `bool`).
        padding: What the rows past the real ones hold: a number; `repeat_last` (offsets: empty segments at the end);
            `identity` (row r holds r: permutations).
    """

    shape: tuple[int, ...]
    dtype: str
    padding: int | str = 0


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

    def get_encoder_cudagraph_item_specs(self, mm_kwargs: EncoderInputs) -> list[EncoderItemSpec]:
        """Size, tokens and segments of each item, in order."""

    def select_encoder_cudagraph_items(self, mm_kwargs: EncoderInputs, indices: Sequence[int]) -> EncoderInputs:
        """The same call restricted to some of its items; pixels are not copied."""

    def prepare_encoder_cudagraph_capture_inputs(self, capacity: GraphKey) -> EncoderCudaGraphCaptureInputs:
        """Buffers of a graph of that capacity, with a dummy batch."""

    def prepare_encoder_cudagraph_replay_buffers(
        self, mm_kwargs: EncoderInputs, capacity: GraphKey
    ) -> EncoderCudaGraphReplayBuffers:
        """Values for one replay of a graph of that capacity."""

    def encoder_cudagraph_forward(
        self, inputs: dict[str, torch.Tensor], scalars: Mapping[str, int], path: str = DEFAULT_PATH
    ) -> Sequence[torch.Tensor]:
        """The captured forward: fixed-shape tensors in, output parts `[M, D_i]` out (joined along the width)."""

    def encoder_eager_forward(self, mm_kwargs: EncoderInputs, path: str = DEFAULT_PATH) -> torch.Tensor:
        """The same encoder on unpadded input, all chosen items at once: `[M, D]` in item order."""

    def postprocess_encoder_output(self, mm_kwargs: EncoderInputs, outputs: PathRows) -> list[torch.Tensor]:
        """Final embedding of each item from its rows on each path (None where the path is absent)."""


ALIGNMENT = 256
"""Bytes to which every field starts aligned; enough for any vectorised load."""

METADATA_DTYPES = ("int32", "int64", "float32", "bool")
"""numpy dtypes of metadata; torch has one of the same name for each."""


class MetadataLayout:
    """Places of named fields, in order, in one byte buffer of `nbytes`."""

    def __init__(self, fields: Mapping[str, MetadataField]) -> None:
        self.fields = dict(fields)
        self._offsets: dict[str, int] = {}
        end = 0
        for name, field in self.fields.items():
            if field.dtype not in METADATA_DTYPES:
                raise CaptureError(
                    f"metadata field {name!r} has dtype {field.dtype!r}; use one of {', '.join(METADATA_DTYPES)}"
                )
            self._offsets[name] = end
            end += -(-_nbytes(field) // ALIGNMENT) * ALIGNMENT
        self.nbytes = end

    def host_views(self, slab: np.ndarray) -> dict[str, np.ndarray]:
        """Views of the fields in a host byte buffer `[>= nbytes]`."""
        return {name: slab[place].view(field.dtype).reshape(field.shape) for name, field, place in self._places()}

    def device_views(self, arena: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views of the fields in a device byte buffer `[>= nbytes]`."""
        return {
            name: arena[place].view(getattr(torch, field.dtype)).view(field.shape)
            for name, field, place in self._places()
        }

    def _places(self) -> Iterator[tuple[str, MetadataField, slice]]:
        """Each field with its bytes."""
        for name, field in self.fields.items():
            start = self._offsets[name]
            yield name, field, slice(start, start + _nbytes(field))

    def overflow(self, values: Mapping[str, np.ndarray]) -> str | None:
        """Name and sizes of the first field that `values` do not fit in, or None."""
        sizes = ((name, len(values[name]), field.shape[0]) for name, field in self.fields.items())
        return next((f"{name}: {rows} rows into {most}" for name, rows, most in sizes if rows > most), None)

    def write(self, views: Mapping[str, np.ndarray], values: Mapping[str, np.ndarray]) -> None:
        """Writes unpadded `values` into host `views` and pads every tail by its field's rule."""
        for name, field in self.fields.items():
            view, value = views[name], values[name]
            used = len(value)
            view[:used] = value
            if used == len(view):
                continue
            if field.padding == PAD_REPEAT_LAST:
                view[used:] = view[used - 1]
            elif field.padding == PAD_IDENTITY:
                view[used:] = np.arange(used, len(view), dtype=view.dtype)
            else:
                view[used:] = field.padding


def _nbytes(field: MetadataField) -> int:
    return int(np.prod(field.shape)) * np.dtype(field.dtype).itemsize


def to_device(values: Mapping[str, np.ndarray], device: torch.device) -> dict[str, torch.Tensor]:
    """Unpadded metadata on the device, sent in one pinned copy; this is how eager gets its metadata."""
    if device.type == "cpu":
        return {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in values.items()}
    layout = MetadataLayout({name: MetadataField(value.shape, value.dtype.name) for name, value in values.items()})
    staging = torch.empty(layout.nbytes, dtype=torch.uint8, pin_memory=True)
    layout.write(layout.host_views(staging.numpy()), values)
    # The caching host allocator does not hand the staging block out again before this copy has run.
    return layout.device_views(staging.to(device, non_blocking=True))


class MetadataArrays(dict[str, np.ndarray]):
    """Metadata of one batch by field. Plans refer to it weakly, so that the cache alone decides how long it lives."""

    __slots__ = ("__weakref__",)


class MetadataCache:
    """Least-recently-used cache of metadata arrays, bounded by their bytes."""

    def __init__(self, max_bytes: int = 256 << 20) -> None:
        self.max_bytes = max_bytes
        self._entries: OrderedDict[Hashable, MetadataArrays] = OrderedDict()
        self._bytes = 0

    def get(self, key: Hashable, compute: Callable[[], Mapping[str, np.ndarray]]) -> MetadataArrays:
        """The cached arrays of `key`, computed on a miss. Callers must not write into them."""
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
            return entry
        entry = MetadataArrays(compute())
        self._entries[key] = entry
        self._bytes += _size(entry)
        while self._bytes > self.max_bytes and len(self._entries) > 1:
            _, dropped = self._entries.popitem(last=False)
            self._bytes -= _size(dropped)
        return entry

    def clear(self) -> None:
        self._entries.clear()
        self._bytes = 0


def _size(arrays: Mapping[str, np.ndarray]) -> int:
    return sum(array.nbytes for array in arrays.values())
