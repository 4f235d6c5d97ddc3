"""Latencies of series, what one gains over another, and how sure that is.

Gains have one sign everywhere: an improvement is positive where the second of two is faster.
"""

from __future__ import annotations

from typing import Literal

from vitgraph.records.sections import Count, Finite, Number, Section, Share, Time

Interval = tuple[Number, Number]
Verdict = Literal["faster", "slower", "same", "undecided", "invalid"]
Metric = Literal["mean", "p50", "p99"]


class RankPart(Section):
    """One rank's part of a series; times are means in ms a request, counts are of one round."""

    rank: Count
    """Its number."""
    encode_ms: Time
    """Encoding of its share, in ms: between events on a GPU, wall clock on a CPU."""
    wait_ms: Time
    """From there to the moment that the last rank came to the gather, in ms."""
    wall_ms: Time
    """From the common start to the end of the gather on this rank, in ms."""
    idle_calls: Count
    """Calls in which it had no items."""
    items: Count
    """Items of its shares."""
    tokens: Count
    """Their output tokens."""
    hits: Count
    """Its items that were replayed on every path; 0 where nothing is replayed."""
    misses: Count
    """Its items with an eager path; 0 where nothing is replayed."""
    replays: Count
    """Its graph replays."""


class Sharing(Section):
    """How the calls of a series were shared among the ranks."""

    gather_ms: Time
    """Mean time of the gather in ms a request, from the moment that the last rank came to it."""
    time_imbalance: Finite
    """Mean over the calls of the longest encoding of a rank over the ranks' mean; 1 is even."""
    input_imbalance: Finite
    """The same of the ranks' pixel rows."""
    ranks: tuple[RankPart, ...]
    """Each rank's part."""


class Latency(Section):
    """Latency of one series over requests: a call counts as often as it has requests, each with its share of the time.

    A request that was measured in several rounds counts once, with its mean. Times are null where nothing was measured.
    """

    mean_ms: Time | None
    """Mean wall time of a request, in ms."""
    p50_ms: Time | None
    """Median, in ms."""
    p90_ms: Time | None
    """90th percentile, in ms."""
    p99_ms: Time | None
    """99th percentile in ms, always the plain one; see `p99_supported`."""
    p99_supported: bool
    """There are enough requests to speak of a P99; below that, speak of `max_ms`."""
    max_ms: Time | None
    """Largest value, in ms."""
    std_ms: Time | None
    """Standard deviation, in ms."""
    requests: Count
    """Requests that these figures describe."""
    calls: Count
    """Encoder calls that these requests were measured in."""
    outliers: Count
    """Requests beyond 1.5 interquartile ranges of the quartiles; counted, never removed."""
    gpu_mean_ms: Time | None = None
    """Mean time between device events in ms a request; null on a CPU."""
    speed_of_light_ms: Time | None = None
    """Time of the arithmetic of a mean request, without padding, at the measured matrix rate, in ms."""
    times_speed_of_light: Time | None = None
    """`mean_ms` over `speed_of_light_ms`."""
    sharing: Sharing | None = None
    """How the calls were shared among the ranks; null in a run of one process."""


class Improvement(Section):
    """What the second of two series gains over the first, in one metric. Positive = the second is faster."""

    improvement_pct: Number | None
    """(first - second) / first, in percent; null where it is not known."""
    ci95: Interval | None = None
    """Lower and upper end of its 95 % interval in percent, from a bootstrap; null where there are too few calls."""
    noise_floor_pct: Number | None = None
    """What a series differs from itself in this run, in percent; null where it is not known."""
    verdict: Verdict
    """`faster` or `slower` where the whole interval lies beyond the noise floor, `same` where it lies within a margin,
    else `undecided`; `invalid` where the times must not be compared."""


class SlowerRequests(Section):
    """Requests that the second of two series made slower."""

    requests: Count
    """Requests compared."""
    threshold_pct: Number | None
    """Request noise in percent: how far 95 % of the requests stay from themselves when eager is repeated."""
    count: Count | None
    """Requests slower by more than the threshold; null where the noise is not known."""
    share: Share | None
    """`count` over `requests`."""
    over_2pct_count: Count
    """Requests slower by more than 2 %."""
    over_2pct_share: Share | None
    """`over_2pct_count` over `requests`."""


class Pair(Section):
    """Two series of the same calls, compared."""

    base: str
    """The series that percentages refer to."""
    series: str
    """The series that is judged."""
    mean: Improvement
    """The mean latency."""
    p50: Improvement | None = None
    """The median latency."""
    p99: Improvement | None = None
    """The 99th percentile."""
    trimmed_mean: Improvement | None = None
    """The mean without the requests whose calls changed most and least, a share of them at either end."""
    slower: SlowerRequests | None = None
    """Requests that `series` made slower than `base`."""

    def metric(self, name: Metric) -> Improvement | None:
        """The improvement in one metric; None where it was not compared."""
        found: Improvement | None = getattr(self, name)
        return found


class Compared(Section):
    """Which calls the series of a run were compared on."""

    requests: Count = 0
    """Requests measured in all compared series."""
    calls: Count = 0
    """Calls that these requests were measured in."""
    rounds: Count = 0
    """Rounds in which they were."""
    unpaired_samples: Count = 0
    """Samples left out because another compared series is missing in that round."""
    invalid_reasons: tuple[str, ...] = ()
    """Why the times must not be compared; empty in a sound run."""
