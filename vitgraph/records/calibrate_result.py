"""The result of `vitgraph calibrate`: what was measured of one encoder on one device, for cost models to fit.

Its points are dataclasses, since cost models hold thousands of them and build them by position.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field, JsonValue, PlainSerializer, TypeAdapter, WithJsonSchema
from pydantic.dataclasses import dataclass

from vitgraph.planning.budgets import BudgetPlan, CaptureAxis, EncoderItemSpec
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

    ms: Time = Field(description="Median, in ms.")
    low_ms: Time = Field(description="10th percentile, in ms.")
    high_ms: Time = Field(description="90th percentile, in ms.")
    repeats: Count = Field(description="How many there were.")


@dataclass(frozen=True, slots=True, config=_POINT)
class ReplayPoint:
    """One graph replayed alone, with a batch in its buffers."""

    path: str = Field(description="Encoder path.")
    axis_key: tuple[Count, ...] = Field(description="Capture-axis values of the graph.")
    token_budget: Count = Field(description="Its budget, in tokens.")
    segment_slots: Count = Field(description="Its segment slots.")
    items: Items = Field(description="The batch.")
    time: Timing = Field(description="Wall clock of a replay between two synchronisations.")


@dataclass(frozen=True, slots=True, config=_POINT)
class EagerPoint:
    """One call run eagerly."""

    items: Items = Field(description="The call.")
    time: Timing = Field(description="Wall clock of it.")


@dataclass(frozen=True, slots=True, config=_POINT)
class CallPoint:
    """One call through the graph manager, beside the sum of what it is made of."""

    items: Items = Field(description="The call.")
    replays: Count = Field(description="Replays in it.")
    misses: Count = Field(description="Items that ran eagerly.")
    time: Timing = Field(description="Wall clock of the whole call.")
    parts_ms: Time = Field(description="Its replays alone in ms, each synchronised; without any, the eager call.")


@dataclass(frozen=True, slots=True, config=_POINT)
class CopyPoint:
    """What moving output rows' worth of data costs on the device."""

    tokens: Count = Field(description="Rows.")
    copy_in_ms: Time = Field(description="Copying them in, in ms.")
    clear_ms: Time = Field(description="Clearing them, in ms.")
    clone_out_ms: Time = Field(description="Cloning them, in ms.")


@dataclass(frozen=True, slots=True, config=_POINT)
class CapturePoint:
    """One captured graph."""

    path: str = Field(description="Encoder path.")
    token_budget: Count = Field(description="Its budget, in tokens.")
    segment_slots: Count = Field(description="Its segment slots.")
    capture_ms: Time = Field(description="Time to capture it, in ms.")
    buffer_bytes: Count = Field(description="Static buffers that it uses, in bytes.")


@dataclass(frozen=True, slots=True, config=_POINT)
class MemoryPoint:
    """The memory of one manager's graphs, which share a pool and buffers."""

    max_budget: Count = Field(description="The largest budget, in tokens.")
    graphs: Count = Field(description="Graphs captured.")
    pool_bytes: Count = Field(description="The shared pool, in bytes.")
    first_pool_bytes: Count = Field(description="What the first graph, the largest, added to the pool, in bytes.")
    buffer_bytes: Count = Field(description="The shared buffers, in bytes.")


@dataclass(frozen=True, slots=True, config=_POINT)
class HoldoutPoint:
    """A random call that no fit has seen, measured in both modes."""

    items: Items = Field(description="The call.")
    plan: Count = Field(description="Place in `holdout_plans` of the graphs that it met.")
    packing: str = Field(description="Packing policy.")
    graph: Timing = Field(description="The call through the manager.")
    eager: Timing = Field(description="The call run eagerly.")
    predicted_graph_ms: Time | None = Field(default=None, description="The cost model's prediction in ms, once known.")
    predicted_eager_ms: Time | None = Field(default=None, description="The same for eager.")


@dataclass(frozen=True, slots=True, config=_POINT)
class EncoderFacts:
    """What planning needs to know of the encoder."""

    path_minimums: dict[str, Count] = Field(description="Smallest budget of each path, in tokens.")
    segment_free_paths: tuple[str, ...] = Field(description="Paths whose attention has no segment list.")
    modalities: tuple[str, ...] = Field(description="`image`, `video`.")
    min_tokens_per_segment: Count = Field(description="Fewest output tokens of a segment.")
    max_frames_per_video: Count = Field(description="Most frames of a video.")
    axes: tuple[CaptureAxis, ...] = Field(default=(), description="Capture axes, each with keys from the cheapest up.")

    @property
    def is_multi_path(self) -> bool:
        """Whether items may have rows on several paths, each with budgets of its own."""
        return len(self.path_minimums) > 1


class HostCheck(Section):
    """How fast the host was, and whether its speed changed: short eager calls are bound by it."""

    launch_us: Time | None = None
    """Host time a kernel of a short eager call, in µs; null where it was not measured or the host does not bind."""
    reference_launch_us: Time = Field(description="The same on usual hosts, in µs.")
    looks: Count = Field(description="How often the same small layer was timed between the measurements.")
    layer_us: Time | None = None
    """What it takes the host, in µs: the median of the looks that nothing slowed down."""
    slowed_layer_us: Time | None = Field(default=None, description="Median of slowed looks, in µs; null where too few.")
    slowed_share: Share | None = Field(default=None, description="Their share.")


class SlotTiers(Section):
    """The segment-slot counts that one budget of a path is captured with."""

    path: str = Field(description="Encoder path.")
    token_budget: Count = Field(description="The budget, in tokens.")
    slots: tuple[Count, ...] = Field(description="The counts, ascending.")


class PlannedGraphs(Section):
    """The graphs that calls met."""

    path_budgets: dict[str, tuple[Count, ...]] = Field(description="Ascending budgets of each path, in tokens.")
    max_items: Count = Field(description="Items that a replay may hold.")
    max_frames: Count = Field(description="Segments that a replay may hold where videos are; 0 sends videos to eager.")
    slot_tiers: tuple[SlotTiers, ...] = Field(description="Segment-slot counts of each path and budget.")
    axes: tuple[CaptureAxis, ...] = Field(default=(), description="Capture axes; graphs multiply by their keys.")
    segment_free_paths: tuple[str, ...] = Field(default=(), description="Paths of equal tiles, limited by tokens.")

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

    name: str = Field(description="Model that was measured.")
    row: str | None = Field(default=None, description="Row of the table of supported models.")
    weights: str = Field(default="random", description="`random`, or where they come from.")
    tower: dict[str, JsonValue] = {}
    """Fields of its vision config that decide its times: a profile serves every model whose tower has the same."""
    encoder: EncoderFacts = Field(description="What planning needs to know of it.")
    max_tokens: Count = Field(description="Most tokens of a call that was measured.")
    replays: list[ReplayPoint] = Field(default=[], description="Graphs replayed alone.")
    eager: list[EagerPoint] = Field(default=[], description="Calls run eagerly.")
    calls: list[CallPoint] = Field(default=[], description="Calls through the graph manager.")
    copies: list[CopyPoint] = Field(default=[], description="What moving data costs.")
    captures: list[CapturePoint] = Field(default=[], description="Captures.")
    memory: list[MemoryPoint] = Field(default=[], description="Memory of graphs.")
    holdout: list[HoldoutPoint] = Field(default=[], description="Calls that no fit has seen.")
    holdout_plans: list[PlannedGraphs] = Field(default=[], description="The graphs that these met.")
    host: HostCheck | None = Field(default=None, description="The host; null in profiles of before it was watched.")
    notes: list[str] = Field(default=[], description="What was left out or adjusted, in words.")
    is_synthetic: bool = Field(default=False, description="Its numbers are made up, for tests.")
    elapsed_s: Time = Field(default=0.0, description="How long the measuring took, in s.")
