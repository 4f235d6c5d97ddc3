"""What a report may claim of a difference, in words: the improvement, its interval, and a verdict's headline.

Improvements are positive where the second is faster, as everywhere in reports and records.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

from vitgraph.records.record import BenchRecord
from vitgraph.records.sections import value_at
from vitgraph.records.series import Compared, Improvement, Latency, Pair
from vitgraph.records.stats import P99_MIN_SAMPLES
from vitgraph.report import say
from vitgraph.report.columns import Cell, Column, column, fields
from vitgraph.report.document import NO_VERDICT

TAIL_OF_FEW = f"max (n<{P99_MIN_SAMPLES})"
"""What stands in the place of a P99 of too few requests."""
IMPROVEMENT_NOTE = "Positive = graph faster; milliseconds a request, eager→graph."
GAP_MEANING = "wall time of a replay over its GPU-busy time"
NOT_A_GPU = "not a GPU"
METRICS = ("mean", "p50", "p99")

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class Claim:
    """One improvement and what may be said of it.

    Attributes:
        label: What was compared: `mean`, `P50`, `P99`, or the maximum where there are too few requests for a P99.
        improvement_pct: Percent, positive = faster; None where it is not known.
        verdict: A verdict, or `none` where nothing may be claimed.
        ci95: The interval; None where nothing may be claimed.
    """

    label: str
    improvement_pct: float | None
    base_ms: float | None
    series_ms: float | None
    verdict: str
    ci95: tuple[float, float] | None = None

    @property
    def is_tail_of_few(self) -> bool:
        return self.label == TAIL_OF_FEW

    @property
    def name(self) -> str:
        """What was compared, at the start of a line."""
        return self.label[:1].upper() + self.label[1:]

    @property
    def word(self) -> str:
        return NOT_A_GPU if self.verdict == NO_VERDICT else self.verdict

    @property
    def times(self) -> str:
        """Both times, `5.13→4.52`."""
        return say.change(self.base_ms, self.series_ms)

    @property
    def headline(self) -> str:
        """The improvement as upstream prints it."""
        return f"{say.pct(self.improvement_pct)} ({self.times} ms)"

    @property
    def cell(self) -> Cell:
        """The improvement, and beneath it what may be claimed of it."""
        named = self.label if self.is_tail_of_few else ""
        return Cell(self.headline, say.joined(named, self.word, say.ci95(self.ci95)), self.verdict)


def label_of(metric: str) -> str:
    """A metric as readers know it."""
    return "mean" if metric == "mean" else metric.upper()


def claim_of(pair: Pair, metric: str, base: Latency, series: Latency, *, is_cpu: bool) -> Claim:
    """The improvement of one metric; on a CPU, where replays save no launches, nothing is claimed."""
    found: Improvement | None = getattr(pair, metric)
    verdict = NO_VERDICT if is_cpu or found is None else found.verdict
    if metric == "p99" and not base.p99_supported:
        before, after = base.max_ms, series.max_ms
        gain = 100 * (1 - after / before) if before and after is not None else None
        return Claim(TAIL_OF_FEW, gain, before, after, "undecided" if found is None and not is_cpu else verdict)
    before, after = (getattr(one, f"{metric}_ms") for one in (base, series))
    ci95 = found.ci95 if found and verdict not in (NO_VERDICT, "invalid") else None
    return Claim(label_of(metric), found.improvement_pct if found else None, before, after, verdict, ci95)


def claims_of(record: BenchRecord, base: str = "eager", series: str = "graph") -> dict[str, Claim]:
    """What one series gains over another, by metric; empty where they were not compared."""
    latency, comparison = record.result.latency, record.result.comparison
    pair = comparison.pair(base, series)
    if pair is None or not comparison.requests or base not in latency or series not in latency:
        return {}
    is_cpu = record.result.graph.mode == "cpu-replay"
    return {metric: claim_of(pair, metric, latency[base], latency[series], is_cpu=is_cpu) for metric in METRICS}


def headline_of(verdict: str, subject: str, both: str) -> str:
    """A verdict in a sentence of a subject with its verb, `Graphs are`, or of both sides, `Graphs and eager`."""
    return {
        "faster": f"{subject} faster",
        "slower": f"{subject} slower",
        "same": f"{both} take the same time",
        "undecided": "Undecided",
        "invalid": "No verdict: the measurement is not valid",
    }[verdict]


_OUTLIER_RATIO = 3.0
_OUTLIER_SHARE = 0.02


def moved_by_one(latencies: Mapping[Key, Latency]) -> dict[Key, str]:
    """The series in which one request moves the mean by itself, each with what is to be said of it.

    A workload of many sizes has large maxima in every series, so a maximum counts as one only against the others.
    """
    ratios = {key: one.max_ms / one.p50_ms for key, one in latencies.items() if one.max_ms and one.p50_ms}
    found = {}
    for key, ratio in ratios.items():
        one, others = latencies[key], [of for other, of in ratios.items() if other != key]
        excess = ((one.max_ms or 0.0) - (one.p50_ms or 0.0)) / one.requests
        if others and ratio > _OUTLIER_RATIO * median(others) and excess > _OUTLIER_SHARE * (one.mean_ms or 0.0):
            found[key] = f"one of {one.requests:,} took {say.short(one.max_ms or 0.0)} ms"
    return found


def slower_text(pair: Pair | None) -> str:
    """How many requests the judged series made slower, by 2 % and by more than the noise."""
    slower = pair.slower if pair else None
    if slower is None or not slower.requests:
        return ""
    fixed = (
        f"{slower.over_2pct_count:,} of {slower.requests:,} requests ({say.share(slower.over_2pct_share)}) slower "
        "than eager by more than 2%"
    )
    if slower.count is None:
        return f"{fixed}; request noise not measured"
    threshold = f"the request noise of {slower.threshold_pct:.1f}%"
    return f"{fixed}; {slower.count:,} ({say.share(slower.share)}) by more than {threshold}"


def improvement_columns(at: str, of: str = "", suffix: str = "") -> tuple[Column, ...]:
    """The columns of an improvement in a tidy table.

    Args:
        of: What it is of, in words.
        suffix: Goes after their names where a row has several improvements.
    """
    name = f"improvement{suffix}_pct"
    kept = f"improvement{of}: (base - other) / base, positive = faster"
    words = "`faster`, `slower`, `same`, `undecided` or `invalid`"

    def end(place: int, which: str) -> Column:
        meaning = f"{which} end of the 95 % interval of `{name}`"
        own = name.replace("_pct", f"_{'low' if which == 'lower' else 'high'}_pct")
        return column(own, meaning, of=lambda row: (value_at(row, f"{at}.ci95") or (None, None))[place])

    return (
        column(name, kept, of=f"{at}.improvement_pct"),
        *(end(0, "lower"), end(1, "upper")),
        column(f"verdict{suffix}", words, of=f"{at}.verdict"),
    )


def latency_columns(**shown: str) -> tuple[Column, ...]:
    """Columns of a latency at `of`, by field with their headers; of a P99 only where its requests support it."""
    p99 = column(
        "p99_ms",
        "99th percentile; of too few requests left out",
        "P99",
        of=lambda row: value_at(row, "of.p99_ms") if value_at(row, "of.p99_supported") else None,
    )
    return tuple(p99 if column.name == "p99_ms" else column for column in fields(Latency, "of", **shown))


def floor_text(pct: float | None) -> str:
    """A noise floor, or that none was measured."""
    return say.NOT_MEASURED if pct is None else f"±{say.number(pct, 2)}%"


def measured_text(compared: Compared, how: str) -> str:
    """On how much the series of a run were compared."""
    left_out = compared.unpaired_samples
    note = f"; {say.count(left_out, 'sample')} without a partner left out" if left_out else ""
    size = f"{say.count(compared.requests, 'request')} in {say.count(compared.calls, 'call')}"
    return f"{size} × {say.count(compared.rounds, 'round')}, {how}{note}"
