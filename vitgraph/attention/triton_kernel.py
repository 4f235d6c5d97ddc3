"""Triton kernels: attention within packed segments, forward only, and zeros past the last one.

Shape legend: N packed rows, S segment slots, H heads, E head width, W elements of a row.

A head is cut into up to three chunks whose widths are powers of two (72 = 64 + 16, 8 of them masked), so that a width
between two powers costs what it is and not the next power. Keys are visited block by block with a running maximum and
sum. Nothing past a segment's end is ever loaded, so padding may hold anything, NaN included.
"""

# Compile-time arguments are in capitals, as everywhere in Triton.
# ruff: noqa: N803

from __future__ import annotations

import torch
import triton
import triton.language as tl

TAIL_ROWS, TAIL_BLOCK = 32, 128
"""Rows of a program that zeros a tail, and elements that it writes at once."""


@triton.jit
def _load(
    base: tl.tensor,
    stride: tl.tensor,
    valid_rows: tl.tensor,
    ROWS: tl.constexpr,
    START: tl.constexpr,
    WIDTH: tl.constexpr,
    HEAD_WIDTH: tl.constexpr,
    MASK_ROWS: tl.constexpr,
) -> tl.tensor:
    """Columns START to START + WIDTH of ROWS rows; zeros past `valid_rows` and past the head's width."""
    rows = tl.arange(0, ROWS)[:, None]
    columns = START + tl.arange(0, WIDTH)[None, :]
    pointers = base + rows * stride + columns
    if MASK_ROWS:
        if START + WIDTH > HEAD_WIDTH:
            tile = tl.load(pointers, mask=(rows < valid_rows) & (columns < HEAD_WIDTH), other=0.0)
        else:
            tile = tl.load(pointers, mask=rows < valid_rows, other=0.0)
    elif START + WIDTH > HEAD_WIDTH:
        tile = tl.load(pointers, mask=columns < HEAD_WIDTH, other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def _store(
    base: tl.tensor,
    stride: tl.tensor,
    valid_rows: tl.tensor,
    tile: tl.tensor,
    ROWS: tl.constexpr,
    START: tl.constexpr,
    WIDTH: tl.constexpr,
    HEAD_WIDTH: tl.constexpr,
) -> None:
    """Writes `tile` to columns START to START + WIDTH of the first `valid_rows` of ROWS rows."""
    rows = tl.arange(0, ROWS)[:, None]
    columns = START + tl.arange(0, WIDTH)[None, :]
    mask = rows < valid_rows
    if START + WIDTH > HEAD_WIDTH:
        mask = mask & (columns < HEAD_WIDTH)
    tl.store(base + rows * stride + columns, tile, mask=mask)


@triton.jit
def _attend(
    query_0: tl.tensor,
    query_1: tl.tensor,
    query_2: tl.tensor,
    sum_0: tl.tensor,
    sum_1: tl.tensor,
    sum_2: tl.tensor,
    row_max: tl.tensor,
    row_sum: tl.tensor,
    key_block: tl.tensor,
    value_block: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    valid_keys: tl.tensor,
    scale_log2: tl.tensor,
    BLOCK_K: tl.constexpr,
    HEAD_WIDTH: tl.constexpr,
    WIDTH_0: tl.constexpr,
    WIDTH_1: tl.constexpr,
    WIDTH_2: tl.constexpr,
    MASKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Adds one block of keys to the running output, maximum and sum."""
    key = _load(key_block, key_stride, valid_keys, BLOCK_K, 0, WIDTH_0, HEAD_WIDTH, MASKED)
    scores = tl.dot(query_0, tl.trans(key))
    if WIDTH_1 > 0:
        key = _load(key_block, key_stride, valid_keys, BLOCK_K, WIDTH_0, WIDTH_1, HEAD_WIDTH, MASKED)
        scores = tl.dot(query_1, tl.trans(key), scores)
    if WIDTH_2 > 0:
        key = _load(key_block, key_stride, valid_keys, BLOCK_K, WIDTH_0 + WIDTH_1, WIDTH_2, HEAD_WIDTH, MASKED)
        scores = tl.dot(query_2, tl.trans(key), scores)
    if MASKED:
        scores = tl.where(tl.arange(0, BLOCK_K)[None, :] < valid_keys, scores, float("-inf"))

    new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
    weights = tl.exp2(scores * scale_log2 - new_max[:, None])
    shrink = tl.exp2(row_max - new_max)
    row_sum = row_sum * shrink + tl.sum(weights, 1)
    weights = weights.to(value_block.dtype.element_ty)

    value = _load(value_block, value_stride, valid_keys, BLOCK_K, 0, WIDTH_0, HEAD_WIDTH, MASKED)
    sum_0 = tl.dot(weights, value, sum_0 * shrink[:, None])
    if WIDTH_1 > 0:
        value = _load(value_block, value_stride, valid_keys, BLOCK_K, WIDTH_0, WIDTH_1, HEAD_WIDTH, MASKED)
        sum_1 = tl.dot(weights, value, sum_1 * shrink[:, None])
    if WIDTH_2 > 0:
        value = _load(value_block, value_stride, valid_keys, BLOCK_K, WIDTH_0 + WIDTH_1, WIDTH_2, HEAD_WIDTH, MASKED)
        sum_2 = tl.dot(weights, value, sum_2 * shrink[:, None])
    return sum_0, sum_1, sum_2, new_max, row_sum


# Every launch of a tile shares one compiled kernel: nothing may compile because a length or a stride changed.
@triton.jit(
    do_not_specialize=[
        "slots",
        "query_row",
        "query_head",
        "key_row",
        "key_head",
        "value_row",
        "value_head",
        "out_row",
        "out_head",
    ],
    do_not_specialize_on_alignment=["cu_seqlens"],
)
def varlen_forward(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    out: tl.tensor,
    cu_seqlens: tl.tensor,
    slots: tl.tensor,
    scale_log2: tl.tensor,
    query_row: tl.tensor,
    query_head: tl.tensor,
    key_row: tl.tensor,
    key_head: tl.tensor,
    value_row: tl.tensor,
    value_head: tl.tensor,
    out_row: tl.tensor,
    out_head: tl.tensor,
    STRIDE: tl.constexpr,
    HEAD_WIDTH: tl.constexpr,
    WIDTH_0: tl.constexpr,
    WIDTH_1: tl.constexpr,
    WIDTH_2: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_TAIL: tl.constexpr,
) -> None:
    """One program computes BLOCK_Q rows of one segment and one head.

    Programs are numbered so that segment s owns those from `cu_seqlens[s] // BLOCK_Q + s` on: enough for its blocks,
    whatever the lengths are, and `N // BLOCK_Q + S` in all. A program finds its segment by bisection; one that has no
    rows ends there. `*_row` and `*_head` are strides in units of STRIDE elements, which tells the compiler how wide
    loads may be; `scale_log2` is the scale times log2(e). SPLIT_TAIL is for a head in one chunk only; see `Tile`.
    """
    program = tl.program_id(0)
    low = 0
    high = slots
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(cu_seqlens + middle) // BLOCK_Q + middle <= program:
            low = middle
        else:
            high = middle
    start = tl.load(cu_seqlens + low)
    length = tl.load(cu_seqlens + low + 1) - start
    first = (program - start // BLOCK_Q - low) * BLOCK_Q
    if first >= length:
        return

    head = tl.program_id(1).to(tl.int64)
    segment = start.to(tl.int64)
    query_block = query + head * (query_head * STRIDE) + (segment + first) * (query_row * STRIDE)
    key_block = key + head * (key_head * STRIDE) + segment * (key_row * STRIDE)
    value_block = value + head * (value_head * STRIDE) + segment * (value_row * STRIDE)
    out_block = out + head * (out_head * STRIDE) + (segment + first) * (out_row * STRIDE)
    query_stride = query_row * STRIDE
    key_stride = key_row * STRIDE
    value_stride = value_row * STRIDE
    out_stride = out_row * STRIDE

    rows = length - first
    query_0 = _load(query_block, query_stride, rows, BLOCK_Q, 0, WIDTH_0, HEAD_WIDTH, True)
    sum_0 = tl.zeros([BLOCK_Q, WIDTH_0], tl.float32)
    # Chunks that do not exist are carried as scalars, which the compiler drops.
    query_1 = 0.0
    query_2 = 0.0
    sum_1 = 0.0
    sum_2 = 0.0
    if WIDTH_1 > 0:
        query_1 = _load(query_block, query_stride, rows, BLOCK_Q, WIDTH_0, WIDTH_1, HEAD_WIDTH, True)
        sum_1 = tl.zeros([BLOCK_Q, WIDTH_1], tl.float32)
    if WIDTH_2 > 0:
        query_2 = _load(query_block, query_stride, rows, BLOCK_Q, WIDTH_0 + WIDTH_1, WIDTH_2, HEAD_WIDTH, True)
        sum_2 = tl.zeros([BLOCK_Q, WIDTH_2], tl.float32)
    row_max = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_Q], tl.float32)

    # fmt: off
    if SPLIT_TAIL:
        unmasked = length // BLOCK_K * BLOCK_K
        for _ in range(0, unmasked, BLOCK_K):
            sum_0, sum_1, sum_2, row_max, row_sum = _attend(
                query_0, query_1, query_2, sum_0, sum_1, sum_2, row_max, row_sum, key_block, value_block, key_stride,
                value_stride, BLOCK_K, scale_log2, BLOCK_K, HEAD_WIDTH, WIDTH_0, WIDTH_1, WIDTH_2, False,
            )
            key_block += BLOCK_K * key_stride
            value_block += BLOCK_K * value_stride
        if unmasked < length:
            sum_0, sum_1, sum_2, row_max, row_sum = _attend(
                query_0, query_1, query_2, sum_0, sum_1, sum_2, row_max, row_sum, key_block, value_block, key_stride,
                value_stride, length - unmasked, scale_log2, BLOCK_K, HEAD_WIDTH, WIDTH_0, WIDTH_1, WIDTH_2, True,
            )
    else:
        for done in range(0, length, BLOCK_K):
            sum_0, sum_1, sum_2, row_max, row_sum = _attend(
                query_0, query_1, query_2, sum_0, sum_1, sum_2, row_max, row_sum, key_block, value_block, key_stride,
                value_stride, length - done, scale_log2, BLOCK_K, HEAD_WIDTH, WIDTH_0, WIDTH_1, WIDTH_2, True,
            )
            key_block += BLOCK_K * key_stride
            value_block += BLOCK_K * value_stride
    # fmt: on

    inverse = 1.0 / row_sum
    dtype = out.dtype.element_ty
    _store(out_block, out_stride, rows, (sum_0 * inverse[:, None]).to(dtype), BLOCK_Q, 0, WIDTH_0, HEAD_WIDTH)
    if WIDTH_1 > 0:
        _store(out_block, out_stride, rows, (sum_1 * inverse[:, None]).to(dtype), BLOCK_Q, WIDTH_0, WIDTH_1, HEAD_WIDTH)
    if WIDTH_2 > 0:
        _store(
            out_block,
            out_stride,
            rows,
            (sum_2 * inverse[:, None]).to(dtype),
            BLOCK_Q,
            WIDTH_0 + WIDTH_1,
            WIDTH_2,
            HEAD_WIDTH,
        )


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
    """Zeros rows `cu_seqlens[slots]` to `rows` of `out`, each of `width` elements; a program has ROWS of them.

    It touches no other row: most programs read one offset.
    """
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
        grid = (triton.cdiv(rows, TAIL_ROWS),)
        slots, width = cu_seqlens.shape[0] - 1, out.numel() // rows
        _zero_tail[grid](out, cu_seqlens, slots, rows, width, ROWS=TAIL_ROWS, BLOCK=TAIL_BLOCK)
    return out
