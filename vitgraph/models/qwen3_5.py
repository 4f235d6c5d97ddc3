"""Qwen3.5 and Qwen3.5-MoE: the Qwen3-VL tower without deepstack features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from vitgraph.models.geometry import GeometryRule, GridGeometry, ItemGeometry, sampled_frames, smart_resize_video
from vitgraph.models.grid_encoder import image_settings, preprocess_patches
from vitgraph.models.qwen3_vl import Qwen3VLEncoder, Qwen3VLRule
from vitgraph.planning.items import VIDEO

if TYPE_CHECKING:
    import torch


class Qwen3_5Rule(Qwen3VLRule):  # noqa: N801
    """Sizes as in Qwen3-VL; the output has the language model's plain width."""

    @property
    def deepstack_levels(self) -> int:
        # Published files carry the key, and the tower ignores it.
        return 0

    def video_geometry(self, width: int, height: int, frames: int, fps: float | None) -> GridGeometry:
        video = self.processor["video"]
        temporal = int(self.vision_config["temporal_patch_size"])
        kept = sampled_frames(frames, fps, video["fps"], video["min_frames"], video["max_frames"])
        # The processor sizes the frames that it was given, and only then repeats the last one of an odd count.
        new_height, new_width = smart_resize_video(
            kept, height, width, temporal, self.factor, int(video["shortest_edge"]), int(video["longest_edge"])
        )
        return GridGeometry(VIDEO, -(-kept // temporal), new_height // self.patch, new_width // self.patch)


class Qwen3_5Encoder(Qwen3VLEncoder):  # noqa: N801
    """`Qwen3_5VisionModel`; output `[M, D]`."""

    rule_class: ClassVar[type[GeometryRule]] = Qwen3_5Rule
    rule: Qwen3_5Rule
    has_deepstack: ClassVar[bool] = False

    @classmethod
    def tower_class(cls) -> tuple[type[Any], type[Any]]:
        from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig
        from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel

        return Qwen3_5VisionConfig, Qwen3_5VisionModel

    @classmethod
    def read_processor_config(cls, processor: Mapping[str, Any]) -> dict[str, Any]:
        found = super().read_processor_config(processor)
        found.pop("size", None)
        return {**found, **image_settings(processor, (56 * 56, 28 * 28 * 1280))}

    def preprocess(self, images: Sequence[Any]) -> tuple[list[ItemGeometry], dict[str, torch.Tensor]]:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        return preprocess_patches(self, Qwen2VLImageProcessorPil, images)


class Qwen3_5MoeEncoder(Qwen3_5Encoder):  # noqa: N801
    """`Qwen3_5MoeVisionModel`, the same network under another name."""

    @classmethod
    def tower_class(cls) -> tuple[type[Any], type[Any]]:
        from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeVisionConfig
        from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeVisionModel

        return Qwen3_5MoeVisionConfig, Qwen3_5MoeVisionModel
