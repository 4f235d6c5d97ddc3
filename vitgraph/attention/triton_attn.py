"""`TRITON_ATTN`: a varlen kernel of our own in Triton; its tile sizes are measured once for a device and head shape.

Shape legend: N packed rows, S segment slots, H heads, E head width.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import Any, ClassVar, NamedTuple

import torch

from vitgraph.attention.base import HalfPrecisionBackend, Packed
from vitgraph.attention.measure import AttentionCase, queued_ms, reference_attention, relative_error, segments_of
from vitgraph.errors import BackendError

logger = logging.getLogger(__name__)

STRIDE_UNIT = 8
"""The kernel takes strides in units of so many elements (16 bytes), which lets its loads be 16 bytes wide."""

LENGTH_CLASSES = (64, 441, 3072)
"""Segment lengths that tiles are measured at; a call uses the first that is more than half its longest segment."""

ROW_CLASSES = (512, 3072, 8192)
"""Packed rows that tiles are measured at; a call uses the first that is more than half its own."""

SMALLEST_CHUNK = 16
"""Matrix instructions take no fewer columns."""

CHUNKED_SHAPES = ((64, 64, 4, 3), (64, 32, 4, 3), (128, 64, 8, 3))
WHOLE_SHAPES = ((64, 64, 4, 3), (64, 32, 4, 3), (128, 64, 8, 3), (128, 128, 8, 3))
WIDE_SHAPES = ((64, 64, 4, 2), (128, 64, 8, 2), (64, 32, 4, 3))
"""Rows, keys, warps and stages worth measuring, for heads in chunks, whole, and whole above 128: the fastest on an H200
for segments of 64 to 8160 rows."""

COMPILE_THREADS = 8

INTERPRET_VARIABLE = "TRITON_INTERPRET"


@dataclass(frozen=True, slots=True)
class Tile:
    """What a launch is compiled for.

    Attributes:
        block_q: Query rows of a program.
        block_k: Keys visited at once.
        warps: Warps of a program.
        stages: Depth of the pipeline that loads keys and values.
        widths: Chunks that a head is cut into; 0 where there are fewer than three.
        split_tail: Whole key blocks run without masks and the rest once with one; False masks every block. A head in
            several chunks needs False: with True, Triton 3.6 made kernels for an H200 that were wrong wherever a
            segment has a rest, or read outside their input.
    """

    block_q: int
    block_k: int
    warps: int
    stages: int
    widths: tuple[int, int, int]
    split_tail: bool = True


HeadShape = tuple[torch.device, torch.dtype, int, int]
"""Device, dtype, heads and head width."""


class TuningKey(NamedTuple):
    """What a tile is chosen by: a `HeadShape`, and classes of segment lengths and packed rows."""

    device: torch.device
    dtype: torch.dtype
    heads: int
    head_width: int
    length_class: int
    row_class: int

    @property
    def head_shape(self) -> HeadShape:
        return self[:4]

    @property
    def case(self) -> AttentionCase:
        """The input that the class is measured with."""
        length = min(self.length_class, self.row_class)
        return AttentionCase(self.heads, self.head_width, self.dtype, segments_of(length, self.row_class))


CHECK_CASE = ((1, 17, 200, 129, 64, 3), 9, 70)
CHECK_TOLERANCE = 1e-2
"""Every tile computes segments of these lengths in that many slots, with that many rows of padding, before it may be
chosen: whole and broken blocks, empty slots, NaN as padding."""

Arguments = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float]
"""Query, key, value, output, segment offsets and scale of a launch."""

_AGREES: dict[tuple[HeadShape, Tile], bool] = {}
"""Whether a tile's result is that of the definition, so that a compiler's fault can never reach a user's result."""

_CHOSEN: dict[TuningKey, Tile] = {}
"""The fastest tile: whichever backend object of the process asks, it is the same."""


def chunk_widths(head_width: int) -> list[tuple[int, int, int]]:
    """Ways to cut a head into powers of two: without excess beyond 16, as two chunks, and as one; duplicates removed.

    72 is cut as 64 + 16 or padded to 128; 112 as 64 + 32 + 16, as 64 + 64 or as 128; a power of two only as itself.
    """
    parts: list[int] = []
    rest = -(-head_width // SMALLEST_CHUNK) * SMALLEST_CHUNK
    while rest:
        parts.append(1 << (rest.bit_length() - 1))
        rest -= parts[-1]
    ways = [parts, [_power_of_two(head_width)]]
    if len(parts) > 2:
        ways.insert(1, [parts[0], _power_of_two(head_width - parts[0])])
    padded = [[*way, 0, 0] for way in ways if len(way) <= 3]
    return list(dict.fromkeys((way[0], way[1], way[2]) for way in padded))


def _power_of_two(width: int) -> int:
    return max(SMALLEST_CHUNK, 1 << (width - 1).bit_length())


def candidate_tiles(head_width: int) -> list[Tile]:
    """Tiles to measure for a head width; the first is used where nothing can be measured."""
    tiles = []
    for widths in chunk_widths(head_width):
        if widths[1]:
            tiles += [Tile(*shape, widths, split_tail=False) for shape in CHUNKED_SHAPES]
        elif widths[0] > 128:
            tiles += [Tile(*shape, widths) for shape in WIDE_SHAPES]
        else:
            tiles += [Tile(*shape, widths) for shape in WHOLE_SHAPES]
    return tiles


def _class_of(value: int, classes: tuple[int, ...]) -> int:
    return next((known for known in classes if value < 2 * known), classes[-1])


class TritonAttnBackend(HalfPrecisionBackend):
    """Loads nothing past a segment's end, so padding may hold anything; a launch depends on shapes, not on lengths.

    Tiles are measured in the first call of a head shape and size class, which a warm-up makes; a capture measures
    nothing.
    """

    name: ClassVar[str] = "TRITON_ATTN"
    computes: ClassVar[str] = "TRITON_ATTN"
    segment_padding: ClassVar[str] = "an empty segment costs one program a head that ends at once"

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__()
        from vitgraph.attention import triton_kernel

        self._kernel: Any = triton_kernel.varlen_forward
        self._is_interpreted = os.environ.get(INTERPRET_VARIABLE) == "1"
        self._head_shapes: dict[HeadShape, None] = {}
        self.implementation = f"vitgraph kernel in triton {metadata.version('triton')}"
        if self._is_interpreted:
            self.implementation += ", interpreted"

    @classmethod
    def unavailable_reason(cls, device: torch.device) -> str | None:
        try:
            import triton  # noqa: F401
        except ImportError as error:
            return f"triton does not import ({error}); pip install triton"
        if os.environ.get(INTERPRET_VARIABLE) == "1":
            return None
        if device.type != "cuda":
            return (
                f"a Triton kernel needs a GPU, this is {device.type} (for tests, {INTERPRET_VARIABLE}=1 interprets it)"
            )
        if torch.cuda.get_device_capability(device)[0] < 8:
            return "its matrix products in bfloat16 need compute capability 8.0 or newer"
        return None

    def varlen(self, *packed: *Packed) -> torch.Tensor:
        query, key, value, cu_seqlens, max_seqlen, scale = packed
        rows, heads, width = query.shape
        out = torch.empty((rows, heads, width), dtype=query.dtype, device=query.device)
        if rows == 0 or cu_seqlens.shape[0] < 2:
            return out
        head_shape = (query.device, query.dtype, heads, width)
        self._head_shapes[head_shape] = None
        tile = self._tile(head_shape, rows, max_seqlen)
        self._launch(tile, _wide(query), _wide(key), _wide(value), out, cu_seqlens, scale)
        return out

    def prepare(self, shapes: Iterable[tuple[int, int, int]]) -> None:
        for rows, _, max_seqlen in shapes:
            for head_shape in self._head_shapes:
                self._tile(head_shape, rows, max_seqlen)

    def _tile(self, head_shape: HeadShape, rows: int, max_seqlen: int) -> Tile:
        length_class = _class_of(min(max_seqlen, rows), LENGTH_CLASSES)
        key = TuningKey(*head_shape, length_class, _class_of(rows, ROW_CLASSES))
        chosen = _CHOSEN.get(key)
        if chosen is None:
            if self._is_interpreted or torch.cuda.is_current_stream_capturing():
                return candidate_tiles(key.head_width)[0]
            started = time.perf_counter()
            times = self._measure_tiles(key)
            self.plan_build_ms += (time.perf_counter() - started) * 1e3
            chosen = _CHOSEN[key] = min(times, key=times.__getitem__)
        return chosen

    def _measure_tiles(self, key: TuningKey) -> dict[Tile, float]:
        """Milliseconds of each tile that is right, on the class's own input.

        Raises:
            BackendError: No tile is right.
        """
        query, value_key, value = key.case.tensors(key.device)
        offsets = key.case.offsets(key.device)
        out = torch.empty_like(query)
        arguments = (query, value_key, value, out, offsets, key.head_width**-0.5)
        times: dict[Tile, float] = {}
        tiles = candidate_tiles(key.head_width)
        self._compile_together(tiles, arguments)
        for tile in tiles:
            try:
                if self._agrees(tile, key):
                    times[tile] = queued_ms(partial(self._launch, tile, *arguments), key.device)
            except Exception as error:  # a tile that does not fit this GPU says so in many ways
                logger.info("TRITON_ATTN: %s left out: %r", tile, error)
        if not times:
            raise BackendError(
                f"no tile of TRITON_ATTN is right for head width {key.head_width} in {key.dtype} with "
                f"{self.implementation} on this GPU; use FLASH_ATTN or FLASHINFER"
            )
        return times

    def _agrees(self, tile: Tile, key: TuningKey) -> bool:
        known = _AGREES.get((key.head_shape, tile))
        if known is None:
            case = AttentionCase(key.heads, key.head_width, key.dtype, *CHECK_CASE)
            inputs, offsets, scale = case.tensors(key.device), case.offsets(key.device), key.head_width**-0.5
            for tensor in inputs:
                tensor[sum(case.lengths) :] = float("nan")
            out = torch.full_like(inputs[0], float("nan"))
            self._launch(tile, *inputs, out, offsets, scale)
            error = relative_error(out, reference_attention(*inputs, offsets, scale), offsets)
            known = _AGREES[key.head_shape, tile] = error < CHECK_TOLERANCE
            if not known:
                logger.warning("TRITON_ATTN: %s is wrong by %.2g on this GPU and is not used", tile, error)
        return known

    def _compile_together(self, tiles: list[Tile], arguments: Arguments) -> None:
        """Compiles in parallel where this Triton can; a tile that does not compile fails again when it is launched."""
        import triton

        mode = getattr(triton, "AsyncCompileMode", None)
        if mode is None:
            return
        with ThreadPoolExecutor(COMPILE_THREADS) as threads, mode(threads, ignore_errors=True):
            for tile in tiles:
                positional, options = _launch_arguments(tile, *arguments)
                self._kernel.warmup(*positional, grid=(1,), **options)

    def _launch(self, tile: Tile, *arguments: *Arguments) -> None:
        query, _, _, _, cu_seqlens, _ = arguments
        positional, options = _launch_arguments(tile, *arguments)
        programs = query.shape[0] // tile.block_q + cu_seqlens.shape[0] - 1
        with torch.cuda.device(query.device) if query.is_cuda else nullcontext():
            self._kernel[(programs, query.shape[1])](*positional, **options)


def _launch_arguments(tile: Tile, *arguments: *Arguments) -> tuple[tuple[Any, ...], dict[str, Any]]:
    *tensors, cu_seqlens, scale = arguments
    strides = [tensor.stride(axis) // STRIDE_UNIT for tensor in tensors for axis in (0, 1)]
    positional = (*tensors, cu_seqlens, cu_seqlens.shape[0] - 1, scale * math.log2(math.e), *strides)
    options = {
        "STRIDE": STRIDE_UNIT,
        "HEAD_WIDTH": tensors[0].shape[2],
        "WIDTH_0": tile.widths[0],
        "WIDTH_1": tile.widths[1],
        "WIDTH_2": tile.widths[2],
        "BLOCK_Q": tile.block_q,
        "BLOCK_K": tile.block_k,
        "SPLIT_TAIL": tile.split_tail,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
    return positional, options


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself where the kernel can load 16 bytes at once from every row of every head, else a copy."""
    if (
        tensor.stride(2) == 1
        and tensor.stride(0) % STRIDE_UNIT == 0
        and tensor.stride(1) % STRIDE_UNIT == 0
        and tensor.data_ptr() % (STRIDE_UNIT * tensor.element_size()) == 0
    ):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
