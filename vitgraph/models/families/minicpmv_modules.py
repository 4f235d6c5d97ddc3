"""MiniCPM-V's resampler: learned queries that attend to one slice's patches, in a packed and in the published form.

transformers has no class for it; parameter names follow the published checkpoints, with norms spelled out. Shape
legend: S slices, L keys of a slice, Q queries, W width (the language model's), N packed patches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from vitgraph.attention.base import AttentionBackend

NORM_EPS = 1e-6
TABLE_ROWS = 512
"""Positions kept ready on an axis; longer slices (aspect ratios above about 250) make their own table, in eager."""

KEY_ALIGNMENT = 8
"""Keys of a dense slice are padded to a multiple of this, which fused attention asks of a mask's last dimension."""


def sine_table(rows: int, width: int) -> torch.Tensor:
    """Sine and cosine of positions 0 to `rows - 1` on one axis: `[rows, width]` float32, sines first.

    The published two-dimensional table is this table of the column followed by this table of the row.
    """
    frequencies = np.arange(width // 2, dtype=np.float32) / np.float32(width / 2)
    frequencies = np.float32(1.0) / np.power(np.float32(10000.0), frequencies)
    angles = np.arange(rows, dtype=np.float32)[:, None] * frequencies
    return torch.from_numpy(np.concatenate([np.sin(angles), np.cos(angles)], axis=1))


class Resampler(nn.Module):
    """Turns every slice into Q rows of the language model's width W, a multiple of 4 and of `heads`, from rows of
    `kv_width`."""

    def __init__(self, queries: int, width: int, heads: int, kv_width: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Parameter(torch.empty(queries, width))
        self.kv_proj = nn.Linear(kv_width, width, bias=False) if kv_width != width else nn.Identity()
        self.attn = nn.MultiheadAttention(width, heads, batch_first=True)
        self.query_norm = nn.LayerNorm(width, eps=NORM_EPS)
        self.kv_norm = nn.LayerNorm(width, eps=NORM_EPS)
        self.post_norm = nn.LayerNorm(width, eps=NORM_EPS)
        self.proj = nn.Parameter(torch.empty(width, width))
        nn.init.normal_(self.query, std=0.02)
        nn.init.normal_(self.proj, std=width**-0.5)
        self.register_buffer("axis_table", sine_table(TABLE_ROWS, width // 2), persistent=False)
        self.axis_table: torch.Tensor

    def table_of(self, largest_side: int) -> torch.Tensor:
        """`[>= largest_side, W / 2]` positions of one axis, in the parameters' dtype."""
        if largest_side <= len(self.axis_table):
            return self.axis_table
        # Only eager calls come here (a graph's key bounds the side), so making a table may wait for the device.
        return sine_table(largest_side, self.axis_table.shape[1]).to(self.axis_table)

    def forward_packed(
        self,
        hidden: torch.Tensor,
        cu_seqlens: torch.Tensor,
        grid_positions: torch.Tensor,
        max_seqlen: int,
        largest_side: int,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        """Resamples packed slices; every shape follows from the shapes and host integers given.

        Args:
            hidden: `[N, kv_width]` tower output. Rows past `cu_seqlens[-1]` may hold anything and are not read.
            cu_seqlens: `[S + 1]` offsets of the slices; empty slices at the end give unspecified, finite rows.
            grid_positions: `[N, 2]` column and row of each patch within its slice.
            max_seqlen: Upper bound of a slice's patches.
            largest_side: Upper bound of a slice's columns and rows.
            attention: Backend of the dense cross attention.

        Returns:
            `[S * Q, W]`.
        """
        length = -(-max_seqlen // KEY_ALIGNMENT) * KEY_ALIGNMENT
        rows, is_key = _dense_keys(cu_seqlens, length)
        slices = len(cu_seqlens) - 1
        keys = self.kv_norm(self.kv_proj(hidden.index_select(0, rows))).view(slices, length, -1)
        places = grid_positions.index_select(0, rows)
        # [S * L, 2] columns and rows to [S * L, 2, W / 2]: the two halves of the published table, side by side.
        sines = functional.embedding(places, self.table_of(largest_side)).view_as(keys)
        attended = self._attend(keys + sines, keys, is_key[:, None, None, :], attention)
        return self.post_norm(attended) @ self.proj

    def _attend(
        self, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, attention: AttentionBackend
    ) -> torch.Tensor:
        """`[S, L, W]` keys and values to `[S * Q, W]`, with the weights of `nn.MultiheadAttention`."""
        slices, length, width = keys.shape
        head_width = width // self.heads
        weights = self.attn.in_proj_weight.split(width)
        biases = self.attn.in_proj_bias.split(width)
        query = functional.linear(self.query_norm(self.query), weights[0], biases[0])
        query = query.view(1, -1, self.heads, head_width).transpose(1, 2).expand(slices, -1, -1, -1)
        key, value = (
            functional.linear(source, weight, bias).view(slices, length, self.heads, head_width).transpose(1, 2)
            for source, weight, bias in zip((keys, values), weights[1:], biases[1:], strict=True)
        )
        attended = attention.dense(query, key, value, mask, head_width**-0.5)
        return self.attn.out_proj(attended.reshape(-1, width))

    def forward(self, features: Sequence[torch.Tensor], grids: Sequence[tuple[int, int]]) -> torch.Tensor:
        """The published form, `[S * Q, W]`: slices padded to the longest, padding masked; the reference of the packed
        form.

        Args:
            features: `[h * w, kv_width]` tower output of each slice.
            grids: Patch rows and columns of each slice.
        """
        table = self.table_of(max(max(grid) for grid in grids))
        padded = nn.utils.rnn.pad_sequence(list(features), batch_first=True)
        values = self.kv_norm(self.kv_proj(padded))
        sines = nn.utils.rnn.pad_sequence([_grid_sines(table, h, w) for h, w in grids], batch_first=True)
        lengths = torch.tensor([h * w for h, w in grids], device=values.device)
        is_padding = torch.arange(values.shape[1], device=values.device) >= lengths[:, None]
        query = self.query_norm(self.query).expand(len(grids), -1, -1)
        attended, _ = self.attn(query, values + sines, values, key_padding_mask=is_padding, need_weights=False)
        return (self.post_norm(attended) @ self.proj).flatten(0, 1)


def _dense_keys(cu_seqlens: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed row of every dense key (`[S * length]`), and which dense keys count (`[S, length]` bool).

    A missing key repeats its slice's last one, and an empty slice takes the last real row: padded rows of the packed
    tensor may hold NaN, which no mask removes. Every slice, empty ones too, keeps one key, so no softmax is empty.
    """
    starts, lengths = cu_seqlens[:-1], cu_seqlens.diff()
    offsets = torch.arange(length, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    present = lengths.clamp(min=1)[:, None]
    rows = starts[:, None] + torch.minimum(offsets, present - 1)
    return torch.minimum(rows, cu_seqlens[-1:] - 1).flatten(), offsets < present


def _grid_sines(table: torch.Tensor, h: int, w: int) -> torch.Tensor:
    """`[h * w, W]`: the table of the column, then that of the row."""
    columns = table[:w].unsqueeze(0).expand(h, -1, -1)
    rows = table[:h].unsqueeze(1).expand(-1, w, -1)
    return torch.cat([columns, rows], dim=-1).flatten(0, 1)
