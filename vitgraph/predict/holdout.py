"""How far the cost model is from calls that its fit has not seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from vitgraph.predict.cost_model import CostModel
from vitgraph.predict.targets import TARGETS, VITGRAPH, TargetCost
from vitgraph.records.kinds.calibrate import HoldoutPoint
from vitgraph.records.kinds.tune import ModelError, PredictionError


def summarize_errors(predicted: Sequence[float], measured: Sequence[float]) -> PredictionError:
    """Errors of predictions against measurements of the same calls.

    Raises:
        ValueError: The series differ in length.
    """
    if len(predicted) != len(measured):
        raise ValueError(f"{len(predicted)} predictions of {len(measured)} measurements")
    if not predicted:
        return PredictionError(n=0)
    errors = (np.array(predicted) / np.array(measured) - 1.0) * 100.0
    median, p90 = np.percentile(np.abs(errors), (50, 90))
    bias = float(np.median(errors))
    return PredictionError(n=len(errors), median_pct=float(median), p90_pct=float(p90), bias_pct=bias)


def predicted_holdout(model: CostModel) -> list[HoldoutPoint]:
    """The profile's held-out calls with the model's predictions."""
    cost = TargetCost(model, TARGETS[VITGRAPH])
    plans = [graphs.plan() for graphs in model.profile.holdout_plans]
    found = []
    for point in model.profile.holdout:
        prediction = cost.predict_call(point.items, plans[point.plan], point.packing)
        found.append(replace(point, predicted_graph_ms=prediction.graph_ms, predicted_eager_ms=prediction.eager_ms))
    return found


def model_error(model: CostModel) -> ModelError:
    """The model's errors on its profile's held-out calls."""
    points = predicted_holdout(model)
    graph = [point.predicted_graph_ms or 0.0 for point in points], [point.graph.ms for point in points]
    eager = [point.predicted_eager_ms or 0.0 for point in points], [point.eager.ms for point in points]
    both = summarize_errors([*graph[0], *eager[0]], [*graph[1], *eager[1]])
    return ModelError(graph=summarize_errors(*graph), eager=summarize_errors(*eager), both=both)
