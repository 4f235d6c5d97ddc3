"""When predictions are not good enough to act on: bounds on a profile's own errors, and on its host."""

from __future__ import annotations

from vitgraph.predict.profile import CalibrationProfile
from vitgraph.records.kinds.calibrate import HostCheck
from vitgraph.records.kinds.tune import ModelError

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
    """How many times as long as a profile's host this one takes, and what that means for predictions, in words.

    Args:
        host: The profile's.
        layer_us: Host time of the small layer here, in µs.
    """
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
