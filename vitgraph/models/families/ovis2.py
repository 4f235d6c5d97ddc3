"""Ovis2: AIMv2 on square tiles; a token is a softmax over visual words, and the mean of their embeddings by it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from itertools import product
from typing import Any, ClassVar

from vitgraph.models import functional, nn, torch
from vitgraph.models.family import CHANNELS, Tower, modeling_class
from vitgraph.models.tiles import TileEncoder, TileRule, nearest_layout, tile_layouts

ENOUGH = 0.9
"""Share of an image that its tiles should show at full resolution."""


@lru_cache(maxsize=4096)
def covering_tiles(width: int, height: int, side: int, most: int) -> int:
    """Tiles of the smallest layout whose tiles show enough of the image, or of the one that shows most."""

    def shown(layout: tuple[int, int]) -> float:
        lines, columns = (
            [*[whole // count] * (count - 1), whole - whole // count * (count - 1)]
            for whole, count in zip((height, width), layout, strict=True)
        )
        # A region longer than a tile is shrunk to it, and the other side with it.
        pairs = ((max(tall, wide), min(tall, wide)) for tall, wide in product(lines, columns))
        areas = (side * (short / long * side) if long > side else long * short for long, short in pairs)
        return sum(areas) / (width * height)

    found = [(layout, shown(layout)) for layout in tile_layouts(1, most)]
    enough = [(rows * columns, -share) for (rows, columns), share in found if share > ENOUGH]
    if enough:
        return min(enough)[0]
    return min((-share, rows * columns) for (rows, columns), share in found)[1]


class Ovis2Rule(TileRule):
    """Up to twelve tiles, and the whole image as one more where there are several."""

    mlp_matrices = 3
    merge_field = "hidden_stride"

    def most_segments(self) -> int:
        most = int(self.processor["max_patches"])
        return most + 1 if self.processor["crop_to_patches"] and most > 1 else 1

    def image_tiles(self, width: int, height: int) -> int:
        if self.most_segments() == 1:
            return 1
        fewest, most = int(self.processor["min_patches"]), int(self.processor["max_patches"])
        if self.processor["use_covering_area_grid"]:
            tiles = covering_tiles(width, height, self.tile_side, most)
        else:
            columns, rows = nearest_layout(width, height, self.tile_side, tile_layouts(fewest, most))
            tiles = columns * rows
        return tiles + 1 if tiles > 1 else 1

    def projector_flops(self) -> float:
        config = self.vision_config
        words = config["vocab_size"] - config["num_visual_indicator_tokens"]
        return 2.0 * self.tokens_per_tile * words * (config["hidden_size"] * self.merge**2 + self.output_width)


class Ovis2Encoder(TileEncoder):
    """`Ovis2VisionModel` and the table of visual words; the words that mark an image's parts are never looked up."""

    tower = Tower("ovis2", "Ovis2VisionConfig", "Ovis2VisionModel")
    fixed: ClassVar[Mapping[str, Any]] = {"vision_config.tokenize_function": "softmax"}
    rule_class = Ovis2Rule
    image_processor = "ovis2.image_processing_pil_ovis2:Ovis2ImageProcessorPil"
    image_settings = ("crop_to_patches", "min_patches", "max_patches", "use_covering_area_grid", *CHANNELS)
    patch_convolutions = ("visual.transformer.embeddings.patch_embedding",)
    blocks = "visual.transformer.encoder.layers"
    checkpoint_keys = ((r"vision_tower\.", "visual."), (r"visual_embeddings_table\.", "table."))

    @classmethod
    def following_modules(cls, config: Any, extra: Mapping[str, Any]) -> dict[str, nn.Module]:
        table_class = modeling_class("ovis2:Ovis2VisualEmbeddingTable")
        return {"table": table_class(config.vocab_size, extra["text_hidden_size"])}

    def encode_tiles(self, pixels: torch.Tensor) -> torch.Tensor:
        words = self.visual(pixel_values=pixels).pooler_output
        return words @ self.modules["table"].weight[: words.shape[-1]]

    def stock_tiles(self, pixels: torch.Tensor) -> torch.Tensor:
        """transformers' way: zeros for the words that are never looked up."""
        words = self.visual(pixel_values=pixels).pooler_output
        return self.modules["table"](functional.pad(words, (0, self.rule.vision_config["num_visual_indicator_tokens"])))
