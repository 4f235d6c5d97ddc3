"""What tuning minimises, what it must stay within, and how settings score."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import sqrt
from typing import Any

import numpy as np

from vitgraph.errors import UsageError
from vitgraph.planning.budgets import BudgetSettings
from vitgraph.planning.graph_tables import FloatArray
from vitgraph.records.tune_result import PredictedLatency

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
