"""Per-patch metadata of `t x h x w` grids in numpy: positions, interpolation taps, segment offsets.

The values equal those of transformers' `vision_utils`, which the tests compare with; they are computed here because a
server's hot path must not loop over grids in Python or touch the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from vitgraph.models.geometry import GridGeometry


@lru_cache(maxsize=2048)
def block_positions(h: int, w: int, merge: int) -> np.ndarray:
    """Row and column of every patch of one frame, in merge-block order; `merge` 1 is raster order.

    Returns:
        `[h * w, 2]` int32.
    """
    rows, cols = np.meshgrid(np.arange(h, dtype=np.int32), np.arange(w, dtype=np.int32), indexing="ij")
    shape = (h // merge, merge, w // merge, merge)
    return np.stack([axis.reshape(shape).transpose(0, 2, 1, 3).reshape(-1) for axis in (rows, cols)], axis=-1)


def grid_positions(grids: Sequence[GridGeometry], merge: int) -> np.ndarray:
    """`block_positions` of every frame of every grid, `[N, 2]` int32."""
    parts = []
    for grid in grids:
        positions = block_positions(grid.h, grid.w, merge)
        parts.extend([positions] * grid.t)
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def segment_offsets(grids: Sequence[GridGeometry]) -> np.ndarray:
    """Offsets of one attention segment a frame, `[S + 1]` int32, from 0 to N."""
    lengths = np.repeat([grid.h * grid.w for grid in grids], [grid.t for grid in grids])
    offsets = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


@lru_cache(maxsize=1024)
def bilinear_taps(h: int, w: int, merge: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Where each patch of one frame samples a `side x side` position table, corners aligned.

    Returns:
        `[h * w, 4]` int32 indices into the flattened table and `[h * w, 4]` float32 weights.
    """
    positions = block_positions(h, w, merge)
    row_taps, row_weights = _linear_axis(positions[:, 0], h, side)
    col_taps, col_weights = _linear_axis(positions[:, 1], w, side)
    taps = (row_taps[:, :, None] * side + col_taps[:, None, :]).reshape(-1, 4)
    weights = (row_weights[:, :, None] * col_weights[:, None, :]).reshape(-1, 4)
    return taps.astype(np.int32), weights


def _linear_axis(index: np.ndarray, size: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Two taps and their weights of each position on an axis of `size`, as float32 arithmetic gives them."""
    source = index.astype(np.float32) * np.float32(side - 1) / np.float32(max(size - 1, 1))
    floor = np.floor(source)
    offsets = np.arange(2)
    taps = np.clip(floor.astype(np.int64)[:, None] + offsets, 0, side - 1)
    distance = np.abs(source[:, None] - floor[:, None] - offsets.astype(np.float32))
    return taps, np.clip(1 - distance, 0, None).astype(np.float32)


CUBIC = -0.75
"""Keys' coefficient, as torch's bicubic sampling has it."""


def cubic_axis(source: np.ndarray, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Four taps, clamped at the border, and their weights for float32 coordinates on an axis of `side` cells.

    How a family scales its positions to coordinates is its own; a different rounding there moves the taps.

    Returns:
        `[n, 4]` int64 taps and `[n, 4]` float64 weights.
    """
    floor = np.floor(source)
    offsets = np.arange(-1, 3)
    taps = np.clip(floor.astype(np.int64)[:, None] + offsets, 0, side - 1)
    distance = np.abs(source[:, None] - floor[:, None] - offsets)
    near = ((CUBIC + 2) * distance - (CUBIC + 3)) * distance**2 + 1
    far = ((CUBIC * distance - 5 * CUBIC) * distance + 8 * CUBIC) * distance - 4 * CUBIC
    return taps, np.where(distance <= 1, near, far)
