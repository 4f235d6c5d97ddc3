"""Kimi-K2.5, K2.6 and K3: MoonViT as in Kimi-VL, images within a limit of patches and of their sides.

Video chunks, which vLLM 0.33 encodes eagerly, are left to it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from vitgraph.models.families.kimi_vl import PUBLISHED_KEYS, KimiVLEncoder, KimiVLRule
from vitgraph.models.geometry import GeometryRule, GridGeometry, ItemGeometry
from vitgraph.models.grid_encoder import preprocess_patches
from vitgraph.models.grid_metadata import PositionTable, center_coordinates, linear_axis
from vitgraph.models.processor_classes import transformers_class

if TYPE_CHECKING:
    import torch
    from torch import nn

PROJECTOR_KEYS = (
    (r"^(?:model\.)?mm_projector\.(pre_norm|post_norm)\.", r"projector.\1."),
    (r"^(?:model\.)?mm_projector\.(?:proj\.0|in_proj)\.", "projector.in_proj."),
    (r"^(?:model\.)?mm_projector\.(?:proj\.2|out_proj)\.", "projector.out_proj."),
)
"""Published key to module name; the tower's names are Kimi-VL's."""

PROCESSOR_FIELDS = {
    "in_patch_limit": "in_token_limit",
    "max_patches": "in_token_limit",
    "patch_limit_on_one_side": "side_limit",
    "patch_size": "patch_size",
    "image_mean": "image_mean",
    "image_std": "image_std",
}
"""Settings of the published processor (in `media_proc_cfg`) and of transformers', and the presets' names."""


class KimiK25Rule(KimiVLRule):
    """Images are shrunk to a limit of patches and of each side, never enlarged, and padded to whole output tokens."""

    @property
    def side_limit(self) -> int:
        return int(self.processor["side_limit"])

    def resized(self, width: int, height: int) -> tuple[int, int]:
        patches = max(1.0, width // self.patch) * max(1.0, height // self.patch)
        longest = self.side_limit * self.patch
        scale = min(1.0, math.sqrt(int(self.processor["in_token_limit"]) / patches), longest / width, longest / height)
        return max(1, int(width * scale)), max(1, int(height * scale))


class KimiK25Encoder(KimiVLEncoder):
    """`Kimi_K25VisionModel` and `Kimi_K25MultimodalProjection`."""

    rule_class: ClassVar[type[GeometryRule]] = KimiK25Rule
    rule: KimiK25Rule
    checkpoint_keys: ClassVar[Sequence[tuple[str, str]]] = (*PROJECTOR_KEYS, *PUBLISHED_KEYS)

    @classmethod
    def read_model_config(cls, config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        found = config["vision_config"]
        # The original file marks the tower's numbers, which stand beside the projector's, with a prefix.
        tower = {name.removeprefix("vt_"): value for name, value in found.items() if name.startswith("vt_")}
        vision, extra = super().read_model_config({**config, "vision_config": {**found, **tower}})
        if found.get("qkv_hidden_size"):
            vision["head_dim"] = found["qkv_hidden_size"] // vision["num_attention_heads"]
        eps = found.get("projector_ln_eps", config.get("projection_layer_norm_eps"))
        return vision, {**extra, **({"projection_layer_norm_eps": eps} if eps is not None else {})}

    @classmethod
    def read_processor_config(cls, processor: Mapping[str, Any]) -> dict[str, Any]:
        nested = processor.get("media_proc_cfg") or {}
        settings = {name: nested.get(name, processor.get(name)) for name in PROCESSOR_FIELDS}
        found = {ours: settings[name] for name, ours in PROCESSOR_FIELDS.items() if settings[name] is not None}
        size = processor.get("size") or {}
        return {**found, **({"side_limit": size["max_height"]} if size.get("max_height") else {})}

    def preprocess(self, images: Sequence[Any]) -> tuple[list[ItemGeometry], dict[str, torch.Tensor]]:
        processor_class = transformers_class("kimi_k25.image_processing_kimi_k25:Kimi_K25ImageProcessor")
        side, processor = self.rule.side_limit, self.rule.processor
        limits = {"max_patches": processor["in_token_limit"], "size": {"max_height": side, "max_width": side}}
        return preprocess_patches(self, processor_class, images, merge_size=self.rule.merge, **limits)


class KimiK3Rule(KimiK25Rule):
    """Sizes as in Kimi-K2.5; attention is wider than the tower."""

    def block_flops(self, grid: GridGeometry) -> float:
        config, shape = self.vision_config, self.tower_shape
        inner = config["num_attention_heads"] * config["head_dim"]
        products = 2.0 * grid.patches * shape.width * (4 * inner + 2 * shape.mlp_width)
        return shape.depth * (products + 4.0 * float(grid.patches) ** 2 * inner)


class KimiK3Encoder(KimiK25Encoder):
    """`Kimi_K25VisionModel` with wider attention, RMS norms and no biases, and a projector that norms last.

    transformers has no class for it. The position table is sampled linearly.
    """

    rule_class: ClassVar[type[GeometryRule]] = KimiK3Rule
    rule: KimiK3Rule
    table: ClassVar[PositionTable | None] = PositionTable(
        lambda rule: int(rule.vision_config["pos_emb_height"]), linear_axis, center_coordinates
    )

    @classmethod
    def build_modules(
        cls, vision_config: Mapping[str, Any], extra: Mapping[str, Any], dtype: torch.dtype, device: torch.device
    ) -> nn.ModuleDict:
        from torch import nn
        from transformers.models.kimi_k25 import Kimi_K25VisionConfig, Kimi_K25VisionModel

        config = Kimi_K25VisionConfig(**vision_config)
        width, heads, head = config.hidden_size, config.num_attention_heads, vision_config["head_dim"]
        with device:
            tower: Any = Kimi_K25VisionModel._from_config(config, attn_implementation="sdpa", dtype=dtype)
            tower.patch_embed.proj.bias = None
            tower.patch_embed.pos_emb.interpolation_mode = "bilinear"
            tower.final_layernorm = nn.RMSNorm(width)
            for layer in tower.layers:
                layer.norm1, layer.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
                layer.mlp.fc1.bias = layer.mlp.fc2.bias = None
                layer.attn.head_dim, layer.attn.scaling = head, head**-0.5
                for name in ("q_proj", "k_proj", "v_proj"):
                    setattr(layer.attn, name, nn.Linear(width, heads * head, bias=False))
                layer.attn.proj = nn.Linear(heads * head, width, bias=False)
            merged, text = width * config.merge_kernel_size[0] ** 2, extra["text_hidden_size"]
            projector = nn.ModuleDict(
                {
                    "in_proj": nn.Linear(merged, merged, bias=False),
                    "out_proj": nn.Linear(merged, text, bias=False),
                    "post_norm": nn.RMSNorm(text, eps=extra.get("projection_layer_norm_eps", 1e-5)),
                }
            )
        return nn.ModuleDict({"visual": tower.to(dtype), "projector": projector.to(dtype)})

    def projected(self, pooled: torch.Tensor) -> torch.Tensor:
        from torch.nn import functional

        layers: Any = self.modules["projector"]
        hidden = functional.gelu(layers["in_proj"](pooled.flatten(1)))
        return layers["post_norm"](layers["out_proj"](hidden))
