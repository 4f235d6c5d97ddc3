"""`FLASH_ATTN`: FlashAttention 4 where its package and the GPU allow, else the FlashAttention 2 inside torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import metadata
from typing import Any, ClassVar

import torch

from vitgraph.attention.base import AttentionBackend
from vitgraph.errors import BackendError

FA4_CAPABILITIES = (9, 10, 11)
"""Major compute capabilities that the flash-attn-4 package has forward kernels for."""


class FlashAttnBackend(AttentionBackend):
    """Varlen FlashAttention; half-precision only.

    Neither generation writes the rows past the last segment. Generation 2 clears what it loads past a segment's end,
    so stale padding cannot reach a valid row. Generation 4 loads whole tiles, and a NaN in the padding of `value`
    would turn into 0 * NaN: its output therefore goes to a buffer that starts as zeros and is shared by all layers
    (`reserve_padding_safe_output`), so that padded rows always hold finite numbers. Eager uses no such buffer.

    Args:
        version: 2 or 4 forces a generation; None takes the newest that runs on `device`.
        device: Where it will run; None takes the current CUDA device.
    """

    name: ClassVar[str] = "FLASH_ATTN"
    is_capture_safe: ClassVar[bool] = True
    writes_padding_rows: ClassVar[bool] = False

    def __init__(self, version: int | None = None, device: torch.device | None = None) -> None:
        super().__init__()
        device = device or torch.device("cuda", torch.cuda.current_device())
        if version is None:
            version = 4 if _fa4_unavailable_reason(device) is None else 2
        reason = {2: _fa2_unavailable_reason, 4: _fa4_unavailable_reason}.get(version, _no_such_version)(device)
        if reason is not None:
            raise BackendError(f"FlashAttention {version} cannot run on {device}: {reason}")
        self.version = version
        self._kernel: Callable[..., torch.Tensor]
        if version == 4:
            self._kernel = _fa4_kernel()
            self.implementation = f"flash-attn-4 {metadata.version('flash-attn-4')}"
        else:
            self._kernel = _fa2_kernel()
            self.implementation = f"FlashAttention 2 in torch {torch.__version__}"
        self._outputs: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}
        self._padded_rows = 0

    @classmethod
    def unavailable_reason(cls, device: torch.device) -> str | None:
        return _fa2_unavailable_reason(device)

    def unsupported_reason(self, head_width: int, dtype: torch.dtype) -> str | None:
        if dtype not in (torch.float16, torch.bfloat16):
            return f"FlashAttention computes in float16 or bfloat16, not {dtype}; use --dtype bfloat16 or TORCH_SDPA"
        if head_width % 8 or head_width > 256:
            return f"head width {head_width} is not a multiple of 8 up to 256"
        return None

    def reserve_padding_safe_output(self, rows: int) -> None:
        if self.version == 4 and rows > self._padded_rows:
            self._padded_rows = rows
            self._outputs.clear()

    def release_padding_safe_output(self) -> None:
        self._padded_rows = 0
        self._outputs.clear()

    def varlen(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_seqlen: int,
        scale: float,
    ) -> torch.Tensor:
        if self.version == 2:
            return self._kernel(query, key, value, cu_seqlens, max_seqlen, scale)
        out = self._padding_safe_output(query) if self.is_on_graph_path else None
        return self._kernel(query, key, value, cu_seqlens, max_seqlen, scale, out)

    def _padding_safe_output(self, query: torch.Tensor) -> torch.Tensor:
        rows, heads, width = query.shape
        shape = (heads, width, query.dtype)
        if shape not in self._outputs:
            self._outputs[shape] = torch.zeros(
                max(self._padded_rows, rows), heads, width, dtype=query.dtype, device=query.device
            )
        return self._outputs[shape][:rows]


def _no_such_version(device: torch.device) -> str:
    return "known generations are 2 and 4"


def _fa2_unavailable_reason(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"FlashAttention needs a CUDA device, this is {device.type}"
    if torch.cuda.get_device_capability(device)[0] < 8:
        return "FlashAttention 2 needs compute capability 8.0 or newer"
    try:
        from torch.nn.attention import varlen  # noqa: F401
    except ImportError:
        return f"torch {torch.__version__} has no torch.nn.attention.varlen; install torch 2.11 or newer"
    return None


def _fa4_unavailable_reason(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"FlashAttention needs a CUDA device, this is {device.type}"
    if torch.cuda.get_device_capability(device)[0] not in FA4_CAPABILITIES:
        return "flash-attn-4 has kernels for Hopper and Blackwell only"
    try:
        import flash_attn.cute.interface  # noqa: F401
    except ImportError as error:
        return f"flash-attn-4 does not import ({error}); pip install 'vitgraph[flash-attn-4]'"
    return None


def _fa2_kernel() -> Callable[..., torch.Tensor]:
    from torch.nn.attention.varlen import varlen_attn

    takes_scale = "scale" in inspect.signature(varlen_attn).parameters

    def call(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_seqlen: int,
        scale: float,
    ) -> torch.Tensor:
        options: dict[str, Any] = {"scale": scale} if takes_scale else {}
        if not takes_scale and scale != query.shape[-1] ** -0.5:
            query = query * (scale * query.shape[-1] ** 0.5)
        return varlen_attn(query, key, value, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, **options)

    return call


def _fa4_kernel() -> Callable[..., torch.Tensor]:
    # The public function cannot be given its output, which padding safety needs; see the class.
    from flash_attn.cute.interface import _flash_attn_fwd

    def call(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_seqlen: int,
        scale: float,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        return _flash_attn_fwd(
            query,
            key,
            value,
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_k=cu_seqlens,
            max_seqlen_q=max_seqlen,
            max_seqlen_k=max_seqlen,
            softmax_scale=scale,
            out=out,
        )[0]

    return call
