"""`TORCH_SDPA`: torch's fused attention, one call a segment. The only backend on a CPU."""

from __future__ import annotations

from typing import ClassVar

import torch

from vitgraph.attention.base import AttentionBackend, Packed, Tiles, fused_tiles
from vitgraph.attention.padding import segment_endpoints


class TorchSdpaBackend(AttentionBackend):
    """Reads the segment lengths on the host, so its varlen call cannot be captured on a GPU; its dense call can.

    On a CPU, where a "replay" calls the forward again, the lengths are read anew each time.
    """

    name: ClassVar[str] = "TORCH_SDPA"
    is_capture_safe: ClassVar[bool] = False
    writes_padding_rows: ClassVar[bool] = True
    segment_padding: ClassVar[str] = "empty segments are left out on the host"

    @classmethod
    def unavailable_reason(cls, device: torch.device) -> str | None:
        return None

    def unsupported_reason(self, head_width: int, dtype: torch.dtype) -> str | None:
        return None

    def varlen(self, *packed: *Packed) -> torch.Tensor:
        query, key, value, cu_seqlens, _, scale = packed
        out = torch.zeros(*query.shape[:-1], value.shape[-1], dtype=query.dtype, device=query.device)
        start = 0
        for stop in segment_endpoints(cu_seqlens, query.shape[0]):
            q, k, v = (tensor[start:stop].transpose(0, 1).unsqueeze(0) for tensor in (query, key, value))
            segment = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale)
            out[start:stop] = segment[0].transpose(0, 1)
            start = stop
        return out

    def dense(self, *tiles: *Tiles) -> torch.Tensor:
        return fused_tiles(*tiles)
