"""ERNIE-4.5-VL: tower and resampler captured together; frames are paired by two gather indices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from vitgraph.errors import InputError, ModelError
from vitgraph.models import nn, torch
from vitgraph.models.base import EncoderInputs, MetadataField, Tensors
from vitgraph.models.family import Tower, given, text_part
from vitgraph.models.geometry import GridGeometry, ItemGeometry, MergedGridRule, linear_flops
from vitgraph.models.grid_encoder import GridTowerEncoder
from vitgraph.models.resizing import smart_resize
from vitgraph.planning.budgets import VIDEO, CaptureAxis, EncoderItemSpec, GraphKey

PATCHES_PER_TOKEN = "patches_per_token"
"""Capture axis: patches behind one output token, 4 in images and 8 in videos, whose frames are merged in pairs."""

MERGED_FRAMES = 2
"""Frames that the resampler merges; transformers' class does not take another number either."""


class Ernie45VLRule(MergedGridRule):
    """Images: 28-pixel tokens within the processor's pixel range. Videos: the range counts each frame, the last frame
    of an odd count is repeated, and two frames share their tokens."""

    def prepare(self) -> None:
        frames = self.vision_config.get("temporal_merge_size", MERGED_FRAMES)
        if frames != MERGED_FRAMES:
            raise ModelError(f"temporal_merge_size is {frames}; the resampler merges {MERGED_FRAMES} frames only")

    def most_frames(self) -> int:
        most = int(self.video["max_frames"])
        return most + most % MERGED_FRAMES

    def video_geometry(self, width: int, height: int, frames: int, fps: float | None) -> GridGeometry:
        kept = frames if fps is None else self.sampled_frames(frames, fps)
        kept += kept % MERGED_FRAMES
        return self.sized_grid(
            VIDEO, kept, width, height, lambda: smart_resize(height, width, self.factor, *self.video_pixel_range)
        )

    def sampled_frames(self, frames: int, file_fps: float) -> int:
        """Frames that the processor takes from a file: `fps` a second where set, else all, within its limits."""
        wanted = frames / file_fps * self.video["fps"] if self.video.get("fps") else frames
        wanted = min(max(wanted, self.video["min_frames"]), self.video["max_frames"], frames)
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

    @property
    def axes(self) -> tuple[CaptureAxis, ...]:
        # One graph for both would make every image replay compute twice the patches that it has.
        return (CaptureAxis(PATCHES_PER_TOKEN, tuple((self.merge**2 * frames,) for frames in (1, MERGED_FRAMES))),)

    def min_tokens_per_segment(self) -> int:
        cells = []
        for (low, high), frames in ((self.image_pixel_range, 1), (self.video_pixel_range, MERGED_FRAMES)):
            # An enlarged image reaches the lower bound; a shrunk one keeps at least half of each side it may have.
            fewest = min(-(-low // self.factor**2), high // self.factor**2 // 4)
            cells.append(max(1, fewest // frames))
        return min(cells)

    def merger_flops(self, grid: GridGeometry) -> float:
        tokens, cells = grid.patches // self.patches_per_token(grid), grid.patches // self.merge**2
        wide = self.merged_width
        return linear_flops(cells, wide, wide, wide) + linear_flops(
            tokens, MERGED_FRAMES * wide, wide, wide, self.output_width
        )


@lru_cache(maxsize=128)
def frame_pairs(t: int, cells: int) -> tuple[np.ndarray, np.ndarray]:
    """Merged rows of an item of `t` frames (1 or an even number) of so many `cells` that make each output row: two
    int32 arrays, of frames 2i and of frames 2i + 1; an image's frame is both."""
    if t == 1:
        rows = np.arange(cells, dtype=np.int32)
        return rows, rows
    frames = np.arange(t * cells, dtype=np.int32).reshape(t // 2, 2, cells)
    return frames[:, 0].reshape(-1), frames[:, 1].reshape(-1)


class Ernie45VLEncoder(GridTowerEncoder):
    """`Ernie4_5_VLMoeVisionTransformerPretrainedModel` and the layers of its variable-resolution resampler."""

    tower = Tower("ernie4_5_vl_moe", "Ernie4_5_VLMoeVisionConfig", "Ernie4_5_VLMoeVisionTransformerPretrainedModel")
    vision_fields = ("mlp_ratio",)
    rule_class = Ernie45VLRule
    image_processor = "ernie4_5_vl_moe.image_processing_pil_ernie4_5_vl_moe:Ernie4_5_VLMoeImageProcessorPil"
    video_processor = "ernie4_5_vl_moe.video_processing_ernie4_5_vl_moe:Ernie4_5_VLMoeVideoProcessor"
    processor_names = ("Ernie4_5_VL_MoeImageProcessor", "Ernie4_5_VLImageProcessor", "Ernie4_5_VLVideoProcessor")
    checkpoint_keys = (
        (r"vision_(?:model|tower)\.", "visual."),
        (r"resampler_model\.(\w+)\.0\.", r"resampler.\1.fc1."),
        (r"resampler_model\.(\w+)\.2\.", r"resampler.\1.fc2."),
        (r"resampler_model\.(\w+)\.3\.", r"resampler.\1.ln."),
        (r"resampler_model\.", "resampler."),
    )

    @classmethod
    def following_modules(cls, config: Any, extra: Mapping[str, Any]) -> dict[str, nn.Module]:
        from transformers.models.ernie4_5_vl_moe import (
            Ernie4_5_VLMoeConfig,
            Ernie4_5_VLMoeTextConfig,
            Ernie4_5_VLMoeVariableResolutionResamplerModel,
        )

        text = Ernie4_5_VLMoeTextConfig(
            hidden_size=extra["text_hidden_size"], rms_norm_eps=extra.get("text_rms_norm_eps", 1e-5)
        )
        full = Ernie4_5_VLMoeConfig(vision_config=config, text_config=text)
        return {"resampler": Ernie4_5_VLMoeVariableResolutionResamplerModel(full)}

    @classmethod
    def read_model_config(cls, config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        found, extra = super().read_model_config(config)
        ratio = found.pop("mlp_ratio", None)
        if ratio is not None:
            found.setdefault("intermediate_size", int(found["hidden_size"] * ratio))
        # The original file keeps the merge sizes beside the language model's numbers.
        names = [(f"{axis}_conv_size", f"{axis}_merge_size") for axis in ("spatial", "temporal")]
        text = given(text_part(config), [("rms_norm_eps", "text_rms_norm_eps")])
        return {**given(config, names), **found}, {**extra, **text}

    def buffer_rows(self, capacity: GraphKey) -> int:
        # A batch is given the axis key of its densest item, so no item of it has more patches a token than the key.
        ratio = capacity.axis_key[0] if capacity.axis_key else self.rule.merge**2 * MERGED_FRAMES
        return capacity.token_budget * ratio

    def metadata_fields(self, capacity: GraphKey) -> dict[str, MetadataField]:
        # A padded output row gathers row 0: it only reads, nothing reads it, and row 0 always is finite.
        rows = MetadataField((capacity.token_budget,), "int32")
        return {**super().metadata_fields(capacity), "first_rows": rows, "second_rows": rows}

    def compute_metadata(self, items: Sequence[ItemGeometry]) -> dict[str, np.ndarray]:
        first, second, start = [], [], 0
        for grid in self.grids(items):
            cells = grid.h * grid.w // self.rule.merge**2
            even, odd = frame_pairs(grid.t, cells)
            first.append(even + np.int32(start))
            second.append(odd + np.int32(start))
            start += grid.t * cells
        rows = {"first_rows": np.concatenate(first), "second_rows": np.concatenate(second)}
        return {**super().compute_metadata(items), **rows}

    def capture_scalars(self, capacity: GraphKey) -> dict[str, int]:
        # An image of m tokens has 4m patches. A video of m tokens has 8m in at least two frames, so 4m a frame at most.
        return {"max_seqlen": capacity.token_budget * self.rule.merge**2}

    def dummy_items(self, capacity: GraphKey) -> list[ItemGeometry]:
        merge, tokens = self.rule.merge, capacity.token_budget
        if self.buffer_rows(capacity) > tokens * merge**2 and capacity.segment_slots >= MERGED_FRAMES:
            return [GridGeometry(VIDEO, MERGED_FRAMES, merge, merge * tokens)]
        return super().dummy_items(capacity)

    def forward_packed(self, inputs: Tensors, scalars: Mapping[str, int], path: str) -> Sequence[torch.Tensor]:
        resampler = self.modules["resampler"]
        hidden = self.tower_output(inputs, scalars).last_hidden_state
        merged = resampler.spatial_linear(hidden.reshape(-1, hidden.shape[-1] * self.rule.merge**2))
        pairs = [merged.index_select(0, inputs[name]) for name in ("first_rows", "second_rows")]
        return [resampler.after_norm(resampler.mlp(resampler.temporal_linear(torch.cat(pairs, dim=-1))))]

    def stock_rows(self, mm_kwargs: EncoderInputs) -> torch.Tensor:
        return self.modules["resampler"](self.stock_output(mm_kwargs).last_hidden_state, self.stock_grids(mm_kwargs))
