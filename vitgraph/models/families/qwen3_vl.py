"""Qwen3-VL, Qwen3-Omni and Qwen3.5: transformers' own tower, deepstack features joined to the output."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from vitgraph.models import torch
from vitgraph.models.base import Tensors
from vitgraph.models.families.qwen2_vl import FrameSizedVideos
from vitgraph.models.family import Tower
from vitgraph.models.geometry import GridGeometry, MergedGridRule
from vitgraph.models.grid_encoder import GridTowerEncoder, PositionTable, corner_coordinates, linear_axis
from vitgraph.models.resizing import sampled_frames, smart_resize_video
from vitgraph.planning.budgets import VIDEO


class Qwen3VLRule(MergedGridRule):
    """Images: 32-pixel tokens within the processor's pixel range. Videos: the range counts all frames."""

    def video_geometry(self, width: int, height: int, frames: int, fps: float | None) -> GridGeometry:
        video, (low, high) = self.video, self.video_pixel_range
        kept = sampled_frames(frames, fps, video["fps"], video["min_frames"], video["max_frames"])
        if video.get("cap_pixels_per_frame"):
            frame = int(video.get("max_video_tokens", 768)) * self.factor**2
            high = kept * max(min(frame, high // kept), int(low * 1.05))
        # The processor sizes the frames that it was given, and only then repeats the last one of an odd count.
        return self.sized_grid(
            VIDEO,
            -(-kept // self.temporal),
            width,
            height,
            lambda: smart_resize_video(kept, height, width, self.temporal, self.factor, low, high),
        )

    @property
    def deepstack_levels(self) -> int:
        # Of a tower cut short, layers that are not there give nothing.
        return len({*self.vision_config.get("deepstack_visual_indexes", ())} & {*range(self.tower_shape.depth)})

    @property
    def output_width(self) -> int:
        return int(self.vision_config["out_hidden_size"]) * (1 + self.deepstack_levels)

    @property
    def projector_widths(self) -> Sequence[int]:
        return self.merged_width, self.merged_width, int(self.vision_config["out_hidden_size"])

    def merger_flops(self, grid: GridGeometry) -> float:
        return super().merger_flops(grid) * (1 + self.deepstack_levels)


class Qwen3VLEncoder(GridTowerEncoder):
    """The modules of `Qwen3VLVisionModel`; output `[M, D * (1 + deepstack levels)]`. The MoE variant's are the same.

    The loop over blocks is here so that their sums and the position embeddings can be compiled together with them.
    """

    tower = Tower("qwen3_vl", "Qwen3VLVisionConfig", "Qwen3VLVisionModel")
    rule_class = Qwen3VLRule
    video_processor: ClassVar[str | None] = "qwen3_vl.video_processing_qwen3_vl:Qwen3VLVideoProcessor"
    null_settings: ClassVar[Sequence[str]] = ("fps",)
    has_deepstack = True
    # Cosmos 3 publishes the modules of the tower without a prefix.
    checkpoint_keys = (
        (r"(blocks|merger|patch_embed|pos_embed|deepstack_merger_list)\.", r"visual.\1."),
        *GridTowerEncoder.checkpoint_keys,
    )
    table = PositionTable(
        lambda rule: math.isqrt(rule.vision_config["num_position_embeddings"]), linear_axis, corner_coordinates
    )
    compiled_functions = ("position_rows",)

    @classmethod
    def read_model_config(cls, config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        vision_config, extra = super().read_model_config(config)
        if "InternS1ProForConditionalGeneration" in config.get("architectures", ()):
            # Its config class has no deepstack; transformers' class would fill the field in.
            vision_config = {"deepstack_visual_indexes": (), **vision_config}
        return vision_config, extra

    @staticmethod
    def position_rows(
        table: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """Position embeddings `[N, K]` in `dtype`: of each row, the sum of four rows (`indices` `[N, 4]`) of the table
        `[positions, K]` by float32 `weights` `[N, 4]`, computed in float32."""
        return (table[indices] * weights[:, :, None]).sum(1).to(dtype)

    def forward_packed(self, inputs: Tensors, scalars: Mapping[str, int], path: str) -> Sequence[torch.Tensor]:
        hidden = self.visual.patch_embed(inputs["pixel_values"])
        table = self.visual.pos_embed.weight
        positions = self.position_rows(table, inputs["interp_indices"], inputs["interp_weights"], hidden.dtype)
        return self.forward_embedded(hidden, positions, **self.block_arguments(hidden, inputs, scalars))

    def forward_embedded(
        self, hidden: torch.Tensor, positions: torch.Tensor, **arguments: Any
    ) -> Sequence[torch.Tensor]:
        """Everything after the embeddings: merged rows `[M, D]` of the last block, then of each deepstack level.

        Args:
            hidden: Embedded patches `[N, K]`.
            positions: Position embeddings `[N, K]`, to be added to them.
            arguments: Of every block.
        """
        from vitgraph.models.fusions import ResidualStream

        stream, levels = ResidualStream(hidden, positions), []
        taps = self.visual.deepstack_visual_indexes if self.has_deepstack else ()
        for layer, block in enumerate(self.visual.blocks):
            stream = self.run_block(block, stream, **arguments)
            if layer in taps:
                merger = self.visual.deepstack_merger_list[taps.index(layer)]
                levels.append(merger(stream.whole()))
        return [self.visual.merger(stream.whole()), *levels]

    def projected(self, output: Any) -> torch.Tensor:
        return torch.cat([output.pooler_output, *(output.deepstack_features if self.has_deepstack else ())], dim=-1)


class Qwen3OmniRule(FrameSizedVideos, Qwen3VLRule):
    """Images as in Qwen3-VL, videos as in Qwen2-VL: the pixel range counts each frame."""


class Qwen3OmniEncoder(Qwen3VLEncoder):
    """`Qwen3OmniMoeVisionEncoder`: the same network under other names."""

    tower = Tower("qwen3_omni_moe", "Qwen3OmniMoeVisionEncoderConfig", "Qwen3OmniMoeVisionEncoder")
    rule_class = Qwen3OmniRule
    whole_processor = "qwen3_omni_moe.processing_qwen3_omni_moe:Qwen3OmniMoeProcessor"
    video_processor = "qwen2_vl.video_processing_qwen2_vl:Qwen2VLVideoProcessor"


class CohereCompassEncoder(Qwen3VLEncoder):
    """`CohereCompassVisionModel`, the same network; images only, as vLLM 0.33 captures them."""

    tower = Tower("cohere_compass", "CohereCompassVisionConfig", "CohereCompassVisionModel")
    image_processor = "cohere_compass.image_processing_pil_cohere_compass:CohereCompassImageProcessorPil"
    video_processor = None


class Qwen3_5Rule(Qwen3VLRule):  # noqa: N801
    """Sizes as in Qwen3-VL; the output has the language model's plain width."""

    @property
    def deepstack_levels(self) -> int:
        # Published files carry the key, and the tower ignores it.
        return 0


class Qwen3_5Encoder(Qwen3VLEncoder):  # noqa: N801
    """`Qwen3_5VisionModel`; output `[M, D]`."""

    tower = Tower("qwen3_5", "Qwen3_5VisionConfig", "Qwen3_5VisionModel")
    rule_class = Qwen3_5Rule
    has_deepstack = False


class Qwen3_5MoeEncoder(Qwen3_5Encoder):  # noqa: N801
    """`Qwen3_5MoeVisionModel`, the same network under another name."""

    tower = Tower("qwen3_5_moe", "Qwen3_5MoeVisionConfig", "Qwen3_5MoeVisionModel")
