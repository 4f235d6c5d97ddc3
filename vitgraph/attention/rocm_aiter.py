"""`ROCM_AITER_FA`: the varlen attention of AMD's aiter package; never run by this project, which has had no AMD GPU."""

from __future__ import annotations

from typing import ClassVar

import torch

from vitgraph.attention.base import HalfPrecisionBackend, Packed
from vitgraph.attention.flash_attn import installed_version, package_kernel

UNTESTED = "untested: this project has not been run on an AMD GPU"


class RocmAiterBackend(HalfPrecisionBackend):
    """Eager only: that its call can be captured, and that stale padding cannot reach a valid row, was never shown."""

    name: ClassVar[str] = "ROCM_AITER_FA"
    is_capture_safe: ClassVar[bool] = False
    computes: ClassVar[str] = "aiter"

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__()
        from aiter import flash_attn_varlen_func

        self._kernel = package_kernel(flash_attn_varlen_func)
        self.implementation = f"aiter {installed_version('aiter')} ({UNTESTED})"

    @classmethod
    def unavailable_reason(cls, device: torch.device) -> str | None:
        if device.type != "cuda" or torch.version.hip is None:
            here = device.type if device.type != "cuda" else f"torch for CUDA {torch.version.cuda}"
            return f"it needs an AMD GPU and a ROCm build of torch, this is {here} ({UNTESTED})"
        try:
            from aiter import flash_attn_varlen_func  # noqa: F401
        except ImportError as error:
            return f"aiter does not import ({error}); install AMD's aiter package ({UNTESTED})"
        return None

    def varlen(self, *packed: *Packed) -> torch.Tensor:
        return self._kernel(None, *packed)
