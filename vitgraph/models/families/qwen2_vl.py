"""Qwen2-VL and Qwen2.5-VL: transformers' own towers, of the latter with its attention windows ordered on the host."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from vitgraph.errors import InputError
from vitgraph.models import torch
from vitgraph.models.base import PAD_IDENTITY, PAD_REPEAT_LAST, MetadataField, Tensors
from vitgraph.models.family import Tower
from vitgraph.models.geometry import GridGeometry, ItemGeometry, MergedGridRule, TowerShape
from vitgraph.models.grid_encoder import GridTowerEncoder, block_positions, offsets_of, segment_offsets
from vitgraph.models.resizing import smart_resize
from vitgraph.planning.budgets import VIDEO, GraphKey


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
    tower = Tower("qwen2_vl", "Qwen2VLVisionConfig", "Qwen2VisionTransformerPretrainedModel")
    video_processor = "qwen2_vl.video_processing_qwen2_vl:Qwen2VLVideoProcessor"


@lru_cache(maxsize=2048)
def window_order(rows: int, cols: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Order in which the windows of one frame take its `rows x cols` merged tokens, raster order within a window of
    `side`.

    Returns:
        `[rows * cols]` int32 token indices, and the tokens of each window, `[windows]` int32; none is empty.
    """
    row, col = np.divmod(np.arange(rows * cols, dtype=np.int32), np.int32(cols))
    window = row // side * -(-cols // side) + col // side
    return np.argsort(window, kind="stable").astype(np.int32), np.bincount(window).astype(np.int32)


@lru_cache(maxsize=2048)
def frame_windows(h: int, w: int, merge: int, side: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Metadata of one `h x w` frame of patches: `window_order`, its inverse (both `[h * w / merge**2]` int32), and the
    row and column of every patch in window order, `[h * w, 2]` int32."""
    order, _ = window_order(h // merge, w // merge, side)
    inverse = np.argsort(order).astype(np.int32)
    positions = block_positions(h, w, merge).reshape(len(order), merge**2, 2)[order].reshape(-1, 2)
    return order, inverse, positions


def most_windows(tokens: int, segments: int, side: int) -> int:
    """Most windows that at most `segments` frames of together at most `tokens` merged tokens can have.

    A frame of a x b tokens has ceil(a / side) * ceil(b / side) windows, which is at most (ab + side - 1) / side for
    all a, b >= 1. Frames have a token at least, so the sum over S frames is at most (tokens + S * (side - 1)) / side
    with S at most min(segments, tokens). Strips one token wide reach it: no smaller number is safe.
    """
    return (tokens + (side - 1) * min(segments, tokens)) // side


class Qwen2_5VLRule(Qwen2VLRule):  # noqa: N801
    """Sizes as in Qwen2-VL; most layers attend within windows of 112 pixels."""

    mlp_matrices = 3
    tower_shape = MergedGridRule.tower_shape

    @property
    def window_side(self) -> int:
        """Merged tokens on a side of a full window."""
        return int(self.vision_config["window_size"]) // self.factor

    @property
    def output_width(self) -> int:
        return int(self.vision_config["out_hidden_size"])

    def block_flops(self, grid: GridGeometry) -> float:
        shape, config = self.tower_shape, self.vision_config
        _, lengths = window_order(grid.h // self.merge, grid.w // self.merge, self.window_side)
        window_pairs = float(grid.t) * float(np.square(lengths.astype(np.int64) * self.merge**2).sum())
        pairs = float(grid.t) * (grid.h * grid.w) ** 2
        full = len(set(config["fullatt_block_indexes"]) & set(range(shape.depth)))
        return shape._replace(depth=full).flops(grid.patches, pairs) + shape._replace(depth=shape.depth - full).flops(
            grid.patches, window_pairs
        )


class Exaone45Rule(Qwen2_5VLRule):
    """As in Qwen2.5-VL; keys and values are projected to fewer heads than queries."""

    def block_flops(self, grid: GridGeometry) -> float:
        shape, config = self.tower_shape, self.vision_config
        left_out = 1 - config["num_key_value_heads"] / config["num_heads"]
        return super().block_flops(grid) - 2.0 * grid.patches * shape.depth * 2 * shape.width**2 * left_out


class Qwen2_5VLEncoder(GridTowerEncoder):  # noqa: N801
    """The modules of `Qwen2_5_VisionTransformerPretrainedModel`; output `[M, D]`.

    The tower's own forward permutes its rotary tables and sorts the window index to undo it; here positions arrive in
    window order and the inverse is given, so the graph holds two gathers and no sort.
    """

    tower = Tower("qwen2_5_vl", "Qwen2_5_VLVisionConfig", "Qwen2_5_VisionTransformerPretrainedModel")
    rule_class = Qwen2_5VLRule
    rule: Qwen2_5VLRule
    video_processor = "qwen2_vl.video_processing_qwen2_vl:Qwen2VLVideoProcessor"

    def metadata_fields(self, capacity: GraphKey) -> dict[str, MetadataField]:
        windows = most_windows(capacity.token_budget, capacity.segment_slots, self.rule.window_side)
        return {
            **super().metadata_fields(capacity),
            "cu_window_seqlens": MetadataField((windows + 1,), "int32", PAD_REPEAT_LAST),
            # The real part permutes the real groups among themselves; a padded place takes its own group.
            "window_index": MetadataField((capacity.token_budget,), "int32", PAD_IDENTITY),
            "inverse_index": MetadataField((capacity.token_budget,), "int32", PAD_IDENTITY),
        }

    def capture_scalars(self, capacity: GraphKey) -> dict[str, int]:
        # A window is at most window_side x window_side tokens of merge x merge patches, whatever the frame's shape.
        window = (self.rule.window_side * self.rule.merge) ** 2
        return {**super().capture_scalars(capacity), "max_window_seqlen": min(window, self.buffer_rows(capacity))}

    def compute_metadata(self, items: Sequence[ItemGeometry]) -> dict[str, np.ndarray]:
        grids = self.grids(items)
        merge, side = self.rule.merge, self.rule.window_side
        orders, inverses, positions, lengths = [], [], [], []
        start = 0
        for grid in grids:
            order, inverse, frame_positions = frame_windows(grid.h, grid.w, merge, side)
            _, frame_lengths = window_order(grid.h // merge, grid.w // merge, side)
            starts = start + np.arange(grid.t, dtype=np.int32)[:, None] * np.int32(len(order))
            orders.append((order + starts).reshape(-1))
            inverses.append((inverse + starts).reshape(-1))
            positions.append(np.tile(frame_positions, (grid.t, 1)))
            lengths.append(np.tile(frame_lengths, grid.t))
            start += grid.t * len(order)
        return {
            "cu_seqlens": segment_offsets(grids),
            "position_ids": np.concatenate(positions),
            "cu_window_seqlens": offsets_of(np.concatenate(lengths) * merge**2),
            "window_index": np.concatenate(orders),
            "inverse_index": np.concatenate(inverses),
        }

    def forward_packed(self, inputs: Tensors, scalars: Mapping[str, int], path: str) -> Sequence[torch.Tensor]:
        from vitgraph.models.fusions import ResidualStream

        hidden = self.visual.patch_embed(inputs["pixel_values"])
        groups = hidden.view(-1, self.rule.merge**2 * hidden.shape[-1])
        hidden = groups.index_select(0, inputs["window_index"]).view(hidden.shape)
        position_embeddings = self.visual.rotary_pos_emb(hidden, inputs["position_ids"])
        stream = ResidualStream(hidden)
        for layer, block in enumerate(self.visual.blocks):
            is_full = layer in self.visual.fullatt_block_indexes
            stream = self.run_block(
                block,
                stream,
                cu_seqlens=inputs["cu_seqlens" if is_full else "cu_window_seqlens"],
                max_seqlen=scalars["max_seqlen" if is_full else "max_window_seqlen"],
                position_embeddings=position_embeddings,
            )
        return [self.visual.merger(stream.whole()).index_select(0, inputs["inverse_index"])]


class Exaone45Encoder(Qwen2_5VLEncoder):
    """`Exaone4_5_VisionModel`: groups of heads share keys and values."""

    tower = Tower("exaone4_5", "Exaone4_5_VisionConfig", "Exaone4_5_VisionModel")
    rule_class = Exaone45Rule


class Qwen2_5OmniEncoder(Qwen2_5VLEncoder):  # noqa: N801
    """`Qwen2_5OmniVisionEncoder`: the same network with projections apart."""

    tower = Tower("qwen2_5_omni", "Qwen2_5OmniVisionEncoderConfig", "Qwen2_5OmniVisionEncoder")
    whole_processor = "qwen2_5_omni.processing_qwen2_5_omni:Qwen2_5OmniProcessor"
