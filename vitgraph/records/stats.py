"""Statistics of calls: summaries, paired improvements with intervals, noise floors and verdicts.

A series is one value a call: its milliseconds a request, in the order in which the calls were measured. `requests`
says how many requests each call had (one each where it is left out) and weighs the call; resampling draws calls, since
the requests of a call share one measurement. No call is removed from any figure that describes a series. Two series
have the same calls in the same order; a ValueError says where they differ in length.

An improvement is (base - other) / base in percent, so positive is faster; `vitgraph.records.resampling` says how its
95 % interval is made. What the rules below are worth is measured by `tests/drills/simulate_verdicts.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vitgraph.records.resampling import (
    MIN_PAIRS,
    TRIMMED_SHARE,
    Calls,
    FloatArray,
    Gain,
    Metric,
    Values,
    improvement_of,
    min_samples,
    percentiles,
)
from vitgraph.records.results import BenchComparison
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
from vitgraph.records.series import Improvement, Latency, Pair, SlowerRequests, Verdict
from vitgraph.specs.parts import SAME_MARGIN_PCT

__all__ = ["MIN_PAIRS", "FloatArray", "Gain", "Metric", "min_samples"]

METRICS: tuple[Metric, ...] = ("mean", "p50", "p99")
ALL_METRICS: tuple[Metric, ...] = (*METRICS, "trimmed_mean")
"""The last one also of paired calls: few calls that are far off in either series hardly move it."""
P99_MIN_SAMPLES = min_samples(99.0)
REQUEST_NOISE_PERCENTILE = 95.0
FIXED_THRESHOLD_PCT = 2.0


@dataclass(frozen=True, slots=True)
class Judgement:
    """An improvement with what it is worth.

    Attributes:
        noise_floor_pct: What the same thing differs by when it is measured twice; None where it is not known.
        margin_pct: Within which `same` is claimed.
        calls: Calls compared.
    """

    improvement: Gain
    noise_floor_pct: float | None
    margin_pct: float
    calls: int

    @property
    def verdict(self) -> Verdict:
        return verdict(self.improvement, self.noise_floor_pct, self.margin_pct)

    def section(self, is_invalid: bool = False) -> Improvement:
        """What a record holds of it; the times may be ones that must not be compared."""
        return Improvement(
            improvement_pct=self.improvement.improvement_pct,
            ci95=self.improvement.ci95,
            noise_floor_pct=self.noise_floor_pct,
            verdict="invalid" if is_invalid else self.verdict,
        )

    def reason(self, name: str = "mean") -> str:
        """Why, in words; where nothing is decided also what to do about it."""
        ci95, floor, margin = self.improvement.ci95, self.noise_floor_pct, self.margin_pct
        if not self.calls:
            return "no call was measured in both"
        if ci95 is None:
            return f"{self.calls} calls are too few for an interval of the {name}; it takes {MIN_PAIRS}"
        interval = f"the 95% interval of the {name}"
        found = self.verdict
        if found == "same":
            return f"{interval} lies wholly within ±{margin:g}%"
        if floor is None:
            return "the noise is not known, since too few calls were measured against themselves: measure more requests"
        if found != "undecided":
            return f"{interval} lies wholly beyond the noise floor of ±{floor:.2f}%"
        if ci95[0] > floor or ci95[1] < -floor:
            return f"{interval} lies beyond the noise floor of ±{floor:.2f}% by few calls alone: measure more requests"
        if ci95[0] > 0.0 or ci95[1] < 0.0:
            return (
                f"{interval} excludes zero, but reaches into the noise floor of ±{floor:.2f}%: measure on a quieter "
                f"host (nothing else on the GPU, fixed clocks), or more requests{self._calls_needed()}"
            )
        return f"{interval} is too wide for a claim: measure more requests{self._calls_needed()}, or on a quieter host"

    def _calls_needed(self) -> str:
        """How many calls would decide, if their spread stayed: both the interval and the floor shrink with the root."""
        assert self.improvement.ci95 is not None and self.improvement.improvement_pct is not None
        low, high = self.improvement.ci95
        size, half = abs(self.improvement.improvement_pct), (high - low) / 2.0
        aims = [(half + (self.noise_floor_pct or 0.0)) / size if size else math.inf]
        if size < self.margin_pct:
            aims.append(half / (self.margin_pct - size))
        times = max(min(aims), 1.1) ** 2
        return f" (about {times * self.calls:.0f} calls)" if times < 1000.0 else ""


@dataclass(frozen=True, slots=True)
class Noise:
    """What one thing differs from itself by in a run; everything that is compared in the run is judged by it.

    Attributes:
        floors: By metric, the far end of the 95 % interval of that difference in percent; None where too few calls were
            measured twice.
    """

    floors: Mapping[Metric, float | None]

    @classmethod
    def of(
        cls,
        first: Values,
        second: Values,
        requests: Values | None = None,
        metrics: Iterable[Metric] = ALL_METRICS,
        seed: int = 0,
    ) -> Noise:
        """The noise of a series against its repeat."""
        calls = Calls.of(first, second, requests)
        floors: dict[Metric, float | None] = {}
        for metric in metrics:
            # One interrupted call would otherwise decide what the mean of every other comparison must exceed.
            kept = calls.without_outliers() if metric == "mean" else calls
            ci95 = improvement_of(kept, metric, seed).ci95
            floors[metric] = None if ci95 is None else max(abs(ci95[0]), abs(ci95[1]))
        return cls(floors)

    @classmethod
    def largest(cls, noises: Iterable[Noise]) -> Noise:
        """The noise of several runs or modes together: the larger floor of each metric; None where one is not known."""
        known = list(noises)
        floors: dict[Metric, float | None] = {}
        for metric in known[0].floors if known else ():
            found = [noise.floors[metric] for noise in known]
            floors[metric] = None if None in found else max(value for value in found if value is not None)
        return cls(floors)

    def judge(
        self,
        base: Values,
        other: Values,
        metric: Metric = "mean",
        requests: Values | None = None,
        *,
        margin_pct: float = SAME_MARGIN_PCT,
        seed: int = 0,
    ) -> Judgement:
        """Compares two series of the same calls in one metric."""
        found = improvement(base, other, metric, requests, seed)
        return Judgement(found, self.floors.get(metric), margin_pct, np.size(base))


def verdict(found: Gain, floor_pct: float | None, margin_pct: float = SAME_MARGIN_PCT) -> Verdict:
    """What an improvement with its interval amounts to.

    `faster` or `slower` where the whole interval lies beyond the noise floor, and a mean does not by few calls alone;
    `same` where the interval lies within the margin, whatever the noise; else `undecided`, as where there is no
    interval. `invalid` (clock drop, throttling, another process on the device) is for the caller to set.
    """
    if found.ci95 is None:
        return "undecided"
    low, high = found.ci95
    least = found.improvement_pct if found.without_few_pct is None else found.without_few_pct
    if floor_pct is not None and least is not None:
        if min(low, least) > floor_pct:
            return "faster"
        if max(high, least) < -floor_pct:
            return "slower"
    return "same" if -margin_pct <= low and high <= margin_pct else "undecided"


def conclude(mean: Judgement, trimmed: Judgement) -> tuple[Verdict, str]:
    """The verdict of a comparison and why: the mean's or, where few slow calls hide it, that of all but those.

    Calls that an interrupt made ten times as long widen the interval of a mean until it says nothing. The trimmed mean
    decides in its place where it agrees with it: the same sign, and a value that the mean's interval allows.
    """
    found, reason = mean.verdict, mean.reason()
    middle, ci95 = trimmed.improvement.improvement_pct, mean.improvement.ci95
    if found != "undecided" or trimmed.verdict not in ("faster", "slower") or ci95 is None or middle is None:
        return found, reason
    if ci95[0] <= middle <= ci95[1] and (mean.improvement.improvement_pct or 0.0) * middle > 0.0:
        share = f"{100 * TRIMMED_SHARE:g}%"
        name = f"mean without the {share} of requests at either end ({middle:+.2f}%)"
        return trimmed.verdict, f"{trimmed.reason(name)}; the plain mean is spread by few far-off calls"
    return found, reason


def improvement(
    base: Values, other: Values, metric: Metric = "mean", requests: Values | None = None, seed: int = 0
) -> Gain:
    """Gain of `other` over `base` in one metric, with its interval; the same seed gives the same interval.

    The interval needs `MIN_PAIRS` calls; that of P99 needs three calls above it, so 300.

    Args:
        base: Milliseconds a request, `[calls]`.
        other: The same of the other series.
        metric: `mean` (ratio of the means), `p50`, `p99` (of either series), or `trimmed_mean` (ratio of the means
            without the calls whose own ratio is among the outer `TRIMMED_SHARE`).
        requests: Requests of each call.
        seed: Seed of the resampling.
    """
    return improvement_of(Calls.of(base, other, requests), metric, seed)


def summarize(values: Values, requests: Values | None = None) -> Latency:
    """Describes a series; nothing is removed and nothing is invented for an empty one.

    Percentiles are linear between neighbours, the deviation divides by one less than there are values, and outliers are
    those of Tukey.
    """
    array = np.asarray(values, dtype=np.float64)
    calls = int(array.size)
    if requests is not None:
        array = np.repeat(array, np.asarray(requests, dtype=np.int64))
    found: dict[str, Any] = dict.fromkeys(("mean_ms", "p50_ms", "p90_ms", "p99_ms", "max_ms", "std_ms"))
    outliers = 0
    if array.size:
        p25, p50, p75, p90, p99 = (float(value) for value in np.percentile(array, (25, 50, 75, 90, 99)))
        reach = 1.5 * (p75 - p25)
        outliers = int(np.count_nonzero((array < p25 - reach) | (array > p75 + reach)))
        found |= {"mean_ms": float(np.mean(array)), "p50_ms": p50, "p90_ms": p90, "p99_ms": p99}
        found |= {"max_ms": float(np.max(array)), "std_ms": float(np.std(array, ddof=1)) if array.size > 1 else None}
    supported = calls >= P99_MIN_SAMPLES
    return Latency(**found, p99_supported=supported, requests=int(array.size), calls=calls, outliers=outliers)


def request_noise_pct(first: Values, second: Values, requests: Values | None = None) -> float | None:
    """95th percentile over requests of how far a repeat of the same call was from it, in percent.

    None with fewer than `MIN_PAIRS` calls, which may all lie close together by chance.
    """
    calls = Calls.of(first, second, requests)
    if calls.n < MIN_PAIRS:
        return None
    change = np.abs(calls.other / calls.base - 1.0)
    return float(percentiles(calls.requests[None], change, REQUEST_NOISE_PERCENTILE)[0] * 100.0)


def count_slower(
    base: Values, other: Values, noise_pct: float | None, requests: Values | None = None
) -> SlowerRequests:
    """Counts requests that `other` made slower by more than the `request_noise_pct`, and by more than 2 %."""
    calls = Calls.of(base, other, requests)
    n = int(calls.requests.sum())

    def slower_by(threshold_pct: float) -> int:
        return int(calls.requests[calls.other > calls.base * (1.0 + threshold_pct / 100.0)].sum())

    count = None if noise_pct is None else slower_by(noise_pct)
    fixed = slower_by(FIXED_THRESHOLD_PCT)
    return SlowerRequests(
        requests=n,
        threshold_pct=noise_pct,
        count=count,
        share=count / n if count is not None and n else None,
        over_2pct_count=fixed,
        over_2pct_share=fixed / n if n else None,
    )


CPU_REPLAY_REASON = "replay on a CPU saves no launches; no speed-up is claimed here"
"""Why the times of a run whose replays ran on a CPU must not be compared."""


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
    device = summarize(gpu.times[name], gpu.requests).mean_ms
    return summarize(wall.times[name], wall.requests).model_copy(update={"gpu_mean_ms": device})


def noise_of(samples: Samples, series: Sequence[str], seed: int) -> tuple[Noise, float | None]:
    """What series differ from themselves: the noise of their figures, and that of a request in percent."""
    twice = samples.repeated(series)
    first, second = twice.times[FIRST], twice.times[SECOND]
    noise = Noise.of(first, second, twice.requests, seed=seed)
    return noise, request_noise_pct(first, second, twice.requests)


@dataclass(frozen=True, slots=True)
class Judge:
    """Compares series on the calls that all of them have, by one rule.

    Attributes:
        is_invalid: The times must not be compared.
        margin_pct: Within which `same` is claimed.
    """

    times: PairedTimes
    is_invalid: bool = False
    margin_pct: float = SAME_MARGIN_PCT
    seed: int = 0

    def judge(self, base: str, series: str, noise: Noise, metric: Metric = "mean") -> Judgement:
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
        metrics: Sequence[Metric] = ALL_METRICS,
        request_noise_pct: float | None = None,
    ) -> Pair:
        """Two series compared in these metrics; above `request_noise_pct`, a request counts as slower."""
        found = {metric: self.improvement(base, series, noise, metric) for metric in metrics}
        times, requests = self.times.times, self.times.requests
        slower = count_slower(times[base], times[series], request_noise_pct, requests)
        return Pair.model_validate({"base": base, "series": series, **found, "slower": slower})

    def compared(self, invalid_reasons: Iterable[str]) -> dict[str, Any]:
        """The fields of `Compared`."""
        times = self.times
        found = {"requests": times.request_count, "calls": len(times.calls), "rounds": times.rounds}
        return found | {"unpaired_samples": times.unpaired, "invalid_reasons": tuple(invalid_reasons)}


def compare_bench(
    samples: Samples, seed: int = 0, invalid_reasons: Iterable[str] = (), margin_pct: float = SAME_MARGIN_PCT
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
    verdict, reason = conclude(*(judge.judge(EAGER, GRAPH, noise, name) for name in ("mean", "trimmed_mean")))
    return BenchComparison(
        **judge.compared(reasons),
        pairs=tuple(judge.pair(*pair, noise, request_noise_pct=request_noise) for pair in against),
        verdict="invalid" if reasons else verdict,
        verdict_reason="; ".join(reasons) or reason,
    )
