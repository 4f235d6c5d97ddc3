"""What records say of graphs: their captures, how they were used, and what a replay costs."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from vitgraph.records.sections import Count, DroppedGraph, Finite, GraphKey, Number, ReplayMode, Section, Share, Time


class PartUse(Section):
    """The rows of one of a model's paths in replays; of two paths also inside monolithic graphs."""

    path: str = Field(description="Encoder path.")
    tokens_replayed: Count = Field(description="Real output rows of its replays.")
    budget_tokens_replayed: Count = Field(description="Rows that its replays computed, padding included.")
    waste: Number | None = Field(description="Share of the rows of its replays that was padding.")


class PathUse(PartUse):
    """How one encoder path was used."""

    items: Count = Field(description="Items that have rows on the path.")
    hits: Count = Field(description="Items whose rows on the path were replayed.")
    runs: Count = Field(description="Executions of it, replayed or eager.")
    replays: Count = Field(description="Executions of the path that were replayed.")
    replay_ms: Time | None = Field(default=None, description="Its replays alone, ms a request; null unless all timed.")


class GraphUse(GraphKey):
    """How one graph was used; times are of a replay alone."""

    replays: Count = Field(description="Replays of the graph.")
    items: Count = Field(description="Items in its replays.")
    tokens: Count = Field(description="Real output rows of its replays.")
    segments: Count = Field(description="Real segments in them.")
    waste: Number | None = Field(description="Share of the rows of its replays that was padding.")
    replay_ms: Time | None = Field(default=None, description="Wall time of a replay, in ms.")
    gpu_busy_ms: Time | None = Field(default=None, description="Time in it in which the GPU computed, in ms.")
    kernels: Count | None = Field(default=None, description="GPU kernels of a replay.")
    launch_gap: Time | None = Field(default=None, description="`replay_ms` over `gpu_busy_ms`.")
    break_even_tokens: Count | None = None
    """Fewest tokens of a single image from which on a replay is predicted to be no slower than eager."""


class Counters(Section):
    """Hits, misses and replays of one round over the workload."""

    items: Count = Field(default=0, description="Items seen.")
    hits: Count = Field(default=0, description="Items all of whose non-empty paths were replayed.")
    misses: Count = Field(default=0, description="Items with an eager path; hits and misses are all items.")
    hit_rate: Share | None = Field(default=None, description="`hits` over `items`; null of no items.")
    misses_by_reason: dict[str, Count] = Field(default={}, description="Misses by reason; they add up to `misses`.")
    partial_hits: Count = Field(default=0, description="Misses of which some path was replayed.")
    replays: Count = Field(default=0, description="Graph replays.")
    path_runs: Count = Field(default=0, description="Executions of a path, replayed or eager.")
    path_replays: Count = Field(default=0, description="Executions of a path that were replayed.")
    tokens_replayed: Count = Field(default=0, description="Real output rows of the replays.")
    budget_tokens_replayed: Count = Field(default=0, description="Rows that the replays computed, padding included.")
    waste: Number | None = Field(default=None, description="Padding among the replays' rows; null where none replayed.")
    per_path: tuple[PathUse, ...] = Field(default=(), description="One entry an encoder path.")
    per_budget: tuple[GraphUse, ...] = Field(default=(), description="One entry a graph that was replayed.")
    parts: tuple[PartUse, ...] = Field(default=(), description="Rows of each path in monolithic graphs; else empty.")

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

    capture_ms: Time = Field(description="Time of its capture, warm-up included, in ms.")
    pool_bytes: Count | None = Field(default=None, description="What it added to the pool, in bytes.")
    buffer_bytes: Count | None = Field(default=None, description="Static buffers that it uses, which graphs share.")


class CallOverhead(Section):
    """What a call takes beside its replays."""

    items: Count = Field(description="Items of the call.")
    tokens: Count = Field(description="Its output tokens.")
    replays: Count = Field(description="Its replays.")
    call_ms: Time = Field(description="The whole call, in ms.")
    replays_ms: Time = Field(description="Its replays alone, in ms.")
    overhead_ms: Finite = Field(description="The difference, in ms.")


class GraphFacts(Counters):
    """The graphs of a series: what was captured, how it was used, and what a replay costs."""

    mode: ReplayMode | None = Field(default=None, description="`cpu-replay`: on a CPU; null before capturing.")
    policy: str = Field(description="Packing policy.")
    graphs: Count = Field(default=0, description="Graphs that were captured.")
    captured: tuple[CapturedGraph, ...] = Field(default=(), description="They, in order; empty where only counted.")
    dropped: tuple[DroppedGraph, ...] = Field(default=(), description="Planned graphs that could not be captured.")
    pool_bytes: Count | None = Field(default=None, description="Memory of the graphs' pool, in bytes.")
    buffer_bytes: Count | None = Field(default=None, description="Memory of the static buffers, in bytes.")
    capture_s: Time | None = Field(default=None, description="Time of all captures, warm-up included, in s.")
    launch_gap: Time | None = Field(default=None, description="Wall over GPU-busy time of a replay, averaged by use.")
    replay_ms: Time | None = Field(default=None, description="Wall time of the most used replays, by use, in ms.")
    gpu_busy_ms: Time | None = Field(default=None, description="GPU-busy time of a replay, averaged alike, in ms.")
    call_overheads: tuple[CallOverhead, ...] | None = Field(default=None, description="What calls take beside replays.")
    host_steps_ms: dict[str, Time] | None = None
    """Host time of each step of a graph call, in ms; `call` is the whole."""
