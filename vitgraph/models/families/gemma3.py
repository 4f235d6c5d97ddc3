"""Gemma 3: SigLIP on 896-pixel crops, average pooling and projection captured with it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from vitgraph.errors import ModelError
from vitgraph.models.family import CHANNELS
from vitgraph.models.tiles import SiglipTileEncoder, TileRule


class Gemma3Rule(TileRule):
    """The whole image as one crop, whatever its shape; with pan and scan also 2 to 4 crops of a long image."""

    @property
    def merge(self) -> int:
        patches = self.patches_per_side
        tokens = math.isqrt(int(self.extra["mm_tokens_per_image"]))
        if tokens**2 != self.extra["mm_tokens_per_image"] or patches % tokens:
            raise ModelError(
                f"mm_tokens_per_image is {self.extra['mm_tokens_per_image']}; it must be a square whose side divides "
                f"the {patches} patches on a side of a crop"
            )
        return patches // tokens

    def most_segments(self) -> int:
        return 1 + int(self.processor["pan_and_scan_max_num_crops"] if self.processor["do_pan_and_scan"] else 0)

    def image_tiles(self, width: int, height: int) -> int:
        long, short = max(width, height), min(width, height)
        if not self.processor["do_pan_and_scan"]:
            return 1
        if long / short < self.processor["pan_and_scan_min_ratio_to_activate"]:
            return 1
        smallest = int(self.processor["pan_and_scan_min_crop_size"])
        crops = min(math.floor(long / short + 0.5), long // smallest)
        crops = min(int(self.processor["pan_and_scan_max_num_crops"]), max(2, crops))
        if min(math.ceil(long / crops), short) < smallest:
            return 1
        return 1 + crops

    @property
    def projector_widths(self) -> Sequence[int]:
        return self.tower_shape.width, self.output_width


class Gemma3Encoder(SiglipTileEncoder):
    """`SiglipVisionModel` without its head, and `Gemma3MultiModalProjector`."""

    projector = "gemma3:Gemma3MultiModalProjector"
    projector_fields = ("mm_tokens_per_image",)
    extra_fields = projector_fields
    rule_class = Gemma3Rule
    image_processor = "gemma3.image_processing_pil_gemma3:Gemma3ImageProcessorPil"
    # Published files leave those of the extra crops of long images null, that is off.
    image_settings = (
        *("do_pan_and_scan", "pan_and_scan_min_crop_size", "pan_and_scan_max_num_crops"),
        *("pan_and_scan_min_ratio_to_activate", *CHANNELS),
    )
