"""Latencies of series, what one gains over another, and how sure that is.

Gains have one sign everywhere: an improvement is positive where the second of two is faster.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from vitgraph.records.sections import Count, Finite, Number, Section, Share, Time

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
