"""What tuning minimises, what it must stay within, how settings score, and whether that is reason to use graphs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import sqrt
from typing import Any, Final

import numpy as np

from vitgraph.errors import UsageError
from vitgraph.planning.budgets import BudgetSettings
from vitgraph.planning.graph_tables import FloatArray
from vitgraph.records.tune_result import Measured, PredictedLatency, TuneVerdict

METRICS = ("mean", "p99", "throughput")
TIE_WEIGHT = 0.05

SLOWER_THRESHOLD = 0.02
"""A request counts as slower than eager, and so does the P99, from this share on, as in the bench."""

MOST_SLOWER = 0.02
"""Share of the requests that may become slower than eager, unless another is asked for."""


def is_surely_more(share: float, requests: int, most: float) -> bool:
    """Whether a share of so many requests is more than `most`, and not by chance (one-sided, 95 %)."""
    return share - 1.645 * sqrt(share * (1.0 - share) / requests) > most


@dataclass(frozen=True, slots=True)
class Kept:
    """What settings keep of eager: somebody whose requests became slower is not consoled by a better mean.

    Attributes:
        slower_share: Requests that become slower than eager by more than `SLOWER_THRESHOLD`.
        p99_ratio: P99 over eager's.
    """

    slower_share: float
    p99_ratio: float
    requests: int

    @classmethod
    def of(cls, graph: FloatArray, eager: FloatArray) -> Kept:
        """What latencies of requests keep of eager's."""
        slower = float((graph > eager * (1.0 + SLOWER_THRESHOLD)).mean())
        return cls(slower, float(np.percentile(graph, 99) / np.percentile(eager, 99)), len(graph))

    def excess(self, most_slower: float) -> float:
        """By how much more requests become slower than may, and by how much the P99 does; 0 where it is kept."""
        too_many, tail = self.slower_share - most_slower, self.p99_ratio - 1.0 - SLOWER_THRESHOLD
        return max(0.0, too_many) + max(0.0, tail)

    def broken(self, most_slower: float) -> str:
        """What is surely not kept, in words; empty where all is."""
        found = []
        if is_surely_more(self.slower_share, self.requests, most_slower):
            found.append(
                f"{self.slower_share:.1%} of the requests would become slower (at most {most_slower:.1%}; "
                "--max-slower-share allows more)"
            )
        if self.p99_ratio > 1.0 + SLOWER_THRESHOLD:
            found.append(f"the P99 would become {self.p99_ratio - 1.0:.1%} longer")
        return " and ".join(found)


@dataclass(frozen=True, slots=True)
class Objective:
    """A mix of metrics by weights that sum to 1, each relative to eager, so that units do not matter; less is better.

    `mean` and `p99` are over requests; `throughput` is the time of the whole workload, one call after the other. Where
    only the P99 counts, the mean decides between settings that are alike in it, with a weight of `TIE_WEIGHT`.
    """

    weights: Mapping[str, float] = field(default_factory=lambda: {"mean": 1.0})

    @classmethod
    def parse(cls, text: str) -> Objective:
        """Reads `mean`, `p99`, `throughput`, or a mix such as `mean=0.7,p99=0.3`.

        Raises:
            UsageError: An unknown metric, or weights that are not positive numbers.
        """
        weights: dict[str, float] = {}
        for part in text.split(","):
            name, _, number = part.strip().partition("=")
            if name not in METRICS:
                raise UsageError(
                    f"--objective is {text!r}; known metrics: {', '.join(METRICS)}, or a mix such as mean=0.7,p99=0.3"
                )
            try:
                weight = float(number) if number else 1.0
            except ValueError as error:
                raise UsageError(f"--objective {text!r}: {number!r} is not a number") from error
            if not 0 < weight < float("inf"):
                raise UsageError(f"--objective {text!r}: the weight of {name} must be a positive number")
            weights[name] = weights.get(name, 0.0) + weight
        total = sum(weights.values())
        return cls({name: weight / total for name, weight in weights.items()})

    def score(self, graph: FloatArray, eager: FloatArray) -> float:
        """The score of per-request latencies against eager's; below 1 is better than eager."""
        by_sum = float(graph.sum() / eager.sum())
        by_tail = float(np.percentile(graph, 99) / np.percentile(eager, 99)) if "p99" in self.weights else 0.0
        tail = self.weights.get("p99", 0.0)
        if tail >= 1.0:
            tail = 1.0 - TIE_WEIGHT
        return tail * by_tail + (1.0 - tail) * by_sum

    def __str__(self) -> str:
        if len(self.weights) == 1:
            return next(iter(self.weights))
        return ",".join(f"{name}={weight:.3g}" for name, weight in self.weights.items())


@dataclass(frozen=True, slots=True)
class Limits:
    """What the graphs may take; None is no limit.

    Attributes:
        max_graphs: Graphs to capture, all slot tiers counted.
        max_memory_bytes: Pool and buffers.
        max_capture_s: Seconds of capturing.
        most_slower: Share of the requests that may become slower than eager; kept where any settings keep it.
    """

    max_graphs: int | None = None
    max_memory_bytes: float | None = None
    max_capture_s: float | None = None
    most_slower: float = MOST_SLOWER

    @property
    def needs_penalty(self) -> bool:
        """True where a limit depends on which budgets are chosen, and not on how many alone."""
        return self.max_memory_bytes is not None or self.max_capture_s is not None

    def allow(self, graphs: int, memory_bytes: float, capture_s: float) -> bool:
        """Whether graphs of that number, size and capture time are within the limits."""
        return (
            (self.max_graphs is None or graphs <= self.max_graphs)
            and (self.max_memory_bytes is None or memory_bytes <= self.max_memory_bytes)
            and (self.max_capture_s is None or capture_s <= self.max_capture_s)
        )

    def __str__(self) -> str:
        asked = (
            ("--max-graphs {}", self.max_graphs),
            ("--max-graph-memory {:.3g} (GiB)", self.max_memory_bytes and self.max_memory_bytes / 2**30),
            ("--max-capture-time {:g} (s)", self.max_capture_s),
        )
        return ", ".join(text.format(value) for text, value in asked if value is not None)

    def as_dict(self) -> dict[str, Any]:
        """The limits as a record has them."""
        return {
            "max_graphs": self.max_graphs,
            "max_graph_memory_bytes": self.max_memory_bytes,
            "max_capture_s": self.max_capture_s,
            "max_slower_share": self.most_slower,
        }


@dataclass(frozen=True, slots=True)
class ScoredSettings:
    """Settings with what they are predicted to give and to take.

    Attributes:
        score: Of the objective; below 1 is better than eager.
        loss: What requests may be slower than eager, as a share of eager's time; weighed beside the score.
        excess: By how much more requests, or the P99, may become slower than eager than is allowed; 0 is preferred to
            everything else.
        latency: Per request.
    """

    settings: BudgetSettings
    score: float
    loss: float
    excess: float
    latency: PredictedLatency
    graphs: int
    memory_bytes: float
    capture_s: float
    is_allowed: bool

    @property
    def rank(self) -> float:
        """What the search minimises, of settings that keep eager's promises and of those that do not."""
        return self.score + self.loss + self.excess

    @property
    def order(self) -> tuple[bool, float]:
        """The less, the better."""
        return self.excess > 0.0, self.rank


def latency_of(times: FloatArray, requests: int | None = None) -> PredictedLatency:
    """Predicted times of requests in a few figures."""
    p50, p99 = np.percentile(times, (50, 99))
    return PredictedLatency(mean_ms=float(times.mean()), p50_ms=float(p50), p99_ms=float(p99), requests=requests)


USE_GRAPHS: Final = "use_graphs"
NO_GRAPHS: Final = "no_graphs"
MEASURE_FIRST: Final = "measure_first"
DEPENDS: Final = "depends"
TUNED, AUTOMATIC, SEED_NINE, EAGER, ORACLE = "tuned", "automatic", "seed_nine", "eager", "oracle"
"""What is compared: the settings found, those that people use without tuning, and the bounds on both sides."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What settings are predicted to do, against eager.

    Attributes:
        improvement_pct: Of the objective, in percent of eager's; positive = faster.
        kept: How many requests become slower, and what the tail does.
        margin_pct: Error and noise that a gain must exceed.
        most_slower: Share of the requests that may become slower.
        doubts: Why predictions are not to be acted on.
        objective: What was minimised, in words; empty for the mean.
    """

    improvement_pct: float
    kept: Kept
    margin_pct: float
    most_slower: float
    doubts: tuple[str, ...] = ()
    objective: str = ""

    @property
    def is_kept(self) -> bool:
        """Whether not surely too many requests become slower, and the tail does not."""
        return not self.kept.broken(self.most_slower)

    @property
    def verdict(self) -> TuneVerdict:
        """`use_graphs`, `no_graphs` (also where it is not sure that eager is never better), `measure_first`."""
        if self.doubts:
            return MEASURE_FIRST
        return USE_GRAPHS if self.improvement_pct > self.margin_pct and self.is_kept else NO_GRAPHS

    def __str__(self) -> str:
        if self.verdict == MEASURE_FIRST:
            return f"measure it first: {'; '.join(self.doubts)}"
        by = f" by --objective {self.objective}" if self.objective else ""
        if self.improvement_pct <= 0.0:
            loss = abs(self.improvement_pct)
            return f"leave graphs off: the best settings found are predicted {loss:.1f}% slower than eager{by}"
        gain = f"predicted {self.improvement_pct:.1f}% faster than eager{by}"
        slower = f"{self.kept.slower_share:.1%} of the requests slower"
        if self.verdict == USE_GRAPHS:
            return f"use graphs: {gain}, {slower}"
        if self.improvement_pct <= self.margin_pct:
            return (
                f"leave graphs off: {gain}, {slower}, which is within the error of the prediction and the noise of "
                f"eager ({self.margin_pct:.1f}%)"
            )
        where = "" if by else " in the mean"
        return f"leave graphs off: the best list is {gain}{where}, but {self.kept.broken(self.most_slower)}"


def measured_verdict(measured: Measured, most_slower: float) -> tuple[TuneVerdict, str] | None:
    """Whether to use graphs by what was measured, and the same in a sentence; None where nothing was compared.

    Args:
        most_slower: Share of the requests that may become slower; only what is surely more counts.
    """
    tuned = measured.strategies.get(TUNED)
    pair = tuned.against_eager if tuned else None
    if pair is None or pair.mean.improvement_pct is None:
        return None
    if measured.problems or pair.mean.verdict == "invalid":
        return MEASURE_FIRST, f"measured, but the times are not valid: {'; '.join(measured.problems)}"
    found, gain, slower = pair.mean.verdict, pair.mean.improvement_pct, pair.slower
    ends = "" if pair.mean.ci95 is None else f" (95% CI {pair.mean.ci95[0]:+.1f}% to {pair.mean.ci95[1]:+.1f}%)"
    # Slower by more than noise and by more than what counts.
    shares = [] if slower is None else [one for one in (slower.share, slower.over_2pct_share) if one is not None]
    share = min(shares, default=None)
    said = "requests not compared one by one" if share is None else f"{share:.1%} of the requests slower"
    what = f"measured {gain:+.1f}%{ends} against eager on {measured.calls} calls, {said}"
    if found == "faster":
        broken = share is not None and slower is not None and is_surely_more(share, slower.requests, most_slower)
        broken |= pair.p99 is not None and pair.p99.verdict == "slower"
        why = f"leave graphs off: {what}, P99 {'not known' if pair.p99 is None else pair.p99.verdict}"
        return (NO_GRAPHS, why) if broken else (USE_GRAPHS, f"use graphs: {what}")
    if found in ("slower", "same"):
        return NO_GRAPHS, f"leave graphs off: {what}: {found}"
    return MEASURE_FIRST, f"undecided: {what}; measure more with --verify-calls and --time-limit"
