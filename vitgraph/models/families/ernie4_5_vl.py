"""ERNIE-4.5-VL: tower and resampler captured together; frames are paired by two gather indices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from vitgraph.errors import InputError, ModelError
from vitgraph.models.base import EncoderInputs, MetadataField
from vitgraph.models.geometry import (
    EncoderCudaGraphConfig,
    EncoderCudaGraphPathConfig,
    GeometryRule,
    GridGeometry,
    ItemGeometry,
    MergedGridRule,
)
from vitgraph.models.grid_encoder import GridTowerEncoder
from vitgraph.models.resizing import smart_resize
from vitgraph.planning.budgets import CaptureAxis, GraphKey
from vitgraph.planning.items import DEFAULT_PATH, IMAGE, VIDEO, EncoderItemSpec

if TYPE_CHECKING:
    import torch
    from torch import nn

PATCHES_PER_TOKEN = "patches_per_token"
"""Capture axis: patches behind one output token, 4 in images and 8 in videos, whose frames are merged in pairs."""

VISION_FIELDS = (
    "depth",
    "hidden_size",
    "hidden_act",
    "intermediate_size",
    "num_heads",
    "in_channels",
    "patch_size",
    "spatial_merge_size",
    "temporal_merge_size",
    "rms_norm_eps",
)
"""Fields of transformers' vision config that a checkpoint's `vision_config` may set."""

RESAMPLER_LAYERS = {"0": "fc1", "2": "fc2", "3": "ln"}
"""Published numbers of the layers of `spatial_linear` and `temporal_linear`, and transformers' names."""

MERGED_FRAMES = 2
"""Frames that the resampler merges; transformers' class does not take another number either."""


class Ernie45VLRule(MergedGridRule):
    """Images: 28-pixel tokens within the processor's pixel range. Videos: the range counts each frame, the last frame
    of an odd count is repeated, and two frames share their tokens."""

    def __init__(
        self, vision_config: Mapping[str, Any], processor: Mapping[str, Any], extra: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(vision_config, processor, extra)
        frames = self.vision_config.get("temporal_merge_size", MERGED_FRAMES)
        if frames != MERGED_FRAMES:
            raise ModelError(f"temporal_merge_size is {frames}; the resampler merges {MERGED_FRAMES} frames only")

    @property
    def output_width(self) -> int:
        return int(self.extra["text_hidden_size"])

    @property
    def video_pixel_range(self) -> tuple[int, int]:
        """Fewest and most pixels of one video frame."""
        video = self.processor["video"]
        return int(video["shortest_edge"]), int(video["longest_edge"])

    def max_frames_per_video(self) -> int:
        most = int(self.processor["video"]["max_frames"])
        return most + most % MERGED_FRAMES

    def video_geometry(self, width: int, height: int, frames: int, fps: float | None) -> GridGeometry:
        kept = frames if fps is None else self.sampled_frames(frames, fps)
        kept += kept % MERGED_FRAMES
        return self.sized_grid(
            VIDEO, kept, width, height, lambda: smart_resize(height, width, self.factor, *self.video_pixel_range)
        )

    def sampled_frames(self, frames: int, file_fps: float) -> int:
        """Frames that the processor takes from a file: `fps` a second where set, else all, within its limits."""
        video = self.processor["video"]
        wanted = frames / file_fps * video["fps"] if video.get("fps") else frames
        wanted = min(max(wanted, video["min_frames"]), video["max_frames"], frames)
        # The processor steps through the file by a float; a part of a frame still gives a frame.
        return len(np.arange(0, frames, frames / wanted))

    def checked_grid(self, geometry: ItemGeometry) -> GridGeometry:
        grid = super().checked_grid(geometry)
        if grid.t > 1 and grid.t % MERGED_FRAMES:
            raise InputError(
                f"grid [{grid.t}, {grid.h}, {grid.w}] has {grid.t} frames; frames are merged in pairs and an odd one "
                f"would be lost. Repeat the last frame to get {grid.t + 1}"
            )
        return grid

    def patches_per_token(self, grid: GridGeometry) -> int:
        """Patches behind one output token of the item."""
        return self.merge**2 * (MERGED_FRAMES if grid.t > 1 else 1)

    def item_spec(self, geometry: ItemGeometry) -> EncoderItemSpec:
        grid = self.checked_grid(geometry)
        ratio = self.patches_per_token(grid)
        return EncoderItemSpec(
            grid.modality, grid.patches, grid.patches // ratio, grid.t, axis_sizes={PATCHES_PER_TOKEN: (ratio,)}
        )

    def graph_config(self) -> EncoderCudaGraphConfig:
        image = self.merge**2
        return EncoderCudaGraphConfig(
            modalities=self.modalities,
            output_width=self.output_width,
            paths={DEFAULT_PATH: EncoderCudaGraphPathConfig(self.min_token_budget())},
            # One graph for both would make every image replay compute twice the patches that it has.
            axes=(CaptureAxis(PATCHES_PER_TOKEN, ((image,), (image * MERGED_FRAMES,))),),
            max_frames_per_video=self.max_frames_per_video(),
            min_tokens_per_segment=self.min_tokens_per_segment(),
        )

    def min_tokens_per_segment(self) -> int:
        """Fewest output tokens of one image or video frame."""
        cells = []
        for (low, high), frames in ((self.image_pixel_range, 1), (self.video_pixel_range, MERGED_FRAMES)):
            # An enlarged image reaches the lower bound; a shrunk one keeps at least half of each side it may have.
            fewest = min(-(-low // self.factor**2), high // self.factor**2 // 4)
            cells.append(max(1, fewest // frames))
        return min(cells)

    def merger_flops(self, grid: GridGeometry) -> float:
        tokens, cells = grid.patches // self.patches_per_token(grid), grid.patches // self.merge**2
        spatial = self.tower_shape.width * self.merge**2
        return 2.0 * cells * 2 * spatial**2 + 2.0 * tokens * (
            MERGED_FRAMES * spatial**2 + spatial**2 + spatial * self.output_width
        )


@lru_cache(maxsize=128)
def frame_pairs(t: int, cells: int) -> tuple[np.ndarray, np.ndarray]:
    """Merged rows of one item that make each output row: those of frames 2i and of frames 2i + 1; an image's frame
    is both.

    Args:
        t: Frames, 1 or an even number.
        cells: Merged rows of a frame.

    Returns:
        Two `[t / 2 * cells]` (`[cells]` for an image) int32 arrays.
    """
    if t == 1:
        rows = np.arange(cells, dtype=np.int32)
        return rows, rows
    frames = np.arange(t * cells, dtype=np.int32).reshape(t // 2, 2, cells)
    return frames[:, 0].reshape(-1), frames[:, 1].reshape(-1)


class Ernie45VLEncoder(GridTowerEncoder):
    """`Ernie4_5_VLMoeVisionTransformerPretrainedModel` and the layers of its variable-resolution resampler."""

    rule_class: ClassVar[type[GeometryRule]] = Ernie45VLRule
    rule: Ernie45VLRule
    image_processor: ClassVar[str | None] = (
        "ernie4_5_vl_moe.image_processing_pil_ernie4_5_vl_moe:Ernie4_5_VLMoeImageProcessorPil"
    )
    video_processor: ClassVar[str | None] = (
        "ernie4_5_vl_moe.video_processing_ernie4_5_vl_moe:Ernie4_5_VLMoeVideoProcessor"
    )
    processor_names: ClassVar[Sequence[str]] = (
        "Ernie4_5_VL_MoeImageProcessor",
        "Ernie4_5_VLImageProcessor",
        "Ernie4_5_VLVideoProcessor",
    )

    @classmethod
    def tower_class(cls) -> tuple[type[Any], type[Any]]:
        from transformers.models.ernie4_5_vl_moe import (
            Ernie4_5_VLMoeVisionConfig,
            Ernie4_5_VLMoeVisionTransformerPretrainedModel,
        )

        return Ernie4_5_VLMoeVisionConfig, Ernie4_5_VLMoeVisionTransformerPretrainedModel

    @classmethod
    def build_modules(
        cls, vision_config: Mapping[str, Any], extra: Mapping[str, Any], dtype: torch.dtype, device: torch.device
    ) -> nn.ModuleDict:
        from transformers.models.ernie4_5_vl_moe import (
            Ernie4_5_VLMoeConfig,
            Ernie4_5_VLMoeTextConfig,
            Ernie4_5_VLMoeVariableResolutionResamplerModel,
        )

        modules = super().build_modules(vision_config, extra, dtype, device)
        tower: Any = modules["visual"]
        text = Ernie4_5_VLMoeTextConfig(
            hidden_size=extra["text_hidden_size"], rms_norm_eps=extra.get("text_rms_norm_eps", 1e-5)
        )
        config = Ernie4_5_VLMoeConfig(vision_config=tower.config, text_config=text)
        with device:
            modules["resampler"] = Ernie4_5_VLMoeVariableResolutionResamplerModel(config).to(dtype)
        return modules

    @classmethod
    def map_checkpoint_key(cls, key: str) -> str | None:
        name = key.removeprefix("model.")
        for prefix in ("vision_model.", "vision_tower."):
            if name.startswith(prefix):
                return "visual." + name.removeprefix(prefix)
        if not name.startswith("resampler_model."):
            return None
        parts = name.removeprefix("resampler_model.").split(".")
        if len(parts) == 3:
            parts[1] = RESAMPLER_LAYERS.get(parts[1], parts[1])
        return "resampler." + ".".join(parts)

    @classmethod
    def read_model_config(cls, config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        found = dict(config["vision_config"])
        if "intermediate_size" not in found and "mlp_ratio" in found:
            found["intermediate_size"] = int(found["hidden_size"] * found["mlp_ratio"])
        # The original file keeps the merge sizes beside the language model's numbers.
        for axis in ("spatial", "temporal"):
            if config.get(f"{axis}_conv_size") is not None:
                found.setdefault(f"{axis}_merge_size", config[f"{axis}_conv_size"])
        text = config.get("text_config") or config
        extra = {"text_hidden_size": text["hidden_size"]} if "hidden_size" in text else {}
        if text.get("rms_norm_eps") is not None:
            extra["text_rms_norm_eps"] = text["rms_norm_eps"]
        return {name: found[name] for name in VISION_FIELDS if found.get(name) is not None}, extra

    def pixel_row_shape(self, name: str) -> tuple[int, ...]:
        return (int(self.rule.vision_config.get("in_channels", 3)) * self.rule.patch**2,)

    def patch_rows(self, capacity: GraphKey) -> int:
        # A batch is given the axis key of its densest item, so no item of it has more patches a token than the key.
        ratio = capacity.axis_key[0] if capacity.axis_key else self.rule.merge**2 * MERGED_FRAMES
        return capacity.token_budget * ratio

    def metadata_fields(self, capacity: GraphKey) -> dict[str, MetadataField]:
        # A padded output row gathers row 0: it only reads, nothing reads it, and row 0 always is finite.
        rows = MetadataField((capacity.token_budget,), "int32")
        return {**super().metadata_fields(capacity), "first_rows": rows, "second_rows": rows}

    def compute_metadata(
        self, items: Sequence[ItemGeometry], path: str, axis_key: tuple[int, ...]
    ) -> dict[str, np.ndarray]:
        grids = [self.rule.checked_grid(item) for item in items]
        first, second, start = [], [], 0
        for grid in grids:
            cells = grid.h * grid.w // self.rule.merge**2
            even, odd = frame_pairs(grid.t, cells)
            first.append(even + np.int32(start))
            second.append(odd + np.int32(start))
            start += grid.t * cells
        rows = {"first_rows": np.concatenate(first), "second_rows": np.concatenate(second)}
        return {**super().compute_metadata(items, path, axis_key), **rows}

    def capture_scalars(self, capacity: GraphKey) -> dict[str, int]:
        # An image of m tokens has 4m patches. A video of m tokens has 8m in at least two frames, so 4m a frame at most.
        return {"max_seqlen": capacity.token_budget * self.rule.merge**2}

    def dummy_items(self, capacity: GraphKey) -> list[ItemGeometry]:
        merge, tokens = self.rule.merge, capacity.token_budget
        if self.patch_rows(capacity) > tokens * merge**2 and capacity.segment_slots >= MERGED_FRAMES:
            return [GridGeometry(VIDEO, MERGED_FRAMES, merge, merge * tokens)]
        return [GridGeometry(IMAGE, 1, merge, merge * tokens)]

    def forward_packed(
        self, inputs: Mapping[str, torch.Tensor], scalars: Mapping[str, int], path: str
    ) -> Sequence[torch.Tensor]:
        import torch

        resampler: Any = self.modules["resampler"]
        hidden = self.modules["visual"](
            inputs["pixel_values"],
            # Everything that the tower would derive from the grid is passed in; it must not look at it.
            grid_thw=None,
            cu_seqlens=inputs["cu_seqlens"],
            max_seqlen=scalars["max_seqlen"],
            position_ids=inputs["position_ids"],
        ).last_hidden_state
        merged = resampler.spatial_linear(hidden.reshape(-1, hidden.shape[-1] * self.rule.merge**2))
        pairs = [merged.index_select(0, inputs[name]) for name in ("first_rows", "second_rows")]
        return [resampler.after_norm(resampler.mlp(resampler.temporal_linear(torch.cat(pairs, dim=-1))))]

    def stock_rows(self, mm_kwargs: EncoderInputs) -> torch.Tensor:
        import torch

        grids = [self.rule.checked_grid(item) for item in mm_kwargs.chosen]
        grid_thw = torch.tensor([[grid.t, grid.h, grid.w] for grid in grids], device=self.device)
        pixels = mm_kwargs.rows("pixel_values").materialize()
        hidden = self.modules["visual"](pixels, grid_thw=grid_thw).last_hidden_state
        return self.modules["resampler"](hidden, grid_thw)
