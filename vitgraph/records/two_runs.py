"""Compares two saved bench runs, or several of either setting: what differs, improvements with intervals, a verdict.

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
from vitgraph.records.resampling import compare_samples
from vitgraph.records.sample_table import EAGER, FIRST, GRAPH, HF, SECOND, FloatArray, IntArray, Samples
from vitgraph.records.saved_runs import SavedRun
from vitgraph.records.stats import METRICS, Metric

Pair = tuple[FloatArray, FloatArray]
Side = Sequence[SavedRun]
"""Runs of the same settings, each a process of its own."""


@dataclass(frozen=True, slots=True)
class _InBoth:
    """Calls that both runs measured: their indexes, their requests, and by series the times in either; `[n]` each."""

    calls: IntArray
    requests: IntArray
    times: dict[str, Pair]


GRAPH_ONLY_FACTORS = frozenset({"budgets", "packing"})
"""Factors that leave eager mode as it is: there, eager against eager measures the noise between the two runs."""
ONE_RUN = "with one run a side the noise between processes is unknown: --compare A1,A2 B1,B2 measures it"
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
        firsts: The runs that percentages refer to.
        seconds: The runs that are judged.
        differing: The factors in which they differ: what is compared. Empty for a repeat.
        requests: Requests that were measured in eager and graph mode in both runs.
        rows: Deltas by mode and metric.
        noise_source: Where the noise floors come from, in words.
        invalid_reasons: Why no verdict can be given; empty where one can.
        margin_pct: Within which `same` is claimed.
    """

    firsts: tuple[SavedRun, ...]
    seconds: tuple[SavedRun, ...]
    differing: tuple[Difference, ...]
    requests: int
    rows: tuple[DeltaRow, ...]
    noise_source: str
    invalid_reasons: tuple[str, ...]
    margin_pct: float

    @property
    def first(self) -> SavedRun:
        """The run that stands for the first side: what its runs were given is equal."""
        return self.firsts[0]

    @property
    def second(self) -> SavedRun:
        """The run that stands for the second side."""
        return self.seconds[0]

    @property
    def runs(self) -> tuple[SavedRun, ...]:
        """All of them."""
        return self.firsts + self.seconds

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
        if len(self.runs) > 2 and row.ci95 is not None:
            interval = "the 95% interval of the mean over runs and calls"
            return {
                "same": f"{interval} lies wholly within ±{self.margin_pct:g}%",
                "undecided": f"{interval} is too wide for a claim: measure more runs of either side",
            }.get(row.verdict, f"{interval} excludes zero, the noise between processes included")
        found = stats.Improvement(row.improvement_pct, row.ci95)
        return stats.Judgement(found, row.noise_floor_pct, self.margin_pct, row.n).reason()


def compare_runs(
    first: SavedRun,
    second: SavedRun,
    across: Sequence[str] = (),
    seed: int = 0,
    margin_pct: float = stats.MARGIN_PCT,
) -> RunComparison:
    """Compares two runs of the same requests on the same device.

    Args:
        first: The run that percentages refer to.
        second: The run to judge.
        across: Factors that may differ, by name; empty allows any one of them.
        seed: Seed of the bootstrap.
        margin_pct: Within which `same` is claimed.

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
        _delta_row(mode, metric, both, floors[metric], bool(reasons), is_controlled and mode != GRAPH, margin_pct, seed)
        for mode, both in series.items()
        for metric in stats.METRICS
    )
    source = (
        "the larger of eager against eager in each run and between the two runs"
        if is_controlled
        else "the larger of eager against eager in each run; the noise between the two runs was not measured, since "
        "their eager modes differ too"
    )
    source += f"; {ONE_RUN}"
    requests = int(common.requests.sum())
    return RunComparison((first,), (second,), differing, requests, rows, source, reasons, margin_pct)


def compare_sides(
    firsts: Side, seconds: Side, across: Sequence[str] = (), seed: int = 0, margin_pct: float = stats.MARGIN_PCT
) -> RunComparison:
    """Compares runs of the same settings with runs of others, so that the noise between processes is measured.

    Args:
        firsts: The runs that percentages refer to.
        seconds: The runs to judge.
        across: Factors that may differ between the sides, by name; empty allows any one of them.
        seed: Seed of the bootstrap.
        margin_pct: Within which `same` is claimed.

    Raises:
        UsageError: Runs of one side differ in something, or the sides are unlike.
    """
    if len(firsts) == len(seconds) == 1:
        return compare_runs(firsts[0], seconds[0], across, seed, margin_pct)
    for side in (firsts, seconds):
        for other in side[1:]:
            _refuse_unlike(side[0], other)
    differing = _allowed_differences(firsts[0], seconds[0], across)
    tables = [[run.samples or Samples.of([]) for run in side] for side in (firsts, seconds)]
    reasons = _invalid_reasons(*firsts, *seconds)
    is_controlled = {difference.name for difference in differing} <= GRAPH_ONLY_FACTORS
    rows: list[DeltaRow] = []
    requests = 0
    for mode, wanted in ((EAGER, [EAGER, GRAPH]), (GRAPH, [EAGER, GRAPH])):
        weights, times = _times_of_sides(tables, wanted, mode)
        requests = int(weights.sum())
        if not requests:
            names = ", ".join(run.name for run in (*firsts, *seconds))
            raise UsageError(f"{names} have no request that all of them measured in eager and graph mode")
        is_control = is_controlled and mode != GRAPH
        rows += [
            _row_of_sides(mode, metric, weights, times, bool(reasons), is_control, margin_pct, seed)
            for metric in METRICS
        ]
    source = (
        f"the spread of the runs of one side, {len(firsts)} and {len(seconds)} of them; every interval holds it, so "
        "that a verdict asks for no more"
    )
    return RunComparison(tuple(firsts), tuple(seconds), differing, requests, tuple(rows), source, reasons, margin_pct)


def _refuse_unlike(first: SavedRun, other: SavedRun) -> None:
    ruled_out, differing = find_differences(first.record, other.record)
    if ruled_out or differing:
        raise UsageError(
            f"{first.name} and {other.name} are given as runs of one side, but differ in "
            f"{join_differences((*ruled_out, *differing))}; a side is one setting, measured several times"
        )


def _times_of_sides(
    tables: Sequence[Sequence[Samples]], wanted: Sequence[str], mode: str
) -> tuple[IntArray, tuple[FloatArray, FloatArray]]:
    """Requests of the calls that all runs measured, `[n]`, and their times in one mode, `[runs, n]` of either side."""
    paired = [[table.paired(wanted) for table in side] for side in tables]
    common = paired[0][0].calls
    for one in (each for side in paired for each in side):
        common = np.intersect1d(common, one.calls)
    first, second = (
        np.stack([one.times[mode][np.isin(one.calls, common)] for one in side]) if side else np.empty((0, 0))
        for side in paired
    )
    return paired[0][0].requests[np.isin(paired[0][0].calls, common)], (first, second)


def _row_of_sides(
    mode: str,
    metric: Metric,
    requests: IntArray,
    times: tuple[FloatArray, FloatArray],
    is_invalid: bool,
    is_control: bool,
    margin_pct: float,
    seed: int,
) -> DeltaRow:
    found = compare_samples(*times, requests, metric, seed)
    return DeltaRow(
        mode=mode,
        metric=metric,
        n=int(requests.sum()),
        first_ms=found.base_ms,
        second_ms=found.other_ms,
        improvement_pct=found.improvement.improvement_pct,
        ci95=found.improvement.ci95,
        noise_floor_pct=found.spread_pct,
        # The interval holds the noise between processes: beyond zero is beyond noise.
        verdict="invalid" if is_invalid else stats.verdict(found.improvement, 0.0, margin_pct),
        is_control=is_control,
    )


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


def _invalid_reasons(*runs: SavedRun) -> tuple[str, ...]:
    reasons = []
    for run in runs:
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
    mode: str,
    metric: Metric,
    both: _InBoth,
    floor: float | None,
    is_invalid: bool,
    is_control: bool,
    margin_pct: float,
    seed: int,
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
        verdict="invalid" if is_invalid else stats.verdict(found, floor, margin_pct),
        is_control=is_control,
    )
