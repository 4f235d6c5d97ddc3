"""Encodes a call on all ranks: each takes its share of the items, and all get every item's rows in input order."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch

from vitgraph.models.base import EncoderInputs
from vitgraph.models.encoder import VisionEncoder
from vitgraph.models.geometry import ItemGeometry
from vitgraph.predict.assignment import Assigner, Shares
from vitgraph.ranks.gather import PendingRows, RowGather, RowLayout
from vitgraph.ranks.group import ParallelGroup

SHARED_CALLS = 16384
"""Calls whose shares are remembered, by the geometries of their items."""

Encode = Callable[[EncoderInputs], list[torch.Tensor]]
"""Encodes some items on this rank: the final embedding `[rows, D]` of each, in the order given."""


@dataclass(frozen=True, slots=True)
class SharedCall:
    """How the ranks divide a call.

    Attributes:
        shares: Item indices of each rank.
        layout: Where the items' rows lie among those of the ranks.
    """

    shares: Shares
    layout: RowLayout


class CallSharing:
    """Divides calls among the ranks; a pure function of the items, so that every rank finds the same.

    Args:
        encoder: The encoder.
        rank: This rank.
        ranks: Ranks of the run.
        assign: Who encodes what.
    """

    def __init__(self, encoder: VisionEncoder, rank: int, ranks: int, assign: Assigner) -> None:
        self._encoder = encoder
        self._rank = rank
        self._ranks = ranks
        self._assign = assign
        self._known: OrderedDict[tuple[ItemGeometry, ...], SharedCall] = OrderedDict()

    def divide(self, items: tuple[ItemGeometry, ...]) -> SharedCall:
        """Every rank's share of a call with these items; remembered."""
        known = self._known.get(items)
        if known is not None:
            return known
        rule = self._encoder.rule
        shares = self._assign([rule.item_spec(item) for item in items], self._ranks)
        shared = SharedCall(shares, RowLayout.of(shares, [rule.final_tokens(item) for item in items]))
        self._known[items] = shared
        if len(self._known) > SHARED_CALLS:
            self._known.popitem(last=False)
        return shared

    def select(self, mm_kwargs: EncoderInputs, shared: SharedCall | None = None) -> EncoderInputs | None:
        """This rank's items of a call, pixels not copied; None where it has none."""
        share = (shared or self.divide(mm_kwargs.chosen)).shares[self._rank]
        return self._encoder.select_encoder_cudagraph_items(mm_kwargs, share) if share else None


class DataParallelEncoder:
    """Runs one way of encoding, graph or eager, on all ranks of a group.

    Every rank calls it with the same items and with the pixels of at least its own share. The ranks meet in one
    gather after everything was encoded, which is outside of every captured graph; a rank without items goes straight to
    it.

    Args:
        encode: What each rank does with its share: `EncoderCudaGraphManager.execute`, or an eager forward.
        sharing: Divides the calls.
        gather: Brings the rows together.
        on_encoded: Called between encoding and gather; a measurement reads its clock there.
    """

    def __init__(
        self, encode: Encode, sharing: CallSharing, gather: RowGather, on_encoded: Callable[[], None] | None = None
    ) -> None:
        self._encode = encode
        self._sharing = sharing
        self._gather = gather
        self._on_encoded = on_encoded

    @classmethod
    def over(
        cls, group: ParallelGroup, encoder: VisionEncoder, encode: Encode, assign: Assigner
    ) -> DataParallelEncoder:
        """One that shares nothing with others."""
        gather = RowGather(group, encoder.rule.output_width, encoder.dtype)
        return cls(encode, CallSharing(encoder, group.rank, group.size, assign), gather)

    def execute(self, mm_kwargs: EncoderInputs) -> list[torch.Tensor]:
        """Encodes one call.

        Args:
            mm_kwargs: All items of the call.

        Returns:
            The final embedding of each item, in input order, on every rank. On a GPU the rows are there once the
            current stream is; see `ParallelGroup.wait_device`.

        Raises:
            RankFailedError: A rank failed, or did not come within the group's limit.
        """
        return self.submit(mm_kwargs).wait()

    @torch.inference_mode()
    def submit(self, mm_kwargs: EncoderInputs) -> PendingRows:
        """Encodes this rank's share and starts the gather; the next call may be encoded while it runs."""
        shared = self._sharing.divide(mm_kwargs.chosen)
        selected = self._sharing.select(mm_kwargs, shared)
        pieces = [] if selected is None else self._encode(selected)
        if self._on_encoded is not None:
            self._on_encoded()
        return self._gather.start(pieces, shared.layout)
