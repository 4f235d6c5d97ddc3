"""DeepSeek-VL2: SigLIP on 384-pixel tiles, an MLP over four patches, newlines and a separator put between the rows.

transformers has the tower alone. Tiles are 27 patches wide, as in the published code (vLLM 0.33 pads them to 28 before
the tower). The published processor does not cut the images of prompts with more than two; sizes here are of one image.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from vitgraph.errors import InputError
from vitgraph.models import functional, nn, torch
from vitgraph.models.base import Tensors
from vitgraph.models.family import CHANNELS, QKV
from vitgraph.models.geometry import ItemGeometry, TileGeometry
from vitgraph.models.resizing import cut_patches, normalized
from vitgraph.models.tiles import SiglipTileEncoder, TileRule, best_resolution
from vitgraph.planning.budgets import IMAGE, GraphKey

SIGLIP_SO400M: Mapping[str, Any] = {
    "hidden_size": 1152,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_channels": 3,
    "image_size": 384,
    "patch_size": 14,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-6,
}
"""The tower of all published sizes; its config.json restates a part of it."""


@dataclass(frozen=True, slots=True)
class ViewsGeometry(TileGeometry):
    """The whole image as one tile, then `columns * rows` tiles of it, row by row."""

    columns: int
    rows: int


class DeepseekVL2Rule(TileRule):
    """The candidate resolution that keeps most of the image's pixels, cut into tiles, and the whole image."""

    fewest_tiles_per_item = 2
    merge_field = "downsample_ratio"
    has_whole_cells = False

    def prepare(self) -> None:
        super().prepare()
        self.resolutions = self.filled([(int(w), int(h)) for w, h in self.processor["candidate_resolutions"]])

    @property
    def cells(self) -> int:
        """Output tokens on a side of a tile."""
        return -(-self.patches_per_side // self.merge)

    def most_segments(self) -> int:
        return 1 + max(width * height for width, height in self.resolutions) // self.tile_side**2

    def resolution(self, width: int, height: int) -> tuple[int, int]:
        """Width and height in pixels to which the image is padded before it is cut."""
        best = best_resolution(width, height, self.resolutions)
        scale = min(best[0] / width, best[1] / height)
        if min(int(width * scale), int(height * scale)) == 0:
            raise InputError(
                f"image of {width}x{height} keeps no pixel at any of the processor's resolutions, which it refuses; "
                "crop it or leave it out"
            )
        return best

    def image_tiles(self, width: int, height: int) -> int:
        return self.image_geometry(width, height).tiles

    def image_geometry(self, width: int, height: int) -> ViewsGeometry:
        columns, rows = (side // self.tile_side for side in self.resolution(width, height))
        return ViewsGeometry(IMAGE, 1 + columns * rows, columns, rows)

    def checked_tiles(self, geometry: ItemGeometry) -> ViewsGeometry:
        tiles = super().checked_tiles(geometry)
        if not isinstance(tiles, ViewsGeometry) or tiles.tiles != 1 + tiles.columns * tiles.rows:
            raise InputError(f"expected a whole view with a grid of tiles, got {geometry!r}")
        return tiles

    def final_tokens(self, geometry: ItemGeometry) -> int:
        item, side = self.checked_tiles(geometry), self.cells
        return side * (side + 1) + 1 + item.rows * side * (item.columns * side + 1)

    @property
    def projector_widths(self) -> Sequence[int]:
        return self.merged_width, *[self.output_width] * int(self.extra["projector_depth"])


class DeepseekVL2Encoder(SiglipTileEncoder):
    """`SiglipVisionModel` without its head, the projector and the view tokens."""

    rule_class = DeepseekVL2Rule
    rule: DeepseekVL2Rule
    fused: ClassVar[Mapping[str, Sequence[str]]] = {".qkv.": QKV}
    tokens = ("image_newline", "view_separator")
    vision_defaults = SIGLIP_SO400M
    vision_fields = (
        *("image_size", "patch_size"),
        *(("width", "hidden_size"), ("layers", "num_hidden_layers"), ("heads", "num_attention_heads")),
    )
    extra_fields = (
        *(("projector_config.n_embed", "text_hidden_size"), ("projector_config.depth", "projector_depth")),
        ("projector_config.downsample_ratio", "downsample_ratio"),
    )
    fixed: ClassVar[Mapping[str, Any]] = {"tile_tag": "2D", "global_view_pos": "head", "projector_config.mlp_ratio": 1}
    image_settings = ("candidate_resolutions", *CHANNELS)
    checkpoint_keys = (
        (r"vision\.patch_embed\.proj\.", "visual.embeddings.patch_embedding."),
        (r"vision\.pos_embed$", "visual.embeddings.position_embedding.weight"),
        (r"vision\.norm\.", "visual.post_layernorm."),
        (r"vision\.blocks\.(\d+)\.norm([12])\.", r"visual.encoder.layers.\1.layer_norm\2."),
        (r"vision\.blocks\.(\d+)\.attn\.proj\.", r"visual.encoder.layers.\1.self_attn.out_proj."),
        (r"vision\.blocks\.(\d+)\.attn\.qkv\.", r"visual.encoder.layers.\1.self_attn.qkv."),
        (r"vision\.blocks\.(\d+)\.mlp\.", r"visual.encoder.layers.\1.mlp."),
        (r"projector\.layers\.", "projector."),
        (r"image_newline$", "tokens.image_newline"),
        # The published name has the typing error.
        (r"view_seperator$", "tokens.view_separator"),
    )

    @classmethod
    def following_modules(cls, config: Any, extra: Mapping[str, Any]) -> dict[str, nn.Module]:
        text = extra["text_hidden_size"]
        layers: list[nn.Module] = [nn.Linear(config.hidden_size * extra["downsample_ratio"] ** 2, text)]
        for _ in range(1, extra["projector_depth"]):
            layers += [nn.GELU(), nn.Linear(text, text)]
        return {"projector": nn.Sequential(*layers), **super().following_modules(config, extra)}

    @classmethod
    def convert_tensor(cls, key: str, tensor: torch.Tensor, modules: nn.ModuleDict) -> dict[str, torch.Tensor]:
        return super().convert_tensor(key, tensor.squeeze(0) if key == "vision.pos_embed" else tensor, modules)

    @classmethod
    def accepts_model_config(cls, config: Mapping[str, Any]) -> bool:
        """DeepSeek-OCR has the same `model_type`, and another projector; published files leave this one's type out."""
        projector = config.get("projector_config") or {}
        return projector.get("projector_type", "downsample_mlp_gelu") == "downsample_mlp_gelu"

    @classmethod
    def read_model_config(cls, config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        found, extra = super().read_model_config(config)
        ratio = config["vision_config"].get("mlp_ratio", 4304 / 1152)
        return {**found, "intermediate_size": int(found["hidden_size"] * ratio)}, extra

    def dummy_items(self, capacity: GraphKey) -> list[ItemGeometry]:
        tiles = self.buffer_rows(capacity)
        return [ViewsGeometry(IMAGE, tiles, tiles - 1, 1 if tiles > 1 else 0)]

    def _padded(self, pixels: torch.Tensor) -> torch.Tensor:
        """`[tiles, rows, columns, K]` features of patches, with zeros up to whole cells."""
        features, side = self.visual(pixel_values=pixels).last_hidden_state, self.rule.patches_per_side
        spare = -side % self.rule.merge
        return functional.pad(features.unflatten(1, (side, side)), (0, 0, 0, spare, 0, spare))

    def encode_tiles(self, pixels: torch.Tensor) -> torch.Tensor:
        grid, merge, cells = self._padded(pixels), self.rule.merge, self.rule.cells
        # The unfolded order of the published code: channels slowest, then the patch within its cell.
        blocks = grid.unflatten(2, (cells, merge)).unflatten(1, (cells, merge)).permute(0, 1, 3, 5, 2, 4)
        return self.modules["projector"](blocks.reshape(len(pixels), cells * cells, -1))

    def joined(self, item: TileGeometry, rows: torch.Tensor) -> torch.Tensor:
        """The item's final embedding from the rows of its tiles: every line ends with a newline."""
        item = self.rule.checked_tiles(item)
        side = self.rule.cells
        tiles = rows.unflatten(0, (item.tiles, side, side))
        cut = tiles[1:].unflatten(0, (item.rows, item.columns)).transpose(1, 2)
        lines = (tiles[0], cut.reshape(item.rows * side, item.columns * side, -1))
        newline = self.modules["tokens"].image_newline
        whole, local = (torch.cat([grid, newline.expand(len(grid), 1, -1)], dim=1).flatten(0, 1) for grid in lines)
        return torch.cat([whole, self.modules["tokens"].view_separator[None], local])

    def stock_tiles(self, pixels: torch.Tensor) -> torch.Tensor:
        """The published padding and unfolding."""
        merge = self.rule.merge
        unfolded = functional.unfold(self._padded(pixels).permute(0, 3, 1, 2), kernel_size=merge, stride=merge)
        return self.modules["projector"](unfolded.permute(0, 2, 1))

    def image_rows(self, image: Any, item: ItemGeometry) -> Tensors:
        from PIL import ImageOps

        rule, image = self.rule, image.convert("RGB")
        mean, std, side = rule.processor["image_mean"], rule.processor["image_std"], rule.tile_side
        color = tuple(int(value * 255) for value in mean)
        whole, padded = (
            normalized(ImageOps.pad(image, size, color=color), mean, std)
            for size in ((side, side), rule.resolution(*image.size))
        )
        return {"pixel_values": torch.cat([whole[None], cut_patches(padded, side)])}
