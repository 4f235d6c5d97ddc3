"""What the planner knows of one encoder input item: its size, its tokens, its attention segments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

DEFAULT_PATH = "default"

MOST_FRAMES = 1_000_000
"""Frames of the longest video: nine hours at 30 a second."""

IMAGE = "image"
VIDEO = "video"


@dataclass(frozen=True, slots=True)
class EncoderItemSpec:
    """One image or video as the packing sees it; nothing here needs a device.

    Attributes:
        modality: `image` or `video`.
        input_size: Rows of the pixel tensor that the item brings (patches, tiles or slices).
        output_tokens: Graph output rows of the item, summed over its paths; the unit of token budgets.
        segments: Attention sequences of the item: 1 for an image of a full-attention tower, one a frame
            for a video, one a tile or slice for tiled towers.
        path_output_tokens: Output rows by path; empty means everything is on the default path.
        axis_sizes: What the item needs of each capture axis, for example `{"patch_grid": (28, 36)}`.
    """

    modality: str
    input_size: int
    output_tokens: int
    segments: int = 1
    path_output_tokens: Mapping[str, int] = field(default_factory=dict)
    axis_sizes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def tokens_on(self, path: str) -> int:
        """Output rows that the item has on `path` (0 where it has none)."""
        if not self.path_output_tokens:
            return self.output_tokens if path == DEFAULT_PATH else 0
        return self.path_output_tokens.get(path, 0)
