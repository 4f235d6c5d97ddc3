"""Gemma 3: SigLIP on 896-pixel crops, average pooling and projection captured with it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from vitgraph.errors import ModelError
from vitgraph.models.families.siglip import SiglipTileEncoder
from vitgraph.models.geometry import GeometryRule
from vitgraph.models.tiles import TileRule

if TYPE_CHECKING:
    import torch
    from torch import nn

PAN_AND_SCAN = (
    "do_pan_and_scan",
    "pan_and_scan_min_crop_size",
    "pan_and_scan_max_num_crops",
    "pan_and_scan_min_ratio_to_activate",
)
"""Settings of the optional extra crops of long images; published files leave them null, that is off."""


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

    @property
    def most_tiles_per_item(self) -> int:
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


class Gemma3Encoder(SiglipTileEncoder):
    """`SiglipVisionModel` without its head, and `Gemma3MultiModalProjector`."""

    rule_class: ClassVar[type[GeometryRule]] = Gemma3Rule
    rule: Gemma3Rule
    image_processor: ClassVar[str | None] = "gemma3.image_processing_pil_gemma3:Gemma3ImageProcessorPil"
    follows_pixels: ClassVar[bool] = True

    @classmethod
    def following_modules(cls, config: Any, extra: Mapping[str, Any]) -> dict[str, nn.Module]:
        from transformers.models.gemma3 import Gemma3Config, Gemma3TextConfig
        from transformers.models.gemma3.modeling_gemma3 import Gemma3MultiModalProjector

        text = Gemma3TextConfig(hidden_size=extra["text_hidden_size"])
        full = Gemma3Config(vision_config=config, text_config=text, mm_tokens_per_image=extra["mm_tokens_per_image"])
        return {"projector": Gemma3MultiModalProjector(full)}

    @classmethod
    def read_model_config(cls, config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        vision, extra = super().read_model_config(config)
        for name in ("model_type", "torch_dtype", "dtype"):
            vision.pop(name, None)
        if config.get("mm_tokens_per_image") is not None:
            extra["mm_tokens_per_image"] = config["mm_tokens_per_image"]
        return vision, extra

    @classmethod
    def read_processor_config(cls, processor: Mapping[str, Any]) -> dict[str, Any]:
        wanted = (*PAN_AND_SCAN, "image_mean", "image_std")
        return {name: processor[name] for name in wanted if processor.get(name) is not None}

    def encode_tiles(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.modules["projector"](self.modules["visual"](pixel_values=pixels).last_hidden_state)

    def image_pixels(self, images: Sequence[Any]) -> torch.Tensor:
        from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

        settings = {name: self.rule.processor[name] for name in (*PAN_AND_SCAN, "image_mean", "image_std")}
        side = self.rule.tile_side
        settings |= {"size": {"height": side, "width": side}, **self.rule.processor.get("pixels", {})}
        processor = Gemma3ImageProcessorPil(**settings)
        return processor(images=list(images), return_tensors="pt")["pixel_values"]
