"""A calibration profile in a few numbers: how far the cost model is from calls that its fit has not seen, and when that
or the host forbids acting on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from vitgraph.planning.budgets import DEFAULT_PATH
from vitgraph.predict.cost_model import CostModel
from vitgraph.predict.fitting import spread
from vitgraph.predict.profile import CalibrationProfile
from vitgraph.predict.targets import TARGETS, VITGRAPH, TargetCost, fit_overheads
from vitgraph.records.calibrate_result import HoldoutPoint, HostCheck, ReplayPoint
from vitgraph.records.sections import choices_text
from vitgraph.records.tune_result import ModelError, PredictionError

MOST_MEDIAN_PCT = 5.0
"""Median error of a mode on held-out calls up to which its predictions are acted on."""

MOST_P90_PCT = 20.0
"""The same of the 90th percentile. A host that was slow while eager calls were timed shows here first."""

REFERENCE_LAUNCH_US, SLOW_LAUNCH_US = 45.0, 80.0
"""Host time a kernel of short eager calls, in µs: in the median of the records of `vitgraph profile` on H200 hosts
(InternVL3.5-8B, Qwen2.5-VL-7B, Qwen3-VL-30B-A3B at 336x336 and 1024x768: 36 to 58), and from which a host is called
slow. Hosts that doubled eager times took 100 to 124."""


SAME_HOST = 1.1
"""Hosts whose times for a small layer differ by no more than this factor are taken to be alike."""


def host_problems(host: HostCheck | None) -> dict[str, str]:
    """What is wrong with the host of a calibration, in words by kind: `slow`, `unsteady`; empty where nothing is."""
    found: dict[str, str] = {}
    if host is None:
        return found
    if host.launch_us is not None and host.launch_us >= SLOW_LAUNCH_US:
        found["slow"] = (
            f"a slow host: {host.launch_us:.0f} µs a kernel in short eager calls, where H200 hosts took "
            f"{host.reference_launch_us:.0f}; eager is slower on it than on most hosts, and graphs gain more"
        )
    if host.slowed_layer_us is not None:
        found["unsteady"] = (
            f"an unsteady host: the same small layer took it {host.layer_us:.0f} µs at most times and "
            f"{host.slowed_layer_us:.0f} µs in {host.slowed_share:.0%} of {host.looks} looks between the measurements"
        )
    return found


def host_factor(host: HostCheck | None, layer_us: float) -> tuple[float, str]:
    """How many times as long as a profile's host this one takes, and what that means for predictions, in words."""
    if host is None or host.layer_us is None:
        return 1.0, (
            "the profile does not say how fast its host was, so that eager is predicted as on that host; where this "
            "one is slower, graphs gain more than predicted, and less where it is faster"
        )
    factor = layer_us / host.layer_us
    times = f"this host takes {layer_us:.0f} µs for a small layer, the profile's took {host.layer_us:.0f}"
    if 1.0 / SAME_HOST <= factor <= SAME_HOST:
        return 1.0, f"{times}: eager is predicted as measured there"
    return factor, f"{times}: eager's launches are predicted to take {factor:.2f} times as long here"


def profile_doubts(profile: CalibrationProfile, error: ModelError) -> list[str]:
    """Why a profile's predictions are not to be acted on, in words; empty where they are."""
    found = []
    if profile.is_cpu and not profile.is_synthetic:
        found.append("the profile was measured on a CPU, where a replay saves no launches")
    if error.both.median_pct is None:
        found.append("the profile holds no calls to check its predictions with")
    if slow := host_problems(profile.host).get("slow"):
        found.append(f"the profile is of {slow}")
    for mode, of_mode in (("graph", error.graph), ("eager", error.eager)):
        if of_mode.median_pct is None or of_mode.p90_pct is None:
            continue
        if of_mode.median_pct > MOST_MEDIAN_PCT or of_mode.p90_pct > MOST_P90_PCT:
            found.append(
                f"the profile misses its own {mode} calls by {of_mode.median_pct:.1f}% in the median and "
                f"{of_mode.p90_pct:.1f}% at P90, above the {MOST_MEDIAN_PCT:g}% and {MOST_P90_PCT:g}% that are acted on"
            )
    return found


def summarize_errors(predicted: Sequence[float], measured: Sequence[float]) -> PredictionError:
    """Errors of predictions against measurements of the same calls."""
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


CURVE_POINTS = 12
POINTS = ("replays", "eager", "calls", "copies", "captures", "holdout")


def describe_profile(profile: CalibrationProfile) -> dict[str, Any]:
    """What `calibrate` prints.

    Returns:
        `label`, `points` (how many measurements of each kind), `curve` (budget, replay, eager of the same size),
        `empty_slots`, `overheads`, `memory`, `error`, `attention` (where `auto` chose), `host`, `doubts` and `notes`.
    """
    model = CostModel(profile)
    error = model_error(model)
    path = DEFAULT_PATH if DEFAULT_PATH in model.replay else next(iter(model.replay))
    slots = model.replay[path].slots
    return {
        "label": profile.label,
        "created_at": profile.created_at,
        "elapsed_s": profile.elapsed_s,
        "max_tokens": profile.max_tokens,
        "points": {name: len(getattr(profile, name)) for name in POINTS},
        "curve": _curve(profile, path),
        "empty_slots": [
            {"slots": float(level), "at_small_budget_ms": float(low), "at_large_budget_ms": float(high)}
            for level, low, high in zip(slots.low.x, slots.low.y, slots.high.y, strict=True)
        ],
        "empty_slots_budgets": [slots.low_budget, slots.high_budget],
        "eager_launch_ms": model.launch_ms,
        "eager_spread": model.eager_spread,
        "overheads": asdict(fit_overheads(TARGETS[VITGRAPH], profile)),
        "memory": [asdict(point) for point in profile.memory],
        "capture_ms": float(np.median([point.capture_ms for point in profile.captures])) if profile.captures else None,
        "error": error.model_dump(),
        "error_text": str(error),
        "attention": choices_text(ran.attn_choices or ()) if (ran := profile.ran) else "",
        "host": None if profile.host is None else profile.host.model_dump(),
        "doubts": profile_doubts(profile, error),
        "notes": [*profile.notes, *([profile.stopped] if profile.stopped else [])],
    }


def _curve(profile: CalibrationProfile, path: str) -> list[dict[str, Any]]:
    """The fullest batch of each budget in the fewest slots, with the eager run of the same batch where measured."""

    def tokens(point: ReplayPoint) -> int:
        return sum(spec.tokens_on(path) for spec in point.items)

    best: dict[int, ReplayPoint] = {}
    points = (point for point in profile.replays if point.path == path)
    for point in sorted(points, key=lambda point: (point.token_budget, -tokens(point), point.segment_slots)):
        best.setdefault(point.token_budget, point)
    rows = []
    for point in spread(list(best.values()), CURVE_POINTS):
        alone = next((eager.time for eager in profile.eager if eager.items == point.items), None)
        rows.append(
            {
                "token_budget": point.token_budget,
                "segment_slots": point.segment_slots,
                "tokens": tokens(point),
                "replay_ms": point.time.ms,
                "eager_ms": alone.ms if alone else None,
                "eager_low_ms": alone.low_ms if alone else None,
                "eager_high_ms": alone.high_ms if alone else None,
            }
        )
    return rows
