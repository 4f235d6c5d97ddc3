"""When predictions are not good enough to act on: bounds on a profile's own errors, and signs of an unsteady host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vitgraph.predict.profile import CalibrationProfile
from vitgraph.records.kinds.tune import ModelError

MOST_MEDIAN_PCT = 5.0
"""Median error of a mode on held-out calls up to which its predictions are acted on."""

MOST_P90_PCT = 20.0
"""The same of the 90th percentile. A host that was slow while eager calls were timed shows here first."""

MOVED = 1.15
"""The host has moved where the same calls take this factor longer or shorter, in the median over calls."""

FEWEST_SHARED = 3
"""Calls that must be timed twice to be compared."""

BUSY_LOAD = 0.8
"""Load average over cores from which on something else competes for the host."""


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


def host_doubts(
    first_ms: Sequence[float], again_ms: Sequence[float], load: float | None = None, cores: int | None = None
) -> list[str]:
    """Signs that the host was slow or unsteady while short eager calls were timed, to be told as soon as they show.

    Args:
        first_ms: Short calls, timed once.
        again_ms: The same calls, timed some seconds later.
        load: The host's load average over a minute, before the measuring.
        cores: Its cores.

    Raises:
        ValueError: The series differ in length.
    """
    found = []
    if len(first_ms) >= FEWEST_SHARED:
        pairs = np.array(list(zip(first_ms, again_ms, strict=True)))
        ratio = float(np.median(pairs[:, 1] / pairs[:, 0]))
        if max(ratio, 1.0 / ratio) > MOVED:
            fast, slow = sorted(np.median(pairs, axis=0))
            found.append(
                f"this host's eager times move: the same short calls took {fast:.1f} ms at one time and {slow:.1f} ms "
                "at another (medians), so something else uses its cores; calibrate again when it is idle"
            )
    if load is not None and cores and load > BUSY_LOAD * cores:
        found.append(
            f"the host's load average is {load:.1f} on {cores} cores: something else uses them, and short eager calls "
            "will be timed too long; calibrate when it is idle"
        )
    return found
