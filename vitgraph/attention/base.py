"""What an attention backend is: declared abilities, one varlen call, one dense call; and `TORCH_SDPA`, torch's own.

Shape legend: N packed rows, S segments, H heads, E head width, B tiles, L rows of a tile.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar, NamedTuple, Self

import torch

from vitgraph.attention.padding import GraphOutputs, segment_endpoints

Packed = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, float]
"""A call of packed segments: query, key and value `[N, H, E]` of any strides whose last is 1; `[S + 1]` int32 offsets
on the device, where repeated entries are empty segments; a bound of the segment lengths; factor of the scores."""

Tiles = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, float]
"""A call of equal tiles: query, key and value `[B, H, L, E]`, a mask that broadcasts to `[B, H, L, L]`, factor of the
scores."""

TransformersFunction = Callable[..., tuple[torch.Tensor, None]]

Lengths = tuple[int, ...]
"""Rows of each segment of a call, empty ones included."""


class GraphContents(NamedTuple):
    """What the replays of one graph will hold, of one of its lists of segments.

    Attributes:
        slots: Segment slots of the graph.
        longest: Bound of the segment lengths that the graph was captured with.
        replays: How often a replay has which segments.
    """

    slots: int
    longest: int
    replays: Mapping[Lengths, int]

    @property
    def most_rows(self) -> int:
        """Rows of the fullest replay."""
        return max(map(sum, self.replays), default=0)


class AttentionBackend(ABC):
    """One way to compute attention, behind the names of vLLM's `--mm-encoder-attn-backend`.

    Windows need nothing of a backend: they are segments of their own.

    Attributes:
        name: Registry name.
        is_capture_safe: The varlen call may be captured and replayed with other offsets.
        writes_padding_rows: Rows past the last segment are written (with zeros) by the varlen call; where False they
            keep whatever the memory held, and no valid row may ever read them.
        head_widths: Head widths that it takes, in words.
        dtypes: Names of the dtypes that it takes; empty for any.
        segment_padding: How it treats unused segment slots, in words.
        has_versions: The generations of `--flash-attn-version` are variants of it.
        needs_finite_padding: Rows past the last segment are loaded with the last tile, and a NaN there could reach
            valid rows; graphs therefore write to an output whose padded rows are always finite.
        outputs: Where its graphs write what must be finite. `are_fresh` is set where the caller may reuse the memory
            of what a call returns, as compiled code does.
        implementation: What really runs (package and version), for the record.
        plan_build_ms: Time spent so far on what a first call of a shape builds: plans, tuning.
        selection: Where `auto` chose: what it found of each candidate.
    """

    name: ClassVar[str]
    is_capture_safe: ClassVar[bool]
    writes_padding_rows: ClassVar[bool]
    head_widths: ClassVar[str] = "any"
    dtypes: ClassVar[tuple[str, ...]] = ()
    segment_padding: ClassVar[str] = "empty segments are skipped"
    has_versions: ClassVar[bool] = False

    def __init__(self, device: torch.device | None = None) -> None:
        self.implementation = self.name
        self.is_on_graph_path = False
        self.needs_finite_padding = False
        self.plan_build_ms = 0.0
        self.selection: tuple[Mapping[str, Any], ...] = ()
        self.outputs = GraphOutputs()
        self._tile_offsets: dict[tuple[int, int, torch.device], torch.Tensor] = {}

    @classmethod
    def for_device(cls, device: torch.device, variant: str | None = None) -> Self:
        """Makes the backend for `device`; a `variant` means something only where the backend has several."""
        return cls(device)

    @classmethod
    def variants(cls, device: torch.device) -> tuple[str | None, ...]:
        """Implementations that `auto` may choose between on `device`, the preferred one first; None is the default."""
        return (None,)

    def graph_path(self) -> AbstractContextManager[None]:
        """Marks the warm-up and capture of a graph, whose inputs have padded rows; eager calls have none."""
        return self._on_graph_path(True)

    @contextmanager
    def _on_graph_path(self, is_on: bool) -> Iterator[None]:
        before, self.is_on_graph_path = self.is_on_graph_path, is_on
        try:
            yield
        finally:
            self.is_on_graph_path = before

    def one_forward(self) -> AbstractContextManager[object]:
        """Marks one forward of a tower: until it ends, offsets do not change, and what a backend derives from them may
        be derived once and not once a layer. Without it every layer derives its own, which is slower and as right.
        """
        # Outputs are only zeroed in graphs.
        return self.outputs.one_forward() if self.is_on_graph_path else nullcontext()

    def expect(  # noqa: B027 (a hook, empty by default)
        self, calls: Mapping[Lengths, int], replays: Sequence[GraphContents] = ()
    ) -> None:
        """Says, before anything is captured, what eager calls and graphs will hold.

        Args:
            calls: How often an eager call has which segments.
            replays: The same of the graphs' replays.
        """

    def prepare(self, shapes: Iterable[tuple[int, int, int]]) -> None:  # noqa: B027 (a hook, empty by default)
        """Builds what calls of other lengths will need, for the head shapes seen so far, so that no timed call does.

        Args:
            shapes: `(rows, segment slots, max_seqlen)` of the calls to come.
        """

    def graph_output(self, query: torch.Tensor) -> torch.Tensor | None:
        """Where a graph's call must write (`[N, H, E]`, as `query`); None where a fresh tensor will do, as in eager."""
        if not (self.needs_finite_padding and self.is_on_graph_path):
            return None
        return self.outputs.take(query)

    @classmethod
    @abstractmethod
    def unavailable_reason(cls, device: torch.device) -> str | None:
        """Why the backend cannot run on `device` here, with what to install; None where it can."""

    @abstractmethod
    def unsupported_reason(self, head_width: int, dtype: torch.dtype) -> str | None:
        """Why the backend does not take heads of that width in that dtype; None where it does."""

    @abstractmethod
    def varlen(self, *packed: *Packed) -> torch.Tensor:
        """Attention within packed segments: `[N, H, E]`. See `writes_padding_rows` for the rows past the last one."""

    def dense(self, *tiles: *Tiles) -> torch.Tensor:
        """Attention of equal tiles: `[B, L, H, E]`.

        The default flattens the tiles into equal segments; a mask goes through torch's fused attention.
        """
        query, key, value, mask, scale = tiles
        if mask is not None:
            return fused_tiles(*tiles)
        count, heads, length, width = query.shape
        query, key, value = (
            tensor.transpose(1, 2).reshape(count * length, heads, tensor.shape[-1]) for tensor in (query, key, value)
        )
        offsets = self._offsets_of_tiles(count, length, query.device)
        # The segments take up every row, in a graph too: nothing past the last one must be finite.
        with self._on_graph_path(False):
            return self.varlen(query, key, value, offsets, length, scale).view(count, length, heads, width)

    def _offsets_of_tiles(self, tiles: int, length: int, device: torch.device) -> torch.Tensor:
        known = self._tile_offsets.get((tiles, length, device))
        if known is None:
            known = torch.arange(0, (tiles + 1) * length, length, dtype=torch.int32, device=device)
            # Made during a capture, it would hold its values only after a replay of that very graph.
            if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
                self._tile_offsets[tiles, length, device] = known
        return known

    def facts(self) -> dict[str, Any]:
        """What ran, for a record; complete once the calls have been prepared."""
        return {
            "attn_backend": self.name,
            "attn_implementation": self.implementation,
            "attn_selection": list(self.selection) or None,
            "attn_choices": self.choices() or None,
            "attn_plan_build_ms": self.plan_build_ms,
        }

    def choices(self) -> list[dict[str, Any]]:
        """Which backend each shape of a call goes to, where there is a choice; one plain row a shape."""
        return []

    @property
    def transformers_name(self) -> str:
        """The attention implementation that towers are set to; `flash` in it makes them take the packed branch."""
        return f"vitgraph_flash_{self.name.lower()}"

    @property
    def transformers_function(self) -> TransformersFunction:
        """What transformers calls under that name."""
        return transformers_function(self.varlen, self.dense)


class HalfPrecisionBackend(AttentionBackend):
    """Kernels that take half precision, and heads whose width is a multiple of 8.

    Attributes:
        computes: What takes no other dtype, for the refusal.
        widest_head: Widest head that it takes.
    """

    is_capture_safe: ClassVar[bool] = True
    writes_padding_rows: ClassVar[bool] = False
    head_widths: ClassVar[str] = "multiples of 8 up to 256"
    dtypes: ClassVar[tuple[str, ...]] = ("float16", "bfloat16")
    computes: ClassVar[str]
    widest_head = 256

    def unsupported_reason(self, head_width: int, dtype: torch.dtype) -> str | None:
        if dtype not in (torch.float16, torch.bfloat16):
            return f"{self.computes} computes in float16 or bfloat16, not {dtype}; use --dtype bfloat16 or TORCH_SDPA"
        if head_width <= 0 or head_width % 8 or head_width > self.widest_head:
            return f"head width {head_width} is not a multiple of 8 up to {self.widest_head}; use TORCH_SDPA"
        return None


def transformers_function(
    varlen: Callable[[*Packed], torch.Tensor], dense: Callable[[*Tiles], torch.Tensor]
) -> TransformersFunction:
    """The two calls in the signature of transformers' `AttentionInterface`: `[1, H, N, E]` packed or `[B, H, L, E]`.

    Returns:
        A function that returns `([1, N, H, E] or [B, L, H, E], None)`. Unknown keywords (towers pass some down) are
        ignored.
    """

    def attend(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        scaling: float | None = None,
        dropout: float = 0.0,
        cu_seq_lens_q: torch.Tensor | None = None,
        max_length_q: int | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        if key.shape[1] != query.shape[1]:
            # Not every kernel takes groups of heads that share keys and values.
            key, value = (part.repeat_interleave(query.shape[1] // part.shape[1], dim=1) for part in (key, value))
        if cu_seq_lens_q is None:
            return dense(query, key, value, attention_mask, scale), None
        longest = query.shape[2] if max_length_q is None else max_length_q
        query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        return varlen(query, key, value, cu_seq_lens_q, longest, scale).unsqueeze(0), None

    return attend


def register_with_transformers(name: str, function: TransformersFunction) -> None:
    """Makes an attention implementation that towers can be set to."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(name, function)
    # A name without a mask function gets no mask at all, silently: padded rows would be attended.
    AttentionMaskInterface.register(name, sdpa_mask)


def fused_tiles(*tiles: *Tiles) -> torch.Tensor:
    """Attention of equal tiles by torch's fused attention."""
    query, key, value, mask, scale = tiles
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    return out.transpose(1, 2)


class TorchSdpaBackend(AttentionBackend):
    """torch's fused attention, one call a segment; the only backend on a CPU. It reads the segment lengths on the host,
    so its varlen call cannot be captured on a GPU; its dense call can.

    On a CPU, where a "replay" calls the forward again, the lengths are read anew each time.
    """

    name: ClassVar[str] = "TORCH_SDPA"
    is_capture_safe: ClassVar[bool] = False
    writes_padding_rows: ClassVar[bool] = True
    segment_padding: ClassVar[str] = "empty segments are left out on the host"

    @classmethod
    def unavailable_reason(cls, device: torch.device) -> str | None:
        return None

    def unsupported_reason(self, head_width: int, dtype: torch.dtype) -> str | None:
        return None

    def varlen(self, *packed: *Packed) -> torch.Tensor:
        query, key, value, cu_seqlens, _, scale = packed
        out = torch.zeros(*query.shape[:-1], value.shape[-1], dtype=query.dtype, device=query.device)
        start = 0
        for stop in segment_endpoints(cu_seqlens, query.shape[0]):
            q, k, v = (tensor[start:stop].transpose(0, 1).unsqueeze(0) for tensor in (query, key, value))
            segment = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale)
            out[start:stop] = segment[0].transpose(0, 1)
            start = stop
        return out

    def dense(self, *tiles: *Tiles) -> torch.Tensor:
        return fused_tiles(*tiles)
