"""What a search for settings returns: each evaluation that it made, and the winner."""

from __future__ import annotations

from dataclasses import dataclass

from vitgraph.predict.targets import Settings


@dataclass(frozen=True, slots=True)
class ScoredSettings:
    """Settings with what they are predicted to give and to take.

    Attributes:
        settings: What was evaluated.
        score: Of the objective; below 1 is better than eager.
        loss: What requests may be slower than eager, as a share of eager's time; weighed beside the score.
        excess: By how much more requests, or the P99, may become slower than eager than is allowed; 0 is preferred to
            everything else.
        mean_ms, p50_ms, p99_ms: Per request.
        graphs: Graphs to capture.
        memory_bytes: Their pool and buffers.
        capture_s: Time to capture them.
        is_allowed: Within the limits.
    """

    settings: Settings
    score: float
    loss: float
    excess: float
    mean_ms: float
    p50_ms: float
    p99_ms: float
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


@dataclass(slots=True)
class SearchResult:
    """What a search found.

    Attributes:
        best: The winner; None where nothing is within the limits.
        evaluated: Every evaluation within the limits, the best first; without a limit on graphs, those of up to
            `MOST_GRAPHS` where there are any.
        is_exhaustive: All settings of the space were tried.
        is_exact: The winner is the optimum over the candidates.
        evaluations: How many settings were evaluated.
    """

    best: ScoredSettings | None
    evaluated: list[ScoredSettings]
    is_exhaustive: bool
    is_exact: bool
    evaluations: int
