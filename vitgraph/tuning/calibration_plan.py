"""What a calibration measures: budgets on which images fit, and the segment-slot levels of each. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from vitgraph.records.kinds.calibrate import EncoderFacts
from vitgraph.tuning.calibration_items import ItemCatalogue, budget_grid

DEFAULT_SLOTS = (8, 64, 256, 1024)
SLOT_BUDGETS = (256, 1024, 4096)
"""Budgets near which segment slots and attention are measured: two numbers and a curve are fitted to them."""

FINE_STEP, COARSE_STEP, COARSE_FROM = 1.18, 1.8, 3072


@dataclass(slots=True)
class CalibrationPlan:
    """What to measure.

    Attributes:
        catalogue: Items to fill budgets with.
        facts: The encoder.
        budgets: For each path, ascending budgets.
        slots: Segment-slot levels.
        slot_budgets: For each path, the budgets that are measured at all levels.
    """

    catalogue: ItemCatalogue
    facts: EncoderFacts
    budgets: dict[str, list[int]]
    slots: tuple[int, ...]
    slot_budgets: dict[str, list[int]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, catalogue: ItemCatalogue, facts: EncoderFacts, budgets: Sequence[int] | None, slots: Sequence[int]
    ) -> CalibrationPlan:
        """Budgets on which an image fits, snapped to what images really have; None takes a grid."""
        grids = {}
        for path, low in facts.path_minimums.items():
            smallest = min(item.spec.tokens_on(path) for item in catalogue.images if item.spec.tokens_on(path))
            start = max(low, smallest)
            grid = list(budgets) if budgets is not None else None
            if grid is None:
                grid = budget_grid(start, catalogue.max_tokens, fine=FINE_STEP, coarse=COARSE_STEP, turn=COARSE_FROM)
            filled = (catalogue.fill(path, budget) for budget in grid if budget >= start)
            grids[path] = sorted({sum(item.spec.tokens_on(path) for item in batch) for batch in filled if batch})
        found = cls(catalogue, facts, grids, tuple(sorted({level for level in slots if level > 1})))
        for path, grid in grids.items():
            nearest = {min(grid, key=lambda size: (abs(size - goal), size)) for goal in SLOT_BUDGETS if grid}
            found.slot_budgets[path] = sorted(nearest)
        return found

    def tiers(self, path: str, budget: int) -> tuple[int, ...]:
        """Slots of the batch that fills the budget, and the levels to measure where this is a budget for that."""
        room = max(1, budget // self.facts.min_tokens_per_segment)
        if path in self.facts.segment_free_paths:
            return (room,)
        base = sum(item.spec.segments for item in self.catalogue.fill(path, budget))
        if budget not in self.slot_budgets[path]:
            return (base,)
        return (base, *(level for level in self.slots if base < level <= room))
