"""The measurements that a calibration profile is made of, one class for each kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vitgraph.planning.budgets import CaptureAxis
from vitgraph.planning.items import EncoderItemSpec

Specs = tuple[EncoderItemSpec, ...]


@dataclass(frozen=True, slots=True)
class Timing:
    """A repeated measurement, in milliseconds of wall clock.

    Attributes:
        ms: Median.
        low_ms: 10th percentile.
        high_ms: 90th percentile.
        repeats: How many there were.
    """

    ms: float
    low_ms: float
    high_ms: float
    repeats: int


@dataclass(frozen=True, slots=True)
class ReplayPoint:
    """One graph replayed alone, with a batch in its buffers.

    Attributes:
        path: Encoder path.
        axis_key: Capture-axis values of the graph.
        token_budget: Its budget.
        segment_slots: Its segment slots.
        items: The batch.
        time: Wall clock of a replay between two synchronisations.
    """

    path: str
    axis_key: tuple[int, ...]
    token_budget: int
    segment_slots: int
    items: Specs
    time: Timing


@dataclass(frozen=True, slots=True)
class EagerPoint:
    """One call run eagerly."""

    items: Specs
    time: Timing


@dataclass(frozen=True, slots=True)
class CallPoint:
    """One call through the graph manager, beside the sum of what it is made of.

    Attributes:
        items: The call.
        replays: Replays in it.
        misses: Items that ran eagerly.
        time: Wall clock of the whole call.
        parts_ms: Its replays alone, each between two synchronisations; the eager call for a call without replays.
    """

    items: Specs
    replays: int
    misses: int
    time: Timing
    parts_ms: float


@dataclass(frozen=True, slots=True)
class CopyPoint:
    """What moving `tokens` output rows' worth of data costs on the device, in milliseconds."""

    tokens: int
    copy_in_ms: float
    clear_ms: float
    clone_out_ms: float


@dataclass(frozen=True, slots=True)
class CapturePoint:
    """One captured graph: time to capture, and bytes of the static buffers that it uses."""

    path: str
    token_budget: int
    segment_slots: int
    capture_ms: float
    buffer_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryPoint:
    """The memory of one manager's graphs, which share a pool and buffers.

    Attributes:
        max_budget: The largest budget.
        graphs: Graphs captured.
        pool_bytes: Bytes of the shared pool.
        first_pool_bytes: What the first graph, the largest, added to the pool.
        buffer_bytes: Bytes of the shared buffers.
    """

    max_budget: int
    graphs: int
    pool_bytes: int
    first_pool_bytes: int
    buffer_bytes: int


@dataclass(frozen=True, slots=True)
class HoldoutPoint:
    """A random call that no fit has seen, measured in both modes.

    Attributes:
        items: The call.
        plan: Place in the profile's `holdout_plans` of the graphs that it met.
        packing: Packing policy.
        graph: The call through the manager.
        eager: The call run eagerly.
        predicted_graph_ms: The cost model's prediction when the profile was made; None before it is known.
        predicted_eager_ms: The same for eager.
    """

    items: Specs
    plan: int
    packing: str
    graph: Timing
    eager: Timing
    predicted_graph_ms: float | None = None
    predicted_eager_ms: float | None = None


@dataclass(frozen=True, slots=True)
class EncoderFacts:
    """What planning needs to know of the encoder.

    Attributes:
        path_minimums: Smallest budget of each path.
        segment_free_paths: Paths whose attention has no segment list.
        modalities: `image`, `video`.
        min_tokens_per_segment: Fewest output tokens of a segment.
        max_frames_per_video: Segments of the longest video.
        axes: Capture axes.
    """

    path_minimums: Mapping[str, int]
    segment_free_paths: tuple[str, ...]
    modalities: tuple[str, ...]
    min_tokens_per_segment: int
    max_frames_per_video: int
    axes: tuple[CaptureAxis, ...] = ()

    @property
    def is_multi_path(self) -> bool:
        """Whether items may have rows on several paths, each with budgets of its own."""
        return len(self.path_minimums) > 1
