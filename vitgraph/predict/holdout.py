"""How far the cost model is from calls that its fit has not seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vitgraph.predict.cost_model import CostModel
from vitgraph.predict.targets import TARGETS, VITGRAPH, TargetCost
from vitgraph.records.kinds.calibrate import HoldoutPoint


@dataclass(frozen=True, slots=True)
class ErrorSummary:
    """Absolute relative errors, in percent.

    Attributes:
        n: Calls compared.
        median_pct: Median; None without calls.
        p90_pct: 90th percentile; None without calls.
        bias_pct: Median of the signed error; positive means predicted too slow. None without calls.
    """

    n: int
    median_pct: float | None = None
    p90_pct: float | None = None
    bias_pct: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """The summary as a record has it."""
        return {"n": self.n, "median_pct": self.median_pct, "p90_pct": self.p90_pct, "bias_pct": self.bias_pct}


@dataclass(frozen=True, slots=True)
class ModelError:
    """Errors of a cost model on the calls held out: through the manager, eager, and both together."""

    graph: ErrorSummary
    eager: ErrorSummary
    both: ErrorSummary

    def as_dict(self) -> dict[str, Any]:
        """The three summaries by name."""
        return {"graph": self.graph.as_dict(), "eager": self.eager.as_dict(), "both": self.both.as_dict()}

    def __str__(self) -> str:
        """One line for every prediction that is printed."""
        if self.both.median_pct is None:
            return "the profile holds no calls to check the model with, so its error is unknown"
        return (
            f"model error on {self.both.n // 2} calls it has not seen: median {self.both.median_pct:.1f}%, "
            f"P90 {self.both.p90_pct:.1f}% (graph {self.graph.median_pct:.1f}%, eager {self.eager.median_pct:.1f}%)"
        )


def summarize_errors(predicted: Sequence[float], measured: Sequence[float]) -> ErrorSummary:
    """Errors of predictions against measurements of the same calls.

    Raises:
        ValueError: The series differ in length.
    """
    if len(predicted) != len(measured):
        raise ValueError(f"{len(predicted)} predictions of {len(measured)} measurements")
    if not predicted:
        return ErrorSummary(0)
    errors = (np.array(predicted) / np.array(measured) - 1.0) * 100.0
    median, p90 = np.percentile(np.abs(errors), (50, 90))
    return ErrorSummary(len(errors), float(median), float(p90), float(np.median(errors)))


def predicted_holdout(model: CostModel) -> list[HoldoutPoint]:
    """The profile's held-out calls with the model's predictions."""
    cost = TargetCost(model, TARGETS[VITGRAPH])
    found = []
    for point in model.profile.holdout:
        prediction = cost.predict_call(point.items, model.profile.holdout_plans[point.plan], point.packing)
        found.append(replace(point, predicted_graph_ms=prediction.graph_ms, predicted_eager_ms=prediction.eager_ms))
    return found


def model_error(model: CostModel) -> ModelError:
    """The model's errors on its profile's held-out calls."""
    points = predicted_holdout(model)
    graph = [point.predicted_graph_ms or 0.0 for point in points], [point.graph.ms for point in points]
    eager = [point.predicted_eager_ms or 0.0 for point in points], [point.eager.ms for point in points]
    both = summarize_errors([*graph[0], *eager[0]], [*graph[1], *eager[1]])
    return ModelError(summarize_errors(*graph), summarize_errors(*eager), both)
