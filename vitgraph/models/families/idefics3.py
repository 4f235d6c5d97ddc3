"""Idefics 3 and SmolVLM: a SigLIP tower on square tiles, pixel shuffle and a linear connector."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

from vitgraph.errors import ModelError
from vitgraph.models.geometry import GeometryRule
from vitgraph.models.tiles import TileEncoder, TileRule

if TYPE_CHECKING:
    import torch
    from torch import nn

    from vitgraph.attention.base import AttentionBackend

LONGEST_SIDE = 4096
"""Pixels above which the processor never enlarges."""

CHECKPOINT_KEYS = (
    (r"^(?:model\.)?vision_model\.", "visual."),
    (r"^(?:model\.)?connector\.", "connector."),
)


class Idefics3Rule(TileRule):
    """The image at a fixed longest side, stretched to whole tiles, and the whole image as one more tile where there
    are several."""

    def __init__(
        self, vision_config: Mapping[str, Any], processor: Mapping[str, Any], extra: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(vision_config, processor, extra)
        tile = self.processor.get("tile_size", self.tile_side)
        if tile != self.tile_side:
            raise ModelError(
                f"the processor cuts tiles of {tile} pixels (max_image_size), the tower takes {self.tile_side}"
            )

    @property
    def merge(self) -> int:
        return int(self.extra["scale_factor"])

    @property
    def longest_side(self) -> int:
        """Pixels of the longer side before the image is cut."""
        return min(int(self.processor["longest_edge"]), LONGEST_SIDE)

    @property
    def most_tiles_per_item(self) -> int:
        side = math.ceil(self.longest_side / self.tile_side)
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

    def projector_flops(self) -> float:
        merged = self.vision_config["hidden_size"] * self.merge**2
        return 2.0 * self.tokens_per_tile * merged * self.output_width


class Idefics3Encoder(TileEncoder):
    """`Idefics3VisionTransformer` and `Idefics3Connector`; every tile is whole, so nothing is masked."""

    rule_class: ClassVar[type[GeometryRule]] = Idefics3Rule
    rule: Idefics3Rule
    image_processor: ClassVar[str | None] = "idefics3.image_processing_pil_idefics3:Idefics3ImageProcessorPil"
    processor_names: ClassVar[Sequence[str]] = ("SmolVLMImageProcessor",)
    follows_pixels: ClassVar[bool] = True
    patch_convolutions: ClassVar[Sequence[str]] = ("visual.embeddings.patch_embedding",)
    blocks: ClassVar[str | None] = "visual.encoder.layers"
    checkpoint_keys: ClassVar[Sequence[tuple[str, str]]] = CHECKPOINT_KEYS

    @classmethod
    def vision_config_class(cls) -> type[Any] | None:
        from transformers.models.idefics3 import Idefics3VisionConfig

        return Idefics3VisionConfig

    def __init__(self, modules: nn.ModuleDict, rule: Idefics3Rule, attention: AttentionBackend) -> None:
        import torch

        super().__init__(modules, rule, attention)
        # transformers finds each patch's position by its fraction of the side, in float32: a rounding can move it.
        side = rule.patches_per_side
        edges = torch.arange(1 / side, 1.0, 1 / side)
        cells = torch.bucketize(
            (torch.arange(side) * (1.0 / torch.tensor(side))).clamp(max=1 - 1e-6), edges, right=True
        )
        self._positions = (cells[:, None] * side + cells).flatten().to(self.device)

    @classmethod
    def build_modules(
        cls, vision_config: Mapping[str, Any], extra: Mapping[str, Any], dtype: torch.dtype, device: torch.device
    ) -> nn.ModuleDict:
        from torch import nn
        from transformers.models.idefics3 import Idefics3VisionConfig
        from transformers.models.idefics3.modeling_idefics3 import Idefics3Connector, Idefics3VisionTransformer

        config = Idefics3VisionConfig(**vision_config)
        text = SimpleNamespace(hidden_size=extra["text_hidden_size"])
        full: Any = SimpleNamespace(vision_config=config, text_config=text, scale_factor=extra["scale_factor"])
        with device:
            tower = Idefics3VisionTransformer._from_config(config, attn_implementation="sdpa", dtype=dtype)
            connector = Idefics3Connector(full).to(dtype)
        return nn.ModuleDict({"visual": tower, "connector": connector})

    @classmethod
    def read_model_config(cls, config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        found, extra = super().read_model_config(config)
        return found, {**extra, "scale_factor": config.get("scale_factor", 2)}

    @classmethod
    def read_processor_config(cls, processor: Mapping[str, Any]) -> dict[str, Any]:
        names = ("do_image_splitting", "image_mean", "image_std")
        found = {name: processor[name] for name in names if processor.get(name) is not None}
        for setting, ours in (("size", "longest_edge"), ("max_image_size", "tile_size")):
            side = (processor.get(setting) or {}).get("longest_edge")
            found |= {ours: side} if side else {}
        return found

    def encode_tiles(self, pixels: torch.Tensor) -> torch.Tensor:
        tower: Any = self.modules["visual"]
        embeddings = tower.embeddings
        hidden = embeddings.patch_embedding(pixels).flatten(2).transpose(1, 2)
        hidden = hidden + embeddings.position_embedding(self._positions)
        hidden = tower.encoder(inputs_embeds=hidden, attention_mask=None).last_hidden_state
        return self.modules["connector"](tower.post_layernorm(hidden))

    def stock_tiles(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.modules["connector"](self.modules["visual"](pixel_values=pixels).last_hidden_state)

    def image_pixels(self, images: Sequence[Any]) -> torch.Tensor:
        import torch
        from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

        settings = {name: self.rule.processor[name] for name in ("do_image_splitting", "image_mean", "image_std")}
        settings |= self.rule.processor.get("pixels", {})
        processor = Idefics3ImageProcessorPil(
            size={"longest_edge": self.rule.processor["longest_edge"]},
            max_image_size={"longest_edge": self.rule.tile_side},
            **settings,
        )
        # Image by image: the processor pads a batch to the most tiles of any image.
        return torch.cat([processor(images=[image], return_tensors="pt")["pixel_values"][0] for image in images])
