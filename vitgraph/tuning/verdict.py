"""Whether to use graphs, from what settings are predicted to do with calls that they were not made for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from vitgraph.planning.graph_tables import FloatArray
from vitgraph.records.kinds.tune import ModelError, TuneVerdict
from vitgraph.tuning.objective import Objective

USE_GRAPHS: Final = "use_graphs"
NO_GRAPHS: Final = "no_graphs"
MEASURE_FIRST: Final = "measure_first"
DEPENDS: Final = "depends"
TUNED, EAGER = "tuned", "eager"

SLOWER_THRESHOLD = 0.02
"""A request counts as slower than eager from this share on, as in the bench."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What settings are predicted to do, against eager.

    Attributes:
        improvement_pct: Of the objective, in percent of eager's; positive = faster.
        slower_share: Requests that become slower than eager by more than `SLOWER_THRESHOLD`.
        margin_pct: Error and noise that a gain must exceed.
        doubts: Why predictions are not to be acted on.
    """

    improvement_pct: float
    slower_share: float
    margin_pct: float
    doubts: tuple[str, ...] = ()

    @property
    def verdict(self) -> TuneVerdict:
        """`use_graphs`, `no_graphs` (never slower than eager: also where the gain is within error), `measure_first`."""
        if self.doubts:
            return MEASURE_FIRST
        return USE_GRAPHS if self.improvement_pct > self.margin_pct else NO_GRAPHS

    def __str__(self) -> str:
        slower = f"{self.slower_share:.1%} of the requests slower"
        if self.verdict == MEASURE_FIRST:
            return f"measure it first: {'; '.join(self.doubts)}"
        if self.verdict == USE_GRAPHS:
            return f"use graphs: predicted {self.improvement_pct:.1f}% faster than eager, {slower}"
        if self.improvement_pct <= 0.0:
            loss = abs(self.improvement_pct)
            return f"leave graphs off: the best settings found are predicted {loss:.1f}% slower than eager"
        return (
            f"leave graphs off: predicted {self.improvement_pct:.1f}% faster than eager, {slower}, which is within the "
            f"error of the prediction and the noise of eager ({self.margin_pct:.1f}%)"
        )


def outcome_of(
    times: Mapping[str, FloatArray],
    objective: Objective,
    error: ModelError,
    noise_pct: float,
    doubts: Sequence[str],
    name: str = TUNED,
) -> Outcome:
    """What one plan's predicted times amount to.

    Args:
        times: Predicted times of each request, by name.
        objective: What is minimised.
        error: Of the model on its held-out calls.
        noise_pct: How far eager strays from itself, in percent.
        doubts: Why predictions are not to be acted on.
        name: Of the plan.
    """
    graph, eager = times[name], times[EAGER]
    margin = max(noise_pct, error.both.median_pct or 0.0)
    slower = float((graph > eager * (1.0 + SLOWER_THRESHOLD)).mean())
    return Outcome((1.0 - objective.score(graph, eager)) * 100.0, slower, margin, tuple(doubts))


def joint_verdict(verdicts: Sequence[TuneVerdict]) -> TuneVerdict:
    """The verdict where how many requests a call has is not known: the common one, or `depends`."""
    return verdicts[0] if len(set(verdicts)) == 1 else DEPENDS
