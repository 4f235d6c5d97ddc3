"""When predictions are not good enough to act on: bounds on a profile's own errors."""

from __future__ import annotations

from vitgraph.predict.profile import CalibrationProfile
from vitgraph.records.kinds.tune import ModelError

MOST_MEDIAN_PCT = 5.0
"""Median error of a mode on held-out calls up to which its predictions are acted on."""

MOST_P90_PCT = 20.0
"""The same of the 90th percentile. A host that was slow while eager calls were timed shows here first."""


def profile_doubts(profile: CalibrationProfile, error: ModelError) -> list[str]:
    """Why a profile's predictions are not to be acted on, in words; empty where they are."""
    found = []
    if profile.is_cpu and not profile.is_synthetic:
        found.append("the profile was measured on a CPU, where a replay saves no launches")
    if error.both.median_pct is None:
        found.append("the profile holds no calls to check its predictions with")
    for mode, of_mode in (("graph", error.graph), ("eager", error.eager)):
        if of_mode.median_pct is None or of_mode.p90_pct is None:
            continue
        if of_mode.median_pct > MOST_MEDIAN_PCT or of_mode.p90_pct > MOST_P90_PCT:
            found.append(
                f"the profile misses its own {mode} calls by {of_mode.median_pct:.1f}% in the median and "
                f"{of_mode.p90_pct:.1f}% at P90, above the {MOST_MEDIAN_PCT:g}% and {MOST_P90_PCT:g}% that are acted on"
            )
    return found
