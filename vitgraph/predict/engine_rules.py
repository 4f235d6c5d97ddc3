"""Which settings vLLM can capture and replay: the check of a list, and the nearest list that breaks no rule.

A list that breaks one of these rules does not run slower: it ends the server, at start or at the first call that its
buffers do not hold. What each of its model files asks of a list is read from `vllm_families.csv`.

Legend: b is a token budget, `items` and `frames` are `encoder_cudagraph_max_vision_items_per_batch` and
`..._max_frames_per_batch`, and m is the spatial merge size.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from itertools import count

from vitgraph.models.registry import ModelSource
from vitgraph.planning.budgets import VIDEO, BudgetSettings

ENGINE = "vLLM 0.33.0"
"""What the rules were read from."""

MANAGER_FILE = "v1/worker/encoder_cudagraph.py"
"""Where the manager's own rules were read, inside the wheel's `vllm/`."""

POSITIONS = 8192
"""Rows of the rotary table that the grid of a capture indexes."""

_GRID_SIDE = 512
_NO_LIMIT = 2**31
_SLICES_AN_ITEM = 10

ITEMS_RULE = "items may not exceed the smallest budget: the manager refuses to start"
PATH_RULE = "the largest budget holds one unit of every path: the manager refuses to start"
ROUNDING_RULE = (
    "buffers hold items x (b // items) tokens, fewer than b unless items divides it; a batch of more tokens overflows "
    "them"
)
UNIT_RULE = "a budget below one item captures an empty batch"
FRAMES_RULE = (
    "the manager packs by tokens and items alone, and frames 0 is a size, not a switch: a batch of videos with more "
    "segments than a graph holds overflows it. Where videos may come, a graph holds the segments of items videos of "
    "the greatest length, or of a whole budget; where not, --limit-mm-per-prompt turns them off"
)


@dataclass(frozen=True, slots=True)
class EngineTower:
    """What the rules need to know of a tower.

    Attributes:
        architecture: As config.json names it.
        merge: Patches along one side of an output token.
        path_tokens: Output tokens of one unit (item, tile, crop) on each path.
        tokens_per_segment: Fewest output tokens of an attention segment.
        segments_per_video: Segments of the longest video; 0 where videos are not taken.
        crops: Crops that an image may bring beside its whole view.
    """

    architecture: str
    merge: int
    path_tokens: Mapping[str, int]
    tokens_per_segment: int = 1
    segments_per_video: int = 0
    crops: int = 0

    @property
    def unit(self) -> int:
        """Output tokens of the smallest unit."""
        return min(self.path_tokens.values())


def engine_tower(source: ModelSource) -> EngineTower:
    """The facts of a model; needs no torch."""
    config, graphs = source.vision_config, source.rule().graph_config()
    merge = config.get("spatial_merge_size") or config.get("merge_kernel_size") or 1
    has_crops = bool(source.processor.get("do_pan_and_scan"))
    return EngineTower(
        source.architecture,
        int(merge[0] if isinstance(merge, list | tuple) else merge),
        {path: policy.min_token_budget for path, policy in graphs.paths.items()},
        graphs.min_tokens_per_segment,
        graphs.max_frames_per_video if VIDEO in graphs.modalities else 0,
        int(source.processor.get("pan_and_scan_max_num_crops", 0)) if has_crops else 0,
    )


LIMITS: Mapping[str, tuple[str, Callable[[EngineTower, int, int], int]]] = {
    "rotary-table": (
        "the capture batch has one row of patches an item, m x (b / items) wide, over frames // items where that is "
        f"above 1; the rotary table has {POSITIONS:,} positions, and a wider row ends the engine at start",
        lambda tower, items, frames: items * max(1, frames // items) * (POSITIONS // tower.merge),
    ),
    "position-grid": (
        f"the capture batch is shaped within a position table of {_GRID_SIDE} x {_GRID_SIDE} patches, so that b / "
        f"items is at most ({_GRID_SIDE} // m) squared; above it the engine stops at start",
        lambda tower, items, _: items * (_GRID_SIDE // tower.merge) ** 2,
    ),
    "crops-of-an-item": (
        "a graph holds min(b // tokens of a crop, items) crops, so that with pan-and-scan an item of more crops than "
        "items overflows it, unless its tokens are above every budget",
        # Without crops every item is one unit, and a batch has no more units than items.
        lambda tower, items, _: (items + 1) * tower.unit - 1 if tower.crops else _NO_LIMIT,
    ),
}
"""By name, what must hold in words, and the largest budget that can be captured of a tower with items and frames."""

_SEGMENTS_HELD: Mapping[str, Callable[[int, int], int]] = {
    "rows": lambda items, frames: max(items * max(1, frames // items), frames),
    "most": max,
    "slices": lambda items, frames: _SLICES_AN_ITEM * max(items, frames),
}
"""Attention segments that a graph holds, from items and frames."""


@dataclass(frozen=True, slots=True)
class EngineFamily:
    """What vLLM's model file asks of a list.

    Attributes:
        name: For people; empty where the engine always runs the encoder eagerly.
        architectures: Values of `architectures` in config.json.
        file: Where it was read, inside the wheel's `vllm/`.
        limit: Which of `LIMITS` bounds the largest budget; empty for none.
        rounds_down: Buffers hold items x (b // items) tokens, fewer than b unless items divides it.
        needs_whole_unit: A budget below one unit captures an empty batch.
        segments_held: Attention segments that a graph holds, from items and frames; None without such a size.
    """

    name: str
    architectures: tuple[str, ...]
    file: str
    limit: str
    rounds_down: bool
    needs_whole_unit: bool
    segments_held: Callable[[int, int], int] | None
    note: str


def _read_families() -> list[EngineFamily]:
    text = (resources.files("vitgraph.predict") / "vllm_families.csv").read_text(encoding="utf-8")
    return [
        EngineFamily(
            row["family"],
            tuple(row["architectures"].split()),
            row["file"],
            row["limit"],
            bool(row["rounds_down"]),
            bool(row["needs_whole_unit"]),
            _SEGMENTS_HELD.get(row["segments_held"]),
            row["note"],
        )
        for row in csv.DictReader(text.splitlines())
    ]


_READ = _read_families()
FAMILIES = tuple(family for family in _READ if family.name)
WITHOUT_GRAPHS = {name: family.file for family in _READ if not family.name for name in family.architectures}
"""Architectures whose encoder the engine always runs eagerly, and where that was read."""


@dataclass(slots=True)
class EngineRules:
    """The rules of one tower.

    Attributes:
        ruled_out: How often a rule changed or refused settings that were asked about, by its name.
        family: The family's facts; None where the engine has no encoder graphs for it, or none that were read.
    """

    tower: EngineTower
    has_videos: bool
    ruled_out: Counter[str] = field(default_factory=Counter)
    family: EngineFamily | None = field(init=False)

    def __post_init__(self) -> None:
        self.family = next((family for family in FAMILIES if self.tower.architecture in family.architectures), None)

    @property
    def refusal(self) -> str | None:
        """Why the engine has no graphs for this encoder whatever is set; None where it may have."""
        architecture = self.tower.architecture
        file = WITHOUT_GRAPHS.get(architecture)
        return file and f"{ENGINE} runs the encoder of {architecture} without graphs, whatever is set ({file})"

    def largest_budget(self, items: int, frames: int) -> int:
        """The largest budget that can be captured at these limits."""
        limit = self.family.limit if self.family else ""
        return LIMITS[limit][1](self.tower, items, frames) if limit else _NO_LIMIT

    def least_frames(self, items: int, largest: int) -> int:
        """The fewest frames with which no batch of videos can overflow a graph; 0 where no video comes."""
        held = self.family.segments_held if self.family else None
        if held is None or not (self.has_videos and self.tower.segments_per_video):
            return 0
        needed = self._most_segments(items, largest)
        return next(frames for frames in (1, -(-needed // held(1, 1))) if held(items, frames) >= needed)

    def _most_segments(self, items: int, largest: int) -> int:
        by_length = items * self.tower.segments_per_video
        return min(by_length, largest // self.tower.tokens_per_segment)

    def broken(self, settings: BudgetSettings) -> dict[str, str]:
        """By name, every rule that settings break: the first values that do, the rule, its source, and a way out."""
        family, items, frames, tower = self.family, settings.max_items, settings.max_frames, self.tower
        smallest, largest = min(settings.token_budgets), max(settings.token_budgets)
        file = family.file if family else MANAGER_FILE
        found: dict[str, str] = {}

        def add(name: str, value: str, rule: str, way_out: str, source: str = file) -> None:
            found[name] = f"{value}: {rule} ({ENGINE}, {source}); {way_out}"

        if items > smallest:
            value = f"{items} items with a budget of {smallest}"
            add("items-within-budget", value, ITEMS_RULE, f"use at most {smallest} items", MANAGER_FILE)
        unit = max(tower.path_tokens.values())
        if len(tower.path_tokens) > 1 and largest < unit:
            add("path-minimum", f"largest budget {largest}", PATH_RULE, f"use a budget of {unit} or more")
        if family is None:
            return found
        if largest > (most := self.largest_budget(items, frames)):
            value = f"budget {largest} with {items} items and {frames} frames"
            add(family.limit, value, LIMITS[family.limit][0], f"use budgets up to {most}, or more items")
        odd = next((budget for budget in settings.token_budgets if budget != self.usable(budget, items)), None)
        if odd is not None:
            add("floor-division", f"budget {odd} with {items} items", ROUNDING_RULE, f"use {self.usable(odd, items)}")
        if family.needs_whole_unit and smallest < tower.unit:
            add("whole-item", f"budget {smallest}", UNIT_RULE, f"use {tower.unit} or more")
        least, held = self.least_frames(items, largest), family.segments_held
        if held is not None and least and held(items, frames) < self._most_segments(items, largest):
            value = f"{frames} frames with {items} items and a budget of {largest}"
            add("frames-held", value, FRAMES_RULE, f"use {least} frames, or leave them unset")
        return found

    def conform(self, settings: BudgetSettings) -> BudgetSettings | None:
        """The nearest settings that break no rule, or None where no budget is left."""
        items = settings.max_items
        most = self.largest_budget(items, self.least_frames(items, max(settings.token_budgets)))
        budgets = sorted({self.usable(budget, items) for budget in settings.token_budgets})
        kept = tuple(budget for budget in budgets if items <= budget <= most)
        if self.family and budgets[-1] > most:
            self.ruled_out[self.family.limit] += 1
        if not kept:
            return None
        found = replace(settings, token_budgets=kept, max_frames=self.least_frames(items, kept[-1]))
        broken = self.broken(found)
        self.ruled_out.update(list(broken))
        return None if broken else found

    def usable(self, budget: int, items: int) -> int:
        """The smallest budget from `budget` on whose buffers hold all of it."""
        return -(-budget // items) * items if self.family and self.family.rounds_down else budget

    def least_items(self, tokens: int) -> int:
        """The fewest items with which a budget of `tokens` can be captured."""
        return next(items for items in count(1) if self.largest_budget(items, 0) >= tokens)
