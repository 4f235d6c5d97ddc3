"""Which settings vLLM can capture and replay: the check of a list, and the nearest list that breaks no rule.

A list that breaks one of these rules does not run slower: it ends the server, at start or at the first call that its
buffers do not hold.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from vitgraph.models.registry import ModelSource
from vitgraph.planning.items import VIDEO
from vitgraph.predict.engine_families import ENGINE, FAMILIES, MANAGER_FILE, WITHOUT_GRAPHS, EngineFamily, EngineTower
from vitgraph.predict.targets import Settings


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
class BrokenRule:
    """One rule that settings break.

    Attributes:
        name: Of the rule.
        text: The values, the rule, where it was read, and a way out.
    """

    name: str
    text: str


@dataclass(slots=True)
class EngineRules:
    """The rules of one tower.

    Attributes:
        tower: Its facts.
        has_videos: Whether videos may come.
        ruled_out: How often a rule changed or refused settings that were asked about, by its name.
    """

    tower: EngineTower
    has_videos: bool
    ruled_out: Counter[str] = field(default_factory=Counter)

    @property
    def family(self) -> EngineFamily | None:
        """The family's facts; None where the engine has no encoder graphs for it, or none that were read."""
        return next((family for family in FAMILIES if self.tower.architecture in family.architectures), None)

    def largest_budget(self, items: int, frames: int) -> tuple[int, str | None]:
        """The largest budget that can be captured at these limits, and the rule that sets it; None without one."""
        limits = self.family.limits if self.family else ()
        found = min(((limit.most(self.tower, items, frames), limit.name) for limit in limits), default=(2**31, None))
        return found if found[0] < 2**31 else (2**31, None)

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

    def broken(self, settings: Settings) -> list[BrokenRule]:
        """Every rule that settings break, each once, with the first value that breaks it."""
        family, items, frames = self.family, settings.max_items, settings.max_frames
        budgets, tower = settings.token_budgets, self.tower
        where = f"{ENGINE}, {family.file if family else MANAGER_FILE}"
        found: list[BrokenRule] = []

        def add(name: str, value: str, rule: str, way_out: str, source: str = where) -> None:
            found.append(BrokenRule(name, f"{value}: {rule} ({source}); {way_out}"))

        if items > min(budgets):
            smallest = min(budgets)
            add(
                "items-within-budget",
                f"{items} items with a budget of {smallest}",
                ITEMS_RULE,
                f"use at most {smallest} items",
                f"{ENGINE}, {MANAGER_FILE}",
            )
        largest = max(budgets)
        if len(tower.path_tokens) > 1 and largest < max(tower.path_tokens.values()):
            least = max(tower.path_tokens.values())
            add("path-minimum", f"largest budget {largest}", PATH_RULE, f"use a budget of {least} or more")
        if family is None:
            return found
        for limit in family.limits:
            most = limit.most(tower, items, frames)
            if largest > most:
                value = f"budget {largest} with {items} items and {frames} frames"
                add(limit.name, value, limit.text, f"use budgets up to {most}, or more items")
        odd = next((budget for budget in budgets if budget % items), None) if family.rounds_down else None
        if odd is not None:
            rounded = -(-odd // items) * items
            add("floor-division", f"budget {odd} with {items} items", ROUNDING_RULE, f"use {rounded}")
        if family.needs_whole_unit and min(budgets) < tower.unit:
            add("whole-item", f"budget {min(budgets)}", UNIT_RULE, f"use {tower.unit} or more")
        least = self.least_frames(items, largest)
        if (
            family.segments_held is not None
            and least
            and family.segments_held(items, frames) < self._most_segments(items, largest)
        ):
            value = f"{frames} frames with {items} items and a budget of {largest}"
            add("frames-held", value, FRAMES_RULE, f"use {least} frames, or leave them unset")
        return found

    def conform(self, settings: Settings) -> Settings | None:
        """The nearest settings that break no rule, or None where no budget is left."""
        items = settings.max_items
        frames = self.least_frames(items, max(settings.token_budgets))
        most, name = self.largest_budget(items, frames)
        budgets = sorted({self.usable(budget, items) for budget in settings.token_budgets})
        kept = tuple(budget for budget in budgets if items <= budget <= most)
        if name and budgets[-1] > most:
            self.ruled_out[name] += 1
        if not kept:
            return None
        found = replace(settings, token_budgets=kept, max_frames=self.least_frames(items, kept[-1]))
        broken = self.broken(found)
        for rule in broken:
            self.ruled_out[rule.name] += 1
        return None if broken else found

    def usable(self, budget: int, items: int) -> int:
        """The smallest budget from `budget` on whose buffers hold all of it."""
        return -(-budget // items) * items if self.family and self.family.rounds_down else budget

    def least_items(self, tokens: int) -> int:
        """The fewest items with which a budget of `tokens` can be captured."""
        items = 1
        while self.largest_budget(items, 0)[0] < tokens:
            items += 1
        return items


def rules_table() -> str:
    """The rules by family, as a Markdown table for the documentation."""
    rows = ["| family | read from | what a list must keep |", "|---|---|---|"]
    rows.append(f"| every family | `{MANAGER_FILE}` | {ITEMS_RULE}. Models of two paths: {PATH_RULE} |")
    for family in FAMILIES:
        texts = [limit.text for limit in family.limits]
        texts += [ROUNDING_RULE] if family.rounds_down else []
        texts += [UNIT_RULE] if family.needs_whole_unit else []
        texts += ["frames hold the longest videos (below)"] if family.segments_held else []
        texts += [family.note] if family.note else []
        rows.append(f"| {family.name} | `{family.file}` | {'. '.join(text[0].upper() + text[1:] for text in texts)} |")
    eager = ", ".join(f"{name} (`{file}`)" for name, file in WITHOUT_GRAPHS.items())
    return "\n".join([*rows, "", f"Frames: {FRAMES_RULE}.", "", f"Without encoder graphs there: {eager}."])
