"""The result of `vitgraph calibrate`: what was measured of one encoder on one device, for cost models to fit.

Its points are dataclasses, since cost models hold thousands of them and build them by position.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, JsonValue, PlainSerializer, TypeAdapter, WithJsonSchema
from pydantic.dataclasses import dataclass

from vitgraph.planning.budgets import BudgetPlan, CaptureAxis
from vitgraph.planning.items import EncoderItemSpec
from vitgraph.records.sections import Count, Section, Share, Time

MOST_ITEMS = 100_000
"""Items of a call that a file may hold, so that a damaged count cannot fill the memory."""

_ITEM = TypeAdapter(EncoderItemSpec)
_POINT = ConfigDict(extra="forbid", use_attribute_docstrings=True)


def _expand(value: Any) -> Any:
    """Items of the entries of a file; anything else is left to the type to refuse."""
    if not isinstance(value, list):
        return value
    items: list[Any] = []
    for entry in value:
        if not isinstance(entry, Mapping):
            items.append(entry)
            continue
        count, values = entry.get("count", 1), {name: of for name, of in entry.items() if name != "count"}
        if not isinstance(count, int) or not 1 <= count <= MOST_ITEMS:
            raise ValueError(f"count is {count!r}; it is a whole number from 1 to {MOST_ITEMS}")
        items += [_ITEM.validate_python(values)] * count
    return tuple(items)


def _join(items: tuple[EncoderItemSpec, ...]) -> list[dict[str, Any]]:
    """Equal neighbours in one entry, since calls of many equal items are common."""
    runs = [(spec, len(list(run))) for spec, run in groupby(items)]
    entries = [(count, _ITEM.dump_python(spec, mode="json")) for spec, count in runs]
    return [{"count": count, **{name: of for name, of in entry.items() if of != {}}} for count, entry in entries]


Items = Annotated[
    tuple[EncoderItemSpec, ...],
    BeforeValidator(_expand),
    PlainSerializer(_join, when_used="json"),
    WithJsonSchema({"type": "array", "items": {"$ref": "#/$defs/EncoderItemSpec"}}),
]
"""Items of a call; in files, equal neighbours are one entry with their `count`."""


@dataclass(frozen=True, slots=True, config=_POINT)
class Timing:
    """A repeated measurement of wall clock."""

    ms: Time
    """Median, in ms."""
    low_ms: Time
    """10th percentile, in ms."""
    high_ms: Time
    """90th percentile, in ms."""
    repeats: Count
    """How many there were."""


@dataclass(frozen=True, slots=True, config=_POINT)
class ReplayPoint:
    """One graph replayed alone, with a batch in its buffers."""

    path: str
    """Encoder path."""
    axis_key: tuple[Count, ...]
    """Capture-axis values of the graph."""
    token_budget: Count
    """Its budget, in tokens."""
    segment_slots: Count
    """Its segment slots."""
    items: Items
    """The batch."""
    time: Timing
    """Wall clock of a replay between two synchronisations."""


@dataclass(frozen=True, slots=True, config=_POINT)
class EagerPoint:
    """One call run eagerly."""

    items: Items
    """The call."""
    time: Timing
    """Wall clock of it."""


@dataclass(frozen=True, slots=True, config=_POINT)
class CallPoint:
    """One call through the graph manager, beside the sum of what it is made of."""

    items: Items
    """The call."""
    replays: Count
    """Replays in it."""
    misses: Count
    """Items that ran eagerly."""
    time: Timing
    """Wall clock of the whole call."""
    parts_ms: Time
    """Its replays alone in ms, each between two synchronisations; the eager call for a call without replays."""


@dataclass(frozen=True, slots=True, config=_POINT)
class CopyPoint:
    """What moving output rows' worth of data costs on the device."""

    tokens: Count
    """Rows."""
    copy_in_ms: Time
    """Copying them in, in ms."""
    clear_ms: Time
    """Clearing them, in ms."""
    clone_out_ms: Time
    """Cloning them, in ms."""


@dataclass(frozen=True, slots=True, config=_POINT)
class CapturePoint:
    """One captured graph."""

    path: str
    """Encoder path."""
    token_budget: Count
    """Its budget, in tokens."""
    segment_slots: Count
    """Its segment slots."""
    capture_ms: Time
    """Time to capture it, in ms."""
    buffer_bytes: Count
    """Static buffers that it uses, in bytes."""


@dataclass(frozen=True, slots=True, config=_POINT)
class MemoryPoint:
    """The memory of one manager's graphs, which share a pool and buffers."""

    max_budget: Count
    """The largest budget, in tokens."""
    graphs: Count
    """Graphs captured."""
    pool_bytes: Count
    """The shared pool, in bytes."""
    first_pool_bytes: Count
    """What the first graph, the largest, added to the pool, in bytes."""
    buffer_bytes: Count
    """The shared buffers, in bytes."""


@dataclass(frozen=True, slots=True, config=_POINT)
class HoldoutPoint:
    """A random call that no fit has seen, measured in both modes."""

    items: Items
    """The call."""
    plan: Count
    """Place in `holdout_plans` of the graphs that it met."""
    packing: str
    """Packing policy."""
    graph: Timing
    """The call through the manager."""
    eager: Timing
    """The call run eagerly."""
    predicted_graph_ms: Time | None = None
    """The cost model's prediction when the profile was made, in ms; null before it is known."""
    predicted_eager_ms: Time | None = None
    """The same for eager."""


@dataclass(frozen=True, slots=True, config=_POINT)
class EncoderFacts:
    """What planning needs to know of the encoder."""

    path_minimums: dict[str, Count]
    """Smallest budget of each path, in tokens."""
    segment_free_paths: tuple[str, ...]
    """Paths whose attention has no segment list."""
    modalities: tuple[str, ...]
    """`image`, `video`."""
    min_tokens_per_segment: Count
    """Fewest output tokens of a segment."""
    max_frames_per_video: Count
    """Most frames of a video."""
    axes: tuple[CaptureAxis, ...] = ()
    """Capture axes of the model, each with its keys from the cheapest to the most expensive."""

    @property
    def is_multi_path(self) -> bool:
        """Whether items may have rows on several paths, each with budgets of its own."""
        return len(self.path_minimums) > 1


class HostCheck(Section):
    """How fast the host was, and whether its speed changed: short eager calls are bound by it."""

    launch_us: Time | None = None
    """Host time a kernel of a short eager call, in µs; null where it was not measured or the host does not bind."""
    reference_launch_us: Time
    """The same on usual hosts, in µs."""
    looks: Count
    """How often the same small layer was timed between the measurements."""
    layer_us: Time | None = None
    """What it takes the host, in µs: the median of the looks that nothing slowed down."""
    slowed_layer_us: Time | None = None
    """Median of the others, in µs; null where they are so few that the host is steady."""
    slowed_share: Share | None = None
    """Their share."""


class SlotTiers(Section):
    """The segment-slot counts that one budget of a path is captured with."""

    path: str
    """Encoder path."""
    token_budget: Count
    """The budget, in tokens."""
    slots: tuple[Count, ...]
    """The counts, ascending."""


class PlannedGraphs(Section):
    """The graphs that calls met."""

    path_budgets: dict[str, tuple[Count, ...]]
    """Ascending budgets of each path, in tokens."""
    max_items: Count
    """Items that a replay may hold."""
    max_frames: Count
    """Segments that a replay may hold when videos take part; 0 sends videos to eager."""
    slot_tiers: tuple[SlotTiers, ...]
    """Segment-slot counts of each path and budget."""
    axes: tuple[CaptureAxis, ...] = ()
    """Capture axes; graphs multiply by their keys."""
    segment_free_paths: tuple[str, ...] = ()
    """Paths of equal tiles, which tokens alone limit."""

    @classmethod
    def of(cls, plan: BudgetPlan) -> PlannedGraphs:
        """The graphs of a plan."""
        tiers = [
            {"path": path, "token_budget": budget, "slots": slots} for (path, budget), slots in plan.slot_tiers.items()
        ]
        own = {"slot_tiers": tiers, "segment_free_paths": sorted(plan.segment_free_paths)}
        return cls.model_validate({name: own.get(name, getattr(plan, name)) for name in cls.model_fields})

    def plan(self) -> BudgetPlan:
        """The plan of these graphs."""
        tiers = {(tier.path, tier.token_budget): tier.slots for tier in self.slot_tiers}
        own = {"slot_tiers": tiers, "segment_free_paths": frozenset(self.segment_free_paths)}
        return BudgetPlan(**{**dict(self), **own})


class CalibrateResult(Section):
    """Everything that `calibrate` measured."""

    name: str
    """Model that was measured."""
    row: str | None = None
    """Row of the table of supported models."""
    weights: str = "random"
    """`random`, or where they come from."""
    tower: dict[str, JsonValue] = {}
    """Fields of its vision config that decide its times: a profile serves every model whose tower has the same."""
    encoder: EncoderFacts
    """What planning needs to know of it."""
    max_tokens: Count
    """Most tokens of a call that was measured."""
    replays: tuple[ReplayPoint, ...] = ()
    """Graphs replayed alone."""
    eager: tuple[EagerPoint, ...] = ()
    """Calls run eagerly."""
    calls: tuple[CallPoint, ...] = ()
    """Calls through the graph manager."""
    copies: tuple[CopyPoint, ...] = ()
    """What moving data costs."""
    captures: tuple[CapturePoint, ...] = ()
    """Captures."""
    memory: tuple[MemoryPoint, ...] = ()
    """Memory of graphs."""
    holdout: tuple[HoldoutPoint, ...] = ()
    """Calls that no fit has seen."""
    holdout_plans: tuple[PlannedGraphs, ...] = ()
    """The graphs that these met."""
    host: HostCheck | None = None
    """The host; null in profiles of before it was watched."""
    notes: tuple[str, ...] = ()
    """What was left out or adjusted, in words."""
    is_synthetic: bool = False
    """Its numbers are made up, for tests."""
    elapsed_s: Time = 0.0
    """How long the measuring took, in s."""
