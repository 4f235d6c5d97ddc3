"""DeepSeek-V4.1-Flash: a tower over patch grids of any size, and an aligner that makes a token of 3 x 3 patches.

transformers has no class for it; the blocks are those of Qwen2.5-VL without windows and without biases in their MLPs.
Patches at the right and bottom edges that are missing from a token's square count as zeros.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from vitgraph.errors import InputError
from vitgraph.models import functional, nn, torch
from vitgraph.models.base import EncoderInputs, MetadataField, PathRows, Tensors
from vitgraph.models.families.qwen2_vl import Qwen2_5VLEncoder
from vitgraph.models.family import CHANNELS
from vitgraph.models.geometry import GridGeometry, ItemGeometry, MergedGridRule, linear_flops
from vitgraph.models.grid_encoder import GridTowerEncoder
from vitgraph.models.resizing import cut_patches, normalized
from vitgraph.planning.budgets import DEFAULT_PATH, IMAGE, EncoderItemSpec, GraphKey

TOWER_DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "intermediate_size": 2816,
    "patch_size": 14,
    "rope_theta": 10000.0,
    "downsample_ratio": 3,
    "max_image_tokens": 1024,
    "min_pixels": 295936,
    "max_wh_ratio": None,
}
"""What the published code assumes where config.json is silent."""

SPAN_ENDS = 2
"""Tokens before and after an image's lines."""


@lru_cache(maxsize=1024)
def merge_squares(h: int, w: int, ratio: int) -> tuple[np.ndarray, np.ndarray]:
    """Patches of each output token of an `h x w` grid, and which of them are there.

    Returns:
        `[tokens, ratio**2]` int32 patches in raster order, those outside the grid replaced by one inside, and
        `[tokens, ratio**2]` float32, 0 for those.
    """
    rows, columns = -(-h // ratio), -(-w // ratio)
    down = (np.arange(rows) * ratio)[:, None, None, None] + np.arange(ratio)[:, None]
    across = (np.arange(columns) * ratio)[:, None, None] + np.arange(ratio)
    patches = np.minimum(down, h - 1) * w + np.minimum(across, w - 1)
    is_there = (down < h) & (across < w)
    shape = (rows * columns, ratio**2)
    return patches.reshape(shape).astype(np.int32), is_there.reshape(shape).astype(np.float32)


class DeepseekV41Rule(MergedGridRule):
    """Images are enlarged to a floor of pixels, rounded up to patches and shrunk to a limit of tokens."""

    modalities = (IMAGE,)
    mlp_matrices = 3
    merge_field = "downsample_ratio"

    def lines(self, grid: GridGeometry) -> tuple[int, int]:
        """Rows and columns of output tokens."""
        return -(-grid.h // self.merge), -(-grid.w // self.merge)

    def final_tokens(self, geometry: ItemGeometry) -> int:
        rows, columns = self.lines(self.checked_grid(geometry))
        return rows * (columns + 1) + SPAN_ENDS

    def image_geometry(self, width: int, height: int) -> GridGeometry:
        wide, high = self._enlarged(width, height)
        grid = GridGeometry(IMAGE, 1, math.ceil(high / self.patch), math.ceil(wide / self.patch))
        if self.final_tokens(grid) > int(self.vision_config["max_image_tokens"]):
            grid = self._shrunk(wide, high)
        return self.checked_grid(grid)

    def _enlarged(self, width: float, height: float) -> tuple[float, float]:
        longest, least = self.vision_config["max_wh_ratio"], int(self.vision_config["min_pixels"])
        if longest is not None:
            width = min(width, height * longest)
        if width * height >= least:
            return width, height
        ratio = (least / (width * height)) ** 0.5
        return int(width * ratio), int(height * ratio)

    def _shrunk(self, width: float, height: float) -> GridGeometry:
        """The largest grid of the image's aspect ratio whose tokens are within the limit."""
        most, merge = int(self.vision_config["max_image_tokens"]), self.merge
        ratio = height / width
        columns = math.sqrt((most - SPAN_ENDS) / ratio + 0.25) - 0.5
        if columns < 1:
            return GridGeometry(IMAGE, 1, (most - SPAN_ENDS) // 2 * merge, merge)
        if columns * ratio < 1:
            return GridGeometry(IMAGE, 1, merge, (most - SPAN_ENDS - 1) * merge)
        scale = min(math.floor(columns) * self.factor / width, math.floor(columns * ratio) * self.factor / height)
        return GridGeometry(IMAGE, 1, math.floor(height * scale / self.patch), math.floor(width * scale / self.patch))

    def checked_grid(self, geometry: ItemGeometry) -> GridGeometry:
        if not isinstance(geometry, GridGeometry) or geometry.t != 1 or min(geometry.h, geometry.w) < 1:
            raise InputError(f"expected the patch grid of one image, got {geometry!r}")
        return geometry

    def item_spec(self, geometry: ItemGeometry) -> EncoderItemSpec:
        grid = self.checked_grid(geometry)
        return EncoderItemSpec(IMAGE, grid.patches, math.prod(self.lines(grid)), 1)

    def merger_flops(self, grid: GridGeometry) -> float:
        return linear_flops(math.prod(self.lines(grid)), self.merged_width, self.output_width, self.output_width)


class DeepseekV41Encoder(GridTowerEncoder):
    """Qwen2.5-VL's blocks, the aligner, and the vectors that begin, break and end an image's lines."""

    rule_class = DeepseekV41Rule
    rule: DeepseekV41Rule
    image_processor = None
    image_settings = ("patch_size", *CHANNELS)
    sized_by_pixels = False
    position_merge = 1
    patch_convolutions = ()
    fused: ClassVar[Mapping[str, Sequence[str]]] = {".gate_up.": (".gate_proj.", ".up_proj.")}
    checkpoint_keys = (
        (r"vision\.patch_embed\.proj\.", "visual.patch_embed."),
        (r"vision\.norm\.", "visual.norm."),
        (r"vision\.blocks\.(\d+)\.attn\.wqkv\.", r"visual.blocks.\1.attn.qkv."),
        (r"vision\.blocks\.(\d+)\.attn\.wo\.", r"visual.blocks.\1.attn.proj."),
        (r"vision\.blocks\.(\d+)\.mlp\.w1\.", r"visual.blocks.\1.mlp.gate_up."),
        (r"vision\.blocks\.(\d+)\.mlp\.w2\.", r"visual.blocks.\1.mlp.down_proj."),
        (r"vision\.blocks\.", "visual.blocks."),
        (r"aligner\.", "aligner."),
        (r"image_(start|newline|end)$", r"tokens.\1"),
    )
    vision_fields = ("num_hidden_layers", *TOWER_DEFAULTS)
    vision_defaults = TOWER_DEFAULTS
    tokens = ("start", "newline", "end")

    @classmethod
    def build_tower(cls, vision_config: Mapping[str, Any], extra: Mapping[str, Any], dtype: torch.dtype) -> Any:
        width, patch = vision_config["hidden_size"], vision_config["patch_size"]
        fields = {
            "depth": vision_config["num_hidden_layers"],
            "hidden_size": width,
            "num_heads": vision_config["num_attention_heads"],
            "intermediate_size": vision_config["intermediate_size"],
            "hidden_act": "silu",
            "patch_size": patch,
            "temporal_patch_size": 1,
            "rope_parameters": {"rope_type": "axial", "rope_theta": vision_config["rope_theta"]},
        }
        tower = Qwen2_5VLEncoder.tower.build(fields, dtype)
        tower.patch_embed = nn.Linear(3 * patch**2, width).to(dtype)
        tower.norm = type(tower.blocks[0].norm1)(width, eps=1e-6).to(dtype)
        for block in tower.blocks:
            for name in ("gate_proj", "up_proj", "down_proj"):
                getattr(block.mlp, name).bias = None
        # The aligner takes more than the merger's squares.
        tower.config.downsample_ratio = vision_config["downsample_ratio"]
        del tower.merger
        return tower

    @classmethod
    def following_modules(cls, config: Any, extra: Mapping[str, Any]) -> dict[str, nn.Module]:
        merged, text = config.hidden_size * config.downsample_ratio**2, extra["text_hidden_size"]
        aligner = nn.ModuleDict({"w1": nn.Linear(merged, text), "w2": nn.Linear(text, text)})
        return {"aligner": aligner, **super().following_modules(config, extra)}

    def metadata_fields(self, capacity: GraphKey) -> dict[str, MetadataField]:
        # A padded token reads row 0, which always is finite, and takes nothing of it.
        shape = (capacity.token_budget, self.rule.merge**2)
        squares = {"merge_rows": MetadataField(shape, "int32"), "merge_mask": MetadataField(shape, "float32")}
        return {**super().metadata_fields(capacity), **squares}

    def compute_metadata(self, items: Sequence[ItemGeometry]) -> dict[str, np.ndarray]:
        found, rows, masks = super().compute_metadata(items), [], []
        for grid, start in zip(self.grids(items), found["cu_seqlens"], strict=False):
            patches, is_there = merge_squares(grid.h, grid.w, self.rule.merge)
            rows.append(patches + start)
            masks.append(is_there)
        return {**found, "merge_rows": np.concatenate(rows), "merge_mask": np.concatenate(masks)}

    def _encoded(self, inputs: Tensors, scalars: Mapping[str, int]) -> torch.Tensor:
        hidden = self.visual.patch_embed(inputs["pixel_values"])
        return self.visual.norm(self.run_blocks(hidden, **self.block_arguments(hidden, inputs, scalars)))

    def _aligned(self, merged: torch.Tensor) -> torch.Tensor:
        first, second = self.modules["aligner"].values()
        return second(functional.gelu(first(merged)))

    def forward_packed(self, inputs: Tensors, scalars: Mapping[str, int], path: str) -> Sequence[torch.Tensor]:
        hidden = self._encoded(inputs, scalars)
        squares = hidden[inputs["merge_rows"]] * inputs["merge_mask"][:, :, None].to(hidden.dtype)
        # The published order: channels slowest.
        return [self._aligned(squares.transpose(1, 2).flatten(1))]

    def _span(self, grid: GridGeometry, rows: torch.Tensor) -> torch.Tensor:
        """The item's final embedding: its start, lines that end with newlines, its end."""
        tokens = self.modules["tokens"]
        down, across = self.rule.lines(grid)
        newline = tokens["newline"].expand(down, 1, -1)
        lines = torch.cat([rows.unflatten(0, (down, across)), newline], dim=1).flatten(0, 1)
        return torch.cat([tokens["start"][None], lines, tokens["end"][None]])

    def postprocess_encoder_output(self, mm_kwargs: EncoderInputs, outputs: PathRows) -> list[torch.Tensor]:
        pairs = zip(mm_kwargs.chosen, outputs[DEFAULT_PATH], strict=True)
        return [self._span(self.rule.checked_grid(item), rows) for item, rows in pairs if rows is not None]

    def stock_rows(self, mm_kwargs: EncoderInputs) -> torch.Tensor:
        """The published way, image by image: padding to whole squares and unfolding them."""
        grids, merge, spans = self.grids(mm_kwargs.chosen), self.rule.merge, []
        pixels = mm_kwargs.rows("pixel_values").materialize().split([grid.patches for grid in grids])
        for grid, part in zip(grids, pixels, strict=True):
            positions = torch.cartesian_prod(torch.arange(grid.h), torch.arange(grid.w)).to(self.device)
            offsets = torch.tensor([0, grid.patches], dtype=torch.int32, device=self.device)
            inputs = {"pixel_values": part, "position_ids": positions, "cu_seqlens": offsets}
            hidden = self._encoded(inputs, {"max_seqlen": grid.patches})
            square = hidden.unflatten(0, (grid.h, grid.w)).permute(2, 0, 1)[None]
            padded = functional.pad(square, (0, -grid.w % merge, 0, -grid.h % merge))
            unfolded = functional.unfold(padded, kernel_size=merge, stride=merge)[0].T
            spans.append(self._span(grid, self._aligned(unfolded)))
        return torch.cat(spans)

    def image_rows(self, image: Any, item: ItemGeometry) -> Tensors:
        """The published processor's rule with PIL; transformers has none for this model."""
        from PIL import ImageOps

        grid, patch, longest = self.rule.checked_grid(item), self.rule.patch, self.rule.vision_config["max_wh_ratio"]
        size, rgb = (grid.w * patch, grid.h * patch), image.convert("RGB")
        is_stretched = longest is not None and image.width >= longest * image.height
        view = rgb.resize(size) if is_stretched else ImageOps.pad(rgb, size, color=(127, 127, 127))
        return {"pixel_values": cut_patches(normalized(view, (0.5,) * 3, (0.5,) * 3), patch).flatten(1)}
