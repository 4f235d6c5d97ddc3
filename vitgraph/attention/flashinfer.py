"""`FLASHINFER`: flashinfer's cuDNN batch prefill, which is what that name means for vision encoders in vLLM.

Shape legend: N packed rows, S segment slots, H heads, E head width.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from typing import Any, ClassVar

import torch

from vitgraph.attention.base import HalfPrecisionBackend, Packed
from vitgraph.errors import BackendError, CaptureError

WORKSPACE_BYTES = 128 << 20

SLOT_BUCKETS = (8, 16, 64)
"""Segment slots that plans are built for; above the last one, multiples of it."""

SEQLEN_FLOOR = 256
"""Smallest bound of segment lengths that plans are built for; above it, powers of two."""

INT32_MAX = 2**31 - 1

INSTALL = "pip install '.[flashinfer]' in a clone of vitgraph"
BROKEN_CUDNN = (91000, 91001)
"""cuDNN releases whose half-precision attention is known to be wrong; cuDNN's own front end refuses them."""

OffsetArguments = dict[str, torch.Tensor]

_LAYOUTS: dict[tuple[int, int, torch.dtype], list[HeadLayout]] = {}
"""Layouts met in this process, by what flashinfer's plan cache can tell apart; see `HeadLayout.variant`."""


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """What a plan bakes in beside its two bounds.

    Attributes:
        heads: Heads.
        width: Width of one head.
        dtype: Dtype of query, key and value.
        strides: Row and head strides of query, key and value, in elements.
        scale: Factor of the scores.
    """

    heads: int
    width: int
    dtype: torch.dtype
    strides: tuple[tuple[int, int], tuple[int, int], tuple[int, int]]
    scale: float

    @property
    def row_strides(self) -> tuple[int, int, int, int]:
        """Elements from row to row of query, key, value and output."""
        return (self.strides[0][0], self.strides[1][0], self.strides[2][0], self.heads * self.width)

    @property
    def variant(self) -> int:
        """A number that differs between layouts which flashinfer's plan cache takes for one.

        Its key leaves out strides and scale: a second layout would silently be computed with the first one's plan. The
        number is added to the bound of key lengths, which is in the key and may be any upper bound.
        """
        known = _LAYOUTS.setdefault((self.heads, self.width, self.dtype), [])
        if self not in known:
            known.append(self)
        return known.index(self)

    def dummies(self, device: torch.device) -> list[torch.Tensor]:
        """One-row query, key and value of this layout; a plan depends on no row count."""
        return [
            torch.empty_strided((1, self.heads, self.width), (*strides, 1), dtype=self.dtype, device=device)
            for strides in self.strides
        ]


class FlashInferBackend(HalfPrecisionBackend):
    """cuDNN attention over packed offsets.

    Slots and lengths are rounded up to buckets, so that few plans serve all calls; unused slots are empty. A plan is
    built at the first call of a bucket, outside any capture, and kept: graphs use its kernels. Graphs write to an
    output whose padded rows are finite, because nothing documents that cuDNN leaves the rows past a segment's end out
    of its products.

    Args:
        device: Where it will run; None takes the current CUDA device.
    """

    name: ClassVar[str] = "FLASHINFER"
    head_widths: ClassVar[str] = "multiples of 8 up to 256 on Hopper, up to 128 elsewhere"
    computes: ClassVar[str] = "cuDNN"
    segment_padding: ClassVar[str] = "slots are padded to 8, 16, 64, then multiples of 64; lengths of empty ones are 0"

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__()
        import cudnn
        from flashinfer.cudnn import prefill

        self.device = device or torch.device("cuda", torch.cuda.current_device())
        self.needs_finite_padding = True
        self.implementation = (
            f"cuDNN {cudnn.backend_version()} prefill through flashinfer-python {metadata.version('flashinfer-python')}"
        )
        self._prefill = prefill.cudnn_batch_prefill_with_kv_cache
        self._build = prefill._build_prefill_graph
        self.widest_head = 256 if torch.cuda.get_device_capability(self.device)[0] == 9 else 128
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
        self._old_workspaces: list[torch.Tensor] = []
        self._plans: dict[tuple[HeadLayout, int, int], Any] = {}
        self._derived: dict[tuple[int, int, HeadLayout], tuple[torch.Tensor, OffsetArguments]] | None = None

    @classmethod
    def unavailable_reason(cls, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"cuDNN attention needs a CUDA device, this is {device.type}"
        if torch.cuda.get_device_capability(device)[0] < 9:
            return "cuDNN takes packed offsets from compute capability 9.0 on"
        try:
            import cudnn
            from flashinfer.cudnn import prefill
        except Exception as error:  # a package built for another torch or CUDA fails in many ways
            return f"flashinfer's cuDNN path does not import ({error}); {INSTALL}"
        missing = [
            name for name in ("cudnn_batch_prefill_with_kv_cache", "_build_prefill_graph") if not hasattr(prefill, name)
        ]
        if missing:
            return f"this flashinfer has no {missing[0]}; {INSTALL}"
        if cudnn.backend_version() in BROKEN_CUDNN:
            return f"cuDNN {cudnn.backend_version()} has a known attention bug; install nvidia-cudnn 9.10.2 or newer"
        return None

    @contextmanager
    def one_forward(self) -> Iterator[None]:
        outer, self._derived = self._derived, {}
        try:
            with super().one_forward():
                yield
        finally:
            self._derived = outer

    def varlen(self, *packed: *Packed) -> torch.Tensor:
        query, key, value, cu_seqlens, max_seqlen, scale = packed
        rows, heads, width = query.shape
        if rows == 0:
            return torch.empty_like(query)
        tensors = [tensor if tensor.stride(2) == 1 else tensor.contiguous() for tensor in (query, key, value)]
        strides = [(tensor.stride(0), tensor.stride(1)) for tensor in tensors]
        layout = HeadLayout(heads, width, query.dtype, (strides[0], strides[1], strides[2]), scale)
        slots = bucketed_slots(cu_seqlens.shape[0] - 1)
        bound = bucketed_seqlen(max_seqlen)
        if (layout, slots, bound) not in self._plans:
            self._build_plan(layout, slots, bound)
        offsets = self._offset_arguments(cu_seqlens, layout, slots, rows)
        out = self.graph_output(query)
        return self._prefill(
            *tensors,
            scale,
            self._workspace,
            max_token_per_sequence=bound,
            max_sequence_kv=bound + layout.variant,
            causal=False,
            return_lse=False,
            out=torch.empty_like(query, memory_format=torch.contiguous_format) if out is None else out,
            **offsets,
        )[0]

    def prepare(self, shapes: Iterable[tuple[int, int, int]]) -> None:
        layouts = list(dict.fromkeys(layout for layout, _, _ in self._plans))
        buckets = dict.fromkeys((bucketed_slots(slots), bucketed_seqlen(longest)) for _, slots, longest in shapes)
        for slots, bound in buckets:
            for layout in layouts:
                if (layout, slots, bound) not in self._plans:
                    self._build_plan(layout, slots, bound)

    def _offset_arguments(self, cu_seqlens: torch.Tensor, layout: HeadLayout, slots: int, rows: int) -> OffsetArguments:
        if self._derived is None:
            return offset_arguments(cu_seqlens, slots, layout.row_strides, rows)
        # The offsets are kept with the entry: an address is only theirs as long as they live.
        key = (cu_seqlens.data_ptr(), cu_seqlens.shape[0], layout)
        if key not in self._derived:
            self._derived[key] = (cu_seqlens, offset_arguments(cu_seqlens, slots, layout.row_strides, rows))
        return self._derived[key][1]

    def _build_plan(self, layout: HeadLayout, slots: int, bound: int) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise CaptureError(
                f"a cuDNN plan for {slots} segment slots of up to {bound} rows would have to be built inside a "
                "capture; run the forward once before capturing it"
            )
        started = time.perf_counter()
        query, key, value = layout.dummies(self.device)
        offsets = torch.zeros(slots + 1, dtype=torch.int32, device=self.device)
        try:
            graph, _ = self._build(
                q=query,
                k_cache=key,
                v_cache=value,
                scale=layout.scale,
                max_token_seq_q=bound,
                max_sequence_kv=bound + layout.variant,
                block_tables=None,
                bottom_right_causal_mask=False,
                return_lse=False,
                **offset_arguments(offsets, slots, layout.row_strides, 1),
            )
        except Exception as error:
            raise BackendError(
                f"cuDNN has no plan for {layout.heads} heads of width {layout.width} in {layout.dtype}, {slots} slots "
                f"of up to {bound} rows: {error}; use another attention backend"
            ) from error
        needed = int(graph.get_workspace_size())
        if needed > self._workspace.numel():
            # Graphs captured so far keep using the smaller one.
            self._old_workspaces.append(self._workspace)
            self._workspace = torch.empty(needed, dtype=torch.uint8, device=self.device)
        self._plans[layout, slots, bound] = graph
        self.plan_build_ms += (time.perf_counter() - started) * 1e3


def bucketed_slots(slots: int) -> int:
    """The smallest bucket that holds `slots` segments: 8, 16, 64, then multiples of 64."""
    step = SLOT_BUCKETS[-1]
    return next((bucket for bucket in SLOT_BUCKETS if slots <= bucket), -(-slots // step) * step)


def bucketed_seqlen(max_seqlen: int) -> int:
    """The power of two that bounds `max_seqlen` rows of a segment; at least `SEQLEN_FLOOR`."""
    return max(SEQLEN_FLOOR, 1 << (max_seqlen - 1).bit_length()) if max_seqlen > 0 else SEQLEN_FLOOR


def offset_arguments(
    cu_seqlens: torch.Tensor, slots: int, row_strides: tuple[int, int, int, int], rows: int
) -> OffsetArguments:
    """Lengths and element offsets as cuDNN takes them: `[slots]` and `[slots + 1]` int32, with three dimensions of 1.

    Tensors share segments but not row strides, such as views of a fused QKV. Unused slots have no rows: their offsets
    repeat the last one.

    Args:
        cu_seqlens: `[S + 1]` int32 offsets in rows, on the device.
        slots: Slots to pad to, at least S.
        row_strides: Elements from one row to the next of query, key, value and output.
        rows: Rows of the packed tensors; bounds the offsets.

    Raises:
        BackendError: Offsets would not fit 32 bits.
    """
    if rows * max(row_strides) > INT32_MAX:
        raise BackendError(
            f"{rows} rows of {max(row_strides)} elements need offsets above 32 bits; encode fewer items in one call"
        )
    missing = slots + 1 - cu_seqlens.shape[0]
    padded = torch.cat((cu_seqlens, cu_seqlens[-1:].expand(missing))) if missing else cu_seqlens
    lengths = (padded[1:] - padded[:-1]).view(-1, 1, 1, 1)
    offsets = {stride: (padded * stride).view(-1, 1, 1, 1) for stride in dict.fromkeys(row_strides)}
    named = {f"batch_offsets_{name}": offsets[stride] for name, stride in zip("qkvo", row_strides, strict=True)}
    return {"actual_seq_lens_q": lengths, "actual_seq_lens_kv": lengths, **named}
