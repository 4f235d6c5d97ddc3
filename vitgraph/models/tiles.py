"""What the tile families share: equal square tiles as a dense batch, no segment list, no metadata."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

from vitgraph.errors import BudgetError, InputError, ModelError
from vitgraph.models import torch
from vitgraph.models.base import EncoderInputs, PathRows, Tensors
from vitgraph.models.encoder import VisionEncoder
from vitgraph.models.family import Tower
from vitgraph.models.geometry import GeometryRule, ItemGeometry, TileGeometry, linear_flops
from vitgraph.planning.budgets import DEFAULT_PATH, IMAGE, EncoderItemSpec, GraphKey

if TYPE_CHECKING:
    import numpy as np


def square_side(size: Any, name: str) -> int:
    """One side of a square given as a number or as a pair.

    Raises:
        ModelError: The pair is not square.
    """
    sides = list(size) if isinstance(size, (list, tuple)) else [size]
    if any(side != sides[0] for side in sides):
        raise ModelError(f"{name} is {sides}; only squares are supported")
    return int(sides[0])


def whole_merge(ratio: Any, name: str) -> int:
    """Patches on a side of one output token, from the share of a side that a pixel shuffle keeps.

    Raises:
        ModelError: They are no whole number.
    """
    merge = round(1 / float(ratio))
    if abs(merge * float(ratio) - 1) > 1e-6:
        raise ModelError(f"{name} is {ratio}; only one over a whole number, such as 0.5, is supported")
    return merge


def best_resolution(width: int, height: int, resolutions: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The resolution `(width, height)` that keeps most of an image's pixels, and of those the one that wastes least."""

    def kept_and_wasted(candidate: tuple[int, int]) -> tuple[int, int]:
        scale = min(candidate[0] / width, candidate[1] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - candidate[0] * candidate[1]

    return max(resolutions, key=kept_and_wasted)


@lru_cache(maxsize=32)
def tile_layouts(fewest: int, most: int) -> tuple[tuple[int, int], ...]:
    """Layouts, as `(columns, rows)` or the other way round, of `fewest` to `most` tiles, those of fewer tiles first."""
    layouts = [
        (columns, rows)
        for columns in range(1, most + 1)
        for rows in range(1, most // columns + 1)
        if columns * rows >= fewest
    ]
    return tuple(sorted(layouts, key=lambda layout: layout[0] * layout[1]))


def nearest_layout(width: int, height: int, side: int, layouts: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The layout `(columns, rows)` of tiles of `side` pixels nearest in aspect ratio; 1 x 1 where there is none."""
    ratio, area = width / height, width * height
    best, best_distance = (1, 1), float("inf")
    for columns, rows in layouts:
        distance = abs(ratio - columns / rows)
        # Of layouts with the same ratio the larger is taken while the image fills more than half of it.
        fills = area > 0.5 * side**2 * columns * rows
        if distance < best_distance or (distance == best_distance and fills):
            best, best_distance = (columns, rows), distance
    return best


class TileRule(GeometryRule):
    """Every image becomes a number of tiles of the tower's own size; every tile gives the same number of tokens.

    Raises:
        ModelError: The tile is not square or not a whole number of output cells on a side.
    """

    modalities: tuple[str, ...] = (IMAGE,)
    class_rows: ClassVar[int] = 0
    """Rows that attend beside a tile's patches."""
    fewest_tiles_per_item: ClassVar[int] = 1
    has_segments: ClassVar[bool] = False
    has_whole_cells: ClassVar[bool] = True
    """Tiles divide into patches and those into output cells; where False, pixels are left over and cells padded."""

    def prepare(self) -> None:
        self.tile_side = square_side(self.vision_config["image_size"], "image_size")
        self.patch = square_side(self.vision_config["patch_size"], "patch_size")
        self.patches_per_side = self.tile_side // self.patch
        merge = self.merge
        if self.has_whole_cells and (self.tile_side % self.patch or self.patches_per_side % merge):
            raise ModelError(
                f"tiles of {self.tile_side} pixels do not divide into output cells of {merge}x{merge} patches of "
                f"{self.patch} pixels; image_size must be a multiple of {merge * self.patch}"
            )
        self.tokens_per_tile = (-(-self.patches_per_side // merge)) ** 2

    @abstractmethod
    def image_tiles(self, width: int, height: int) -> int:
        """Tiles that the processor makes of an image of `width` x `height` pixels."""

    def image_geometry(self, width: int, height: int) -> TileGeometry:
        return TileGeometry(IMAGE, self.image_tiles(width, height))

    def filled(self, resolutions: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
        """The resolutions.

        Raises:
            ModelError: Tiles do not fill one of them.
        """
        if any(length % self.tile_side for size in resolutions for length in size):
            raise ModelError(
                f"the processor's resolutions {[list(size) for size in resolutions]} are not all multiples of the "
                f"tower's tiles of {self.tile_side} pixels; the two files do not belong together"
            )
        return resolutions

    def checked_tiles(self, geometry: ItemGeometry) -> TileGeometry:
        """The geometry as tiles.

        Raises:
            InputError: It is something else, or has no tile.
        """
        if not isinstance(geometry, TileGeometry) or geometry.tiles < 1:
            raise InputError(f"expected one tile or more, got {geometry!r}")
        return geometry

    def item_spec(self, geometry: ItemGeometry) -> EncoderItemSpec:
        tiles = self.checked_tiles(geometry).tiles
        return EncoderItemSpec(geometry.modality, tiles, tiles * self.tokens_per_tile, tiles)

    def pixel_rows(self, geometry: ItemGeometry) -> dict[str, int]:
        return {"pixel_values": self.checked_tiles(geometry).tiles}

    def min_token_budget(self) -> int:
        return self.tokens_per_tile * self.fewest_tiles_per_item

    @abstractmethod
    def most_segments(self) -> int:
        """Tiles of the largest item that the processor makes.

        Tiles are bounded by the budget alone; with this, items times frames never is the tighter limit.
        """

    def min_tokens_per_segment(self) -> int:
        return self.tokens_per_tile

    @property
    def projector_widths(self) -> Sequence[int]:
        """Widths before, between and after the linear layers that follow the tower, over output cells."""
        return self.merged_width, self.output_width, self.output_width

    def projector_flops(self) -> float:
        """Operations after the tower, for one tile."""
        return linear_flops(self.tokens_per_tile, *self.projector_widths)

    def tile_flops(self) -> float:
        """Operations of one tile."""
        patches = self.patches_per_side**2
        blocks = self.tower_shape.flops(patches + self.class_rows)
        return self.embedding_flops(patches) + blocks + self.projector_flops()

    def flops(self, geometry: ItemGeometry) -> float:
        return self.checked_tiles(geometry).tiles * self.tile_flops()


class TileEncoder(VisionEncoder):
    """A tower over `[tiles, 3, side, side]`: tiles never see each other, so a graph is padded with spare tiles."""

    rule: TileRule
    # FlashAttention serves equal tiles through its varlen kernel, with offsets that the shapes alone decide.
    calls_varlen: ClassVar[bool] = False

    def encode_tiles(self, pixels: torch.Tensor) -> torch.Tensor:
        """`[tiles, 3, side, side]` to `[tiles, tokens per tile, D]`."""
        return self.stock_tiles(pixels)

    def stock_tiles(self, pixels: torch.Tensor) -> torch.Tensor:
        """transformers' own way from pixels to embeddings; same shapes as `encode_tiles`."""
        return self.modules["projector"](self.visual(pixel_values=pixels).last_hidden_state)

    def pixel_row_shape(self, name: str) -> tuple[int, ...]:
        return (self.rule.channels, self.rule.tile_side, self.rule.tile_side)

    def buffer_rows(self, capacity: GraphKey) -> int:
        tiles = capacity.token_budget // self.rule.tokens_per_tile
        if tiles < 1:
            raise BudgetError(
                f"token budget {capacity.token_budget} holds no tile: every tile of this model has "
                f"{self.rule.tokens_per_tile} tokens. Use budgets of at least {self.rule.tokens_per_tile}"
            )
        return tiles

    def compute_metadata(self, items: Sequence[ItemGeometry]) -> dict[str, np.ndarray]:
        for item in items:
            self.rule.checked_tiles(item)
        return {}

    def dummy_items(self, capacity: GraphKey) -> list[ItemGeometry]:
        return [TileGeometry(IMAGE, self.buffer_rows(capacity))]

    def forward_packed(self, inputs: Tensors, scalars: Mapping[str, int], path: str) -> Sequence[torch.Tensor]:
        return [self.encode_tiles(inputs["pixel_values"]).flatten(0, 1)]

    def joined(self, item: TileGeometry, rows: torch.Tensor) -> torch.Tensor:
        """The item's final embedding from the rows of its tiles: they are it, where nothing joins them."""
        return rows

    def postprocess_encoder_output(self, mm_kwargs: EncoderInputs, outputs: PathRows) -> list[torch.Tensor]:
        pairs = zip(mm_kwargs.chosen, outputs[DEFAULT_PATH], strict=True)
        return [self.joined(self.rule.checked_tiles(item), rows) for item, rows in pairs if rows is not None]

    def stock_rows(self, mm_kwargs: EncoderInputs) -> torch.Tensor:
        items = [self.rule.checked_tiles(item) for item in mm_kwargs.chosen]
        tiles = self.stock_tiles(mm_kwargs.rows("pixel_values").materialize()).split([item.tiles for item in items])
        return torch.cat([self.joined(item, part.flatten(0, 1)) for item, part in zip(items, tiles, strict=True)])

    def processor_settings(self) -> dict[str, Any]:
        side = self.rule.tile_side
        return {"size": {"height": side, "width": side}, **super().processor_settings()}

    def image_rows(self, image: Any, item: ItemGeometry) -> Tensors:
        return {"pixel_values": self.processed(image.convert("RGB"))["pixel_values"].flatten(0, -4)}


class SiglipTileEncoder(TileEncoder):
    """SigLIP without its head on square tiles, and the modules that a family puts after it."""

    tower = Tower("siglip", "SiglipVisionConfig", "SiglipVisionModel")
    patch_convolutions = ("visual.embeddings.patch_embedding",)
    blocks = "visual.encoder.layers"
    checkpoint_keys: ClassVar[Sequence[tuple[str, str]]] = (
        (r"vision_tower\.(?:vision_model\.)?", "visual."),
        (r"multi_modal_projector\.", "projector."),
        (r"image_newline$", "tokens.image_newline"),
    )

    @classmethod
    def build_tower(cls, vision_config: Mapping[str, Any], extra: Mapping[str, Any], dtype: torch.dtype) -> Any:
        return super().build_tower({**vision_config, "vision_use_head": False}, extra, dtype)
