"""DeepSeek-OCR's own modules: SAM attention with ready tables of relative positions.

The towers are transformers' `unlimited_ocr` classes, which are the same network.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers.models.unlimited_ocr.modeling_unlimited_ocr import UnlimitedOcrSamVisionSdpaAttention

from vitgraph.models.compile.replaced_modules import StockSwitch

GLOBAL_BIAS_BYTES = 4 << 30
"""Most bytes of relative-position bias that one global attention layer makes at once; its tiles take turns above."""


class TabledSamAttention(UnlimitedOcrSamVisionSdpaAttention, StockSwitch):
    """SAM attention that looks relative positions up beforehand, for each grid side `[side, side, head width]` on both
    axes.

    transformers interpolates and indexes the tables in every call, with an index made on the CPU; a copy from there
    cannot be captured. The values are the same.
    """

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
