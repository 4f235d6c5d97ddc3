"""Compares two saved bench runs request by request: what differs between them, deltas with intervals, a verdict.

Two runs are compared only where a difference in latency has a cause that can be named. What they were measured on and
with must be equal; of the settings one may differ, or those that the user names. All deltas are second minus first in
percent of the first, so negative means that the second run is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from vitgraph.errors import UsageError
from vitgraph.records import stats
from vitgraph.records.differences import FACTORS, Difference, find_differences, join_differences
from vitgraph.records.samples import EAGER, EAGER_REPEAT, GRAPH, HF, RequestTimes, request_times
from vitgraph.records.saved_runs import SavedRun
from vitgraph.records.stats import FloatArray, Metric

Pair = tuple[FloatArray, FloatArray]

GRAPH_ONLY_FACTORS = frozenset({"budgets", "packing"})
"""Factors that leave eager mode as it is: there, eager against eager measures the noise between the two runs."""
MODE_NAMES = {EAGER: "eager", GRAPH: "graph", HF: "transformers"}


@dataclass(frozen=True, slots=True)
class DeltaRow:
    """One metric of one mode in both runs.

    Attributes:
        mode: `eager`, `graph` or `hf`.
        metric: `mean`, `p50` or `p99`.
        n: Requests that were measured in both runs.
        first_ms: The metric in the first run over these requests, milliseconds a request.
        second_ms: The same in the second run.
        delta_pct: Second minus first in percent of the first; negative = the second is faster.
        ci95: Ends of the 95 % interval of `delta_pct`, from resampled requests; None where they are too few.
        noise_floor_pct: What two measurements of the same thing differ by here; None where it is not known.
        verdict: `faster`, `slower`, `same`, `undecided` or `invalid`, of the second run.
        is_control: The two runs did the same in this mode, so the delta is noise between runs.
    """

    mode: str
    metric: Metric
    n: int
    first_ms: float
    second_ms: float
    delta_pct: float | None
    ci95: tuple[float, float] | None
    noise_floor_pct: float | None
    verdict: stats.Verdict
    is_control: bool

    @property
    def improvement_pct(self) -> float | None:
        """The delta as an improvement, positive = the second is faster."""
        return None if self.delta_pct is None else 0.0 - self.delta_pct

    @property
    def improvement_ci95(self) -> tuple[float, float] | None:
        """The interval of `improvement_pct`."""
        return None if self.ci95 is None else (0.0 - self.ci95[1], 0.0 - self.ci95[0])

    @property
    def is_supported(self) -> bool:
        """False for a P99 of too few requests, which is a maximum in disguise."""
        return self.metric != "p99" or self.n >= stats.P99_MIN_SAMPLES


@dataclass(frozen=True, slots=True)
class RunComparison:
    """What two runs differ in, and by how much.

    Attributes:
        first: The run that percentages refer to.
        second: The run that is judged.
        differing: The factors in which they differ: what is compared. Empty for a repeat.
        requests: Requests that were measured in eager and graph mode in both runs.
        rows: Deltas by mode and metric.
        noise_source: Where the noise floors come from, in words.
        invalid_reasons: Why no verdict can be given; empty where one can.
    """

    first: SavedRun
    second: SavedRun
    differing: tuple[Difference, ...]
    requests: int
    rows: tuple[DeltaRow, ...]
    noise_source: str
    invalid_reasons: tuple[str, ...]

    def row(self, mode: str, metric: Metric) -> DeltaRow:
        """The delta of one metric in one mode."""
        return next(row for row in self.rows if (row.mode, row.metric) == (mode, metric))

    @property
    def verdict(self) -> stats.Verdict:
        """The verdict on the mean latency in graph mode."""
        return self.row(GRAPH, "mean").verdict

    @property
    def verdict_reason(self) -> str:
        """Why, in words."""
        if self.invalid_reasons:
            return "; ".join(self.invalid_reasons)
        row = self.row(GRAPH, "mean")
        found = stats.Improvement(row.improvement_pct, row.improvement_ci95)
        return stats.Judgement(found, row.noise_floor_pct, stats.MARGIN_PCT, row.n).reason()


def compare_runs(first: SavedRun, second: SavedRun, across: Sequence[str] = (), seed: int = 0) -> RunComparison:
    """Compares two runs of the same requests on the same device.

    Args:
        first: The run that percentages refer to.
        second: The run to judge.
        across: Factors that may differ, by name; empty allows any one of them.
        seed: Seed of the bootstrap.

    Raises:
        UsageError: The runs are unlike; the message names every difference that stands in the way.
    """
    differing = _allowed_differences(first, second, across)
    pairs = [request_times(run.samples, (EAGER, GRAPH)) for run in (first, second)]
    common = sorted(set(pairs[0].requests) & set(pairs[1].requests))
    if not common:
        counts = " and ".join(
            f"{len(pair.requests)} in {run.name}" for pair, run in zip(pairs, (first, second), strict=True)
        )
        raise UsageError(
            f"{first.name} and {second.name} have no request that both measured in eager and graph mode ({counts}); "
            "compare runs that ended with a result"
        )
    is_controlled = {difference.name for difference in differing} <= GRAPH_ONLY_FACTORS
    reasons = _invalid_reasons(first, second)
    times = {mode: _times_in_both(pairs, mode, common) for mode in (EAGER, GRAPH)}
    hf_pairs = [request_times(run.samples, (HF,)) for run in (first, second)]
    hf_common = sorted(set(hf_pairs[0].requests) & set(hf_pairs[1].requests))
    if hf_common:
        times[HF] = _times_in_both(hf_pairs, HF, hf_common)
    floors = {
        metric: _noise_floor(first, second, metric, times[EAGER], is_controlled, seed) for metric in stats.METRICS
    }
    rows = tuple(
        _delta_row(mode, metric, series, floors[metric], bool(reasons), is_controlled and mode != GRAPH, seed)
        for mode, series in times.items()
        for metric in stats.METRICS
    )
    source = (
        "the larger of eager against eager in each run and between the two runs"
        if is_controlled
        else "the larger of eager against eager in each run; the noise between the two runs was not measured, since "
        "their eager modes differ too"
    )
    return RunComparison(first, second, differing, len(common), rows, source, reasons)


def _allowed_differences(first: SavedRun, second: SavedRun, across: Sequence[str]) -> tuple[Difference, ...]:
    unknown = [name for name in across if name not in FACTORS]
    if unknown:
        raise UsageError(f"--across has {unknown[0]!r}; two runs can be compared across {', '.join(FACTORS)}")
    ruled_out, differing = find_differences(first.record, second.record)
    pair = f"{first.name} and {second.name}"
    if ruled_out:
        raise UsageError(
            f"{pair} are not comparable: they differ in {join_differences(ruled_out)}. "
            "Measure both with the same requests on the same device"
        )
    names = [difference.name for difference in differing]
    idle = [name for name in across if name not in names]
    found = join_differences(differing)
    if idle:
        raise UsageError(f"--across has {idle[0]!r}, but {pair} have the same {idle[0]}; they differ in {found}")
    unnamed = [difference for difference in differing if difference.name not in across]
    if unnamed and (across or len(differing) > 1):
        raise UsageError(
            f"{pair} differ in {found}, so a difference in latency has no single cause. Measure a pair that differs in "
            f"one, or name all that you compare: --across {','.join(names)}"
        )
    return differing


def _times_in_both(runs: Sequence[RequestTimes], mode: str, requests: Sequence[int]) -> Pair:
    series = []
    for run in runs:
        place = {request: index for index, request in enumerate(run.requests)}
        series.append(run.times[mode][[place[request] for request in requests]])
    return series[0], series[1]


def _invalid_reasons(first: SavedRun, second: SavedRun) -> tuple[str, ...]:
    reasons = []
    for run in (first, second):
        comparison = run.record["comparison"] or {}
        if comparison.get("verdict") == "invalid":
            reasons.append(f"{run.name}: {comparison['verdict_reason']}")
    return tuple(reasons)


def _noise_floor(
    first: SavedRun,
    second: SavedRun,
    metric: Metric,
    eager: Pair,
    is_controlled: bool,
    seed: int,
) -> float | None:
    """The largest of what the same thing was seen to differ by; None where too little of it was measured."""
    floors = []
    for run in (first, second):
        control = request_times(run.samples, (EAGER, EAGER_REPEAT))
        floors.append(_floor(control.times[EAGER], control.times[EAGER_REPEAT], metric, seed))
    if is_controlled:
        floors.append(_floor(*eager, metric, seed))
        # Between the runs is the noise that matters; without it, what each run had is no bound.
        return None if floors[-1] is None else max(floor for floor in floors if floor is not None)
    return None if None in floors else max(floor for floor in floors if floor is not None)


def _floor(first: FloatArray, second: FloatArray, metric: Metric, seed: int) -> float | None:
    return stats.Noise.of(first, second, None, [metric], seed).floors[metric]


def _delta_row(
    mode: str,
    metric: Metric,
    series: Pair,
    floor: float | None,
    is_invalid: bool,
    is_control: bool,
    seed: int,
) -> DeltaRow:
    first, second = series
    found = stats.improvement(first, second, metric, seed=seed)
    value = _METRIC_VALUES[metric]
    return DeltaRow(
        mode=mode,
        metric=metric,
        n=int(first.size),
        first_ms=value(first),
        second_ms=value(second),
        delta_pct=None if found.improvement_pct is None else 0.0 - found.improvement_pct,
        ci95=None if found.ci95 is None else (0.0 - found.ci95[1], 0.0 - found.ci95[0]),
        noise_floor_pct=floor,
        verdict="invalid" if is_invalid else stats.verdict(found, floor),
        is_control=is_control,
    )


_METRIC_VALUES: dict[str, Callable[[FloatArray], float]] = {
    "mean": lambda times: float(np.mean(times)),
    "p50": lambda times: float(np.percentile(times, 50)),
    "p99": lambda times: float(np.percentile(times, 99)),
}
