"""Attention as one opaque torch operator, so that a compiled block is traced around it and not into it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import library

from vitgraph.attention.base import AttentionBackend

_BACKENDS: dict[str, AttentionBackend] = {}
"""Backends that compiled blocks call, by the name that their operator is given."""

_OPERATORS = library.Library("vitgraph", "FRAGMENT")


def _varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float,
    backend: str,
) -> torch.Tensor:
    """`AttentionBackend.varlen` of the named backend."""
    return _BACKENDS[backend].varlen(query, key, value, cu_seqlens, max_seqlen, scale)


def _varlen_example(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float,
    backend: str,
) -> torch.Tensor:
    return query.new_empty((query.shape[0], query.shape[1], value.shape[2]))


def _dense_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    backend: str,
) -> torch.Tensor:
    """`AttentionBackend.dense` of the named backend."""
    return _BACKENDS[backend].dense(query, key, value, mask, scale).contiguous()


def _dense_example(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    backend: str,
) -> torch.Tensor:
    tiles, heads, length, _ = query.shape
    return query.new_empty((tiles, length, heads, value.shape[3]))


def _define(schema: str, compute: Callable[..., torch.Tensor], example: Callable[..., torch.Tensor]) -> Any:
    """Makes an operator; without torch's `custom_op`, whose every call costs 5 us more on the host."""
    name = schema.partition("(")[0]
    _OPERATORS.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for device in ("CPU", "CUDA"):
        _OPERATORS.impl(name, compute, device)
    library.register_fake(f"{_OPERATORS.ns}::{name}", example, lib=_OPERATORS)
    return getattr(getattr(torch.ops, _OPERATORS.ns), name).default


varlen_attention = _define(
    "varlen_attention(Tensor query, Tensor key, Tensor value, Tensor cu_seqlens, SymInt max_seqlen, float scale, "
    "str backend) -> Tensor",
    _varlen_attention,
    _varlen_example,
)
dense_attention = _define(
    "dense_attention(Tensor query, Tensor key, Tensor value, Tensor? mask, float scale, str backend) -> Tensor",
    _dense_attention,
    _dense_example,
)


def register_opaque(backend: AttentionBackend) -> str:
    """Makes the operator form of a backend known to transformers.

    Returns:
        The attention implementation that a tower is set to before its blocks are compiled.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    name = backend.name
    _BACKENDS[name] = backend
    # The compiler may reuse the memory of what an operator returns, so layers must not share one output.
    backend.returns_fresh_output = True

    def attend(
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
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        if cu_seq_lens_q is None:
            return dense_attention(query, key, value, attention_mask, scale, name), None
        longest = query.shape[2] if max_length_q is None else max_length_q
        packed = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
        out = varlen_attention(packed[0], packed[1], packed[2], cu_seq_lens_q, longest, scale, name)
        return out.unsqueeze(0), None

    implementation = f"{backend.transformers_name}_opaque"
    AttentionInterface.register(implementation, attend)
    AttentionMaskInterface.register(implementation, sdpa_mask)
    return implementation
