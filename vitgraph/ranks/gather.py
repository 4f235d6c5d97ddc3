"""Brings the rows of all ranks together on every rank, in one collective, and finds each item's rows in the result.

Shape legend: R rows of all items of a call, R_i rows of rank i's items, D columns of an embedding row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from vitgraph.predict.assignment import Shares
from vitgraph.ranks.group import ParallelGroup, gather_equal_parts


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Where the rows of a call's items lie among those of the ranks; the same on every rank.

    Attributes:
        rows_per_rank: R_i of each rank.
        item_rows: Rows of each item of each rank, in the order of its share.
        places: By item in input order: its rank, and its place in that rank's share.
    """

    rows_per_rank: tuple[int, ...]
    item_rows: tuple[tuple[int, ...], ...]
    places: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, shares: Shares, item_rows: Sequence[int]) -> RowLayout:
        """The layout of shares whose items have `item_rows` rows each, in input order."""
        by_rank = tuple(tuple(item_rows[index] for index in share) for share in shares)
        places = {index: (rank, place) for rank, share in enumerate(shares) for place, index in enumerate(share)}
        return cls(tuple(map(sum, by_rank)), by_rank, tuple(places[index] for index in range(len(item_rows))))

    def split(self, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The rows of each item in input order, as views of the ranks' rows `[at least R_i, D]`."""
        pieces = [
            part[:total].split_with_sizes(list(counts))
            for part, total, counts in zip(rows, self.rows_per_rank, self.item_rows, strict=True)
        ]
        return [pieces[rank][place] for rank, place in self.places]


class PendingRows:
    """A gather under way; `wait` hands out the items' rows.

    Args:
        group: The ranks.
        work: The collective, or None where none was needed.
        rows: Rows of each rank, `[at least R_i, D]`.
        layout: Where the items' rows lie in them.
        kept: What the collective still reads.
    """

    def __init__(
        self,
        group: ParallelGroup,
        work: dist.Work | None,
        rows: Sequence[torch.Tensor],
        layout: RowLayout,
        kept: Any = None,
    ) -> None:
        self._group, self._work, self._rows, self._layout, self._kept = group, work, rows, layout, kept

    def wait(self) -> list[torch.Tensor]:
        """The rows of each item, in input order, as views of the gathered tensor.

        On a GPU this makes the current stream wait, not the host.
        """
        if self._work is not None:
            self._group.finish(self._work, "the gather of rows")
            self._work = self._kept = None
        return self._layout.split(self._rows)


class RowGather:
    """Gathers rows of one width and dtype over the ranks of a group.

    Only rows that exist are moved where the ranks have equally many, or the backend takes unequal parts (NCCL). Gloo
    does not, so there the parts are padded to the longest.

    Args:
        group: The ranks.
        width: D.
        dtype: Dtype of the rows.
    """

    def __init__(self, group: ParallelGroup, width: int, dtype: torch.dtype) -> None:
        self._group = group
        self._width = width
        self._dtype = dtype

    def start(self, pieces: Sequence[torch.Tensor], layout: RowLayout) -> PendingRows:
        """Begins a gather; every rank calls it with the same layout, ranks without items with no pieces.

        The collective has a stream of its own on a GPU, so that whatever is launched before `wait` overlaps with it.

        Args:
            pieces: Rows of this rank's items `[rows, D]`, in the order of its share.
            layout: From the shares of the call.
        """
        group, parts = self._group, layout.rows_per_rank
        if group.size == 1:
            return PendingRows(group, None, [join_rows(pieces) if pieces else self._empty(0)], layout)
        if not any(parts):
            return PendingRows(group, None, [self._empty(0)] * group.size, layout)
        longest = max(parts)
        is_padded = min(parts) < longest and not group.takes_unequal_parts
        mine = join_rows(pieces) if pieces else self._empty(0)
        if is_padded and len(mine) < longest:
            part = self._empty(longest)
            part[: len(mine)].copy_(mine)
            mine = part
        sizes = [longest] * group.size if is_padded else list(parts)
        gathered = self._empty(sum(sizes))
        rows = gathered.split_with_sizes(sizes)
        with group.collective("the gather of rows"):
            if min(sizes) == max(sizes):
                work = gather_equal_parts(gathered, mine, async_op=True)
            else:
                work = dist.all_gather(list(rows), mine, async_op=True)
        return PendingRows(group, work, rows, layout, mine)

    def _empty(self, rows: int) -> torch.Tensor:
        return torch.empty((rows, self._width), dtype=self._dtype, device=self._group.device)


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
