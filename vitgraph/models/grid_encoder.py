"""What adapters of patch-grid towers share: metadata of each patch, pixel buffers, the stock forward and real images.

Positions, interpolation taps and segment offsets equal those of transformers' `vision_utils`, which the tests compare
with; they are computed here in numpy, since a server's hot path must not loop over grids in Python or touch the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, ClassVar

import numpy as np

from vitgraph.errors import ModelError
from vitgraph.models import torch
from vitgraph.models.base import PAD_REPEAT_LAST, EncoderInputs, MetadataField, Tensors
from vitgraph.models.encoder import VisionEncoder
from vitgraph.models.family import CHANNELS, Names
from vitgraph.models.geometry import GridGeometry, ItemGeometry, MergedGridRule
from vitgraph.planning.budgets import IMAGE, GraphKey


@lru_cache(maxsize=2048)
def block_positions(h: int, w: int, merge: int) -> np.ndarray:
    """Row and column of every patch of a frame, `[h * w, 2]` int32, in merge-block order; `merge` 1 is raster order."""
    rows, cols = np.meshgrid(np.arange(h, dtype=np.int32), np.arange(w, dtype=np.int32), indexing="ij")
    shape = (h // merge, merge, w // merge, merge)
    return np.stack([axis.reshape(shape).transpose(0, 2, 1, 3).reshape(-1) for axis in (rows, cols)], axis=-1)


def block_order(h: int, w: int, merge: int) -> np.ndarray:
    """Raster-order number of each patch of one frame in merge-block order: `[h * w]`."""
    return block_positions(h, w, merge) @ np.array([w, 1])


@lru_cache(maxsize=2048)
def block_ranks(h: int, w: int, merge: int) -> np.ndarray:
    """Place in merge-block order of each raster-order patch of one frame: `[h * w]` int32."""
    return np.argsort(block_order(h, w, merge)).astype(np.int32)


def grid_positions(grids: Sequence[GridGeometry], merge: int) -> np.ndarray:
    """`block_positions` of every frame of every grid, `[N, 2]` int32."""
    parts = [block_positions(grid.h, grid.w, merge) for grid in grids for _ in range(grid.t)]
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


class GridTowerEncoder(VisionEncoder):
    """A transformers tower over packed patches in merge-block order, with one attention segment a frame.

    A family gives the tower's classes, the config values that published files leave out, and its own metadata.
    """

    rule: MergedGridRule
    image_processor: ClassVar[str | None] = "qwen2_vl.image_processing_pil_qwen2_vl:Qwen2VLImageProcessorPil"
    image_settings: ClassVar[Names] = ("do_resize", "patch_size", "temporal_patch_size", "merge_size", *CHANNELS)
    video_settings: ClassVar[Names] = (
        *("do_resize", "fps", "min_frames", "max_frames", "cap_pixels_per_frame", "max_video_tokens"),
    )
    sized_by_pixels: ClassVar[bool] = True
    table: ClassVar[PositionTable | None] = None
    """The learned position table, which is sampled at each patch; None where the tower has none."""
    position_merge: ClassVar[int | None] = None
    """Side of the blocks in whose order patches come, where it is not the merge."""
    checkpoint_keys: ClassVar[Sequence[tuple[str, str]]] = (
        (r"(?:vlm\.|thinker\.|model\.)*(?:visual|vision_tower)\.", "visual."),
    )
    patch_convolutions: ClassVar[Sequence[str]] = ("visual.patch_embed.proj",)
    blocks: ClassVar[str | None] = "visual.blocks"

    # Older files call the channels `in_chans`, which transformers ignores.
    vision_fields: ClassVar[Names] = (("in_chans", "in_channels"),)

    # -- capacity --------------------------------------------------------------------------------------------------

    def pixel_row_shape(self, name: str) -> tuple[int, ...]:
        return (self.rule.channels * self.rule.temporal * self.rule.patch**2,)

    def buffer_rows(self, capacity: GraphKey) -> int:
        """Patches N of a graph: the merge gives each output token `merge**2` of them."""
        return capacity.token_budget * self.rule.merge**2

    def metadata_fields(self, capacity: GraphKey) -> dict[str, MetadataField]:
        taps = partial(MetadataField, (self.buffer_rows(capacity), self.table.taps if self.table else 0))
        return {
            "cu_seqlens": MetadataField((capacity.segment_slots + 1,), "int32", PAD_REPEAT_LAST),
            "position_ids": MetadataField((self.buffer_rows(capacity), 2), "int32"),
            **({"interp_indices": taps("int32"), "interp_weights": taps("float32")} if self.table else {}),
        }

    def grids(self, items: Sequence[ItemGeometry]) -> list[GridGeometry]:
        """Patch grids of the items, in order."""
        return [self.rule.checked_grid(item) for item in items]

    def compute_metadata(self, items: Sequence[ItemGeometry]) -> dict[str, np.ndarray]:
        grids = self.grids(items)
        positions = grid_positions(grids, self.position_merge or self.rule.merge)
        found = {"cu_seqlens": segment_offsets(grids), "position_ids": positions}
        if self.table:
            order, side = self.position_merge or self.rule.merge, self.table.side(self.rule)
            axes = (side, self.table.axis, self.table.coordinates)
            frames = [table_taps(grid.h, grid.w, order, *axes) for grid in grids for _ in range(grid.t)]
            for name, parts in zip(("interp_indices", "interp_weights"), zip(*frames, strict=True), strict=True):
                found[name] = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return found

    def capture_scalars(self, capacity: GraphKey) -> dict[str, int]:
        # One image may fill the whole budget, so no tighter bound of a segment is safe.
        return {"max_seqlen": self.buffer_rows(capacity)}

    def dummy_items(self, capacity: GraphKey) -> list[ItemGeometry]:
        merge = self.rule.merge
        return [GridGeometry(IMAGE, 1, merge, merge * capacity.token_budget)]

    # -- forward and reference --------------------------------------------------------------------------------------

    def tower_output(self, inputs: Tensors, scalars: Mapping[str, int], **further: Any) -> Any:
        """What the tower's own forward gives, where it takes everything that it would derive from the grid."""
        return self.visual(
            inputs["pixel_values"],
            grid_thw=None,
            cu_seqlens=inputs["cu_seqlens"],
            max_seqlen=scalars["max_seqlen"],
            position_ids=inputs["position_ids"],
            **further,
        )

    def block_arguments(self, hidden: torch.Tensor, inputs: Tensors, scalars: Mapping[str, int]) -> dict[str, Any]:
        """What the tower's blocks take beside the hidden state, where the loop over them is the adapter's."""
        rotary = self.visual.rotary_pos_emb(hidden, inputs["position_ids"])
        return {"cu_seqlens": inputs["cu_seqlens"], "max_seqlen": scalars["max_seqlen"], "position_embeddings": rotary}

    def projected(self, output: Any) -> torch.Tensor:
        """The encoder's rows `[M, D]` from what the tower gives: they are it, where nothing follows the tower."""
        return output.pooler_output

    def forward_packed(self, inputs: Tensors, scalars: Mapping[str, int], path: str) -> Sequence[torch.Tensor]:
        return [self.projected(self.tower_output(inputs, scalars))]

    def grid_rows(self, grid: GridGeometry) -> list[list[int]]:
        """Rows of transformers' `grid_thw` that stand for the item in a stock forward."""
        return [[grid.t, grid.h, grid.w]]

    def stock_grids(self, mm_kwargs: EncoderInputs) -> torch.Tensor:
        """transformers' `grid_thw` of a call."""
        rows = [row for grid in self.grids(mm_kwargs.chosen) for row in self.grid_rows(grid)]
        return torch.tensor(rows, device=self.device)

    def stock_output(self, mm_kwargs: EncoderInputs) -> Any:
        """What the tower gives from pixels and grids alone."""
        pixels = mm_kwargs.rows("pixel_values").materialize()
        return self.visual(pixels, grid_thw=self.stock_grids(mm_kwargs))

    def stock_rows(self, mm_kwargs: EncoderInputs) -> torch.Tensor:
        return self.projected(self.stock_output(mm_kwargs))

    # -- real images -----------------------------------------------------------------------------------------------

    def image_rows(self, image: Any, item: ItemGeometry) -> Tensors:
        batch = self.processed(image)
        grid = GridGeometry(IMAGE, *batch["image_grid_thw"][0].tolist())
        if grid != item:
            raise ModelError(
                f"transformers' image processor made the grid {grid}, the rule of {type(self.rule).__name__} says "
                f"{item}; this version of transformers resizes differently"
            )
        return {"pixel_values": batch["pixel_values"]}
