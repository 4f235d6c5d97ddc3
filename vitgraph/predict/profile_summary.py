"""A calibration profile in a few numbers, for people: curves, overheads, memory, and the error of the model on it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from vitgraph.planning.items import DEFAULT_PATH
from vitgraph.predict.cost_model import CostModel
from vitgraph.predict.doubt import model_error, profile_doubts
from vitgraph.predict.fitting import spread
from vitgraph.predict.profile import CalibrationProfile
from vitgraph.predict.targets import TARGETS, VITGRAPH, fit_overheads
from vitgraph.records.calibrate_result import ReplayPoint
from vitgraph.records.sections import choices_text

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
