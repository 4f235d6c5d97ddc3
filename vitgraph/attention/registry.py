"""The attention backends by name, and how one is chosen for a device and a tower."""

from __future__ import annotations

from importlib import import_module

import torch

from vitgraph.attention.base import AttentionBackend
from vitgraph.errors import BackendError

BACKENDS: dict[str, str] = {
    "FLASH_ATTN": "vitgraph.attention.flash_attn:FlashAttnBackend",
    "TORCH_SDPA": "vitgraph.attention.torch_sdpa:TorchSdpaBackend",
}
"""Registry name to `module:class`; one line a backend, in order of preference on a GPU."""

AUTO = "auto"


def backend_class(name: str) -> type[AttentionBackend]:
    """The class registered as `name`.

    Raises:
        BackendError: No backend has that name; the known ones are listed.
    """
    if name not in BACKENDS:
        raise BackendError(f"unknown attention backend {name!r}; known: {', '.join(BACKENDS)}, or {AUTO}")
    module, class_name = BACKENDS[name].split(":")
    return getattr(import_module(module), class_name)


def unavailable_backends(device: torch.device) -> dict[str, str]:
    """Name to reason of each backend that cannot run on `device`."""
    reasons = {name: backend_class(name).unavailable_reason(device) for name in BACKENDS}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def create_backend(name: str, device: torch.device, *, flash_attn_version: int | None = None) -> AttentionBackend:
    """Makes the backend `name` and makes it known to transformers.

    Args:
        name: A registry name; `auto` takes the first that is available on `device`.
        device: Where it will run.
        flash_attn_version: Forces the FlashAttention generation of `FLASH_ATTN`.

    Raises:
        BackendError: Unknown, or not available here; nothing else is used instead.
    """
    if name == AUTO:
        missing = unavailable_backends(device)
        name = next(candidate for candidate in BACKENDS if candidate not in missing)
    chosen = backend_class(name)
    reason = chosen.unavailable_reason(device)
    if reason is not None:
        here = [other for other in BACKENDS if backend_class(other).unavailable_reason(device) is None]
        raise BackendError(f"attention backend {name} cannot run on {device}: {reason}. Available: {', '.join(here)}")
    if flash_attn_version is not None:
        from vitgraph.attention.flash_attn import FlashAttnBackend

        if not issubclass(chosen, FlashAttnBackend):
            raise BackendError(f"--flash-attn-version {flash_attn_version} was given, but the backend is {name}")
        backend: AttentionBackend = chosen(flash_attn_version, device)
    else:
        backend = chosen()
    _register_with_transformers(backend)
    return backend


def _register_with_transformers(backend: AttentionBackend) -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(backend.transformers_name, backend.transformers_function)
    # A name without a mask function gets no mask at all, silently: padded rows would be attended.
    AttentionMaskInterface.register(backend.transformers_name, sdpa_mask)
