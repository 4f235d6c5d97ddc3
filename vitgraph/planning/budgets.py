"""What the planner knows of an item, and the token budgets that hold items: generation, selection, resolved settings.

The rules follow vLLM 0.33 (https://github.com/vllm-project/vllm/blob/main/docs/design/cuda_graphs_multimodal.md):
budgets double from the model's minimum, the maximum is always in the list, items never exceed the smallest
budget (an item would otherwise get zero tokens at capture), and frames tell unset from 0.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, product
from typing import Any

from vitgraph.errors import BudgetError

DEFAULT_PATH = "default"

MOST_FRAMES = 1_000_000
"""Frames of the longest video: nine hours at 30 a second."""

IMAGE = "image"
VIDEO = "video"


@dataclass(frozen=True, slots=True)
class EncoderItemSpec:
    """One image or video as the packing sees it; nothing here needs a device.

    Attributes:
        modality: `image` or `video`.
        input_size: Rows of the pixel tensor that the item brings (patches, tiles or slices).
        output_tokens: Graph output rows of the item, summed over its paths; the unit of token budgets.
        segments: Attention sequences of the item: 1 for an image of a full-attention tower, one a frame
            for a video, one a tile or slice for tiled towers.
        path_output_tokens: Output rows by path; empty means everything is on the default path.
        axis_sizes: What the item needs of each capture axis, for example `{"patch_grid": (28, 36)}`.
    """

    modality: str
    input_size: int
    output_tokens: int
    segments: int = 1
    path_output_tokens: Mapping[str, int] = field(default_factory=dict)
    axis_sizes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def tokens_on(self, path: str) -> int:
        """Output rows that the item has on `path` (0 where it has none)."""
        if not self.path_output_tokens:
            return self.output_tokens if path == DEFAULT_PATH else 0
        return self.path_output_tokens.get(path, 0)


def generate_budgets(min_budget: int, max_budget: int) -> list[int]:
    """Doubles from `min_budget` while at most `max_budget`, and always ends with `max_budget`.

    Raises:
        BudgetError: The range is not `1 <= min_budget <= max_budget`.
    """
    if min_budget < 1:
        raise BudgetError(f"smallest token budget is {min_budget}; it must be at least 1 token")
    if max_budget < min_budget:
        raise BudgetError(
            f"largest token budget {max_budget} is below the smallest, {min_budget} (one item of this model); "
            f"raise --max-model-len / --max-num-batched-tokens to {min_budget} or more, or pass --token-budgets"
        )
    return geometric_budgets(min_budget, max_budget, 2.0)


def geometric_budgets(low: int, high: int, fine: float, coarse: float = 0.0, turn: int | None = None) -> list[int]:
    """Budgets from `low` to `high`, in steps of the ratio `fine` up to `turn` and of `coarse` above."""
    budgets = [low]
    while budgets[-1] < high:
        ratio = fine if turn is None or budgets[-1] < turn else coarse
        budgets.append(min(high, max(budgets[-1] + 1, round(budgets[-1] * ratio))))
    return budgets


def validate_budgets(budgets: Iterable[int]) -> list[int]:
    """Returns the user's budgets sorted and without repeats.

    Raises:
        BudgetError: The list is empty or holds a value below 1.
    """
    ordered = sorted(set(budgets))
    if not ordered:
        raise BudgetError("the token budget list is empty; name at least one budget or leave it unset")
    if ordered[0] < 1:
        raise BudgetError(
            f"token budget {ordered[0]} is not positive; budgets count output tokens and start at 1 "
            "(a path that may be absent needs no budget of 0, it is skipped)"
        )
    return ordered


def select_budget(budgets: Sequence[int], tokens: int) -> int | None:
    """Smallest budget of the ascending list that holds `tokens`, or None where none does."""
    position = bisect_left(budgets, tokens)
    return budgets[position] if position < len(budgets) else None


@dataclass(frozen=True, slots=True)
class BudgetSettings:
    """Settings of graph mode after every default has been filled in; what tuning chooses.

    Attributes:
        token_budgets: Ascending output-token budgets of the default path.
        max_items: Most images and videos in one replay.
        max_frames: Most attention segments (video frames) in one replay; 0 means videos go eager.
        packing: Packing policy.
        notes: What was adjusted, in words, for the report.
    """

    token_budgets: tuple[int, ...]
    max_items: int
    max_frames: int
    packing: str = "greedy"
    notes: tuple[str, ...] = field(default=(), compare=False)

    @property
    def max_budget(self) -> int:
        return self.token_budgets[-1]

    def as_dict(self) -> dict[str, Any]:
        """Spelled as vLLM and `bench` spell them."""
        return {
            "token_budgets": list(self.token_budgets),
            "max_vision_items_per_batch": self.max_items,
            "max_frames_per_batch": self.max_frames,
            "packing": self.packing,
        }


def resolve_budget_settings(
    model_range: tuple[int, int],
    token_budgets: Sequence[int] = (),
    max_vision_items_per_batch: int = 0,
    max_frames_per_batch: int | None = None,
    *,
    video_limit_per_prompt: int = 1,
    max_frames_per_video: int = 1,
) -> BudgetSettings:
    """Fills in the settings that the user left open, as vLLM 0.33 does.

    Args:
        model_range: Smallest and largest budget of the model, in output tokens.
        token_budgets: The user's list; empty means automatic.
        max_vision_items_per_batch: The user's limit; 0 means automatic.
        max_frames_per_batch: The user's limit; None means automatic, 0 means image-only graphs.
        video_limit_per_prompt: Videos a prompt may hold; 0 disables video graphs.
        max_frames_per_video: Segments that the model's longest video has.

    Raises:
        BudgetError: The settings contradict each other; the message names the values and the ways out.
    """
    if max_vision_items_per_batch < 0:
        raise BudgetError(f"max vision items per batch is {max_vision_items_per_batch}; use 0 (automatic) or more")
    if max_frames_per_batch is not None and max_frames_per_batch < 0:
        raise BudgetError(f"max frames per batch is {max_frames_per_batch}; leave it unset, or use 0 or more")
    notes: list[str] = []
    items = max_vision_items_per_batch
    low, high = model_range
    if token_budgets:
        budgets = validate_budgets(token_budgets)
    else:
        _check_range(low, high)
        if items > low:
            low = min(items, high)
            notes.append(f"smallest budget raised to {low}: every item of a batch needs a token")
        budgets = generate_budgets(low, high)
    if items == 0:
        _check_range(low, high)
        items = min(high // low, budgets[0])
    elif token_budgets and items > budgets[0]:
        raise BudgetError(
            f"max vision items per batch is {items}, above the smallest token budget {budgets[0]}: an item would get "
            f"zero tokens at capture. Use at most {budgets[0]} items, or budgets of {items} and more"
        )
    if video_limit_per_prompt == 0:
        frames = 0
    elif max_frames_per_batch is None:
        frames = items * max_frames_per_video
    else:
        frames = max_frames_per_batch
    return BudgetSettings(tuple(budgets), items, frames, notes=tuple(notes))


def _check_range(low: int, high: int) -> None:
    if low < 1 or high < low:
        raise BudgetError(
            f"the model's budget range is {low} to {high}; it must be 1 <= smallest <= largest. "
            "The largest is what one call may hold (--max-model-len, --max-num-batched-tokens)"
        )


def segment_slot_tiers(most_segments: int, max_items: int) -> tuple[int, ...]:
    """Segment-slot counts to capture a budget with: 1, the item limit, then steps of 4 up to `most_segments`.

    Empty segments cost time in every attention layer, so a replay should not carry many more slots than it
    has segments: one image replays with one slot, a batch of images with `max_items`, and only videos pay for
    their frames, within a factor of four.
    """
    if most_segments < 1:
        raise BudgetError(f"a graph needs at least one segment slot, got {most_segments}")
    tiers = {1, min(max_items, most_segments)}
    slots = max_items
    while slots < most_segments:
        slots = min(slots * 4, most_segments)
        tiers.add(slots)
    return tuple(sorted(tiers))


@dataclass(frozen=True, slots=True, order=True)
class GraphKey:
    """Names one captured graph, by what it can hold.

    Attributes:
        path: Encoder path; single-path models have `default`.
        token_budget: Output rows that the graph can hold.
        segment_slots: Attention sequences that the graph can hold.
        axis_key: Values of the capture axes, empty for models without.
    """

    path: str
    token_budget: int
    segment_slots: int
    axis_key: tuple[int, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The key in the shape of run.json, which names graphs by it."""
        return asdict(self) | {"axis_key": list(self.axis_key)}


@dataclass(frozen=True, slots=True)
class CaptureAxis:
    """A dimension that multiplies the graphs, with its keys from the cheapest to the most expensive.

    An item needs `axis_sizes[name]`; a batch needs the element-wise maximum of its items; the first key that is
    at least that in every element is used.

    Attributes:
        name: What items call it.
        keys: Its keys, from the cheapest to the most expensive.
    """

    name: str
    keys: tuple[tuple[int, ...], ...]

    def covering_key(self, needs: Iterable[tuple[int, ...]]) -> tuple[int, ...] | None:
        """Cheapest key that covers every need, or None where no key does."""
        most = tuple(map(max, zip(*needs, strict=True)))
        covering = (key for key in self.keys if all(have >= need for have, need in zip(key, most, strict=True)))
        return next(covering, None)

    def for_items(self, items: Iterable[EncoderItemSpec]) -> CaptureAxis:
        """The axis without the keys above what any batch of these items can need."""
        most = self.covering_key(item.axis_sizes[self.name] for item in items)
        return self if most is None else CaptureAxis(self.name, self.keys[: self.keys.index(most) + 1])


@dataclass(frozen=True, slots=True, eq=False)
class BudgetPlan:
    """Everything that decides which graphs exist and which of them a batch uses; a plan equals itself alone.

    Attributes:
        path_budgets: Ascending budgets of each path. A budget of 0 (the path may be absent) is never in here.
        max_items: Items a replay may hold.
        max_frames: Segments a replay may hold when videos take part, also where images may bring more; 0 sends videos
            to eager.
        slot_tiers: For each path and budget, the segment-slot counts that are captured, ascending.
        axes: Capture axes; graphs multiply by their keys.
        segment_free_paths: Paths of equal tiles, which tokens alone limit.
        notes: Adjustments made while planning.
    """

    path_budgets: Mapping[str, tuple[int, ...]]
    max_items: int
    max_frames: int
    slot_tiers: Mapping[tuple[str, int], tuple[int, ...]]
    axes: tuple[CaptureAxis, ...] = ()
    notes: tuple[str, ...] = field(default=())
    segment_free_paths: frozenset[str] = frozenset()

    @property
    def max_segments(self) -> int | None:
        """Segments that a replay of images may hold; None where no path has a segment list."""
        if self.segment_free_paths.issuperset(self.path_budgets):
            return None
        return max(self.max_items, self.max_frames)

    def segment_limit(self, has_video: bool) -> int | None:
        """Segments that a replay may hold, with a video among its items or without; None for no limit."""
        return self.max_frames if has_video else self.max_segments

    @property
    def axis_keys(self) -> list[tuple[int, ...]]:
        """Every combination of the axes' keys, side by side; an empty one without axes."""
        return [tuple(chain(*keys)) for keys in product(*(axis.keys for axis in self.axes))]

    def axis_key(self, items: Sequence[EncoderItemSpec]) -> tuple[int, ...] | None:
        """Cheapest keys of all axes that cover every item, or None where an axis has none."""
        joined: tuple[int, ...] = ()
        for axis in self.axes:
            key = axis.covering_key(item.axis_sizes[axis.name] for item in items)
            if key is None:
                return None
            joined += key
        return joined

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(self.path_budgets)

    def graph_keys(self) -> list[GraphKey]:
        """Every graph to capture, the largest first, so that smaller ones reuse the pool of larger ones."""
        keys = [
            GraphKey(path, budget, slots, axis_key)
            for path, budgets in self.path_budgets.items()
            for budget in budgets
            for slots in self.slot_tiers[path, budget]
            for axis_key in self.axis_keys
        ]
        return sorted(keys, key=lambda key: (key.token_budget, key.axis_key, key.segment_slots), reverse=True)

    def select_slots(self, path: str, budget: int, segments: int) -> int | None:
        """Fewest captured slots of (path, budget) that hold `segments`, or None where none do."""
        tiers = self.slot_tiers[path, budget]
        if path in self.segment_free_paths:
            return tiers[-1]
        position = bisect_left(tiers, segments)
        return tiers[position] if position < len(tiers) else None


def plan_budgets(
    settings: BudgetSettings,
    *,
    path_minimums: Mapping[str, int] | None = None,
    min_tokens_per_segment: int = 1,
    axes: tuple[CaptureAxis, ...] = (),
    segment_free_paths: frozenset[str] = frozenset(),
) -> BudgetPlan:
    """Turns resolved settings into the list of graphs to capture.

    Args:
        settings: Resolved settings.
        path_minimums: Smallest budget of each path of a multi-path model; every path then gets its own doubling
            list up to the settings' largest budget. None for single-path models.
        min_tokens_per_segment: Fewest output tokens that one attention segment can have; bounds the slots.
        axes: Capture axes of the model.
        segment_free_paths: Paths of equal tiles (crops, slices) without a segment list: one slot tier, and only tokens
            limit them. A tile has the path's minimum where there are several paths, else `min_tokens_per_segment`.

    Raises:
        BudgetError: Capture axes and several paths were combined, or a path's minimum exceeds the maximum.
    """
    if path_minimums is None:
        path_budgets: dict[str, tuple[int, ...]] = {DEFAULT_PATH: settings.token_budgets}
    else:
        path_budgets = {
            path: tuple(generate_budgets(minimum, settings.max_budget)) for path, minimum in path_minimums.items()
        }
    if axes and len(path_budgets) > 1:
        raise BudgetError("capture axes and several paths cannot be combined in one model")
    most = max(settings.max_items, settings.max_frames)
    tiers: dict[tuple[str, int], tuple[int, ...]] = {}
    for path, budgets in path_budgets.items():
        for budget in budgets:
            if path in segment_free_paths:
                tile = path_minimums[path] if path_minimums else min_tokens_per_segment
                tiers[path, budget] = (max(1, budget // tile),)
                continue
            room = max(1, min(most, budget // min_tokens_per_segment))
            tiers[path, budget] = segment_slot_tiers(room, min(settings.max_items, room))
    return BudgetPlan(
        path_budgets=path_budgets,
        max_items=settings.max_items,
        max_frames=settings.max_frames,
        slot_tiers=tiers,
        axes=axes,
        notes=settings.notes,
        segment_free_paths=segment_free_paths,
    )
