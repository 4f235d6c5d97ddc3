"""Llama 4: tiles of a best-fitting canvas and a whole-image tile; pixel-shuffle adapter and projector captured too."""

from __future__ import annotations

import math
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

    def size_on_canvas(self, width: int, height: int) -> tuple[int, int]:
        """Width and height in pixels to which the image is resized on its canvas; the rest is padding."""
        rows, columns = self.canvas(width, height)
        room_height, room_width = rows * self.tile_side, columns * self.tile_side
        if not self.processor["resize_to_max_canvas"]:
            # Only images below one tile are enlarged.
            room_height = min(max(height, self.tile_side), room_height)
            room_width = min(max(width, self.tile_side), room_width)
        scale_width, scale_height = room_width / width, room_height / height
        if scale_width < scale_height:
            return room_width, max(1, min(math.floor(height * scale_width), room_height))
        return max(1, min(math.floor(width * scale_height), room_width)), room_height

    def projector_flops(self) -> float:
        config = self.vision_config
        inner, out = config["projector_input_dim"], config["projector_output_dim"]
        adapter = config["hidden_size"] * self.merge**2 * inner + out * out
        return 2.0 * self.tokens_per_tile * (adapter + config["vision_output_dim"] * self.output_width)


class Llama4Encoder(TileEncoder):
    """`Llama4VisionModel`, which holds the pixel-shuffle adapter, and `Llama4MultiModalProjector`."""

    rule_class: ClassVar[type[GeometryRule]] = Llama4Rule
    rule: Llama4Rule
    resample: ClassVar[int] = 2
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
    def map_checkpoint_key(cls, key: str) -> str | None:
        name = key.removeprefix("model.")
        if name.startswith("vision_model."):
            return "visual." + name.removeprefix("vision_model.")
        if name.startswith("multi_modal_projector."):
            return "projector." + name.removeprefix("multi_modal_projector.")
        return None

    @classmethod
    def read_model_config(cls, config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        vision, extra = super().read_model_config(config)
        return {name: vision[name] for name in VISION_FIELDS if vision.get(name) is not None}, extra

    @classmethod
    def read_processor_config(cls, processor: Mapping[str, Any]) -> dict[str, Any]:
        wanted = ("max_patches", "resize_to_max_canvas", "image_mean", "image_std")
        return {name: processor[name] for name in wanted if processor.get(name) is not None}

    def encode_tiles(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.modules["projector"](self.modules["visual"](pixel_values=pixels).last_hidden_state)

    def image_pixels(self, images: Sequence[Any]) -> torch.Tensor:
        """transformers' processor needs torchvision; this is its rule with PIL, bfloat16 arithmetic included."""
        import torch
        from PIL.Image import Resampling

        side = self.rule.tile_side
        tiles: list[np.ndarray] = []
        for image in images:
            rows, columns = self.rule.canvas(*image.size)
            resized = np.asarray(image.resize(self.rule.size_on_canvas(*image.size), Resampling.BILINEAR))
            canvas = np.zeros((rows * side, columns * side, 3), dtype=np.uint8)
            canvas[: resized.shape[0], : resized.shape[1]] = resized
            tiles.extend(canvas.reshape(rows, side, columns, side, 3).swapaxes(1, 2).reshape(-1, side, side, 3))
            if rows * columns > 1:
                tiles.append(np.asarray(image.resize((side, side), Resampling.BILINEAR)))
        pixels = torch.from_numpy(np.stack(tiles)).permute(0, 3, 1, 2).to(torch.bfloat16) * (1 / 255)
        mean = torch.tensor(self.rule.processor["image_mean"], dtype=torch.bfloat16).view(3, 1, 1)
        std = torch.tensor(self.rule.processor["image_std"], dtype=torch.bfloat16).view(3, 1, 1)
        return (pixels - mean) / std
