"""MiniCPM-V's sizes: how images are cut into slices, and how many patches a slice of a capture key can have."""

from __future__ import annotations

import math
from dataclasses import dataclass

from vitgraph.errors import InputError
from vitgraph.models.geometry import GeometryRule, ItemGeometry
from vitgraph.models.resizing import sampled_frames
from vitgraph.planning.budgets import IMAGE, VIDEO, CaptureAxis, EncoderItemSpec

PATCH_GRID_AXIS = "patch_grid"
CAPACITY_ALIGNMENT = 8
LONGEST_SIDE = 4
"""Slices up to an aspect ratio of about 16 (this squared) are captured: some screenshots are longer than the 70 patches
of the tower's table, and the few longer than this go eager rather than make every graph larger."""

PatchGrid = tuple[int, int]
"""Patch rows and columns of one slice."""


@dataclass(frozen=True, slots=True)
class SliceGeometry(ItemGeometry):
    """The patch grid of every slice: an image's overview, then its cuts row by row; or a video's frames."""

    grids: tuple[PatchGrid, ...]

    @property
    def patches(self) -> int:
        return sum(rows * columns for rows, columns in self.grids)


def _nearest_multiple(length: float, divisor: int) -> int:
    return max(round(length / divisor) * divisor, divisor)


class MiniCPMVRule(GeometryRule):
    """MiniCPM-V 2.6 and 4.0: up to `max_slice_nums` cuts and an overview; a video frame is one slice."""

    # Tokens say exactly how many slices there are, so a budget needs one slot count only.
    has_segments = False

    @property
    def queries(self) -> int:
        """Output tokens of one slice."""
        return int(self.extra["query_num"])

    @property
    def resolution(self) -> int:
        """Pixels on a side of the square whose area every slice is scaled to."""
        return int(self.processor["scale_resolution"])

    @property
    def max_cuts(self) -> int:
        return int(self.processor["max_slice_nums"])

    def tower_grid(self, grid: PatchGrid) -> PatchGrid:
        """The grid whose positions the tower gives a slice of `grid`."""
        return grid

    # -- sizes to slices -------------------------------------------------------------------------------------------

    def slice_size(self, width: float, height: float, *, upscale: bool) -> tuple[int, int]:
        """`(width, height)` in pixels of a slice: near the resolution's area, sides multiples of the patch."""
        if width * height > self.resolution**2 or upscale:
            ratio = width / height
            height = int(self.resolution / math.sqrt(ratio))
            width = int(height * ratio)
        return _nearest_multiple(width, self.patch), _nearest_multiple(height, self.patch)

    def cut_grid(self, width: int, height: int) -> tuple[int, int] | None:
        """`(columns, rows)` of the cuts of an image, or None where it is not cut."""
        wanted = min(math.ceil(width * height / self.resolution**2), self.max_cuts)
        if wanted <= 1:
            return None
        counts = [count for count in (wanted - 1, wanted, wanted + 1) if 1 < count <= self.max_cuts]
        candidates = [
            (columns, count // columns) for count in counts for columns in range(1, count + 1) if count % columns == 0
        ]
        log_ratio = math.log(width / height)
        return min(candidates, key=lambda grid: abs(log_ratio - math.log(grid[0] / grid[1])), default=(1, 1))

    def cut_size(self, width: int, height: int, cuts: tuple[int, int]) -> tuple[int, int]:
        """`(width, height)` in pixels of each cut of an image that is cut into `cuts` columns and rows."""
        columns, rows = cuts
        return self.slice_size(
            _nearest_multiple(width, columns) / columns, _nearest_multiple(height, rows) / rows, upscale=True
        )

    def image_geometry(self, width: int, height: int) -> SliceGeometry:
        cuts = self.cut_grid(width, height)
        grids = [self._patch_grid(self.slice_size(width, height, upscale=cuts is None))]
        if cuts is not None:
            grids += [self._patch_grid(self.cut_size(width, height, cuts))] * (cuts[0] * cuts[1])
        return SliceGeometry(IMAGE, tuple(grids))

    def video_geometry(self, width: int, height: int, frames: int, fps: float | None) -> SliceGeometry:
        kept = sampled_frames(frames, fps, self.video["fps"], 1, self.video["max_frames"])
        return SliceGeometry(VIDEO, (self._patch_grid(self.slice_size(width, height, upscale=True)),) * kept)

    def _patch_grid(self, size: tuple[int, int]) -> PatchGrid:
        return size[1] // self.patch, size[0] // self.patch

    # -- slices to planner facts -----------------------------------------------------------------------------------

    def checked_slices(self, geometry: ItemGeometry) -> SliceGeometry:
        """The geometry as slices that the processor could have made.

        Raises:
            InputError: No slices, or a grid above the area that slices are scaled to: graphs are sized by it.
        """
        if not isinstance(geometry, SliceGeometry) or not geometry.grids:
            raise InputError(f"expected an item of at least one slice, got {geometry!r}")
        for rows, columns in geometry.grids:
            if min(rows, columns) < 1 or rows > self._most_rows(columns):
                raise InputError(
                    f"a slice of {rows}x{columns} patches (rows x columns) is none that the processor makes: slices "
                    f"are scaled to the area of {self.resolution}x{self.resolution} pixels; use image_geometry"
                )
        return geometry

    def _most_rows(self, columns: int) -> float:
        """Most rows of a slice that has `columns`.

        A slice covers at most the resolution's area before its sides are rounded to patches, each by half a patch at
        most, so (rows - 1/2) * (columns - 1/2) stays within that area. A side below half a patch becomes one patch;
        nothing then bounds the other.
        """
        if columns == 1:
            return math.inf
        return max(1, math.floor((self.resolution / self.patch) ** 2 / (columns - 0.5) + 0.5))

    def item_spec(self, geometry: ItemGeometry) -> EncoderItemSpec:
        item = self.checked_slices(geometry)
        slices = len(item.grids)
        need = (max(rows for rows, _ in item.grids), max(columns for _, columns in item.grids))
        return EncoderItemSpec(
            item.modality, item.patches, slices * self.queries, slices, axis_sizes={PATCH_GRID_AXIS: need}
        )

    def pixel_rows(self, geometry: ItemGeometry) -> dict[str, int]:
        return {"pixel_values": self.checked_slices(geometry).patches}

    @property
    def axes(self) -> tuple[CaptureAxis, ...]:
        """Square slices, then any slice whose longer side is at most `LONGEST_SIDE` times the square's."""
        side = self.resolution // self.patch
        return (CaptureAxis(PATCH_GRID_AXIS, ((side, side), (LONGEST_SIDE * side, LONGEST_SIDE * side))),)

    def slice_capacity(self, key: tuple[int, ...]) -> int:
        """Most patches of a slice within the grid of an axis key, rounded up for aligned loads."""
        rows, columns = self.largest_grid(key)
        return -(-rows * columns // CAPACITY_ALIGNMENT) * CAPACITY_ALIGNMENT

    def largest_grid(self, key: tuple[int, ...]) -> PatchGrid:
        """A slice within the key's grid that has the most patches."""
        rows, columns = key
        grids = [(int(min(rows, self._most_rows(width))), width) for width in range(1, columns + 1)]
        return max(grids, key=lambda grid: grid[0] * grid[1])

    def most_segments(self) -> int:
        return max(1 + self.max_cuts, int(self.processor.get("video", {}).get("max_frames", 1)))

    def min_token_budget(self) -> int:
        return self.queries

    def flops(self, geometry: ItemGeometry) -> float:
        item = self.checked_slices(geometry)
        width, out = self.tower_shape.width, self.output_width
        tokens = len(item.grids) * self.queries
        pairs = float(sum((rows * columns) ** 2 for rows, columns in item.grids))
        # The queries' own projection is the same for all slices and items, and left out.
        resampler = (
            2.0 * item.patches * (width * out + 2 * out * out)
            + 4.0 * item.patches * self.queries * out
            + 2.0 * tokens * 2 * out * out
        )
        return self.embedding_flops(item.patches) + self.tower_shape.flops(item.patches, pairs) + resampler


class MiniCPMVImageRule(MiniCPMVRule):
    """MiniCPM-V 4.5: images as in 2.6 and 4.0; its resampler joins frames of a video, which is not here."""

    modalities = (IMAGE,)
    without_videos = (
        "videos of MiniCPM-V 4.5 are not yet encoded here: its resampler joins several frames by their times, in a "
        "part that transformers does not have; give it images"
    )


class MiniCPMV25Rule(MiniCPMVImageRule):
    """MiniCPM-V 2.5: images only, and the tower takes every slice for a single row of patches."""

    without_videos = MiniCPMVRule.without_videos

    def tower_grid(self, grid: PatchGrid) -> PatchGrid:
        return 1, grid[0] * grid[1]
