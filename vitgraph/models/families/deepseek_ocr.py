"""DeepSeek-OCR: SAM, CLIP and the projector on a padded global view and on 2 to 6 crops, a path for each."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from typing import Any, ClassVar

from vitgraph.errors import InputError, ModelError
from vitgraph.models import nn, torch
from vitgraph.models.family import CHANNELS, QKV, Tower, given, own_fields
from vitgraph.models.geometry import ItemGeometry, TowerShape
from vitgraph.models.resizing import cut_patches, normalized
from vitgraph.models.tiles import nearest_layout, square_side, tile_layouts
from vitgraph.models.two_path import GLOBAL, LOCAL, CropGeometry, TwoPathEncoder, TwoPathRule

WIDTH_FIELDS = (
    *(("width", "hidden_size"), ("layers", "num_hidden_layers"), ("heads", "num_attention_heads")),
    *("image_size", "patch_size", "global_attn_indexes", "downsample_channels"),
)
"""Fields of the two towers in config.json's `vision_config.width`."""

CONSTANTS: Mapping[str, Any] = {"background_color": [127, 127, 127], "maximum_pad_value": 640}
"""Settings of transformers' processor that the published code has as constants."""


GLOBAL_BIAS_BYTES = 4 << 30
"""Most bytes of relative-position bias that one global attention layer makes at once; its tiles take turns above."""

TOWER = Tower("unlimited_ocr", "UnlimitedOcrVisionConfig", "UnlimitedOcrVisionModel")


class DeepseekOCRRule(TwoPathRule):
    """Crops: the layout nearest in aspect ratio, for images with a side above one crop's. Global view: the whole image,
    padded to a square. Without `crop_mode` there is the global view only.

    Raises:
        ModelError: A side is no multiple of 64 pixels, four SAM patches of 16.
    """

    local_pixels = "images_crop"

    def prepare(self) -> None:
        self.sam = self.vision_config["sam_config"]
        self.clip = self.vision_config["encoder_config"]
        self.patch = int(self.sam["patch_size"])
        for name, side in (("global", self.global_side), ("local", self.local_side)):
            if side < 1 or side % (4 * self.patch):
                raise ModelError(
                    f"the {name} side is {side} pixels; it must be a multiple of {4 * self.patch}, the pixels of one "
                    "output token. Published modes: 512, 640, 1024 and 1280"
                )

    def cells(self, path: str) -> int:
        """Output tokens on a side of a view of that path."""
        return self.side_of(path) // (4 * self.patch)

    @cached_property
    def path_tokens(self) -> Mapping[str, int]:
        # Each row of the global view ends with a newline already; crops get theirs when they are joined.
        whole, crop = self.cells(GLOBAL), self.cells(LOCAL)
        return {GLOBAL: whole * (whole + 1), LOCAL: crop * crop}

    def crop_grid(self, width: int, height: int) -> tuple[int, int]:
        self._check_global_view(width, height)
        if not self.processor["crop_mode"] or max(width, height) <= self.local_side:
            return 0, 0
        layouts = tile_layouts(int(self.processor["min_crops"]), int(self.processor["max_crops"]))
        best = nearest_layout(width, height, self.local_side, layouts)
        # A single crop would repeat the global view; the processor leaves it out.
        return best if best != (1, 1) else (0, 0)

    @property
    def stretches_global_view(self) -> bool:
        """The small modes without crops resize to a square and lose the aspect ratio; the others pad."""
        return not self.processor["crop_mode"] and self.global_side <= CONSTANTS["maximum_pad_value"]

    def _check_global_view(self, width: int, height: int) -> None:
        short, long = sorted((width, height))
        if not self.stretches_global_view and round(short / long * self.global_side) < 1:
            raise InputError(
                f"image of {width}x{height} would be {self.global_side}x0 pixels in the global view of "
                f"{self.global_side}x{self.global_side}, which the processor refuses; crop it or leave it out"
            )

    def final_tokens(self, geometry: ItemGeometry) -> int:
        item = self.checked_crops(geometry)
        side = self.cells(LOCAL)
        local = item.rows * side * (item.columns * side + 1) if item.crops else 0
        return local + self.path_tokens[GLOBAL] + 1

    def view_flops(self, side: int) -> float:
        grid, cells = side // self.patch, side // (4 * self.patch)
        width, channels = self.sam["hidden_size"], self.sam["output_channels"]
        middle, last = self.sam["downsample_channels"]
        patches = grid * grid
        sam = 2.0 * patches * 3 * self.patch**2 * width
        for layer in range(self.sam["num_hidden_layers"]):
            sam += self._sam_layer_flops(grid, is_global=layer in self.sam["global_attn_indexes"])
        sam += 2.0 * patches * channels * (width + 9 * channels)
        sam += 2.0 * 9 * (4 * cells * cells * channels * middle + cells * cells * middle * last)
        rows, clip = cells * cells + 1, self.clip["hidden_size"]
        depth, mlp = self.clip["num_hidden_layers"], self.clip["intermediate_size"]
        projector = 2.0 * cells * cells * (clip + last) * self.output_width
        return sam + TowerShape(depth, clip, mlp).flops(rows) + projector

    def _sam_layer_flops(self, grid: int, *, is_global: bool) -> float:
        """One SAM layer; windows cover the grid with padding, which takes part in attention."""
        width, window = self.sam["hidden_size"], grid if is_global else int(self.sam["window_size"])
        rows = (-(-grid // window) * window) ** 2
        products = 2.0 * rows * 4 * width * width
        attention = 4.0 * rows * window * window * width
        positions = 2.0 * rows * 2 * window * width
        return products + attention + positions + 2.0 * grid * grid * 2 * width * self.sam["mlp_dim"]


@cache
def tabled_attention() -> type[Any]:
    """SAM attention that looks relative positions up beforehand, for each grid side `[side, side, head width]` on both
    axes.

    transformers interpolates and indexes the tables in every call, with an index made on the CPU; a copy from there
    cannot be captured. The values are the same.
    """
    from transformers.models.unlimited_ocr.modeling_unlimited_ocr import UnlimitedOcrSamVisionSdpaAttention

    from vitgraph.models.replaced_modules import StockSwitch

    class TabledSamAttention(UnlimitedOcrSamVisionSdpaAttention, StockSwitch):
        def __init__(self, config: Any, window_size: int) -> None:
            super().__init__(config, window_size)
            self.tables: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def prepare(self, side: int) -> None:
            """Makes the tables of a grid of `side` x `side`, interpolated in float32 as the published code does."""
            looked_up = [
                super(TabledSamAttention, self).get_rel_pos(side, side, table.detach().float()).to(table.dtype)
                for table in (self.rel_pos_h, self.rel_pos_w)
            ]
            self.tables[side] = (looked_up[0].contiguous(), looked_up[1].contiguous())

        def get_rel_pos(self, q_size: int, k_size: int, rel_pos: torch.Tensor) -> torch.Tensor:
            """`[q_size, k_size, head width]` rows of one axis' table; queries and keys have the same grid here."""
            if self.is_stock or q_size not in self.tables:
                return super().get_rel_pos(q_size, k_size, rel_pos)
            return self.tables[q_size][0 if rel_pos is self.rel_pos_h else 1]

    return TabledSamAttention


def sam_features(sam: Any, pixels: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """`UnlimitedOcrSamVisionEncoder` over equal tiles `[tiles, 3, side, side]` with a ready position table `[1, grid,
    grid, width]`: `[tiles, channels, grid / 4, grid / 4]`."""
    hidden = sam.patch_embed(pixels) + positions
    pairs = (hidden.shape[1] * hidden.shape[2]) ** 2
    bias_bytes = pairs * sam.config.num_attention_heads * hidden.element_size()
    tiles = max(1, GLOBAL_BIAS_BYTES // bias_bytes)
    for layer in sam.layers:
        keep_extents(hidden)
        if layer.window_size == 0 and len(hidden) > tiles:
            hidden = torch.cat([layer(part) for part in hidden.split(tiles)])
        else:
            hidden = layer(hidden)
    return sam.proj(sam.neck(hidden))


def keep_extents(hidden: torch.Tensor) -> None:
    """Tells the compiler, where there is one, that only the number of tiles varies in `[tiles, grid, grid, width]`.

    A window's share of an unknown grid keeps it reckoning for a minute; grids are two, and code for each takes seconds.
    """
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.mark_static(hidden, (1, 2, 3))


def clip_features(clip: Any, features: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """`UnlimitedOcrVisionEncoder` over SAM's features `[tiles, width, grid, grid]` in place of patch embeddings, with a
    ready position table `[1, 1 + grid * grid, width]`, the class token first.

    Returns:
        `[tiles, grid * grid, 2 * width]`: CLIP's rows without the class token, joined by SAM's.
    """
    rows = features.flatten(2).transpose(1, 2)
    first = clip.embeddings.class_embedding.expand(len(rows), 1, -1)
    hidden = clip.pre_layrnorm(torch.cat([first, rows], dim=1) + positions)
    hidden = clip.encoder(inputs_embeds=hidden).last_hidden_state
    return torch.cat([hidden[:, 1:], rows], dim=-1)


def position_tables(sam: Any, clip: Any, grid: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The position tables of SAM and CLIP for tiles of `grid` x `grid` patches, interpolated where they must be."""
    cells = grid // 4
    patch = clip.embeddings.patch_size
    # Only the shape of the rows is asked for.
    rows = torch.empty(1, 1 + cells * cells, clip.embeddings.embed_dim, device="meta")
    with torch.no_grad():
        return (
            sam.interpolate_pos_encoding(grid, grid).detach(),
            clip.embeddings.interpolate_pos_encoding(rows, cells * patch, cells * patch).detach(),
        )


class DeepseekOCREncoder(TwoPathEncoder):
    """`UnlimitedOcrVisionModel` (SAM, then CLIP on SAM's features), a linear projector and the view tokens."""

    rule_class = DeepseekOCRRule
    rule: DeepseekOCRRule
    fused: ClassVar[Mapping[str, Sequence[str]]] = {".qkv_proj.": QKV}
    tokens = ("image_newline", "view_separator")
    checkpoint_keys = (
        (r"sam_model\.patch_embed\.proj\.", "visual.sam_encoder.patch_embed.projection."),
        (r"sam_model\.pos_embed$", "visual.sam_encoder.pos_embed"),
        (r"sam_model\.blocks\.(\d+)\.norm([12])\.", r"visual.sam_encoder.layers.\1.layer_norm\2."),
        (r"sam_model\.blocks\.(\d+)\.(attn|mlp)\.", r"visual.sam_encoder.layers.\1.\2."),
        (r"sam_model\.neck\.0\.", "visual.sam_encoder.neck.conv1."),
        (r"sam_model\.neck\.1\.", "visual.sam_encoder.neck.layer_norm1."),
        (r"sam_model\.neck\.2\.", "visual.sam_encoder.neck.conv2."),
        (r"sam_model\.neck\.3\.", "visual.sam_encoder.neck.layer_norm2."),
        (r"sam_model\.net_2\.", "visual.sam_encoder.proj.conv1."),
        (r"sam_model\.net_3\.", "visual.sam_encoder.proj.conv2."),
        (r"vision_model\.embeddings\.(class|position)_embedding", r"visual.vision_encoder.embeddings.\1_embedding"),
        (r"vision_model\.pre_layrnorm\.", "visual.vision_encoder.pre_layrnorm."),
        (r"vision_model\.transformer\.layers\.(\d+)\.", r"visual.vision_encoder.encoder.layers.\1."),
        (r"projector\.layers\.", "projector."),
        (r"image_newline$", "tokens.image_newline"),
        # The published name has the typing error.
        (r"view_seperator$", "tokens.view_separator"),
    )
    extra_fields = (("projector_config.n_embed", "text_hidden_size"),)
    fixed: ClassVar[Mapping[str, Any]] = {"projector_config.projector_type": "linear", "tile_tag": "2D"}
    image_settings = (
        *(("size.height", "global_size"), ("base_size", "global_size"), "global_size"),
        *(("image_size", "local_size"), "local_size", "crop_mode", "min_crops", "max_crops", *CHANNELS),
        *(("tile_size", "local_size"), ("crop_to_patches", "crop_mode")),
        *(("min_patches", "min_crops"), ("max_patches", "max_crops")),
    )
    fixed_settings = CONSTANTS
    patch_convolutions = ("visual.sam_encoder.patch_embed.projection",)

    def prepare(self) -> None:
        tower, self._positions = self.visual, {}
        for path in (GLOBAL, LOCAL):
            grid = self.rule.side_of(path) // self.rule.patch
            self._positions[path] = position_tables(tower.sam_encoder, tower.vision_encoder, grid)
            for layer in tower.sam_encoder.layers:
                layer.attn.prepare(layer.window_size or grid)

    @classmethod
    def build_tower(cls, vision_config: Mapping[str, Any], extra: Mapping[str, Any], dtype: torch.dtype) -> Any:
        # SAM has its attention class from here on and never asks for an implementation again.
        tower = TOWER.build(vision_config, dtype)
        for layer in tower.sam_encoder.layers:
            layer.attn = tabled_attention()(tower.config.sam_config, layer.window_size).to(dtype)
        return tower

    @classmethod
    def following_modules(cls, config: Any, extra: Mapping[str, Any]) -> dict[str, nn.Module]:
        features = config.encoder_config.hidden_size + config.sam_config.downsample_channels[-1]
        projector = nn.Linear(features, extra["text_hidden_size"])
        return {"projector": projector, **super().following_modules(config, extra)}

    @classmethod
    def read_model_config(cls, config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        found, extra = super().read_model_config(config)
        widths = found.get("width") or {}
        published = {"sam_config": "sam_vit_b", "encoder_config": "clip-l-14-224"}
        # What the model's own code builds are the defaults of transformers' classes; config.json restates a part of it.
        towers = TOWER.config_class()()
        vision = {}
        for part, width in published.items():
            tower = getattr(towers, part)
            names = own_fields(type(tower))
            restated = {**given(widths.get(width) or {}, WIDTH_FIELDS), **given(found.get(part) or {}, names)}
            vision[part] = {**{name: getattr(tower, name) for name in names}, **restated}
        return vision, extra

    @classmethod
    def read_processor_config(cls, processor: Mapping[str, Any]) -> dict[str, Any]:
        resolutions = processor.get("candidate_resolutions")
        size = {"global_size": square_side(resolutions[0], "candidate_resolutions")} if resolutions else {}
        return {**size, **super().read_processor_config(processor)}

    @classmethod
    def head_width(cls, vision_config: Mapping[str, Any]) -> int:
        """CLIP's; SAM's attention does not come to the backend."""
        return super().head_width(vision_config["encoder_config"])

    def encode_views(self, pixels: torch.Tensor, path: str) -> torch.Tensor:
        sam_positions, clip_positions = self._positions[path]
        features = sam_features(self.visual.sam_encoder, pixels, sam_positions)
        return self._projected(clip_features(self.visual.vision_encoder, features, clip_positions), path)

    def _projected(self, features: torch.Tensor, path: str) -> torch.Tensor:
        """Patch embeddings of views; a global view's rows end with newlines."""
        rows = self.modules["projector"](features)
        if path == LOCAL:
            return rows
        side = self.rule.cells(GLOBAL)
        grid = rows.unflatten(1, (side, side))
        newline = self.modules["tokens"].image_newline.expand(len(rows), side, 1, -1)
        return torch.cat([grid, newline], dim=2).flatten(1, 2)

    def assemble(self, item: CropGeometry, global_rows: torch.Tensor, local_rows: torch.Tensor | None) -> torch.Tensor:
        """The crops' patches as one grid whose rows end with newlines, the global view, the separator."""
        tokens = self.modules["tokens"]
        if local_rows is None:
            return torch.cat([global_rows, tokens.view_separator[None]])
        side = self.rule.cells(LOCAL)
        height, width = item.rows * side, item.columns * side
        result = local_rows.new_empty(self.rule.final_tokens(item), local_rows.shape[1])
        local = height * (width + 1)
        grid = result[:local].view(height, width + 1, -1)
        crops = local_rows.view(item.rows, item.columns, side, side, -1)
        grid[:, :width].unflatten(1, (item.columns, side)).unflatten(0, (item.rows, side)).copy_(crops.transpose(1, 2))
        grid[:, width] = tokens.image_newline
        result[local:-1] = global_rows
        result[-1] = tokens.view_separator
        return result

    def stock_views(self, pixels: torch.Tensor, path: str) -> torch.Tensor:
        return self._projected(self.visual(pixels).last_hidden_state, path)

    def repeated_blocks(self) -> list[nn.Module]:
        return [*self.visual.sam_encoder.layers, *self.visual.vision_encoder.encoder.layers]

    def image_views(self, image: Any, item: CropGeometry) -> tuple[torch.Tensor, torch.Tensor]:
        """The published processor's rule; transformers has none for this model."""
        from PIL import ImageOps

        rule = self.rule
        mean, std = rule.processor["image_mean"], rule.processor["image_std"]
        side = rule.global_side
        if rule.stretches_global_view:
            view = image.resize((side, side))
        else:
            view = ImageOps.pad(image, (side, side), color=tuple(int(value * 255) for value in mean))
        crops = torch.empty(0, 3, rule.local_side, rule.local_side)
        if item.crops:
            resized = image.resize((item.columns * rule.local_side, item.rows * rule.local_side))
            crops = cut_patches(normalized(resized, mean, std), rule.local_side)
        return normalized(view, mean, std), crops
