"""Kimi-VL: MoonViT and projector on transformers' Kimi K2.5 classes, which are the same network for single frames."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from vitgraph.errors import InputError, ModelError
from vitgraph.models.base import PAD_IDENTITY, EncoderInputs, MetadataField
from vitgraph.models.geometry import (
    GeometryRule,
    GridGeometry,
    ItemGeometry,
    MergedGridRule,
)
from vitgraph.models.grid_encoder import GridTowerEncoder, cut_patches
from vitgraph.models.grid_metadata import PositionTable, block_ranks, center_coordinates, cubic_axis
from vitgraph.planning.budgets import GraphKey
from vitgraph.planning.items import IMAGE

if TYPE_CHECKING:
    import torch
    from torch import nn

SIDE_LIMIT = 512
"""Patches on a side at which the model's rotary table ends; the processor refuses such images."""

VISION_FIELDS = {
    "patch_size": "patch_size",
    "init_pos_emb_height": "pos_emb_height",
    "init_pos_emb_width": "pos_emb_width",
    "num_attention_heads": "num_attention_heads",
    "num_hidden_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "merge_kernel_size": "merge_kernel_size",
}
"""Fields of the published vision config, and of transformers' class."""

PUBLISHED_KEYS = (
    (r"^vision_tower\.patch_embed\.pos_emb\.weight$", "visual.patch_embed.pos_emb.position_embeddings"),
    (r"^vision_tower\.(?:encoder\.)?patch_embed\.proj\.", "visual.patch_embed.proj."),
    (r"^vision_tower\.encoder\.final_layernorm\.", "visual.final_layernorm."),
    (r"^vision_tower\.encoder\.blocks\.(\d+)\.norm0\.", r"visual.layers.\1.norm1."),
    (r"^vision_tower\.encoder\.blocks\.(\d+)\.norm1\.", r"visual.layers.\1.norm2."),
    (r"^vision_tower\.encoder\.blocks\.(\d+)\.mlp\.fc0\.", r"visual.layers.\1.mlp.fc1."),
    (r"^vision_tower\.encoder\.blocks\.(\d+)\.mlp\.fc1\.", r"visual.layers.\1.mlp.fc2."),
    (r"^vision_tower\.encoder\.blocks\.(\d+)\.wo\.", r"visual.layers.\1.attn.proj."),
    (r"^vision_tower\.encoder\.blocks\.(\d+)\.wqkv\.", r"visual.layers.\1.attn.wqkv."),
    (r"^multi_modal_projector\.pre_norm\.", "projector.pre_norm."),
    (r"^multi_modal_projector\.linear_1\.", "projector.in_proj."),
    (r"^multi_modal_projector\.linear_2\.", "projector.out_proj."),
)
"""Published key to module name; the first match holds."""


class KimiVLRule(MergedGridRule):
    """Images are shrunk to a limit of patches, never enlarged, and padded to whole output tokens."""

    modalities: tuple[str, ...] = (IMAGE,)

    def __init__(
        self, vision_config: Mapping[str, Any], processor: Mapping[str, Any], extra: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(vision_config, processor, extra)
        height, width = self.vision_config["merge_kernel_size"]
        if height != width:
            raise ModelError(f"merge_kernel_size is {[height, width]}; only square merges are supported")
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

    def checked_grid(self, geometry: ItemGeometry) -> GridGeometry:
        grid = super().checked_grid(geometry)
        if grid.t != 1:
            raise InputError(f"grid [{grid.t}, {grid.h}, {grid.w}] has {grid.t} frames; this model takes images only")
        return grid


class KimiVLEncoder(GridTowerEncoder):
    """`Kimi_K25VisionModel` and `Kimi_K25MultimodalProjection`; patches are in raster order."""

    rule_class: ClassVar[type[GeometryRule]] = KimiVLRule
    rule: KimiVLRule
    table: ClassVar[PositionTable | None] = PositionTable(
        lambda rule: int(rule.vision_config["pos_emb_height"]), cubic_axis, center_coordinates
    )
    position_merge: ClassVar[int | None] = 1
    image_processor: ClassVar[str | None] = None
    follows_pixels: ClassVar[bool] = False
    resize_switch: ClassVar[tuple[str, ...]] = ()
    blocks: ClassVar[str | None] = "visual.layers"
    checkpoint_keys: ClassVar[Sequence[tuple[str, str]]] = PUBLISHED_KEYS

    @classmethod
    def tower_class(cls) -> tuple[type[Any], type[Any]]:
        from transformers.models.kimi_k25 import Kimi_K25VisionConfig, Kimi_K25VisionModel

        return Kimi_K25VisionConfig, Kimi_K25VisionModel

    @classmethod
    def following_modules(cls, config: Any, extra: Mapping[str, Any]) -> dict[str, nn.Module]:
        from transformers.models.kimi_k25 import Kimi_K25Config
        from transformers.models.kimi_k25.modeling_kimi_k25 import Kimi_K25MultimodalProjection

        full = Kimi_K25Config(
            vision_config=config,
            text_config={"model_type": "deepseek_v3", "hidden_size": extra["text_hidden_size"]},
            projection_hidden_size=config.hidden_size,
            projection_layer_norm_eps=extra.get("projection_layer_norm_eps", 1e-5),
        )
        return {"projector": Kimi_K25MultimodalProjection(full)}

    @classmethod
    def convert_tensor(cls, key: str, tensor: torch.Tensor, modules: nn.ModuleDict) -> dict[str, torch.Tensor]:
        name = cls.map_checkpoint_key(key)
        if name is None:
            return {}
        if ".attn.wqkv." not in name:
            return {name: tensor}
        tower: Any = modules["visual"]
        heads = tower.config.num_attention_heads
        query, key_part, value = tensor.chunk(3)
        parts = {"q": _pairs_to_halves(query, heads), "k": _pairs_to_halves(key_part, heads), "v": value}
        return {name.replace(".wqkv.", f".{part}_proj."): rows for part, rows in parts.items()}

    @classmethod
    def read_model_config(cls, config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        found, extra = super().read_model_config(config)
        vision = {ours: found.get(theirs, found.get(ours)) for theirs, ours in VISION_FIELDS.items()}
        vision = {name: value for name, value in vision.items() if value is not None}
        # The published code has it as a constant.
        return {**vision, "hidden_act": "gelu_pytorch_tanh"}, extra

    @classmethod
    def read_processor_config(cls, processor: Mapping[str, Any]) -> dict[str, Any]:
        wanted = ("patch_size", "in_token_limit", "pad_input", "merge_kernel_size", "image_mean", "image_std")
        return {name: processor[name] for name in wanted if processor.get(name) is not None}

    def pixel_row_shape(self, name: str) -> tuple[int, ...]:
        return (3, self.rule.patch, self.rule.patch)

    def metadata_fields(self, capacity: GraphKey) -> dict[str, MetadataField]:
        # Real patches fill the head of the merged rows, so a padded patch goes to the row of its own number.
        rows = MetadataField((self.patch_rows(capacity),), "int32", PAD_IDENTITY)
        return {**super().metadata_fields(capacity), "merge_rows": rows}

    def compute_metadata(
        self, items: Sequence[ItemGeometry], path: str, axis_key: tuple[int, ...]
    ) -> dict[str, np.ndarray]:
        found = super().compute_metadata(items, path, axis_key)
        grids = [self.rule.checked_grid(item) for item in items]
        rows = [block_ranks(grid.h, grid.w, self.rule.merge) for grid in grids]
        starts = found["cu_seqlens"][:-1]
        return {**found, "merge_rows": np.concatenate([start + own for start, own in zip(starts, rows, strict=True)])}

    def forward_packed(
        self, inputs: Mapping[str, torch.Tensor], scalars: Mapping[str, int], path: str
    ) -> Sequence[torch.Tensor]:
        positions = inputs["position_ids"]
        pooled = self.modules["visual"](
            inputs["pixel_values"],
            # Everything that the tower would derive from the grid is passed in; it must not look at it.
            grid_thw=None,
            cu_seqlens=inputs["cu_seqlens"],
            max_seqlen=scalars["max_seqlen"],
            position_ids=positions,
            interp_indices=inputs["interp_indices"],
            interp_weights=inputs["interp_weights"],
            # Single frames: entry 0 of the time table, which is zero, and a mean over one frame.
            frame_index=positions.new_zeros(len(positions)),
            temporal_merge_index=(
                inputs["merge_rows"],
                inputs["interp_weights"].new_ones(len(positions)),
                len(positions) // self.rule.merge**2,
            ),
        ).pooler_output
        return [self.projected(pooled)]

    def projected(self, pooled: torch.Tensor) -> torch.Tensor:
        """`[M, merge * merge, K]` patches of each output token to `[M, D]`."""
        return self.modules["projector"](pooled).squeeze(1)

    def stock_rows(self, mm_kwargs: EncoderInputs) -> torch.Tensor:
        return self.projected(super().stock_rows(mm_kwargs))

    def preprocess(self, images: Sequence[Any]) -> tuple[list[ItemGeometry], dict[str, torch.Tensor]]:
        """The published processor's rule with PIL; transformers has none for this model."""
        import torch
        from PIL.Image import Resampling
        from torch.nn import functional

        items: list[ItemGeometry] = []
        patches, patch, processor = [], self.rule.patch, self.rule.processor
        for image in images:
            grid, size = self.rule.image_geometry(*image.size), self.rule.resized(*image.size)
            image = image.convert("RGB")
            image = image.resize(size, Resampling.BICUBIC) if size != image.size else image
            pixels = torch.from_numpy(np.array(image, dtype=np.float32)).permute(2, 0, 1) / 255
            padded = functional.pad(pixels, (0, grid.w * patch - image.width, 0, grid.h * patch - image.height))
            mean, std = (torch.tensor(processor[name]).view(3, 1, 1) for name in ("image_mean", "image_std"))
            items.append(grid)
            patches.append(cut_patches((padded - mean) / std, patch))
        return items, {"pixel_values": torch.cat(patches).to(self.device, self.dtype)}


def _pairs_to_halves(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a query or key projection (or its bias) reordered in each head: the published rotary turns neighbouring
    pairs, transformers' turns the two halves."""
    paired = tensor.unflatten(0, (heads, -1, 2))
    return paired.transpose(1, 2).flatten(0, 2)
