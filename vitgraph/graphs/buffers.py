"""The one set of static buffers that all graphs share: pixels, metadata arena, outputs, host staging.

A graph of a smaller budget reads prefix views of the same memory, so a list of a hundred budgets costs no more memory
than its largest. Nothing here is ever re-allocated while a graph exists.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import cycle

import numpy as np
import torch

from vitgraph.models.base import MetadataLayout, PixelField, PixelRows

STAGING_SLABS, SLABS_AN_EVENT = 8, 4
"""Host slabs that take turns, so that writing one does not wait for the copy out of another; and how many of them share
an event, since recording and awaiting one costs the host as much as the copy."""


class HostStaging:
    """Pinned host memory for metadata on its way to the device; slabs are reused once their copies have run.

    Replays share the device's buffers, so that copies are ordered on the device, whatever streams the calls are on: the
    event after a group's last copy is after all of them.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self.slabs = [
            torch.zeros(max(nbytes, 1), dtype=torch.uint8, pin_memory=self._on_gpu) for _ in range(STAGING_SLABS)
        ]
        self._events: list[torch.cuda.Event | None] = [None] * (STAGING_SLABS // SLABS_AN_EVENT)
        self._turn = cycle(range(STAGING_SLABS))

    def next_slab(self) -> int:
        """Index of a slab that may be written now; waits where the last copies of its group are still under way."""
        index = next(self._turn)
        if index % SLABS_AN_EVENT == 0:
            event = self._events[index // SLABS_AN_EVENT]
            if event is not None:
                event.synchronize()
        return index

    def send(self, index: int, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Copies from slab `index` to the device, asynchronously on a GPU."""
        destination.copy_(source, non_blocking=True)
        if self._on_gpu and index % SLABS_AN_EVENT == SLABS_AN_EVENT - 1:
            group = index // SLABS_AN_EVENT
            event = self._events[group]
            if event is None:
                event = self._events[group] = torch.cuda.Event()
            event.record()


class StaticBuffers:
    """Device buffers of all graphs of one manager.

    Args:
        pixels: For each pixel buffer, its largest extent over all graphs.
    """

    def __init__(
        self, pixels: Mapping[str, PixelField], arena_bytes: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.pixels = {
            name: torch.zeros((field.rows, *field.row_shape), dtype=dtype, device=device)
            for name, field in pixels.items()
        }
        self.arena = torch.zeros(max(arena_bytes, 1), dtype=torch.uint8, device=device)
        self.staging = HostStaging(arena_bytes, device)
        self.outputs: dict[str, torch.Tensor] = {}
        # Rows at and past this one are zero; only the rows between a replay's own and this are ever cleared.
        self._written = dict.fromkeys(pixels, 0)

    @property
    def nbytes(self) -> int:
        return total_bytes([*self.pixels.values(), self.arena, *self.outputs.values()])

    def reserve_output(self, path: str, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """The output buffer `[>= rows, width]` of a path; made once, for the path's largest graph."""
        if path not in self.outputs:
            self.outputs[path] = torch.zeros(rows, width, dtype=dtype, device=self.arena.device)
        return self.outputs[path]

    def load_pixels(self, name: str, rows: PixelRows, capacity: int) -> None:
        """Copies the call's rows to the head of buffer `name` and clears stale rows below `capacity` after them."""
        buffer = self.pixels[name]
        used = rows.copy_into(buffer)
        written = self._written[name]
        stale_end = min(written, capacity)
        if used < stale_end:
            buffer[used:stale_end].zero_()
        if written <= capacity or used > written:
            self._written[name] = used


class MetadataWriter:
    """Writes one graph's metadata into whichever slab is free and sends it."""

    def __init__(self, layout: MetadataLayout, staging: HostStaging) -> None:
        self.layout = layout
        self._staging = staging
        self._views = [layout.host_views(slab.numpy()) for slab in staging.slabs]
        self._sources = [slab[: layout.nbytes] for slab in staging.slabs]
        self._destination: torch.Tensor | None = None

    def send(self, values: Mapping[str, np.ndarray], arena: torch.Tensor) -> None:
        """Pads `values`, and copies the layout's bytes into the arena, which is always the same, in one transfer."""
        if not self.layout.nbytes:
            return
        slab = self._staging.next_slab()
        self.layout.write(self._views[slab], values)
        if self._destination is None:
            self._destination = arena[: self.layout.nbytes]
        self._staging.send(slab, self._sources[slab], self._destination)


def total_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of some tensors together."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
