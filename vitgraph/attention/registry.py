"""The attention backends by name, and how one is made for a device and a tower."""

from __future__ import annotations

from typing import Any

import torch

from vitgraph.attention.base import AttentionBackend, TorchSdpaBackend, register_with_transformers
from vitgraph.attention.flash_attn import FlashAttnBackend, RocmAiterBackend
from vitgraph.attention.flashinfer import FlashInferBackend
from vitgraph.attention.measure import try_candidates
from vitgraph.attention.per_shape import PerShapeBackend
from vitgraph.attention.triton_attn import TritonAttnBackend
from vitgraph.errors import BackendError

BACKENDS: dict[str, type[AttentionBackend]] = {
    backend.name: backend
    for backend in (FlashAttnBackend, FlashInferBackend, TritonAttnBackend, RocmAiterBackend, TorchSdpaBackend)
}
"""By name, in order of preference on a GPU where nothing is measured."""

AUTO = "auto"


def backend_class(name: str) -> type[AttentionBackend]:
    """The class registered as `name`.

    Raises:
        BackendError: No backend has that name; the known ones are listed.
    """
    if name not in BACKENDS:
        raise BackendError(f"unknown attention backend {name!r}; known: {', '.join(BACKENDS)}, or {AUTO}")
    return BACKENDS[name]


def unavailable_backends(device: torch.device) -> dict[str, str]:
    """Name to reason of each backend that cannot run on `device`."""
    reasons = {name: backend.unavailable_reason(device) for name, backend in BACKENDS.items()}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def describe_backends(device: torch.device) -> list[dict[str, Any]]:
    """What each backend declares, and whether it can run on `device`: one plain row a backend, in registry order."""
    return [
        {
            "name": name,
            "unavailable_reason": backend.unavailable_reason(device),
            "is_capture_safe": backend.is_capture_safe,
            "head_widths": backend.head_widths,
            "dtypes": list(backend.dtypes) or "any",
            "segment_padding": backend.segment_padding,
            "writes_padding_rows": backend.writes_padding_rows,
        }
        for name, backend in BACKENDS.items()
    ]


def create_backend(
    name: str,
    device: torch.device,
    *,
    flash_attn_version: int | None = None,
    head_width: int | None = None,
    heads: int | None = None,
    dtype: torch.dtype | None = None,
) -> AttentionBackend:
    """Makes the backend `name` and makes it known to transformers.

    Args:
        name: A registry name; or `auto`: on a GPU the fastest at each shape where the tower's heads are given, else the
            first that is available.
        device: Where it will run.
        flash_attn_version: Forces the FlashAttention generation of `FLASH_ATTN`; with `auto`, it chooses `FLASH_ATTN`.
        head_width: Width of one head of the tower.
        heads: Heads of the tower.
        dtype: Dtype of the tower.

    Raises:
        BackendError: Unknown, not available here, or unfit for these heads; nothing else is used instead.
    """
    if name == AUTO and flash_attn_version is not None:
        name = FlashAttnBackend.name
    elif name == AUTO and device.type == "cuda" and head_width is not None and heads is not None and dtype is not None:
        tried = try_candidates(device, head_width, heads, dtype, backends=BACKENDS)
        usable = {found.label: found.backend for found in tried if found.backend is not None}
        return _registered(PerShapeBackend(usable, heads, head_width, dtype, device, tried))
    elif name == AUTO:
        name = next(known for known, backend in BACKENDS.items() if backend.unavailable_reason(device) is None)
    chosen = backend_class(name)
    reason = chosen.unavailable_reason(device)
    if reason is not None:
        missing = unavailable_backends(device)
        here = ", ".join(other for other in BACKENDS if other not in missing)
        raise BackendError(f"attention backend {name} cannot run on {device}: {reason}. Available: {here}")
    if flash_attn_version is not None and not chosen.has_versions:
        raise BackendError(f"--flash-attn-version {flash_attn_version} was given, but the backend is {name}")
    backend = chosen.for_device(device, None if flash_attn_version is None else str(flash_attn_version))
    if head_width is not None and dtype is not None:
        reason = backend.unsupported_reason(head_width, dtype)
        if reason is not None:
            raise BackendError(f"attention backend {name} does not take this tower: {reason}")
    return _registered(backend)


def _registered(backend: AttentionBackend) -> AttentionBackend:
    register_with_transformers(backend.transformers_name, backend.transformers_function)
    return backend
