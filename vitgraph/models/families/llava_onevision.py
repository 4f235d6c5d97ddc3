"""LLaVA-OneVision: SigLIP on tiles of the best resolution and on video frames; grids are put together after the graph.

An image is cut where it is the only one of its prompt; sizes here are of that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from vitgraph.errors import InputError, ModelError
from vitgraph.models import functional, nn, torch
from vitgraph.models.family import CHANNELS
from vitgraph.models.geometry import ItemGeometry, TileGeometry
from vitgraph.models.tiles import SiglipTileEncoder, TileRule, best_resolution
from vitgraph.planning.budgets import IMAGE, VIDEO, GraphKey

FEW = 1.1
"""How many times the side of the largest grid may be that of the whole image's cells before it is shrunk."""


@dataclass(frozen=True, slots=True)
class AnyresGeometry(TileGeometry):
    """The whole image as one tile, then tiles of it padded to the best resolution; its size in pixels."""

    width: int
    height: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Output cells of an image's tiles: of all of them, without the padding, and after shrinking."""

    tiles: tuple[int, int]
    kept: tuple[int, int]
    shown: tuple[int, int]


class LlavaOnevisionRule(TileRule):
    """An image: the pinpoint that keeps most of its pixels, and the image whole. A video: a tile for each frame."""

    modalities = (IMAGE, VIDEO)
    fewest_tiles_per_item = 2
    has_whole_cells = False

    def prepare(self) -> None:
        super().prepare()
        known = self.extra.get("image_grid_pinpoints", self.processor["image_grid_pinpoints"])
        if [list(pair) for pair in known] != [list(pair) for pair in self.processor["image_grid_pinpoints"]]:
            raise ModelError(
                f"image_grid_pinpoints are {known} in config.json, {self.processor['image_grid_pinpoints']} in the "
                "processor's file; the two files do not belong together"
            )
        self.resolutions = self.filled([(int(width), int(height)) for height, width in known])
        self.layout = lru_cache(maxsize=4096)(self._layout)

    def most_segments(self) -> int:
        return 1 + max(width * height for width, height in self.resolutions) // self.tile_side**2

    def image_tiles(self, width: int, height: int) -> int:
        wide, tall = best_resolution(width, height, self.resolutions)
        return 1 + wide // self.tile_side * (tall // self.tile_side)

    def image_geometry(self, width: int, height: int) -> AnyresGeometry:
        return AnyresGeometry(IMAGE, self.image_tiles(width, height), width, height)

    def video_geometry(self, width: int, height: int, frames: int, fps: float | None) -> TileGeometry:
        return TileGeometry(VIDEO, frames)

    def checked_tiles(self, geometry: ItemGeometry) -> TileGeometry:
        tiles = super().checked_tiles(geometry)
        if (tiles.modality == IMAGE) != isinstance(tiles, AnyresGeometry):
            raise InputError(f"expected an image with its size or the frames of a video, got {geometry!r}")
        return tiles

    def _layout(self, item: AnyresGeometry) -> Layout:
        side = self.patches_per_side
        wide, tall = (pixels // self.tile_side for pixels in best_resolution(item.width, item.height, self.resolutions))
        lines, cells = tall * side, wide * side
        if item.width / item.height > cells / lines:
            lines -= (lines - int(round(item.height * (cells / item.width), 7))) // 2 * 2
        else:
            cells -= (cells - int(round(item.width * (lines / item.height), 7))) // 2 * 2
        most = int(self.extra["vision_aspect_ratio"].removeprefix("anyres_max_"))
        ratio = math.sqrt(lines * cells / (most * side**2))
        shown = (int(lines // ratio), int(cells // ratio)) if ratio > FEW else (lines, cells)
        return Layout((tall, wide), (lines, cells), shown)

    @property
    def frame_side(self) -> int:
        """Cells on a side of a video frame, which are halved."""
        return math.ceil(self.patches_per_side / 2)

    def final_tokens(self, geometry: ItemGeometry) -> int:
        item = self.checked_tiles(geometry)
        if not isinstance(item, AnyresGeometry):
            return item.tiles * self.frame_side**2 + 1
        lines, cells = self.layout(item).shown
        return self.tokens_per_tile + lines * (cells + 1)


class LlavaOnevisionEncoder(SiglipTileEncoder):
    """`SiglipVisionModel` without its last norm, `LlavaOnevisionMultiModalProjector` and the newline."""

    rule_class = LlavaOnevisionRule
    rule: LlavaOnevisionRule
    projector = "llava_onevision:LlavaOnevisionMultiModalProjector"
    tokens = ("image_newline",)
    projector_fields = ("projector_hidden_act", "multimodal_projector_bias")
    extra_fields = ("vision_aspect_ratio", *projector_fields, "image_grid_pinpoints")
    fixed: ClassVar[Mapping[str, Any]] = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
    image_processor = "llava_onevision.image_processing_pil_llava_onevision:LlavaOnevisionImageProcessorPil"
    image_settings = ("image_grid_pinpoints", *CHANNELS)
    video_processor = "llava_onevision.video_processing_llava_onevision:LlavaOnevisionVideoProcessor"

    @classmethod
    def build_projector(cls, config: Any, extra: Mapping[str, Any], **fields: Any) -> nn.Module:
        return super().build_projector(config, extra, **cls.fixed, **fields)

    def dummy_items(self, capacity: GraphKey) -> list[ItemGeometry]:
        return [TileGeometry(VIDEO, self.buffer_rows(capacity))]

    def encode_tiles(self, pixels: torch.Tensor) -> torch.Tensor:
        hidden = self.visual.encoder(inputs_embeds=self.visual.embeddings(pixels)).last_hidden_state
        return self.modules["projector"](hidden)

    def stock_tiles(self, pixels: torch.Tensor) -> torch.Tensor:
        states = self.visual(pixel_values=pixels, output_hidden_states=True).hidden_states
        return self.modules["projector"](states[self.fixed["vision_feature_layer"]])

    def joined(self, item: TileGeometry, rows: torch.Tensor) -> torch.Tensor:
        """The item's final embedding from the rows of its tiles."""
        newline, side = self.modules["tokens"]["image_newline"], self.rule.patches_per_side
        tiles = rows.unflatten(0, (item.tiles, side, side)).permute(0, 3, 1, 2)
        if not isinstance(item, AnyresGeometry):
            frames = functional.interpolate(tiles, size=[self.rule.frame_side] * 2, mode="bilinear")
            return torch.cat([frames.flatten(2).transpose(1, 2).flatten(0, 1), newline[None]])
        layout = self.rule.layout(item)
        (tall, wide), (lines, cells) = layout.tiles, layout.kept
        grid = tiles[1:].unflatten(0, (tall, wide)).permute(2, 0, 3, 1, 4).flatten(3).flatten(1, 2)
        top, left = (tall * side - lines) // 2, (wide * side - cells) // 2
        grid = grid[:, top : top + lines, left : left + cells]
        if layout.shown != layout.kept:
            grid = functional.interpolate(grid[None], size=list(layout.shown), mode="bilinear")[0]
        grid = torch.cat([grid, newline[:, None, None].expand(-1, grid.shape[1], 1)], dim=-1)
        return torch.cat([rows[: side * side], grid.flatten(1).T])
