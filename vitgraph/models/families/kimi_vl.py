"""Kimi-VL, Kimi-K2.5, K2.6 and K3: MoonViT and projector on transformers' Kimi K2.5 classes, for single frames.

Video chunks of the later models, which vLLM 0.33 encodes eagerly, are left to it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from vitgraph.errors import InputError, ModelError
from vitgraph.models import functional, nn, torch
from vitgraph.models.base import PAD_IDENTITY, MetadataField, Tensors
from vitgraph.models.family import CHANNELS, QKV, Names, Tower, named_pairs
from vitgraph.models.geometry import GridGeometry, ItemGeometry, MergedGridRule
from vitgraph.models.grid_encoder import (
    GridTowerEncoder,
    PositionTable,
    block_ranks,
    center_coordinates,
    cubic_axis,
    linear_axis,
)
from vitgraph.models.resizing import cut_patches, normalized
from vitgraph.models.tiles import square_side
from vitgraph.planning.budgets import IMAGE, GraphKey

SIDE_LIMIT = 512
"""Patches on a side at which the model's rotary table ends; the processor refuses such images."""

PATCH_LIMITS: Names = (
    *(("in_patch_limit", "in_token_limit"), ("max_patches", "in_token_limit")),
    ("patch_limit_on_one_side", "side_limit"),
)
"""Settings of the later models' processors, and the presets' names."""


class KimiVLRule(MergedGridRule):
    """Images are shrunk to a limit of patches, never enlarged, and padded to whole output tokens."""

    modalities = (IMAGE,)

    def prepare(self) -> None:
        square_side(self.vision_config["merge_kernel_size"], "merge_kernel_size")
        sides = [self.vision_config[f"pos_emb_{side}"] for side in ("height", "width")]
        square_side(sides, "the position table")
        if not self.processor.get("pad_input", True):
            raise ModelError("pad_input is false; images cropped to odd patch grids do not merge, set it to true")

    @property
    def merge(self) -> int:
        return int(self.vision_config["merge_kernel_size"][0])

    @property
    def side_limit(self) -> int:
        """Most patches on a side."""
        return SIDE_LIMIT - 1

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """Width and height in pixels before the padding."""
        limit = int(self.processor["in_token_limit"])
        patches = (width // self.patch) * (height // self.patch)
        if patches <= limit:
            return width, height
        scale = math.sqrt(limit / patches)
        return int(width * scale), int(height * scale)

    def image_geometry(self, width: int, height: int) -> GridGeometry:
        new_width, new_height = self.resized(width, height)
        cols, rows = (-(-side // self.factor) * self.merge for side in (new_width, new_height))
        if max(rows, cols) > self.side_limit or min(rows, cols) < 1:
            raise InputError(
                f"image of {width}x{height} becomes {cols}x{rows} patches of {self.patch} pixels; each side must have "
                f"1 to {self.side_limit}. Resize or crop it"
            )
        return self.checked_grid(GridGeometry(IMAGE, 1, rows, cols))


class KimiVLEncoder(GridTowerEncoder):
    """`Kimi_K25VisionModel` and `Kimi_K25MultimodalProjection`; patches are in raster order."""

    tower = Tower("kimi_k25", "Kimi_K25VisionConfig", "Kimi_K25VisionModel")
    rule_class = KimiVLRule
    rule: KimiVLRule
    table = PositionTable(lambda rule: int(rule.vision_config["pos_emb_height"]), cubic_axis, center_coordinates)
    position_merge = 1
    image_processor = None
    image_settings: ClassVar[Names] = ("patch_size", "in_token_limit", "pad_input", "merge_kernel_size", *CHANNELS)
    sized_by_pixels = False
    blocks = "visual.layers"
    checkpoint_keys: ClassVar[Sequence[tuple[str, str]]] = (
        (r"vision_tower\.patch_embed\.pos_emb\.weight$", "visual.patch_embed.pos_emb.position_embeddings"),
        (r"vision_tower\.(?:encoder\.)?patch_embed\.proj\.", "visual.patch_embed.proj."),
        (r"vision_tower\.encoder\.final_layernorm\.", "visual.final_layernorm."),
        (r"vision_tower\.encoder\.blocks\.(\d+)\.norm0\.", r"visual.layers.\1.norm1."),
        (r"vision_tower\.encoder\.blocks\.(\d+)\.norm1\.", r"visual.layers.\1.norm2."),
        (r"vision_tower\.encoder\.blocks\.(\d+)\.mlp\.fc0\.", r"visual.layers.\1.mlp.fc1."),
        (r"vision_tower\.encoder\.blocks\.(\d+)\.mlp\.fc1\.", r"visual.layers.\1.mlp.fc2."),
        (r"vision_tower\.encoder\.blocks\.(\d+)\.wo\.", r"visual.layers.\1.attn.proj."),
        (r"vision_tower\.encoder\.blocks\.(\d+)\.wqkv\.", r"visual.layers.\1.attn.wqkv."),
        (r"multi_modal_projector\.pre_norm\.", "projector.pre_norm."),
        (r"multi_modal_projector\.linear_1\.", "projector.in_proj."),
        (r"multi_modal_projector\.linear_2\.", "projector.out_proj."),
    )
    fused: ClassVar[Mapping[str, Sequence[str]]] = {".wqkv.": QKV}
    paired = (".wqkv.",)
    vision_fields = (("init_pos_emb_height", "pos_emb_height"), ("init_pos_emb_width", "pos_emb_width"))
    # The published code has it as a constant.
    vision_defaults: ClassVar[Mapping[str, Any]] = {"hidden_act": "gelu_pytorch_tanh"}
    projector = "kimi_k25:Kimi_K25MultimodalProjection"
    projector_fields = ("projection_layer_norm_eps",)

    @classmethod
    def build_projector(cls, config: Any, extra: Mapping[str, Any], **fields: Any) -> nn.Module:
        return super().build_projector(config, extra, projection_hidden_size=config.hidden_size, **fields)

    def pixel_row_shape(self, name: str) -> tuple[int, ...]:
        return (3, self.rule.patch, self.rule.patch)

    def metadata_fields(self, capacity: GraphKey) -> dict[str, MetadataField]:
        # Real patches fill the head of the merged rows, so a padded patch goes to the row of its own number.
        rows = MetadataField((self.buffer_rows(capacity),), "int32", PAD_IDENTITY)
        return {**super().metadata_fields(capacity), "merge_rows": rows}

    def compute_metadata(self, items: Sequence[ItemGeometry]) -> dict[str, np.ndarray]:
        found = super().compute_metadata(items)
        rows = [block_ranks(grid.h, grid.w, self.rule.merge) for grid in self.grids(items)]
        starts = found["cu_seqlens"][:-1]
        return {**found, "merge_rows": np.concatenate([start + own for start, own in zip(starts, rows, strict=True)])}

    def forward_packed(self, inputs: Tensors, scalars: Mapping[str, int], path: str) -> Sequence[torch.Tensor]:
        positions, weights = inputs["position_ids"], inputs["interp_weights"]
        count = len(positions)
        output = self.tower_output(
            inputs,
            scalars,
            interp_indices=inputs["interp_indices"],
            interp_weights=weights,
            # Single frames: entry 0 of the time table, which is zero, and a mean over one frame.
            frame_index=positions.new_zeros(count),
            temporal_merge_index=(inputs["merge_rows"], weights.new_ones(count), count // self.rule.merge**2),
        )
        return [self.projected(output)]

    def projected(self, output: Any) -> torch.Tensor:
        """From `[M, merge * merge, K]`, the patches of each output token."""
        return self.modules["projector"](output.pooler_output).squeeze(1)

    def image_rows(self, image: Any, item: ItemGeometry) -> Tensors:
        """The published processor's rule with PIL; transformers has none for this model."""
        from PIL import Image

        grid, size, processor = self.rule.checked_grid(item), self.rule.resized(*image.size), self.rule.processor
        image = image.convert("RGB")
        padded = Image.new("RGB", (grid.w * self.rule.patch, grid.h * self.rule.patch))
        padded.paste(image.resize(size, Image.Resampling.BICUBIC) if size != image.size else image)
        pixels = normalized(padded, processor["image_mean"], processor["image_std"])
        return {"pixel_values": cut_patches(pixels, self.rule.patch)}


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

    rule_class = KimiK25Rule
    rule: KimiK25Rule
    checkpoint_keys = (
        (r"mm_projector\.(pre_norm|post_norm)\.", r"projector.\1."),
        (r"mm_projector\.(?:proj\.0|in_proj)\.", "projector.in_proj."),
        (r"mm_projector\.(?:proj\.2|out_proj)\.", "projector.out_proj."),
        *KimiVLEncoder.checkpoint_keys,
    )
    # The published processor has its settings in `media_proc_cfg`, transformers' at the top.
    image_settings = (
        *("patch_size", *CHANNELS, *PATCH_LIMITS),
        *((f"media_proc_cfg.{name}", ours) for name, ours in named_pairs(("patch_size", *CHANNELS, *PATCH_LIMITS))),
        ("size.max_height", "side_limit"),
    )
    pixel_processor = "kimi_k25.image_processing_kimi_k25:Kimi_K25ImageProcessor"
    extra_fields = ("projection_layer_norm_eps", ("vision_config.projector_ln_eps", "projection_layer_norm_eps"))

    @classmethod
    def read_model_config(cls, config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        found = config["vision_config"]
        # The original file marks the tower's numbers, which stand beside the projector's, with a prefix.
        tower = {name.removeprefix("vt_"): value for name, value in found.items() if name.startswith("vt_")}
        vision, extra = super().read_model_config({**config, "vision_config": {**found, **tower}})
        if found.get("qkv_hidden_size"):
            vision["head_dim"] = found["qkv_hidden_size"] // vision["num_attention_heads"]
        return vision, extra

    def processor_settings(self) -> dict[str, Any]:
        side, processor = self.rule.side_limit, self.rule.processor
        limits = {"max_patches": processor["in_token_limit"], "size": {"max_height": side, "max_width": side}}
        plain = {name: processor[name] for name in ("patch_size", *CHANNELS)}
        return {**plain, "merge_size": self.rule.merge, **limits}

    image_rows = GridTowerEncoder.image_rows


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

    rule_class = KimiK3Rule
    table = replace(KimiVLEncoder.table, axis=linear_axis)

    @classmethod
    def build_tower(cls, vision_config: Mapping[str, Any], extra: Mapping[str, Any], dtype: torch.dtype) -> Any:
        tower = super().build_tower(vision_config, extra, dtype)
        width, heads, head = tower.config.hidden_size, tower.config.num_attention_heads, vision_config["head_dim"]
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
        return tower.to(dtype)

    @classmethod
    def following_modules(cls, config: Any, extra: Mapping[str, Any]) -> dict[str, nn.Module]:
        merged, text = config.hidden_size * config.merge_kernel_size[0] ** 2, extra["text_hidden_size"]
        layers = {
            "in_proj": nn.Linear(merged, merged, bias=False),
            "out_proj": nn.Linear(merged, text, bias=False),
            "post_norm": nn.RMSNorm(text, eps=extra["projection_layer_norm_eps"]),
        }
        return {"projector": nn.ModuleDict(layers)}

    def projected(self, output: Any) -> torch.Tensor:
        layers = self.modules["projector"]
        hidden = functional.gelu(layers["in_proj"](output.pooler_output.flatten(1)))
        return layers["post_norm"](layers["out_proj"](hidden))
