"""Qwen2-VL: transformers' own tower, and the rule by which its processors size images and videos."""

from __future__ import annotations

import math

from vitgraph.errors import InputError
from vitgraph.models.family import Tower
from vitgraph.models.geometry import GridGeometry, MergedGridRule, TowerShape
from vitgraph.models.grid_encoder import GridTowerEncoder
from vitgraph.models.resizing import smart_resize
from vitgraph.planning.items import VIDEO


class FrameSizedVideos(MergedGridRule):
    """Videos whose pixel range counts each frame, and whose frames are sampled as Qwen2-VL's processor does."""

    def video_geometry(self, width: int, height: int, frames: int, fps: float | None) -> GridGeometry:
        video, (low, high) = self.video, self.video_pixel_range
        kept = frames if fps is None else self._sampled(frames, fps)
        if video.get("cap_pixels_per_frame"):
            total = int(video.get("max_video_tokens", 128000) * self.factor**2 * 0.9)
            high = max(min(high, total * self.temporal // kept), int(low * 1.05))
        # The processor repeats the last frame until the temporal patch divides the count.
        steps = -(-kept // self.temporal)
        return self.sized_grid(VIDEO, steps, width, height, lambda: smart_resize(height, width, self.factor, low, high))

    def _sampled(self, frames: int, file_fps: float) -> int:
        """Frames that the processor samples from a file, its rounding included."""
        video, temporal = self.video, self.temporal
        if frames < temporal:
            raise InputError(
                f"a video of {frames} frame cannot be sampled: the processor takes a multiple of {temporal} frames and "
                "never more than the file has; pass it as an image"
            )
        most = min(int(video["max_frames"]), frames) // temporal * temporal
        wanted = min(max(frames / file_fps * video["fps"], video["min_frames"]), most, frames)
        wanted = math.floor(wanted / temporal) * temporal
        # Every (frames / wanted)-th frame; in floating point that is sometimes one frame more than wanted.
        return math.ceil(frames / (frames / wanted))


class Qwen2VLRule(FrameSizedVideos):
    """Images: 28-pixel tokens within the processor's pixel range. Videos: a range of their own for each frame."""

    @property
    def output_width(self) -> int:
        # This family's config calls the tower's width `embed_dim` and its output's `hidden_size`.
        return int(self.vision_config["hidden_size"])

    @property
    def tower_shape(self) -> TowerShape:
        config = self.vision_config
        return TowerShape(config["depth"], config["embed_dim"], int(config["embed_dim"] * config["mlp_ratio"]))


class Qwen2VLEncoder(GridTowerEncoder):
    """`Qwen2VisionTransformerPretrainedModel` as it is; output `[M, D]`."""

    rule_class = Qwen2VLRule
    rule: Qwen2VLRule
    tower = Tower("qwen2_vl", "Qwen2VLVisionConfig", "Qwen2VisionTransformerPretrainedModel")
    video_processor = "qwen2_vl.video_processing_qwen2_vl:Qwen2VLVideoProcessor"
