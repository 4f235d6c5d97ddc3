"""What a calibration measures: items of wanted sizes, made by a model's own size rule, and the budgets and segment-slot
levels that they fill. Needs no torch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from vitgraph.errors import InputError, UsageError
from vitgraph.models.geometry import GeometryRule, ItemGeometry
from vitgraph.planning.budgets import VIDEO, EncoderItemSpec, geometric_budgets
from vitgraph.records.calibrate_result import EncoderFacts

ASPECTS = (1.0, 4 / 3, 3 / 4, 16 / 9, 2 / 3)
AREA_STEP = 1.03
SMALLEST_SIDE = 28
LARGEST_SIDE = 12000
VIDEO_FRAMES = (2, 4, 8, 16, 32, 64, 128)
VIDEO_SIDES = tuple(range(64, 1025, 32))

DEFAULT_SLOTS = (8, 64, 256, 1024)
SLOT_BUDGETS = (256, 1024, 4096)
"""Budgets near which segment slots and attention are measured: two numbers and a curve are fitted to them."""

FINE_STEP, COARSE_STEP, COARSE_FROM = 1.18, 1.8, 3072


@dataclass(frozen=True, slots=True)
class SizedItem:
    """An item's geometry with its planner facts."""

    geometry: ItemGeometry
    spec: EncoderItemSpec


class ItemCatalogue:
    """Images and videos of many sizes, found by their tokens.

    Raises:
        UsageError: The rule gives no image of at most `max_tokens` tokens.
    """

    def __init__(self, rule: GeometryRule, max_tokens: int) -> None:
        self.rule = rule
        self.max_tokens = max_tokens
        self.images = self._scan_images()
        if not self.images:
            raise UsageError(
                f"no image of this model has {max_tokens} tokens or fewer; raise the largest call to measure"
            )
        self.videos = self._scan_videos() if VIDEO in rule.graph_config().modalities else []
        self.min_tokens = self.images[0].spec.output_tokens

    def _scan_images(self) -> list[SizedItem]:
        found: dict[tuple[int, ...], SizedItem] = {}
        side, number = float(SMALLEST_SIDE), 0
        while side <= LARGEST_SIDE:
            aspect = ASPECTS[number % len(ASPECTS)] ** 0.5
            item = self._sized(round(side * aspect), round(side / aspect), 1)
            if item is not None:
                found.setdefault(self._path_tokens(item), item)
            side *= AREA_STEP**0.5
            number += 1
        return sorted(found.values(), key=lambda item: item.spec.output_tokens)

    def _scan_videos(self) -> list[SizedItem]:
        found: dict[tuple[int, int], SizedItem] = {}
        for frames in VIDEO_FRAMES:
            for side in VIDEO_SIDES:
                item = self._sized(side, side, frames)
                if item is not None and item.spec.modality == VIDEO:
                    found.setdefault((item.spec.output_tokens, item.spec.segments), item)
        return sorted(found.values(), key=lambda item: item.spec.output_tokens)

    def _sized(self, width: int, height: int, frames: int) -> SizedItem | None:
        try:
            geometry = self.rule.geometry(width, height, frames)
        except InputError:
            # The scan asks for sizes that some processors refuse; those are simply not in the catalogue.
            return None
        spec = self.rule.item_spec(geometry)
        return SizedItem(geometry, spec) if spec.output_tokens <= self.max_tokens else None

    def _path_tokens(self, item: SizedItem) -> tuple[int, ...]:
        return tuple(item.spec.tokens_on(path) for path in self.rule.graph_config().paths)

    def image(self, tokens: int, path: str | None = None) -> SizedItem | None:
        """The image with the most tokens (on `path`) of at most `tokens`; None where every image has more."""
        if path is None:
            place = bisect_right([item.spec.output_tokens for item in self.images], tokens)
            return self.images[place - 1] if place else None
        fitting = [item for item in self.images if 0 < item.spec.tokens_on(path) <= tokens]
        return max(fitting, key=lambda item: item.spec.tokens_on(path), default=None)

    def video(self, tokens: int, segments: int) -> SizedItem | None:
        """The video with the most tokens of at most `tokens` that has `segments` segments; None where there is none."""
        fitting = [v for v in self.videos if v.spec.segments == segments and v.spec.output_tokens <= tokens]
        return fitting[-1] if fitting else None

    def fill(self, path: str, budget: int, *, items: int = 1) -> list[SizedItem]:
        """`items` equal images that fill a budget on a path as far as possible; more than one where one cannot.

        Returns:
            Empty where the smallest image is too large.
        """
        image = self.image(budget // items, path)
        if image is None:
            return []
        fits = budget // image.spec.tokens_on(path)
        # A path with a fixed number of rows an image is filled by their number.
        count = fits if items == 1 and fits > 1 else items
        return [image] * count


@dataclass(slots=True)
class CalibrationPlan:
    """What to measure.

    Attributes:
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
                grid = geometric_budgets(start, catalogue.max_tokens, FINE_STEP, COARSE_STEP, COARSE_FROM)
                # A last step that is hardly one would cost a capture and tell nothing.
                if len(grid) > 2 and grid[-1] < 1.1 * grid[-2]:
                    del grid[-2]
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
