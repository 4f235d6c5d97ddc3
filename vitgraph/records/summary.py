"""What is derived from samples: latencies of series, gains with their intervals, and verdicts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vitgraph.records import stats
from vitgraph.records.kinds.bench import BenchComparison
from vitgraph.records.latency import Improvement, Latency, Pair
from vitgraph.records.sample_table import (
    EAGER,
    FIRST,
    GRAPH,
    MONOLITHIC,
    REPEAT_SUFFIX,
    SECOND,
    PairedTimes,
    Samples,
)
from vitgraph.records.stats import Metric, Noise

CPU_REPLAY_REASON = "replay on a CPU saves no launches; no speed-up is claimed here"
"""Why the times of a run whose replays ran on a CPU must not be compared."""

BENCH_METRICS: tuple[Metric, ...] = ("mean", "p50", "p99", "trimmed_mean")


def compared_series(samples: Samples) -> list[str]:
    """Series that a bench sets against one another call by call: monolithic where it was measured."""
    return [EAGER, GRAPH, *([MONOLITHIC] if MONOLITHIC in samples.series else [])]


def latencies(samples: Samples, ranks: int = 1) -> dict[str, Latency]:
    """Latency of each measured series of a bench, each call being the mean of its rounds.

    Eager, graph and monolithic count the calls and rounds in which all were measured, so that they can be compared.

    Args:
        samples: All samples of the run.
        ranks: Processes that shared every call.
    """
    measured = samples.series
    compared = [name for name in compared_series(samples) if name in measured]
    others = [name for name in measured if name not in compared and not name.endswith(REPEAT_SUFFIX)]
    groups = (compared, *([name] for name in others))
    found: dict[str, Latency] = {}
    for group in filter(None, groups):
        wall, gpu = samples.paired(group), samples.paired(group, "gpu_ms")
        for name in group:
            sharing = samples.sharing(name, ranks) if ranks > 1 else None
            found[name] = latency_of(wall, gpu, name).model_copy(update={"sharing": sharing})
    return found


def latency_of(wall: PairedTimes, gpu: PairedTimes, name: str) -> Latency:
    """Latency of one of some series over the calls that all of them have."""
    device = stats.summarize(gpu.times[name], gpu.requests).mean_ms
    return stats.summarize(wall.times[name], wall.requests).model_copy(update={"gpu_mean_ms": device})


def noise_of(samples: Samples, series: Sequence[str], seed: int) -> tuple[Noise, float | None]:
    """What series differ from themselves: the noise of their figures, and that of a request in percent."""
    twice = samples.repeated(series)
    first, second = twice.times[FIRST], twice.times[SECOND]
    noise = Noise.of(first, second, twice.requests, seed=seed)
    return noise, stats.request_noise_pct(first, second, twice.requests)


def improvement_from(judged: stats.Judgement, is_invalid: bool = False) -> Improvement:
    """The section of a judgement."""
    return Improvement(
        improvement_pct=judged.improvement.improvement_pct,
        ci95=judged.improvement.ci95,
        noise_floor_pct=judged.noise_floor_pct,
        verdict="invalid" if is_invalid else judged.verdict,
    )


def pair_of(
    times: PairedTimes,
    base: str,
    series: str,
    noise: Noise,
    metrics: Sequence[Metric] = BENCH_METRICS,
    *,
    request_noise_pct: float | None = None,
    is_invalid: bool = False,
    margin_pct: float = stats.MARGIN_PCT,
    seed: int = 0,
) -> Pair:
    """Two series compared.

    Args:
        times: Of both.
        base: The series that percentages refer to.
        series: The series that is judged.
        noise: What the figures differ by when the same is measured twice.
        metrics: What is compared.
        request_noise_pct: What counts as a slower request.
        is_invalid: The times must not be compared.
        margin_pct: Within which `same` is claimed.
        seed: Seed of the bootstrap.
    """
    before, after = times.times[base], times.times[series]
    judged = {
        metric: noise.judge(before, after, metric, times.requests, margin_pct=margin_pct, seed=seed)
        for metric in metrics
    }
    found = {metric: improvement_from(each, is_invalid) for metric, each in judged.items()}
    slower = stats.count_slower(before, after, request_noise_pct, times.requests)
    return Pair.model_validate({"base": base, "series": series, **found, "slower": slower})


def compare_bench(
    samples: Samples, seed: int = 0, invalid_reasons: Iterable[str] = (), margin_pct: float = stats.MARGIN_PCT
) -> BenchComparison:
    """Graph against eager, and with monolithic graphs those against eager and graph against those.

    Args:
        samples: All samples of the run.
        seed: Seed of the bootstrap.
        invalid_reasons: Why the times must not be compared (clock drop, throttling, another process on the device,
            `CPU_REPLAY_REASON`); any reason makes every verdict `invalid`.
        margin_pct: Within which `same` is claimed.
    """
    series, reasons = compared_series(samples), tuple(invalid_reasons)
    times = samples.paired(series)
    noise, request_noise = noise_of(samples, [EAGER], seed)
    against = [(EAGER, GRAPH), *([(EAGER, MONOLITHIC), (MONOLITHIC, GRAPH)] if MONOLITHIC in series else [])]
    judged = [
        noise.judge(times.times[EAGER], times.times[GRAPH], metric, times.requests, margin_pct=margin_pct, seed=seed)
        for metric in ("mean", "trimmed_mean")
    ]
    verdict, reason = stats.conclude(*judged)
    return BenchComparison(
        requests=times.request_count,
        calls=len(times.calls),
        rounds=times.rounds,
        unpaired_samples=times.unpaired,
        invalid_reasons=reasons,
        pairs=tuple(
            pair_of(
                times,
                *pair,
                noise,
                request_noise_pct=request_noise,
                is_invalid=bool(reasons),
                margin_pct=margin_pct,
                seed=seed,
            )
            for pair in against
        ),
        verdict="invalid" if reasons else verdict,
        verdict_reason="; ".join(reasons) or reason,
    )
