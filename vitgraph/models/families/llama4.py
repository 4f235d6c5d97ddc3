"""Llama 4: tiles of a best-fitting canvas and a whole-image tile; pixel-shuffle adapter and projector captured too."""

from __future__ import annotations

import numpy as np

from vitgraph.models.family import CHANNELS, Tower
from vitgraph.models.tiles import TileEncoder, TileRule, tile_layouts, whole_merge


class Llama4Rule(TileRule):
    """The canvas that keeps most of the image's pixels, cut into tiles, and the whole image as one more tile where
    there are several."""

    class_rows = 1

    @property
    def merge(self) -> int:
        return whole_merge(self.vision_config["pixel_shuffle_ratio"], "pixel_shuffle_ratio")

    def most_segments(self) -> int:
        most = int(self.processor["max_patches"])
        return most + 1 if most > 1 else 1

    def canvas(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of the canvas of an image of `width` x `height` pixels."""
        known = np.array(tile_layouts(1, int(self.processor["max_patches"])))
        # The processor compares these quotients in float32; another precision would break ties differently.
        sides = np.float32(self.tile_side) * known.astype(np.float32)
        scales = np.minimum(sides[:, 0] / np.float32(height), sides[:, 1] / np.float32(width))
        enlarging = scales[scales >= 1]
        if not len(enlarging):
            chosen = scales.max()
        elif self.processor["resize_to_max_canvas"]:
            chosen = enlarging.max()
        else:
            chosen = enlarging.min()
        fitting = known[scales == chosen]
        rows, columns = fitting[fitting.prod(axis=1).argmin()]
        return int(rows), int(columns)

    def image_tiles(self, width: int, height: int) -> int:
        rows, columns = self.canvas(width, height)
        tiles = rows * columns
        return tiles + 1 if tiles > 1 else 1

    def projector_flops(self) -> float:
        config = self.vision_config
        inner, out = config["projector_input_dim"], config["projector_output_dim"]
        adapter = config["hidden_size"] * self.merge**2 * inner + out * out
        return 2.0 * self.tokens_per_tile * (adapter + config["vision_output_dim"] * self.output_width)


class Llama4Encoder(TileEncoder):
    """`Llama4VisionModel`, which holds the pixel-shuffle adapter, and `Llama4MultiModalProjector`."""

    tower = Tower("llama4", "Llama4VisionConfig", "Llama4VisionModel")
    projector = "llama4:Llama4MultiModalProjector"
    rule_class = Llama4Rule
    image_processor = "llama4.image_processing_llama4:Llama4ImageProcessor"
    image_settings = ("max_patches", "resize_to_max_canvas", *CHANNELS)
    checkpoint_keys = ((r"vision_model\.", "visual."), (r"multi_modal_projector\.", "projector."))
    blocks = "visual.model.layers"
