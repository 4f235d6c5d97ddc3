"""Inductor's choices, but for rows that fit registers although torch reads them twice.

A file of its own, since it cannot be imported where torch has no such class.
"""

from __future__ import annotations

from typing import Any

from torch._inductor import config
from torch._inductor.choices import InductorChoices
from torch._inductor.runtime.hints import ReductionHint
from torch._inductor.virtualized import V


class PersistentChoices(InductorChoices):
    """Reductions along contiguous rows of up to `widest` elements (torch's own limit is 1024) read each row once."""

    def __init__(self, widest: int) -> None:
        super().__init__()
        self.widest = widest

    def uuid(self) -> str:
        """What torch puts into the keys of its caches; releases that do not ask take the factory and its argument."""
        return f"vitgraph-persistent-{self.widest}"

    def should_use_persistent_reduction(self, features: Any, cooperative_reduction: bool) -> bool:  # type: ignore[override]
        """torch's answer, or yes where it would read contiguous rows twice that are not too wide."""
        if InductorChoices.should_use_persistent_reduction(features, cooperative_reduction):
            return True
        return (
            config.triton.persistent_reductions
            and not cooperative_reduction
            and features.get_reduction_hint() == ReductionHint.INNER
            and V.graph.sizevars.statically_known_leq(features.reduction_numel, self.widest)
        )
