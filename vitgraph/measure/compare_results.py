"""What follows from the samples of a backend comparison: latencies, gains, verdicts against the best, and the advice.

Differences are second minus first in percent of the first, as in `vitgraph.records.stats`: graph minus eager, and any
series minus the best one. All series are compared on the requests that every one of them has measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from vitgraph.records import stats
from vitgraph.records.compare_samples import (
    FIRST,
    SECOND,
    BackendSample,
    Series,
    repeat_times,
    series_name,
    series_times,
)
from vitgraph.records.resampling import RESAMPLES
from vitgraph.records.samples import EAGER, GRAPH, RequestTimes
from vitgraph.records.stats import FloatArray, Metric

Json = dict[str, Any]

OK = "ok"
COMPARED_MODES = (EAGER, GRAPH)
CLEAR, UNDECIDED = "clear", "undecided"
INVALID, SLOWER = "invalid", "slower"
NOTHING_MEASURED = "No recommendation: no request was measured."
GAIN_METRICS: tuple[Metric, ...] = ("mean", "p99")

_RESAMPLE_ELEMENTS = 1_000_000


def derive_results(rows: Sequence[Json], comparison: Json, samples: Sequence[BackendSample], seed: int) -> Json:
    """Fills what the samples tell into the rows and the comparison; nothing else in them is changed.

    Args:
        rows: The `backends` of a record; each mode whose status is not `ok` gets no figures.
        comparison: The `comparison` of the record; `isolated` and `invalid_reasons` are read. Any reason makes every
            verdict `invalid`.
        samples: All samples of the run.
        seed: Seed of the bootstraps.

    Returns:
        The `recommendation`.
    """
    series = measured_series(rows)
    wall = series_times(samples, series)
    gpu = series_times(samples, series, "gpu_ms")
    floors = {mode: _noise_floors(samples, mode, comparison["isolated"], seed) for mode in COMPARED_MODES}
    is_invalid = bool(comparison["invalid_reasons"])
    comparison |= {
        "requests": len(wall.requests),
        "rounds": wall.rounds,
        "unpaired_samples": wall.unpaired,
        "noise_floor_pct": floors,
    }
    noise = repeat_times(samples, EAGER)
    request_noise = stats.request_noise_pct(noise.times[FIRST], noise.times[SECOND])
    for row in rows:
        has = [mode for mode in COMPARED_MODES if (row["requested"], mode) in series and wall.requests]
        for mode in COMPARED_MODES:
            name = series_name((row["requested"], mode))
            row[mode] = _latency(wall.times[name], gpu.times[name]) if mode in has else None
        row["improvement"] = row["slower_than_eager"] = None
        if len(has) == len(COMPARED_MODES):
            eager, graph = (wall.times[series_name((row["requested"], mode))] for mode in COMPARED_MODES)
            row["improvement"] = {
                metric: _compare(eager, graph, metric, floors[EAGER][metric], is_invalid, seed)
                for metric in GAIN_METRICS
            }
            row["slower_than_eager"] = asdict(stats.count_slower(eager, graph, request_noise))
    standings = _standings(wall, series, floors, is_invalid, seed) if wall.requests else []
    comparison["standings"] = standings
    for row in rows:
        own = [entry for entry in standings if entry["backend"] == row["requested"]]
        row["verdict_vs_best"] = min(own, key=lambda entry: entry["mean_ms"], default=None)
    return _recommend(standings, wall, comparison, seed)


def measured_series(rows: Sequence[Json]) -> list[Series]:
    """Backends and modes that are `ok`, in the order of the rows."""
    return [(row["requested"], mode) for row in rows for mode in COMPARED_MODES if row["modes"][mode]["status"] == OK]


def fastest_shares(times: Sequence[FloatArray], seed: int) -> list[float]:
    """Bootstrap over requests: the share of the resamples in which each series has the smallest mean.

    Args:
        times: One value a request for each series, all of the same requests in the same order.
        seed: Seed of the resampling.
    """
    n = int(times[0].size)
    rng = np.random.default_rng(seed)
    wins = np.zeros(len(times))
    chunk = max(1, _RESAMPLE_ELEMENTS // n)
    for start in range(0, RESAMPLES, chunk):
        picks = rng.integers(0, n, size=(min(chunk, RESAMPLES - start), n), dtype=np.int32)
        means = np.stack([values[picks].mean(axis=1) for values in times])
        wins += np.bincount(means.argmin(axis=0), minlength=len(times))
    return [float(share) for share in wins / RESAMPLES]


def _latency(wall: FloatArray, gpu: FloatArray) -> Json:
    found = stats.summarize(wall)
    return {
        "mean_ms": found.mean,
        "p50_ms": found.p50,
        "p90_ms": found.p90,
        "p99_ms": found.p99,
        "p99_supported": found.is_p99_supported,
        "max_ms": found.max,
        "std_ms": found.std,
        "n": found.n,
        "gpu_mean_ms": stats.summarize(gpu).mean,
        "outliers": found.outliers,
    }


def _noise_floors(samples: Sequence[BackendSample], mode: str, isolated: bool, seed: int) -> dict[str, float | None]:
    """What a mode differs from itself, in percent by metric; of several processes, the noisiest one counts."""
    backends = dict.fromkeys(sample.backend for sample in samples)
    groups = [[s for s in samples if s.backend == backend] for backend in backends] if isolated else [samples]
    floors: dict[str, float | None] = {}
    for metric in GAIN_METRICS:
        found = []
        for group in groups:
            pairs = repeat_times(group, mode)
            found.append(stats.Noise.of(pairs.times[FIRST], pairs.times[SECOND], None, [metric], seed).floors[metric])
        known = [floor for floor in found if floor is not None]
        floors[metric] = max(known) if known else None
    return floors


def _compare(
    first: FloatArray, second: FloatArray, metric: Metric, floor: float | None, is_invalid: bool, seed: int
) -> Json:
    found = stats.improvement(first, second, metric, seed=seed)
    return {
        "improvement_pct": found.improvement_pct,
        "delta_pct": None if found.improvement_pct is None else 0.0 - found.improvement_pct,
        "ci95": None if found.ci95 is None else [0.0 - end for end in reversed(found.ci95)],
        "noise_floor_pct": floor,
        "verdict": INVALID if is_invalid else stats.verdict(found, floor),
    }


def _standings(
    wall: RequestTimes,
    series: Sequence[Series],
    floors: dict[str, dict[str, float | None]],
    is_invalid: bool,
    seed: int,
) -> list[Json]:
    """Every series against the one with the smallest mean, the best first."""
    times = {one: wall.times[series_name(one)] for one in series}
    order = sorted(series, key=lambda one: float(times[one].mean()))
    best = order[0]
    standings = []
    for one in order:
        entry: Json = {"backend": one[0], "mode": one[1], "mean_ms": float(times[one].mean())}
        if one == best:
            verdict = INVALID if is_invalid else "best"
            entry |= {"delta_pct": 0.0, "ci95": None, "noise_floor_pct": None, "verdict": verdict}
        else:
            known = [floors[mode]["mean"] for mode in {best[1], one[1]}]
            floor = None if None in known else max(value for value in known if value is not None)
            found = _compare(times[best], times[one], "mean", floor, is_invalid, seed)
            entry |= {name: found[name] for name in ("delta_pct", "ci95", "noise_floor_pct", "verdict")}
        standings.append(entry)
    return standings


def _recommend(standings: Sequence[Json], wall: RequestTimes, comparison: Json, seed: int) -> Json:
    """Which backend and mode to use, how sure that is, and why in a sentence or two."""
    nothing: Json = {"backend": None, "mode": None, "sure": UNDECIDED, "fastest_in_share": None}
    if not standings:
        return nothing | {"text": NOTHING_MEASURED}
    if comparison["invalid_reasons"]:
        return nothing | {"text": f"No recommendation: {'; '.join(comparison['invalid_reasons'])}."}
    best, others = standings[0], standings[1:]
    advice = f"Use {best['backend']} in {best['mode']} mode ({best['mean_ms']:.2f} ms a request)"
    chosen: Json = {"backend": best["backend"], "mode": best["mode"]}
    if not others:
        text = f"{advice}: nothing else could be measured, so there was no choice."
        return nothing | chosen | {"text": text}
    arrays = [wall.times[series_name((entry["backend"], entry["mode"]))] for entry in standings]
    share = fastest_shares(arrays, seed)[0]
    close = [entry for entry in others if entry["verdict"] != SLOWER]
    often = f"it is the fastest in {100 * share:.0f}% of the bootstrap's resamples"
    if close:
        named = ", ".join(_standing_text(entry) for entry in close)
        text = f"{advice}, but this is undecided: {named} cannot be told apart from it in this run; {often}."
    else:
        text = (
            f"{advice}. This is clear: everything else is slower beyond the noise, the nearest is "
            f"{_standing_text(others[0])}; {often}."
        )
    text += _tail_text(standings, arrays)
    sure = UNDECIDED if close else CLEAR
    return chosen | {"sure": sure, "fastest_in_share": share, "text": text}


def _standing_text(entry: Json) -> str:
    interval = "" if entry["ci95"] is None else f", 95% CI {entry['ci95'][0]:+.1f} … {entry['ci95'][1]:+.1f}"
    return f"{entry['backend']} {entry['mode']} ({entry['delta_pct']:+.1f}%{interval})"


def _tail_text(standings: Sequence[Json], arrays: Sequence[FloatArray]) -> str:
    """A word about P99 where it is supported and another series has the lowest."""
    if arrays[0].size < stats.P99_MIN_SAMPLES:
        return ""
    tails = [float(np.percentile(values, 99)) for values in arrays]
    lowest = int(np.argmin(tails))
    if lowest == 0:
        return ""
    entry = standings[lowest]
    return (
        f" P99 is lowest with {entry['backend']} in {entry['mode']} mode: {tails[lowest]:.2f} ms "
        f"against {tails[0]:.2f} ms."
    )
