"""Llama 4: tiles of a best-fitting canvas and a whole-image tile; pixel-shuffle adapter and projector captured too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from vitgraph.models.geometry import GeometryRule
from vitgraph.models.tiles import TileEncoder, TileRule

if TYPE_CHECKING:
    import torch
    from torch import nn

VISION_FIELDS = (
    "hidden_size",
    "hidden_act",
    "num_hidden_layers",
    "num_attention_heads",
    "num_channels",
    "intermediate_size",
    "vision_output_dim",
    "image_size",
    "patch_size",
    "norm_eps",
    "pixel_shuffle_ratio",
    "projector_input_dim",
    "projector_output_dim",
    "multi_modal_projector_bias",
    "rope_theta",
    "rope_parameters",
)
"""Fields of transformers' vision config that a checkpoint's `vision_config` may set."""

PROCESSOR_FIELDS = ("max_patches", "resize_to_max_canvas", "image_mean", "image_std")
"""Settings of transformers' processor that the rule and the processor take from a preset."""


@lru_cache(maxsize=32)
def canvases(most_tiles: int) -> np.ndarray:
    """Canvases `[K, 2]` as (rows, columns) of 1 to `most_tiles` tiles."""
    return np.array(
        [(rows, columns) for rows in range(1, most_tiles + 1) for columns in range(1, most_tiles // rows + 1)]
    )


class Llama4Rule(TileRule):
    """The canvas that keeps most of the image's pixels, cut into tiles, and the whole image as one more tile where
    there are several."""

    class_rows: ClassVar[int] = 1

    @property
    def merge(self) -> int:
        return round(1 / float(self.vision_config["pixel_shuffle_ratio"]))

    @property
    def most_tiles_per_item(self) -> int:
        most = int(self.processor["max_patches"])
        return most + 1 if most > 1 else 1

    def canvas(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of the canvas of an image of `width` x `height` pixels."""
        known = canvases(int(self.processor["max_patches"]))
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

    rule_class: ClassVar[type[GeometryRule]] = Llama4Rule
    rule: Llama4Rule
    image_processor: ClassVar[str | None] = "llama4.image_processing_llama4:Llama4ImageProcessor"
    follows_pixels: ClassVar[bool] = True
    checkpoint_keys: ClassVar[Sequence[tuple[str, str]]] = (
        (r"^(?:model\.)?vision_model\.", "visual."),
        (r"^(?:model\.)?multi_modal_projector\.", "projector."),
    )
    blocks: ClassVar[str | None] = "visual.model.layers"

    @classmethod
    def vision_config_class(cls) -> type[Any] | None:
        from transformers.models.llama4 import Llama4VisionConfig

        return Llama4VisionConfig

    @classmethod
    def build_modules(
        cls, vision_config: Mapping[str, Any], extra: Mapping[str, Any], dtype: torch.dtype, device: torch.device
    ) -> nn.ModuleDict:
        from torch import nn
        from transformers.models.llama4 import Llama4Config, Llama4TextConfig, Llama4VisionConfig, Llama4VisionModel
        from transformers.models.llama4.modeling_llama4 import Llama4MultiModalProjector

        config = Llama4VisionConfig(**vision_config)
        full = Llama4Config(vision_config=config, text_config=Llama4TextConfig(hidden_size=extra["text_hidden_size"]))
        with device:
            # The dtype is given here because casting the module afterwards would drop the imaginary part of its
            # complex rotary table.
            tower = Llama4VisionModel._from_config(config, attn_implementation="sdpa", dtype=dtype)
            projector = Llama4MultiModalProjector(full).to(dtype)
        return nn.ModuleDict({"visual": tower, "projector": projector})

    @classmethod
    def read_model_config(cls, config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        vision, extra = super().read_model_config(config)
        return {name: vision[name] for name in VISION_FIELDS if vision.get(name) is not None}, extra

    @classmethod
    def read_processor_config(cls, processor: Mapping[str, Any]) -> dict[str, Any]:
        return {name: processor[name] for name in PROCESSOR_FIELDS if processor.get(name) is not None}

    def encode_tiles(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.modules["projector"](self.modules["visual"](pixel_values=pixels).last_hidden_state)

    def image_pixels(self, images: Sequence[Any]) -> torch.Tensor:
        processor_class: Any = self.image_processor_class()
        processor = processor_class(
            size={"height": self.rule.tile_side, "width": self.rule.tile_side},
            **{name: self.rule.processor[name] for name in PROCESSOR_FIELDS},
            **self.rule.processor.get("pixels", {}),
        )
        return processor(images=list(images), return_tensors="pt")["pixel_values"]
