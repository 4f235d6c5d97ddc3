"""GLM-4.1V, GLM-4.6V-Flash, GLM-OCR and GLM-5.3-Flash: transformers' own tower modules.

The position taps of the first two are computed on the host; the others have no position table, and norms of queries and
keys.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from vitgraph.models import functional, torch
from vitgraph.models.base import Tensors
from vitgraph.models.family import Tower
from vitgraph.models.geometry import GridGeometry, MergedGridRule, TowerShape, linear_flops
from vitgraph.models.grid_encoder import GridTowerEncoder, PositionTable, cubic_axis
from vitgraph.models.resizing import smart_resize_video
from vitgraph.planning.budgets import IMAGE, VIDEO

CONSTANT_RATE = "constant_rate"
"""GLM-4.1V: so many frames a second, evenly spread where the video is longer than the limit."""

FALLING_RATE = "falling_rate"
"""GLM-4.6V: fewer frames a second the longer the video is."""

FALLING_RATES = ((30, 3.0), (300, 1.0), (2400, 0.5))
"""Up to so many seconds, so many temporal patches a second; the last holds for longer videos too."""

FALLING_RATE_MOST_FRAMES = 640


@lru_cache(maxsize=4096)
def constant_rate_frames(frames: int, file_fps: float, fps: float, max_duration: float) -> int:
    """Frames that GLM-4.1V's processor samples, an odd count made even by repeating the last one."""
    duration = frames / file_fps
    most = int(max_duration * fps)
    times: np.ndarray
    if duration <= max_duration:
        times = np.arange(max(math.floor(duration * fps), 1)) * file_fps / fps
    elif most >= frames:
        times = np.arange(frames)
    else:
        times = np.linspace(0, duration, most) * file_fps
    distinct = np.unique(np.minimum(np.ceil(times), frames - 1)).size
    return distinct + distinct % 2


@lru_cache(maxsize=4096)
def falling_rate_frames(frames: int, file_fps: float, temporal: int) -> int:
    """Frames that GLM-4.6V's processor samples, an odd count made even by repeating the last one."""
    duration = frames / file_fps
    counted = min(duration, FALLING_RATES[-1][0])
    rate = next(rate for limit, rate in FALLING_RATES if counted <= limit)
    wanted = min(int(counted * rate * temporal), FALLING_RATE_MOST_FRAMES)
    picked, last, second = 0, 0, 0.0
    seconds_per_frame = 1 / file_fps
    # The processor adds up the time step frame by frame; its rounding decides at the edges.
    for index in range(frames):
        if index * seconds_per_frame >= second:
            second += 1 / (temporal * rate)
            picked, last = picked + 1, index
            if second >= int(duration):
                break
    if frames < wanted or picked > wanted:
        last = frames - 1
    elif picked == wanted:
        return picked + picked % 2
    distinct = np.unique(np.linspace(0, last, wanted, dtype=int)).size
    return distinct + distinct % 2


def sampled_coordinates(index: np.ndarray, size: int, side: int) -> np.ndarray:
    """Where each position on an axis of `size` samples a table of `side` cells, in the tower's own rounding."""
    # The tower samples at float32 coordinates that it first scales to [-1, 1]; their rounding moves the taps a little.
    half, one, two = np.float32(0.5), np.float32(1), np.float32(2)
    scaled = (index.astype(np.float32) + half) / np.float32(size) * two - one
    return ((scaled + one) * np.float32(side) - one) / two


class Glm4vRule(MergedGridRule):
    """28-pixel tokens; the processor's pixel ranges count all frames, and an image as `temporal_patch_size` frames."""

    mlp_matrices = 3

    def image_geometry(self, width: int, height: int) -> GridGeometry:
        return self._sized(IMAGE, width, height, self.temporal, self.image_pixel_range)

    def video_geometry(self, width: int, height: int, frames: int, fps: float | None) -> GridGeometry:
        kept = frames if fps is None else self._sampled(frames, fps)
        return self._sized(VIDEO, width, height, kept, self.video_pixel_range)

    def _sized(self, modality: str, width: int, height: int, frames: int, bounds: tuple[int, int]) -> GridGeometry:
        return self.sized_grid(
            modality,
            -(-frames // self.temporal),
            width,
            height,
            lambda: smart_resize_video(frames, height, width, self.temporal, self.factor, *bounds),
        )

    def _sampled(self, frames: int, file_fps: float) -> int:
        if self.video["sampling"] == FALLING_RATE:
            return falling_rate_frames(frames, file_fps, self.temporal)
        return constant_rate_frames(frames, file_fps, self.video["fps"], self.video["max_duration"])

    def most_frames(self) -> int:
        if self.video["sampling"] == FALLING_RATE:
            return FALLING_RATE_MOST_FRAMES
        return int(self.video["fps"] * self.video["max_duration"])

    @property
    def table_side(self) -> int:
        """Rows (and columns) of the learned position table."""
        return int(self.vision_config["image_size"]) // self.patch

    @property
    def tower_shape(self) -> TowerShape:
        # The blocks' MLP has the output's width; `intermediate_size` is the merger's.
        config = self.vision_config
        return TowerShape(config["depth"], config["hidden_size"], self.output_width, self.mlp_matrices)

    @property
    def merger_width(self) -> int:
        """Inner width of the merger's MLP."""
        return int(self.vision_config["intermediate_size"])

    def merger_flops(self, grid: GridGeometry) -> float:
        tokens, out = grid.patches // self.merge**2, self.output_width
        return linear_flops(tokens, self.merged_width, out, out) + 2.0 * tokens * 3 * out * self.merger_width


class Glm4vEncoder(GridTowerEncoder):
    """The modules of `Glm4vVisionModel` (`Glm46VModel` has the same tower); output `[M, D]`.

    The tower's own forward finds each patch's image by comparing every row with every segment and samples the position
    table at run time; here each patch brings the 16 taps and weights that the sampling comes to.
    """

    tower = Tower("glm4v", "Glm4vVisionConfig", "Glm4vVisionModel")
    rule_class = Glm4vRule
    table: ClassVar[PositionTable | None] = PositionTable(lambda rule: rule.table_side, cubic_axis, sampled_coordinates)
    image_processor = "glm4v.image_processing_pil_glm4v:Glm4vImageProcessorPil"
    video_processor = "glm4v.video_processing_glm4v:Glm4vVideoProcessor"
    video_settings = (*GridTowerEncoder.video_settings, "max_duration")
    processor_names = ("Glm46VImageProcessor", "Glm46VVideoProcessor")

    @classmethod
    def read_video_processor_config(cls, processor: Mapping[str, Any]) -> dict[str, Any]:
        found = super().read_video_processor_config(processor)
        kind = processor.get("video_processor_type")
        if kind is not None:
            found["sampling"] = FALLING_RATE if kind.startswith("Glm46V") else CONSTANT_RATE
        return found

    def forward_packed(self, inputs: Tensors, scalars: Mapping[str, int], path: str) -> Sequence[torch.Tensor]:
        hidden = self.embedded_patches(inputs)
        arguments = self.block_arguments(hidden, inputs, scalars)
        for block in self.visual.blocks:
            hidden = block(hidden, **arguments)
        hidden = self.visual.post_layernorm(hidden)
        merge = self.rule.merge
        groups = hidden.view(-1, merge, merge, hidden.shape[-1]).permute(0, 3, 1, 2)
        return [self.visual.merger(self.visual.downsample(groups).view(-1, self.rule.output_width))]

    def embedded_patches(self, inputs: Tensors) -> torch.Tensor:
        """Patches with their position embeddings, `[N, C]`; the tower samples in float32 whatever its dtype."""
        hidden = self.visual.post_conv_layernorm(self.visual.patch_embed(inputs["pixel_values"]))
        # One fused gather and sum; the taps spelled out would be sixteen times the activations.
        positions = functional.embedding_bag(
            inputs["interp_indices"],
            self.visual.embeddings.position_embedding.weight.float(),
            per_sample_weights=inputs["interp_weights"],
            mode="sum",
        )
        return hidden + positions.to(hidden.dtype)

    def grid_rows(self, grid: GridGeometry) -> list[list[int]]:
        # The tower wants a row a frame; transformers' own video features expand their grids so.
        return [[1, grid.h, grid.w]] * grid.t


class GlmOcrRule(Glm4vRule):
    """Sizes as in GLM-4.1V; the blocks' MLP has `intermediate_size`, the merger's three times the output's width."""

    tower_shape = MergedGridRule.tower_shape

    @property
    def merger_width(self) -> int:
        return self.output_width * int(self.vision_config["in_channels"])


class GlmOcrEncoder(Glm4vEncoder):
    """The modules of `GlmOcrVisionModel`; output `[M, D]`."""

    tower = Tower("glm_ocr", "GlmOcrVisionConfig", "GlmOcrVisionModel")
    rule_class = GlmOcrRule
    table = None

    def embedded_patches(self, inputs: Tensors) -> torch.Tensor:
        return self.visual.patch_embed(inputs["pixel_values"])


class Glm5NextRule(GlmOcrRule):
    """As in GLM-OCR; the merger's inner width is a field of its own."""

    @property
    def merger_width(self) -> int:
        return int(self.vision_config["projection_intermediate_size"])


class Glm5NextEncoder(GlmOcrEncoder):
    """The modules of `Glm5NextVisionModel`, whose gated MLPs are clamped.

    vLLM norms with 1e-6 whatever the checkpoint says; here, as in transformers, the checkpoint's `rms_norm_eps` holds.
    """

    tower = Tower("glm5_next", "Glm5NextVisionConfig", "Glm5NextVisionModel")
    rule_class = Glm5NextRule
