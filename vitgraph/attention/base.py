"""What an attention backend is: declared abilities, one varlen call, one dense call.

Shape legend: N packed rows, S segments, H heads, E head width, B tiles, L rows of a tile.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

TRANSFORMERS_PREFIX = "vitgraph_flash_"
"""Names given to transformers contain `flash`, which makes its towers take the packed varlen branch."""


class AttentionBackend(ABC):
    """One way to compute attention, behind the names of vLLM's `--mm-encoder-attn-backend`.

    Attributes:
        name: Registry name.
        is_capture_safe: The varlen call may be captured and replayed with other offsets.
        writes_padding_rows: Rows past the last segment are written (with zeros) by the varlen call; where False they
            keep whatever the memory held, and no valid row may ever read them.
        implementation: What really runs (package and version), for the record.
    """

    name: ClassVar[str]
    is_capture_safe: ClassVar[bool]
    writes_padding_rows: ClassVar[bool]

    def __init__(self) -> None:
        self.implementation = self.name
        self.is_on_graph_path = False

    @contextmanager
    def graph_path(self) -> Iterator[None]:
        """Marks the warm-up and capture of a graph, whose inputs have padded rows; eager calls have none."""
        self.is_on_graph_path = True
        try:
            yield
        finally:
            self.is_on_graph_path = False

    def reserve_padding_safe_output(self, rows: int) -> None:  # noqa: B027 (a hook, empty by default)
        """Called before capturing, with the most patches of any graph; for backends that need a place for them."""

    def release_padding_safe_output(self) -> None:  # noqa: B027
        """Called when the graphs are cleared."""

    @classmethod
    @abstractmethod
    def unavailable_reason(cls, device: torch.device) -> str | None:
        """Why the backend cannot run on `device` here, with what to install; None where it can."""

    @abstractmethod
    def unsupported_reason(self, head_width: int, dtype: torch.dtype) -> str | None:
        """Why the backend does not take heads of that width in that dtype; None where it does."""

    @abstractmethod
    def varlen(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_seqlen: int,
        scale: float,
    ) -> torch.Tensor:
        """Attention within packed segments.

        Args:
            query: `[N, H, E]`; also `key` and `value`. Any strides whose last is 1.
            cu_seqlens: `[S + 1]` int32 offsets on the device; repeated entries are empty segments.
            max_seqlen: Upper bound of the segment lengths.
            scale: Factor of the scores.

        Returns:
            `[N, H, E]`. See `writes_padding_rows` for the rows past `cu_seqlens[-1]`.
        """

    def dense(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
    ) -> torch.Tensor:
        """Attention of equal tiles: `[B, H, L, E]` in, `[B, L, H, E]` out; `mask` broadcasts to `[B, H, L, L]`.

        The default flattens the tiles into equal segments; a mask goes through torch's fused attention.
        """
        if mask is not None:
            out = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
            return out.transpose(1, 2)
        tiles, heads, length, width = query.shape
        offsets = torch.arange(0, (tiles + 1) * length, length, dtype=torch.int32, device=query.device)
        packed = [
            tensor.transpose(1, 2).reshape(tiles * length, heads, tensor.shape[-1]) for tensor in (query, key, value)
        ]
        return self.varlen(*packed, offsets, length, scale).view(tiles, length, heads, width)

    @property
    def transformers_name(self) -> str:
        """The attention implementation that towers are set to."""
        return TRANSFORMERS_PREFIX + self.name.lower()

    def transformers_function(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        scaling: float | None = None,
        dropout: float = 0.0,
        cu_seq_lens_q: torch.Tensor | None = None,
        max_length_q: int | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """The signature of transformers' `AttentionInterface`: `[1, H, N, E]` packed or `[B, H, L, E]` dense.

        Returns:
            `([1, N, H, E] or [B, L, H, E], None)`. Unknown keywords (towers pass some down) are ignored.
        """
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        if cu_seq_lens_q is None:
            return self.dense(query, key, value, attention_mask, scale), None
        if max_length_q is None:
            max_length_q = query.shape[2]
        packed = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
        return self.varlen(*packed, cu_seq_lens_q, max_length_q, scale).unsqueeze(0), None
