"""Host metadata of encoder calls: padding, one packed byte buffer, one copy to the device.

A graph reads its metadata from fixed places in one byte arena on the device; the layout depends on the graph's
capacity, the arena is shared by all graphs, and a replay overwrites exactly the bytes of its own layout. Eager uses
the same values, unpadded, in a buffer of its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping

import numpy as np

from vitgraph.errors import CaptureError
from vitgraph.models.base import PAD_IDENTITY, PAD_REPEAT_LAST, MetadataField
from vitgraph.models.lazy_torch import torch

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
        for name, field in self.fields.items():
            if len(values[name]) > field.shape[0]:
                return f"{name}: {len(values[name])} rows into {field.shape[0]}"
        return None

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
