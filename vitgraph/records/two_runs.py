"""Compares two saved bench runs request by request: what differs between them, deltas with intervals, a verdict.

Two runs are compared only where a difference in latency has a cause that can be named. What they were measured on and
with must be equal; of the settings one may differ, or those that the user names. A positive
improvement means that the second run is faster. Calls weigh as many requests as they have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vitgraph.errors import UsageError
from vitgraph.records import stats
from vitgraph.records.differences import FACTORS, Difference, find_differences, join_differences
from vitgraph.records.sample_table import EAGER, FIRST, GRAPH, HF, SECOND, FloatArray, IntArray, Samples
from vitgraph.records.saved_runs import SavedRun
from vitgraph.records.stats import Metric

Pair = tuple[FloatArray, FloatArray]


@dataclass(frozen=True, slots=True)
class _InBoth:
    """Calls that both runs measured: their indexes, their requests, and by series the times in either; `[n]` each."""

    calls: IntArray
    requests: IntArray
    times: dict[str, Pair]


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
        improvement_pct: (first - second) / first in percent; positive = the second is faster.
        ci95: Ends of its 95 % interval, from resampled calls; None where they are too few.
        noise_floor_pct: What two measurements of the same thing differ by here; None where it is not known.
        verdict: `faster`, `slower`, `same`, `undecided` or `invalid`, of the second run.
        is_control: The two runs did the same in this mode, so the delta is noise between runs.
    """

    mode: str
    metric: Metric
    n: int
    first_ms: float
    second_ms: float
    improvement_pct: float | None
    ci95: tuple[float, float] | None
    noise_floor_pct: float | None
    verdict: stats.Verdict
    is_control: bool

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
        found = stats.Improvement(row.improvement_pct, row.ci95)
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
    tables = [run.samples or Samples.of([]) for run in (first, second)]
    common = _in_both(tables, [EAGER, GRAPH])
    if not len(common.calls):
        counts = " and ".join(
            f"{table.paired([EAGER, GRAPH]).request_count} in {run.name}"
            for table, run in zip(tables, (first, second), strict=True)
        )
        raise UsageError(
            f"{first.name} and {second.name} have no request that both measured in eager and graph mode ({counts}); "
            "compare runs that ended with a result"
        )
    is_controlled = {difference.name for difference in differing} <= GRAPH_ONLY_FACTORS
    reasons = _invalid_reasons(first, second)
    stock = _in_both(tables, [HF])
    series = {EAGER: common, GRAPH: common, **({HF: stock} if len(stock.calls) else {})}
    floors = {metric: _noise_floor(tables, metric, common, is_controlled, seed) for metric in stats.METRICS}
    rows = tuple(
        _delta_row(mode, metric, both, floors[metric], bool(reasons), is_controlled and mode != GRAPH, seed)
        for mode, both in series.items()
        for metric in stats.METRICS
    )
    source = (
        "the larger of eager against eager in each run and between the two runs"
        if is_controlled
        else "the larger of eager against eager in each run; the noise between the two runs was not measured, since "
        "their eager modes differ too"
    )
    return RunComparison(first, second, differing, int(common.requests.sum()), rows, source, reasons)


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


def _in_both(tables: Sequence[Samples], series: Sequence[str]) -> _InBoth:
    """The calls that both runs measured in all of some series."""
    first, second = (table.paired(series) for table in tables)
    calls, mine, theirs = np.intersect1d(first.calls, second.calls, return_indices=True)
    times = {name: (first.times[name][mine], second.times[name][theirs]) for name in series}
    return _InBoth(calls, first.requests[mine], times)


def _invalid_reasons(first: SavedRun, second: SavedRun) -> tuple[str, ...]:
    reasons = []
    for run in (first, second):
        comparison = run.record.result.comparison
        if comparison.verdict == "invalid":
            reasons.append(f"{run.name}: {comparison.verdict_reason}")
    return tuple(reasons)


def _noise_floor(
    tables: Sequence[Samples], metric: Metric, common: _InBoth, is_controlled: bool, seed: int
) -> float | None:
    """The largest of what the same thing was seen to differ by; None where too little of it was measured."""
    floors = []
    for table in tables:
        twice = table.repeated([EAGER])
        floors.append(_floor((twice.times[FIRST], twice.times[SECOND]), twice.requests, metric, seed))
    if is_controlled:
        floors.append(_floor(common.times[EAGER], common.requests, metric, seed))
        # Between the runs is the noise that matters; without it, what each run had is no bound.
        return None if floors[-1] is None else max(floor for floor in floors if floor is not None)
    return None if None in floors else max(floor for floor in floors if floor is not None)


def _floor(pair: Pair, requests: IntArray, metric: Metric, seed: int) -> float | None:
    return stats.Noise.of(*pair, requests, [metric], seed).floors[metric]


def _delta_row(
    mode: str, metric: Metric, both: _InBoth, floor: float | None, is_invalid: bool, is_control: bool, seed: int
) -> DeltaRow:
    first, second = both.times[mode]
    found = stats.improvement(first, second, metric, both.requests, seed)
    values = [getattr(stats.summarize(times, both.requests), f"{metric}_ms") for times in (first, second)]
    return DeltaRow(
        mode=mode,
        metric=metric,
        n=int(both.requests.sum()),
        first_ms=values[0],
        second_ms=values[1],
        improvement_pct=found.improvement_pct,
        ci95=found.ci95,
        noise_floor_pct=floor,
        verdict="invalid" if is_invalid else stats.verdict(found, floor),
        is_control=is_control,
    )
