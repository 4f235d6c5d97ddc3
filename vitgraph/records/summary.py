"""What is derived from a run's samples: latencies of each mode, differences with their intervals, and the verdict."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from vitgraph.records import stats
from vitgraph.records.samples import (
    EAGER,
    EAGER_REPEAT,
    GRAPH,
    HF,
    MONOLITHIC,
    RequestTimes,
    Sample,
    compared_modes,
    request_times,
)

Json = dict[str, Any]


def build_summary(samples: Sequence[Sample]) -> Json:
    """Latency of each measured mode over requests, each request being the mean of its rounds.

    Eager, graph and monolithic count the requests and rounds in which all were measured, so that they can be compared.

    Returns:
        One entry for each of `eager`, `graph`, `monolithic` and `hf` that has samples. `p99_ms` is always the plain
        percentile; `p99_supported` says whether there are enough requests to speak of it.
    """
    present = {sample.mode for sample in samples}
    compared = [mode for mode in compared_modes(samples) if mode in present]
    groups = [compared, [HF] if HF in present else []]
    summary: Json = {}
    for modes in filter(None, groups):
        wall = request_times(samples, modes)
        gpu = request_times(samples, modes, clock="gpu_ms")
        for mode in modes:
            summary[mode] = _latency_entry(stats.summarize(wall.times[mode]), stats.summarize(gpu.times[mode]).mean)
    return summary


def build_comparison(samples: Sequence[Sample], seed: int = 0, invalid_reasons: Iterable[str] = ()) -> Json:
    """Graph against eager: differences with their intervals, noise floors and verdicts.

    Where monolithic graphs were measured, `monolithic_against_eager` and `two_paths_against_monolithic` hold the same
    of these pairs, over the requests that all three modes have.

    Args:
        samples: All samples of the run.
        seed: Seed of the bootstrap.
        invalid_reasons: Why the times must not be compared (clock drop, throttling, another process on the
            device, `CPU_REPLAY_REASON`); any reason makes every verdict `invalid`.

    Returns:
        The `comparison` section; `delta_pct` and `ci95` are graph minus eager, negative is faster.
    """
    pair = request_times(samples, compared_modes(samples))
    control = request_times(samples, (EAGER, EAGER_REPEAT))
    reasons = tuple(invalid_reasons)
    n = len(pair.requests)
    floors = {
        metric: stats.noise_floor(control.times[EAGER], control.times[EAGER_REPEAT], metric, seed)
        for metric in stats.METRICS
    }

    def differences(base: str, other: str) -> Json:
        return {
            metric: _difference(stats.metric_delta(pair.times[base], pair.times[other], metric, seed), floor, reasons)
            for metric, floor in floors.items()
        }

    comparison: Json = {"requests": n, "rounds": pair.rounds, "unpaired_samples": pair.unpaired}
    comparison |= differences(EAGER, GRAPH)
    if MONOLITHIC in pair.times:
        comparison["monolithic_against_eager"] = differences(EAGER, MONOLITHIC)
        comparison["two_paths_against_monolithic"] = differences(MONOLITHIC, GRAPH)
    noise_pct = stats.request_noise_pct(control.times[EAGER], control.times[EAGER_REPEAT])
    comparison["slower_than_eager"] = asdict(stats.slower_than_eager(pair.times[EAGER], pair.times[GRAPH], noise_pct))
    comparison["verdict"] = comparison["mean"]["verdict"]
    comparison["verdict_reason"] = "; ".join(reasons) if reasons else _verdict_reason(pair, comparison["mean"])
    return comparison


def _difference(delta: stats.Delta, floor: float | None, reasons: Sequence[str]) -> Json:
    return {
        "improvement_pct": delta.improvement_pct,
        "delta_pct": delta.delta_pct,
        "ci95": None if delta.ci95 is None else list(delta.ci95),
        "noise_floor_pct": floor,
        "verdict": "invalid" if reasons else stats.verdict(delta.delta_pct, delta.ci95, floor),
    }


def _latency_entry(wall: stats.Summary, gpu_mean_ms: float | None) -> Json:
    return {
        "mean_ms": wall.mean,
        "p50_ms": wall.p50,
        "p90_ms": wall.p90,
        "p99_ms": wall.p99,
        "p99_supported": wall.is_p99_supported,
        "max_ms": wall.max,
        "std_ms": wall.std,
        "n": wall.n,
        "gpu_mean_ms": gpu_mean_ms,
        "outliers": wall.outliers,
    }


def _verdict_reason(pair: RequestTimes, mean: Json) -> str:
    n, floor = len(pair.requests), mean["noise_floor_pct"]
    if n == 0:
        return "no request was measured in both modes"
    if mean["ci95"] is None:
        return f"{n} requests are too few for an interval of the mean; it takes {stats.MIN_PAIRS}"
    if floor is None:
        return "eager was not measured against itself on enough requests, so the noise is not known"
    relation = {
        "faster": "lies wholly beyond",
        "slower": "lies wholly beyond",
        "same": "lies wholly within",
        "undecided": "reaches across",
    }[mean["verdict"]]
    return f"the 95% interval of the mean {relation} the noise floor of ±{floor:.2f}%"
