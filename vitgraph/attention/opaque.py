"""Attention as one opaque torch operator, so that a compiled block is traced around it and not into it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import library

from vitgraph.attention.base import AttentionBackend, register_with_transformers, transformers_function

_BACKENDS: dict[str, AttentionBackend] = {}
"""Backends that compiled blocks call, by the name that their operator is given."""

_OPERATORS = library.Library("vitgraph", "FRAGMENT")


def _define(schema: str, compute: Callable[..., torch.Tensor], example: Callable[..., torch.Tensor]) -> Any:
    """Makes an operator; without torch's `custom_op`, whose every call costs 5 us more on the host."""
    name = schema.partition("(")[0]
    _OPERATORS.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for device in ("CPU", "CUDA"):
        _OPERATORS.impl(name, compute, device)
    library.register_fake(f"{_OPERATORS.ns}::{name}", example, lib=_OPERATORS)
    return getattr(getattr(torch.ops, _OPERATORS.ns), name).default


varlen_attention = _define(
    "varlen_attention(str backend, Tensor query, Tensor key, Tensor value, Tensor cu_seqlens, SymInt max_seqlen, "
    "float scale) -> Tensor",
    lambda backend, *packed: _BACKENDS[backend].varlen(*packed),
    lambda _, query, key, value, *rest: query.new_empty((*query.shape[:2], value.shape[2])),
)
dense_attention = _define(
    "dense_attention(str backend, Tensor query, Tensor key, Tensor value, Tensor? mask, float scale) -> Tensor",
    lambda backend, *tiles: _BACKENDS[backend].dense(*tiles).contiguous(),
    lambda _, query, key, value, *rest: query.new_empty((*query.transpose(1, 2).shape[:3], value.shape[3])),
)


def register_opaque(backend: AttentionBackend) -> str:
    """Makes the operator form of a backend known to transformers.

    Returns:
        The attention implementation that a tower is set to before its blocks are compiled.
    """
    name, implementation = backend.name, f"{backend.transformers_name}_opaque"
    _BACKENDS[name] = backend
    # The compiler may reuse the memory of what an operator returns, so layers must not share one output.
    backend.outputs.are_fresh = True
    attend = transformers_function(partial(varlen_attention, name), partial(dense_attention, name))
    register_with_transformers(implementation, attend)
    return implementation
