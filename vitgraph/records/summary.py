"""What is derived from samples: latencies of series, gains with their intervals, and verdicts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True, slots=True)
class Judge:
    """Compares series on the calls that all of them have, by one rule.

    Attributes:
        is_invalid: The times must not be compared.
        margin_pct: Within which `same` is claimed.
    """

    times: PairedTimes
    is_invalid: bool = False
    margin_pct: float = stats.MARGIN_PCT
    seed: int = 0

    def judge(self, base: str, series: str, noise: Noise, metric: Metric = "mean") -> stats.Judgement:
        """What the second series gains over the first, and what that is worth beside the noise."""
        both, requests = (self.times.times[base], self.times.times[series]), self.times.requests
        return noise.judge(*both, metric, requests, margin_pct=self.margin_pct, seed=self.seed)

    def improvement(self, base: str, series: str, noise: Noise, metric: Metric = "mean") -> Improvement:
        """The section of it."""
        return self.judge(base, series, noise, metric).section(self.is_invalid)

    def pair(
        self,
        base: str,
        series: str,
        noise: Noise,
        metrics: Sequence[Metric] = BENCH_METRICS,
        request_noise_pct: float | None = None,
    ) -> Pair:
        """Two series compared in these metrics; above `request_noise_pct`, a request counts as slower."""
        found = {metric: self.improvement(base, series, noise, metric) for metric in metrics}
        times, requests = self.times.times, self.times.requests
        slower = stats.count_slower(times[base], times[series], request_noise_pct, requests)
        return Pair.model_validate({"base": base, "series": series, **found, "slower": slower})

    def compared(self, invalid_reasons: Iterable[str]) -> dict[str, Any]:
        """The fields of `Compared`."""
        times = self.times
        found = {"requests": times.request_count, "calls": len(times.calls), "rounds": times.rounds}
        return found | {"unpaired_samples": times.unpaired, "invalid_reasons": tuple(invalid_reasons)}


def compare_bench(
    samples: Samples, seed: int = 0, invalid_reasons: Iterable[str] = (), margin_pct: float = stats.MARGIN_PCT
) -> BenchComparison:
    """Graph against eager, and with monolithic graphs those against eager and graph against those.

    Args:
        invalid_reasons: Why the times must not be compared (clock drop, throttling, another process on the device,
            `CPU_REPLAY_REASON`); any reason makes every verdict `invalid`.
    """
    series, reasons = compared_series(samples), tuple(invalid_reasons)
    judge = Judge(samples.paired(series), bool(reasons), margin_pct, seed)
    noise, request_noise = noise_of(samples, [EAGER], seed)
    against = [(EAGER, GRAPH), *([(EAGER, MONOLITHIC), (MONOLITHIC, GRAPH)] if MONOLITHIC in series else [])]
    verdict, reason = stats.conclude(*(judge.judge(EAGER, GRAPH, noise, name) for name in ("mean", "trimmed_mean")))
    return BenchComparison(
        **judge.compared(reasons),
        pairs=tuple(judge.pair(*pair, noise, request_noise_pct=request_noise) for pair in against),
        verdict="invalid" if reasons else verdict,
        verdict_reason="; ".join(reasons) or reason,
    )
