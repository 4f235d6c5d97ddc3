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
    noise = stats.Noise.of(control.times[EAGER], control.times[EAGER_REPEAT], seed=seed)

    def judge(base: str, other: str, metric: stats.Metric) -> stats.Judgement:
        return noise.judge(pair.times[base], pair.times[other], metric, seed=seed)

    def differences(base: str, other: str) -> Json:
        return {metric: _difference(judge(base, other, metric), reasons) for metric in stats.METRICS}

    comparison: Json = {"requests": n, "rounds": pair.rounds, "unpaired_samples": pair.unpaired}
    comparison |= differences(EAGER, GRAPH)
    if MONOLITHIC in pair.times:
        comparison["monolithic_against_eager"] = differences(EAGER, MONOLITHIC)
        comparison["two_paths_against_monolithic"] = differences(MONOLITHIC, GRAPH)
    noise_pct = stats.request_noise_pct(control.times[EAGER], control.times[EAGER_REPEAT])
    comparison["slower_than_eager"] = asdict(stats.count_slower(pair.times[EAGER], pair.times[GRAPH], noise_pct))
    verdict, reason = stats.conclude(judge(EAGER, GRAPH, "mean"), judge(EAGER, GRAPH, "trimmed_mean"))
    comparison["verdict"] = "invalid" if reasons else verdict
    comparison["verdict_reason"] = "; ".join(reasons) or reason
    return comparison


def _difference(judged: stats.Judgement, reasons: Sequence[str]) -> Json:
    found = judged.improvement
    return {
        "improvement_pct": found.improvement_pct,
        "delta_pct": None if found.improvement_pct is None else 0.0 - found.improvement_pct,
        "ci95": None if found.ci95 is None else [0.0 - end for end in reversed(found.ci95)],
        "noise_floor_pct": judged.noise_floor_pct,
        "verdict": "invalid" if reasons else judged.verdict,
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
