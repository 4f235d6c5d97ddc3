"""Graphs of several plans of one encoder, side by side."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vitgraph.graphs.manager import EncoderCudaGraphManager
from vitgraph.models.encoder import VisionEncoder
from vitgraph.planning.budgets import BudgetPlan


class GraphShelf:
    """The graphs that verifications of one encoder have captured, side by side until the end.

    Strategies are measured in turn, so that all their graphs live at once; and a plan that several workloads share,
    like the automatic list, is captured once. Nothing is released in between: graphs share what libraries and attention
    backends reserve.

    Args:
        encoder: The encoder.
    """

    def __init__(self, encoder: VisionEncoder) -> None:
        self.encoder = encoder
        self._managers: list[EncoderCudaGraphManager] = []

    def manager(self, plan: BudgetPlan) -> EncoderCudaGraphManager:
        """The manager of a plan, with whatever graphs it has by now."""
        for manager in self._managers:
            if manager.plan == plan:
                return manager
        self._managers.append(EncoderCudaGraphManager(self.encoder, plan))
        return self._managers[-1]

    def clear(self) -> None:
        """Releases all graphs."""
        for manager in self._managers:
            manager.clear()
        self._managers.clear()

    @classmethod
    @contextmanager
    def of(cls, encoder: VisionEncoder) -> Iterator[GraphShelf]:
        """A shelf that is cleared at the end."""
        shelf = cls(encoder)
        try:
            yield shelf
        finally:
            shelf.clear()
