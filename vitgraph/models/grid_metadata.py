"""Per-patch metadata of `t x h x w` grids in numpy: positions, interpolation taps, segment offsets.

The values equal those of transformers' `vision_utils`, which the tests compare with; they are computed here because a
server's hot path must not loop over grids in Python or touch the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from vitgraph.models.geometry import GridGeometry


@lru_cache(maxsize=2048)
def block_positions(h: int, w: int, merge: int) -> np.ndarray:
    """Row and column of every patch of a frame, `[h * w, 2]` int32, in merge-block order; `merge` 1 is raster order."""
    rows, cols = np.meshgrid(np.arange(h, dtype=np.int32), np.arange(w, dtype=np.int32), indexing="ij")
    shape = (h // merge, merge, w // merge, merge)
    return np.stack([axis.reshape(shape).transpose(0, 2, 1, 3).reshape(-1) for axis in (rows, cols)], axis=-1)


@lru_cache(maxsize=2048)
def block_ranks(h: int, w: int, merge: int) -> np.ndarray:
    """Place in merge-block order of each raster-order patch of one frame: `[h * w]` int32."""
    positions = block_positions(h, w, merge)
    ranks = np.empty(h * w, dtype=np.int32)
    ranks[positions[:, 0] * w + positions[:, 1]] = np.arange(h * w, dtype=np.int32)
    return ranks


def grid_positions(grids: Sequence[GridGeometry], merge: int) -> np.ndarray:
    """`block_positions` of every frame of every grid, `[N, 2]` int32."""
    parts = []
    for grid in grids:
        positions = block_positions(grid.h, grid.w, merge)
        parts.extend([positions] * grid.t)
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def segment_offsets(grids: Sequence[GridGeometry]) -> np.ndarray:
    """Offsets of one attention segment a frame, `[S + 1]` int32, from 0 to N."""
    return offsets_of(np.repeat([grid.h * grid.w for grid in grids], [grid.t for grid in grids]))


def offsets_of(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """Where segments of these lengths begin, and the end: `[S + 1]` int32."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


Axis = Callable[[np.ndarray, int], tuple[np.ndarray, np.ndarray]]
"""Taps and weights of float32 coordinates on an axis of so many cells: `linear_axis` or `cubic_axis`."""


@lru_cache(maxsize=1024)
def table_taps(
    h: int, w: int, merge: int, side: int, axis: Axis, coordinates: Callable[[np.ndarray, int, int], np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Where each patch of an `h x w` frame samples a `side x side` position table, in order of blocks of `merge`.

    Args:
        axis: Taps and weights of coordinates.
        coordinates: `(positions, size, side)` to float32 coordinates in the tower's own rounding, which moves the taps.

    Returns:
        `[h * w, taps]` int32 indices into the flattened table and `[h * w, taps]` float32 weights.
    """
    positions = block_positions(h, w, merge)
    row_taps, row_weights = axis(coordinates(positions[:, 0], h, side), side)
    col_taps, col_weights = axis(coordinates(positions[:, 1], w, side), side)
    taps = row_taps[:, :, None] * side + col_taps[:, None, :]
    weights = row_weights[:, :, None] * col_weights[:, None, :]
    return taps.reshape(h * w, -1).astype(np.int32), weights.reshape(h * w, -1).astype(np.float32)


@dataclass(frozen=True, slots=True)
class PositionTable:
    """How a tower samples its learned `side x side` position table.

    Attributes:
        side: Cells on a side of it, from the family's rule.
        axis: Taps and weights of coordinates on an axis.
        coordinates: Positions of patches as coordinates, in the tower's own rounding.
    """

    side: Callable[[Any], int]
    axis: Axis
    coordinates: Callable[[np.ndarray, int, int], np.ndarray]

    @property
    def taps(self) -> int:
        """Cells that a patch's position is summed of."""
        return 4 if self.axis is linear_axis else 16


def corner_coordinates(index: np.ndarray, size: int, side: int) -> np.ndarray:
    """First and last position on the table's first and last cell."""
    return index.astype(np.float32) * np.float32(side - 1) / np.float32(max(size - 1, 1))


def center_coordinates(index: np.ndarray, size: int, side: int) -> np.ndarray:
    """Patches and cells as areas whose centres are sampled."""
    return (index.astype(np.float32) + np.float32(0.5)) * np.float32(side) / np.float32(size) - np.float32(0.5)


def linear_axis(source: np.ndarray, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Two taps, clamped at the border, and their weights in float32: `[n, 2]` each."""
    floor = np.floor(source)
    offsets = np.arange(2)
    taps = np.clip(floor.astype(np.int64)[:, None] + offsets, 0, side - 1)
    distance = np.abs(source[:, None] - floor[:, None] - offsets.astype(np.float32))
    return taps, np.clip(1 - distance, 0, None).astype(np.float32)


CUBIC = -0.75
"""Keys' coefficient, as torch's bicubic sampling has it."""


def cubic_axis(source: np.ndarray, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Four taps, clamped at the border, and their weights: `[n, 4]` int64 and float64."""
    floor = np.floor(source)
    offsets = np.arange(-1, 3)
    taps = np.clip(floor.astype(np.int64)[:, None] + offsets, 0, side - 1)
    distance = np.abs(source[:, None] - floor[:, None] - offsets)
    near = ((CUBIC + 2) * distance - (CUBIC + 3)) * distance**2 + 1
    far = ((CUBIC * distance - 5 * CUBIC) * distance + 8 * CUBIC) * distance - 4 * CUBIC
    return taps, np.where(distance <= 1, near, far)
