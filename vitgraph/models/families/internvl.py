"""InternVL 2 to 3.5: InternViT on 448-pixel tiles or video frames, pixel shuffle and projector captured with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from vitgraph.errors import ModelError
from vitgraph.models import torch
from vitgraph.models.family import CHANNELS, QKV, Tower
from vitgraph.models.geometry import TileGeometry
from vitgraph.models.resizing import fixed_frames
from vitgraph.models.tiles import TileEncoder, TileRule, nearest_layout, square_side, tile_layouts, whole_merge
from vitgraph.planning.budgets import IMAGE, VIDEO


class InternVLRule(TileRule):
    """Images: the layout of 1 to 12 tiles nearest in aspect ratio, and a thumbnail where it has several. Videos: one
    tile a frame."""

    modalities = (IMAGE, VIDEO)
    class_rows = 1

    @property
    def merge(self) -> int:
        return whole_merge(self.extra.get("downsample_ratio", 0.5), "downsample_ratio")

    def setting(self, name: str) -> Any:
        """A tiling setting; the original repositories keep them in config.json, which then holds."""
        return self.extra[name] if name in self.extra else self.processor[name]

    @property
    def most_video_frames(self) -> int:
        """Frames that a loader takes from a video file."""
        return int(self.video["num_frames"])

    def most_segments(self) -> int:
        return max(int(self.setting("max_dynamic_patch")) + 1, self.most_video_frames)

    def image_tiles(self, width: int, height: int) -> int:
        most = int(self.setting("max_dynamic_patch"))
        if most <= 1:
            return 1
        layouts = tile_layouts(int(self.setting("min_dynamic_patch")), most)
        columns, rows = nearest_layout(width, height, self.tile_side, layouts)
        tiles = columns * rows
        return tiles + 1 if tiles > 1 and self.setting("use_thumbnail") else tiles

    def video_geometry(self, width: int, height: int, frames: int, fps: float | None) -> TileGeometry:
        return TileGeometry(VIDEO, frames if fps is None else fixed_frames(frames, self.most_video_frames))


class InternVLEncoder(TileEncoder):
    """`InternVLVisionModel`, pixel shuffle and `InternVLMultiModalProjector`."""

    tower = Tower("internvl", "InternVLVisionConfig", "InternVLVisionModel")
    projector = "internvl:InternVLMultiModalProjector"
    projector_fields = ("downsample_ratio", "projector_hidden_act")
    vision_fields = (("qkv_bias", "attention_bias"), ("qk_normalization", "use_qk_norm"))
    extra_fields = (
        *("downsample_ratio", "projector_hidden_act", "vision_feature_layer", "vision_feature_select_strategy"),
        *("ps_version", "min_dynamic_patch", "max_dynamic_patch", "use_thumbnail"),
        ("select_layer", "vision_feature_layer"),
    )
    # The class token is dropped, which leaves a square of patches to merge; there is no norm after the tower.
    fixed: ClassVar[Mapping[str, Any]] = {
        "vision_feature_layer": -1,
        "select_layer": -1,
        "vision_feature_select_strategy": "default",
        "ps_version": "v2",
        "vision_config.use_mean_pooling": True,
    }
    image_settings = (
        *(*CHANNELS, ("min_patches", "min_dynamic_patch"), ("max_patches", "max_dynamic_patch")),
        *("min_dynamic_patch", "max_dynamic_patch", "use_thumbnail"),
    )
    video_settings = ("num_frames",)
    rule_class = InternVLRule
    rule: InternVLRule
    image_processor = "got_ocr2.image_processing_pil_got_ocr2:GotOcr2ImageProcessorPil"
    video_processor = "internvl.video_processing_internvl:InternVLVideoProcessor"
    spellings: ClassVar[Mapping[str, str]] = {"crop_to_patches": "dynamic_image_size"}
    block_scale = "lambda_2"
    fused: ClassVar[Mapping[str, Sequence[str]]] = {".qkv.": QKV}
    patch_convolutions = ("visual.embeddings.patch_embeddings.projection",)
    blocks = "visual.encoder.layer"
    checkpoint_keys = (
        (r"vision_model\.embeddings\.class_embedding$", "visual.embeddings.cls_token"),
        (r"vision_model\.embeddings\.position_embedding$", "visual.embeddings.position_embeddings"),
        (r"vision_model\.embeddings\.patch_embedding\.", "visual.embeddings.patch_embeddings.projection."),
        (r"vision_model\.encoder\.layers\.(\d+)\.norm1\.", r"visual.encoder.layer.\1.layernorm_before."),
        (r"vision_model\.encoder\.layers\.(\d+)\.norm2\.", r"visual.encoder.layer.\1.layernorm_after."),
        (r"vision_model\.encoder\.layers\.(\d+)\.ls([12])$", r"visual.encoder.layer.\1.lambda_\2"),
        (r"vision_model\.encoder\.layers\.(\d+)\.attn\.proj\.", r"visual.encoder.layer.\1.attention.projection_layer."),
        (r"vision_model\.encoder\.layers\.(\d+)\.attn\.", r"visual.encoder.layer.\1.attention."),
        (r"vision_model\.encoder\.layers\.(\d+)\.mlp\.", r"visual.encoder.layer.\1.mlp."),
        (r"mlp1\.0\.", "projector.layer_norm."),
        (r"mlp1\.1\.", "projector.linear_1."),
        (r"mlp1\.3\.", "projector.linear_2."),
        (r"vision_tower\.", "visual."),
        (r"multi_modal_projector\.", "projector."),
    )

    @classmethod
    def read_model_config(cls, config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        vision, extra = super().read_model_config(config)
        forced, own = config.get("force_image_size"), vision.get("image_size")
        if forced and own and square_side(forced, "force_image_size") != square_side(own, "image_size"):
            raise ModelError(f"force_image_size is {forced}, the tower's image_size {own}; only its own is supported")
        whole = dict.fromkeys(("min_dynamic_patch", "max_dynamic_patch"), 1)
        return vision, {**extra, **(whole if config.get("dynamic_image_size") is False else {})}

    @classmethod
    def read_processor_config(cls, processor: Mapping[str, Any]) -> dict[str, Any]:
        found = super().read_processor_config(processor)
        # transformers' processor of the model cuts images whatever the file says.
        processor.get("crop_to_patches")
        if processor.get("dynamic_image_size") is False:
            found["min_dynamic_patch"] = found["max_dynamic_patch"] = 1
        return found

    def encode_tiles(self, pixels: torch.Tensor) -> torch.Tensor:
        # The class token has taken part in attention, and is dropped.
        features = self.visual.layernorm(self.run_blocks(self.visual.embeddings(pixels, None)))[:, 1:]
        tiles, _, width = features.shape
        merge, cells = self.rule.merge, self.rule.patches_per_side // self.rule.merge
        # Pixel shuffle: the merge x merge patches of a cell side by side, in row order.
        blocks = features.view(tiles, cells, merge, cells, merge, width).transpose(2, 3)
        return self.modules["projector"](blocks.reshape(tiles, cells * cells, merge * merge * width))

    def stock_tiles(self, pixels: torch.Tensor) -> torch.Tensor:
        from transformers.models.internvl import InternVLModel

        features = self.visual(pixel_values=pixels).last_hidden_state[:, 1:]
        side = self.rule.patches_per_side
        grid = features.reshape(len(pixels), side, side, -1)
        shuffle: Any = InternVLModel.pixel_shuffle
        shuffled = shuffle(None, grid, scale_factor=1 / self.rule.merge)
        return self.modules["projector"](shuffled.reshape(len(pixels), -1, shuffled.shape[-1]))

    def processor_settings(self) -> dict[str, Any]:
        rule, names = self.rule, {"min_patches": "min_dynamic_patch", "max_patches": "max_dynamic_patch"}
        return {
            "size": {"height": rule.tile_side, "width": rule.tile_side},
            "crop_to_patches": True,
            **{name: rule.setting(ours) for name, ours in names.items()},
            **{name: rule.processor[name] for name in CHANNELS},
        }
