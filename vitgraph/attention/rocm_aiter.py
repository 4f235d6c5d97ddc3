"""`ROCM_AITER_FA`: the varlen attention of AMD's aiter package; never run by this project, which has had no AMD GPU."""

from __future__ import annotations

from importlib import metadata
from typing import Any, ClassVar

import torch

from vitgraph.attention.base import AttentionBackend, half_precision_reason, packed_options, width_reason

UNTESTED = "untested: this project has not been run on an AMD GPU"


class RocmAiterBackend(AttentionBackend):
    """Eager only: that its call can be captured, and that stale padding cannot reach a valid row, was never shown."""

    name: ClassVar[str] = "ROCM_AITER_FA"
    is_capture_safe: ClassVar[bool] = False
    writes_padding_rows: ClassVar[bool] = False
    head_widths: ClassVar[str] = "multiples of 8 up to 256"
    dtypes: ClassVar[tuple[str, ...]] = ("float16", "bfloat16")

    def __init__(self) -> None:
        super().__init__()
        from aiter import flash_attn_varlen_func

        self._function: Any = flash_attn_varlen_func
        try:
            version = metadata.version("aiter")
        except metadata.PackageNotFoundError:
            version = "of unknown version"
        self.implementation = f"aiter {version} ({UNTESTED})"

    @classmethod
    def unavailable_reason(cls, device: torch.device) -> str | None:
        if device.type != "cuda" or torch.version.hip is None:
            return f"it needs an AMD GPU and a ROCm build of torch, this is {_built_for(device)} ({UNTESTED})"
        try:
            from aiter import flash_attn_varlen_func  # noqa: F401
        except ImportError as error:
            return f"aiter does not import ({error}); install AMD's aiter package ({UNTESTED})"
        return None

    def unsupported_reason(self, head_width: int, dtype: torch.dtype) -> str | None:
        return half_precision_reason("aiter", dtype) or width_reason(head_width, 8, 256)

    def varlen(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_seqlen: int,
        scale: float,
    ) -> torch.Tensor:
        result = self._function(query, key, value, **packed_options(cu_seqlens, max_seqlen, scale))
        return result[0] if isinstance(result, tuple | list) else result


def _built_for(device: torch.device) -> str:
    if device.type != "cuda":
        return device.type
    return f"torch for CUDA {torch.version.cuda}"
