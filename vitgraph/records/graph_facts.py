"""What records say of graphs: their captures, how they were used, and what a replay costs."""

from __future__ import annotations

from typing import Any, Literal

from vitgraph.records.sections import Count, DroppedGraph, Finite, GraphKey, Number, Section, Share, Time


class PartUse(Section):
    """The rows of one of a model's paths in replays; of two paths also inside monolithic graphs."""

    path: str
    """Encoder path."""
    tokens_replayed: Count
    """Real output rows of its replays."""
    budget_tokens_replayed: Count
    """Rows that its replays computed, padding included."""
    waste: Number | None
    """Share of the rows of its replays that was padding."""


class PathUse(PartUse):
    """How one encoder path was used."""

    items: Count
    """Items that have rows on the path."""
    hits: Count
    """Items whose rows on the path were replayed."""
    runs: Count
    """Executions of it, replayed or eager."""
    replays: Count
    """Executions of the path that were replayed."""
    replay_ms: Time | None = None
    """Its graphs' replays alone, in ms a request; null unless each of them was timed."""


class GraphUse(GraphKey):
    """How one graph was used; times are of a replay alone."""

    replays: Count
    """Replays of the graph."""
    items: Count
    """Items in its replays."""
    tokens: Count
    """Real output rows of its replays."""
    segments: Count
    """Real segments in them."""
    waste: Number | None
    """Share of the rows of its replays that was padding."""
    replay_ms: Time | None = None
    """Wall time of a replay, in ms."""
    gpu_busy_ms: Time | None = None
    """Time in it in which the GPU computed, in ms."""
    kernels: Count | None = None
    """GPU kernels of a replay."""
    launch_gap: Time | None = None
    """`replay_ms` over `gpu_busy_ms`."""
    break_even_tokens: Count | None = None
    """Fewest tokens of a single image from which on a replay is predicted to be no slower than eager."""


class Counters(Section):
    """Hits, misses and replays of one round over the workload."""

    items: Count = 0
    """Items seen."""
    hits: Count = 0
    """Items all of whose non-empty paths were replayed."""
    misses: Count = 0
    """Items with an eager path; hits and misses are all items."""
    hit_rate: Share | None = None
    """`hits` over `items`; null of no items."""
    misses_by_reason: dict[str, Count] = {}
    """Misses by reason; they add up to `misses`."""
    partial_hits: Count = 0
    """Misses of which some path was replayed."""
    replays: Count = 0
    """Graph replays."""
    path_runs: Count = 0
    """Executions of a path, replayed or eager."""
    path_replays: Count = 0
    """Executions of a path that were replayed."""
    tokens_replayed: Count = 0
    """Real output rows of the replays."""
    budget_tokens_replayed: Count = 0
    """Rows that the replays computed, padding included."""
    waste: Number | None = None
    """Share of the rows of the replays that was padding; null where nothing was replayed."""
    per_path: tuple[PathUse, ...] = ()
    """One entry an encoder path."""
    per_budget: tuple[GraphUse, ...] = ()
    """One entry a graph that was replayed."""
    parts: tuple[PartUse, ...] = ()
    """The rows of each of the model's paths inside monolithic graphs; else empty."""

    def model_post_init(self, context: Any) -> None:
        """Refuses counters that contradict one another."""
        if self.hits + self.misses != self.items:
            raise ValueError(f"{self.hits} hits + {self.misses} misses are not {self.items} items")
        if (by_reason := sum(self.misses_by_reason.values())) != self.misses:
            raise ValueError(f"misses by reason add up to {by_reason}, misses are {self.misses}")
        rate = self.hits / self.items if self.items else None
        if (self.hit_rate is None) != (rate is None) or abs((self.hit_rate or 0) - (rate or 0)) > 1e-6:
            raise ValueError(f"hit_rate is {self.hit_rate}; {self.hits} of {self.items} items make it {rate}")


class CapturedGraph(GraphKey):
    """A graph that was captured."""

    capture_ms: Time
    """Time of its capture, warm-up included, in ms."""
    pool_bytes: Count | None = None
    """What it added to the pool, in bytes."""
    buffer_bytes: Count | None = None
    """Static buffers that it uses, in bytes; graphs share them."""


class CallOverhead(Section):
    """What a call takes beside its replays."""

    items: Count
    """Items of the call."""
    tokens: Count
    """Its output tokens."""
    replays: Count
    """Its replays."""
    call_ms: Time
    """The whole call, in ms."""
    replays_ms: Time
    """Its replays alone, in ms."""
    overhead_ms: Finite
    """The difference, in ms."""


class GraphFacts(Counters):
    """The graphs of a series: what was captured, how it was used, and what a replay costs."""

    mode: Literal["cuda", "cpu-replay"] | None = None
    """`cuda`; `cpu-replay` where graphs were stood in for on a CPU, which saves no launches; null before capturing."""
    policy: str
    """Packing policy."""
    graphs: Count = 0
    """Graphs that were captured."""
    captured: tuple[CapturedGraph, ...] = ()
    """They, in the order of capture; empty in kinds that keep their number only."""
    dropped: tuple[DroppedGraph, ...] = ()
    """Graphs that were planned and could not be captured."""
    pool_bytes: Count | None = None
    """Memory of the graphs' pool, in bytes."""
    buffer_bytes: Count | None = None
    """Memory of the static buffers, in bytes."""
    capture_s: Time | None = None
    """Time of all captures, warm-up included, in s."""
    launch_gap: Time | None = None
    """Wall time of a replay over the GPU's busy time in it, averaged by use."""
    replay_ms: Time | None = None
    """Wall time of a replay, averaged over the most used graphs by use, in ms."""
    gpu_busy_ms: Time | None = None
    """GPU-busy time of a replay, averaged in the same way, in ms."""
    call_overheads: tuple[CallOverhead, ...] | None = None
    """What some whole calls take beside their replays."""
    host_steps_ms: dict[str, Time] | None = None
    """Host time of each step of a graph call, in ms; `call` is the whole."""
