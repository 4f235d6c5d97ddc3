"""A Triton kernel that zeros the rows past the last segment, and touches no other: most programs read one offset.

Shape legend: N packed rows, S segment slots, W elements of a row.
"""

# Compile-time arguments are in capitals, as everywhere in Triton.
# ruff: noqa: N803

from __future__ import annotations

import torch
import triton
import triton.language as tl

ROWS_A_PROGRAM, BLOCK = 32, 128


@triton.jit
def _zero_tail(
    out: tl.tensor,
    cu_seqlens: tl.tensor,
    slots: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Zeros rows `cu_seqlens[slots]` to `rows` of `out`, each of `width` elements; a program has ROWS of them."""
    first = tl.program_id(0) * ROWS
    end = tl.load(cu_seqlens + slots)
    if first + ROWS > end:
        places = first + tl.arange(0, ROWS)[:, None]
        is_past = (places >= end) & (places < rows)
        zeros = tl.zeros((ROWS, BLOCK), dtype=out.dtype.element_ty)
        for start in range(0, width, BLOCK):
            columns = start + tl.arange(0, BLOCK)[None, :]
            tl.store(out + places.to(tl.int64) * width + columns, zeros, mask=is_past & (columns < width))


def zero_tail(out: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Zeros the rows of `out` `[N, ...]` past `cu_seqlens[-1]` in place, without a read of `out` or of the host.

    Args:
        out: Contiguous.
        cu_seqlens: `[S + 1]` int32 offsets on the same device.
    """
    rows = out.shape[0]
    if rows:
        grid = (triton.cdiv(rows, ROWS_A_PROGRAM),)
        slots, width = cu_seqlens.shape[0] - 1, out.numel() // rows
        _zero_tail[grid](out, cu_seqlens, slots, rows, width, ROWS=ROWS_A_PROGRAM, BLOCK=BLOCK)
    return out
