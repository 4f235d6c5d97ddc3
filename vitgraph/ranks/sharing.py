"""Encodes a call on all ranks: each takes its share of the items, and all get every item's rows in input order.

Shape legend: R rows of all items of a call, R_i rows of rank i's items, D columns of an embedding row.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from vitgraph.models.base import EncoderInputs
from vitgraph.models.encoder import VisionEncoder
from vitgraph.models.geometry import ItemGeometry
from vitgraph.predict.assignment import Assigner, Shares
from vitgraph.ranks.group import ParallelGroup, gather_equal_parts

SHARED_CALLS = 16384
"""Calls whose shares are remembered, by the geometries of their items."""


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Where the rows of a call's items lie among those of the ranks; the same on every rank.

    Attributes:
        shares: Item indices of each rank.
        rows_per_rank: R_i of each rank.
        item_rows: Rows of each item of each rank, in the order of its share.
        places: By item in input order: its rank, and its place in that rank's share.
    """

    shares: Shares
    rows_per_rank: tuple[int, ...]
    item_rows: tuple[tuple[int, ...], ...]
    places: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, shares: Shares, item_rows: Sequence[int]) -> RowLayout:
        """The layout of shares whose items have `item_rows` rows each, in input order."""
        by_rank = tuple(tuple(item_rows[index] for index in share) for share in shares)
        places = {index: (rank, place) for rank, share in enumerate(shares) for place, index in enumerate(share)}
        return cls(shares, tuple(map(sum, by_rank)), by_rank, tuple(places[index] for index in range(len(item_rows))))

    def split(self, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The rows of each item in input order, as views of the ranks' rows `[at least R_i, D]`."""
        pieces = [
            part[:total].split_with_sizes(list(counts))
            for part, total, counts in zip(rows, self.rows_per_rank, self.item_rows, strict=True)
        ]
        return [pieces[rank][place] for rank, place in self.places]


def gather_rows(
    group: ParallelGroup, pieces: Sequence[torch.Tensor], layout: RowLayout, width: int, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Every item's rows on every rank; all call it with the same layout, ranks without items with no pieces.

    Only rows that exist are moved where the ranks have equally many, or the backend takes unequal parts (NCCL). Gloo
    does not, so there the parts are padded to the longest. On a GPU the current stream waits for them, not the host.

    Args:
        pieces: Rows of this rank's items `[rows, D]`, in the order of its share.

    Returns:
        The rows of each item, in input order, as views of the gathered tensor.
    """

    def empty(rows: int) -> torch.Tensor:
        return torch.empty((rows, width), dtype=dtype, device=group.device)

    parts = layout.rows_per_rank
    mine = join_rows(pieces) if pieces else empty(0)
    if group.size == 1:
        return layout.split([mine])
    if not any(parts):
        return layout.split([mine] * group.size)
    longest = max(parts)
    is_padded = min(parts) < longest and group.device.type != "cuda"
    if is_padded and len(mine) < longest:
        part = empty(longest)
        part[: len(mine)].copy_(mine)
        mine = part
    sizes = [longest] * group.size if is_padded else list(parts)
    gathered = empty(sum(sizes))
    rows = gathered.split_with_sizes(sizes)
    with group.collective("the gather of rows"):
        if min(sizes) == max(sizes):
            work = gather_equal_parts(gathered, mine, async_op=True)
        else:
            work = dist.all_gather(list(rows), mine, async_op=True)
    group.finish(work, "the gather of rows")
    return layout.split(rows)


def join_rows(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """The pieces `[rows, D]` as one contiguous tensor; without a copy where they follow each other in memory."""
    first = pieces[0]
    following = first.data_ptr()
    for piece in pieces:
        if not piece.is_contiguous() or piece.data_ptr() != following:
            return torch.cat(list(pieces))
        following += piece.numel() * piece.element_size()
        if piece.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return torch.cat(list(pieces))
    rows = sum(len(piece) for piece in pieces)
    return first if len(pieces) == 1 else first.as_strided((rows, first.shape[1]), (first.shape[1], 1))


class CallSharing:
    """Divides calls among the ranks; a pure function of the items, so that every rank finds the same."""

    def __init__(self, group: ParallelGroup, encoder: VisionEncoder, assign: Assigner) -> None:
        self.group, self.encoder, self._assign = group, encoder, assign
        self._known: OrderedDict[tuple[ItemGeometry, ...], RowLayout] = OrderedDict()

    def divide(self, items: tuple[ItemGeometry, ...]) -> RowLayout:
        """Every rank's share of a call with these items; remembered."""
        known = self._known.get(items)
        if known is not None:
            return known
        rule = self.encoder.rule
        shares = self._assign([rule.item_spec(item) for item in items], self.group.size)
        layout = self._known[items] = RowLayout.of(shares, [rule.final_tokens(item) for item in items])
        if len(self._known) > SHARED_CALLS:
            self._known.popitem(last=False)
        return layout

    def select(self, mm_kwargs: EncoderInputs, layout: RowLayout) -> EncoderInputs | None:
        """This rank's items of a call, pixels not copied; None where it has none."""
        share = layout.shares[self.group.rank]
        return self.encoder.select_encoder_cudagraph_items(mm_kwargs, share) if share else None

    @torch.inference_mode()
    def encode(
        self,
        encode: Callable[[EncoderInputs], list[torch.Tensor]],
        mm_kwargs: EncoderInputs,
        on_encoded: Callable[[], None] = lambda: None,
    ) -> list[torch.Tensor]:
        """Encodes one call, graph or eager, on all ranks, each of which calls it with the same items.

        The ranks meet in one gather after everything was encoded, which is outside of every captured graph; a rank
        without items goes straight to it.

        Args:
            encode: What each rank does with its share: `EncoderCudaGraphManager.execute`, or an eager forward.
            mm_kwargs: All items of the call, with the pixels of at least this rank's share.
            on_encoded: Called between encoding and gather; a measurement reads its clock there.

        Returns:
            The final embedding of each item, in input order, on every rank. On a GPU the rows are there once the
            current stream is; see `ParallelGroup.wait_device`.

        Raises:
            RankFailedError: A rank failed, or did not come within the group's limit.
        """
        layout = self.divide(mm_kwargs.chosen)
        selected = self.select(mm_kwargs, layout)
        pieces = [] if selected is None else encode(selected)
        on_encoded()
        return gather_rows(self.group, pieces, layout, self.encoder.rule.output_width, self.encoder.dtype)
