"""What records say of a series of calls: its latency, what it gains over another and how sure that is, and its graphs.

Gains have one sign everywhere: an improvement is positive where the second of two is faster.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from vitgraph.records.sections import Count, DroppedGraph, Finite, GraphKey, Number, ReplayMode, Section, Share, Time

Interval = tuple[Number, Number]
Verdict = Literal["faster", "slower", "same", "undecided", "invalid"]


class RankPart(Section):
    """One rank's part of a series; times are means in ms a request, counts are of one round."""

    rank: Count = Field(description="Its number.")
    encode_ms: Time = Field(description="Encoding of its share, in ms: between events on a GPU, wall clock on a CPU.")
    wait_ms: Time = Field(description="From there to the moment that the last rank came to the gather, in ms.")
    wall_ms: Time = Field(description="From the common start to the end of the gather on this rank, in ms.")
    idle_calls: Count = Field(description="Calls in which it had no items.")
    items: Count = Field(description="Items of its shares.")
    tokens: Count = Field(description="Their output tokens.")
    hits: Count = Field(description="Its items that were replayed on every path; 0 where nothing is replayed.")
    misses: Count = Field(description="Its items with an eager path; 0 where nothing is replayed.")
    replays: Count = Field(description="Its graph replays.")


class Sharing(Section):
    """How the calls of a series were shared among the ranks."""

    gather_ms: Time = Field(description="Mean time of the gather in ms a request, from when the last rank came to it.")
    time_imbalance: Finite = Field(description="Mean of a call's longest encoding over the ranks' mean; 1 is even.")
    input_imbalance: Finite = Field(description="The same of the ranks' pixel rows.")
    ranks: tuple[RankPart, ...] = Field(description="Each rank's part.")


class Latency(Section):
    """Latency of one series over requests: a call counts as often as it has requests, each with its share of the time.

    A request that was measured in several rounds counts once, with its mean. Times are null where nothing was measured.
    """

    mean_ms: Time | None = Field(description="Mean wall time of a request, in ms.")
    p50_ms: Time | None = Field(description="Median, in ms.")
    p90_ms: Time | None = Field(description="90th percentile, in ms.")
    p99_ms: Time | None = Field(description="99th percentile in ms, always the plain one; see `p99_supported`.")
    p99_supported: bool = Field(description="There are enough requests for a P99; below that, speak of `max_ms`.")
    max_ms: Time | None = Field(description="Largest value, in ms.")
    std_ms: Time | None = Field(description="Standard deviation, in ms.")
    requests: Count = Field(description="Requests that these figures describe.")
    calls: Count = Field(description="Encoder calls that these requests were measured in.")
    outliers: Count = Field(description="Requests beyond 1.5 interquartile ranges of the quartiles; never removed.")
    gpu_mean_ms: Time | None = Field(default=None, description="Mean a request between device events; null on a CPU.")
    speed_of_light_ms: Time | None = None
    """Time of the arithmetic of a mean request, without padding, at the measured matrix rate, in ms."""
    times_speed_of_light: Time | None = Field(default=None, description="`mean_ms` over `speed_of_light_ms`.")
    sharing: Sharing | None = Field(default=None, description="How ranks shared the calls; null in one process.")


class Improvement(Section):
    """What the second of two series gains over the first, in one metric. Positive = the second is faster."""

    improvement_pct: Number | None = Field(description="(first - second) / first, in percent; null where not known.")
    ci95: Interval | None = None
    """Lower and upper end of its 95 % interval in percent, from a bootstrap; null where there are too few calls."""
    noise_floor_pct: Number | None = Field(default=None, description="What a series differs from itself, in percent.")
    verdict: Verdict
    """`faster` or `slower` where the whole interval lies beyond the noise floor, `same` where it lies within a margin,
    else `undecided`; `invalid` where the times must not be compared."""


class SlowerRequests(Section):
    """Requests that the second of two series made slower."""

    requests: Count = Field(description="Requests compared.")
    threshold_pct: Number | None = Field(description="Request noise: what 95 % of requests stay within, in percent.")
    count: Count | None = Field(description="Requests slower by more than the threshold; null where that is not known.")
    share: Share | None = Field(description="`count` over `requests`.")
    over_2pct_count: Count = Field(description="Requests slower by more than 2 %.")
    over_2pct_share: Share | None = Field(description="`over_2pct_count` over `requests`.")


class Pair(Section):
    """Two series of the same calls, compared."""

    base: str = Field(description="The series that percentages refer to.")
    series: str = Field(description="The series that is judged.")
    mean: Improvement = Field(description="The mean latency.")
    p50: Improvement | None = Field(default=None, description="The median latency.")
    p99: Improvement | None = Field(default=None, description="The 99th percentile.")
    trimmed_mean: Improvement | None = None
    """The mean without the requests whose calls changed most and least, a share of them at either end."""
    slower: SlowerRequests | None = Field(default=None, description="Requests that `series` made slower than `base`.")


class Compared(Section):
    """Which calls the series of a run were compared on."""

    requests: Count = Field(default=0, description="Requests measured in all compared series.")
    calls: Count = Field(default=0, description="Calls that these requests were measured in.")
    rounds: Count = Field(default=0, description="Rounds in which they were.")
    unpaired_samples: Count = Field(default=0, description="Samples left out: their round lacks another series.")
    invalid_reasons: tuple[str, ...] = Field(default=(), description="Why times must not be compared; else empty.")


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
