"""Idefics 3 and SmolVLM: a SigLIP tower on square tiles, pixel shuffle and a linear connector."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from vitgraph.errors import ModelError
from vitgraph.models import torch
from vitgraph.models.family import CHANNELS, Tower
from vitgraph.models.tiles import TileEncoder, TileRule

LONGEST_SIDE = 4096
"""Pixels above which the processor never enlarges."""


class Idefics3Rule(TileRule):
    """The image at a fixed longest side, stretched to whole tiles, and the whole image as one more tile where there
    are several."""

    merge_field = "scale_factor"

    def prepare(self) -> None:
        super().prepare()
        tile = self.processor.get("tile_size", self.tile_side)
        if tile != self.tile_side:
            raise ModelError(
                f"the processor cuts tiles of {tile} pixels (max_image_size), the tower takes {self.tile_side}"
            )

    def most_segments(self) -> int:
        side = math.ceil(min(int(self.processor["longest_edge"]), LONGEST_SIDE) / self.tile_side)
        return side * side + 1

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """Width and height in pixels before the stretching to whole tiles."""
        longest, ratio = int(self.processor["longest_edge"]), width / height
        if width >= height:
            width, height = longest, int(longest / ratio)
            height = max(height + height % 2, 1)
        else:
            width, height = int(longest * ratio), longest
            width = max(width + width % 2, 1)
        ratio = width / height
        if width >= height and width > LONGEST_SIDE:
            width, height = LONGEST_SIDE, int(LONGEST_SIDE / ratio)
        elif height > width and height > LONGEST_SIDE:
            width, height = int(LONGEST_SIDE * ratio), LONGEST_SIDE
        return max(width, 1), max(height, 1)

    def image_tiles(self, width: int, height: int) -> int:
        if not self.processor["do_image_splitting"]:
            return 1
        width, height = self.resized(width, height)
        ratio, side = width / height, self.tile_side
        if width >= height:
            columns = math.ceil(width / side)
            rows = math.ceil(int(columns * side / ratio) / side)
        else:
            rows = math.ceil(height / side)
            columns = math.ceil(int(rows * side * ratio) / side)
        return rows * columns + 1 if rows * columns > 1 else 1

    @property
    def projector_widths(self) -> Sequence[int]:
        return self.merged_width, self.output_width


class Idefics3Encoder(TileEncoder):
    """`Idefics3VisionTransformer` and `Idefics3Connector`; every tile is whole, so nothing is masked."""

    tower = Tower("idefics3", "Idefics3VisionConfig", "Idefics3VisionTransformer")
    projector = "idefics3:Idefics3Connector"
    projector_fields = ("scale_factor",)
    extra_fields = projector_fields
    rule_class = Idefics3Rule
    image_processor = "idefics3.image_processing_pil_idefics3:Idefics3ImageProcessorPil"
    image_settings = (
        *("do_image_splitting", *CHANNELS),
        *(("size.longest_edge", "longest_edge"), ("max_image_size.longest_edge", "tile_size")),
    )
    processor_names = ("SmolVLMImageProcessor",)
    patch_convolutions = ("visual.embeddings.patch_embedding",)
    blocks = "visual.encoder.layers"
    checkpoint_keys = ((r"vision_model\.", "visual."), (r"connector\.", "projector."))

    def prepare(self) -> None:
        # transformers finds each patch's position by its fraction of the side, in float32: a rounding can move it.
        side = self.rule.patches_per_side
        edges = torch.arange(1 / side, 1.0, 1 / side)
        cells = torch.bucketize(
            (torch.arange(side) * (1.0 / torch.tensor(side))).clamp(max=1 - 1e-6), edges, right=True
        )
        self._positions = (cells[:, None] * side + cells).flatten().to(self.device)

    def encode_tiles(self, pixels: torch.Tensor) -> torch.Tensor:
        embeddings = self.visual.embeddings
        hidden = embeddings.patch_embedding(pixels).flatten(2).transpose(1, 2)
        hidden = hidden + embeddings.position_embedding(self._positions)
        hidden = self.visual.encoder(inputs_embeds=hidden, attention_mask=None).last_hidden_state
        return self.modules["projector"](self.visual.post_layernorm(hidden))

    def processor_settings(self) -> dict[str, Any]:
        return {**super().processor_settings(), "max_image_size": {"longest_edge": self.rule.tile_side}}
