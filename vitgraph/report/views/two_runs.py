"""The document of two runs compared: what differs, the verdict, and what the second gains over the first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np

from vitgraph.records.saved_runs import SavedRun
from vitgraph.records.stats import P99_MIN_SAMPLES
from vitgraph.records.two_runs import MODE_NAMES, DeltaRow, RunComparison
from vitgraph.report.charts_of_times import ImprovementBar, draw_distribution, draw_improvements
from vitgraph.report.columns import (
    NO_VALUE,
    Cell,
    Column,
    Row,
    Table,
    TableSpec,
    budgets_text,
    bytes_text,
    interval_text,
    ms_text,
    number_text,
    pct_text,
    share_text,
)
from vitgraph.report.document import Chart, Code, Document, Text, Verdict, command_text, section, sections
from vitgraph.report.views.claims import headline_of
from vitgraph.report.views.conditions import backend_of, conditions, model_of

NOTE = "Improvement = (first - second) / first: positive = second run faster; milliseconds a request, first→second."
COMPARISON = TableSpec(
    "comparison",
    "",
    "a series and metric",
    (
        Column("first", "text", "", "run that percentages refer to"),
        Column("second", "text", "", "run that is judged"),
        Column("series", "text", "", "`eager`, `graph` or `hf`"),
        Column("metric", "text", "", "`mean`, `p50` or `p99`"),
        Column(
            "requests", "integer", "requests", "requests measured in both runs; a P99 of fewer than 300 is a maximum"
        ),
        Column("first_ms", "number", "ms", "the metric in the first run, a request"),
        Column("second_ms", "number", "ms", "the metric in the second run, a request"),
        Column("improvement_pct", "number", "%", "(first - second) / first, positive = second faster"),
        Column("improvement_low_pct", "number", "%", "lower end of the 95 % interval of `improvement_pct`"),
        Column("improvement_high_pct", "number", "%", "upper end of the 95 % interval of `improvement_pct`"),
        Column("noise_floor_pct", "number", "%", "what two measurements of the same thing differ by"),
        Column("verdict", "text", "", "`faster`, `slower`, `same`, `undecided` or `invalid`, of the second run"),
        Column("is_control", "truth", "", "both runs did the same in this series: the difference is noise"),
    ),
    "requests",
)
_SHOWN = TableSpec(
    "comparison",
    "Improvements",
    "a series and metric",
    (
        Column("series", "text", "", "the series", "Series"),
        Column("metric", "text", "", "the metric", "Metric"),
        Column("times", "text", "ms", "both times", "First→second ms"),
        Column("improvement", "text", "%", "what the second gains", "Improvement"),
        Column("interval", "text", "%", "its interval", "95% CI"),
        Column("floor", "text", "%", "noise floor", "Noise floor"),
        Column("verdict", "text", "", "verdict on the second run", "Verdict"),
    ),
    "requests",
)
_SIDES = TableSpec(
    "sides",
    "Both runs",
    "a fact",
    (
        Column("fact", "text", "", "what", " "),
        Column("first", "text", "", "in the first run", "First"),
        Column("second", "text", "", "in the second run", "Second"),
    ),
)


def two_runs_document(comparison: RunComparison) -> Document:
    """The report of a comparison, verdict first."""
    first, second = comparison.first, comparison.second
    mean = comparison.row("graph", "mean")
    compared = ", ".join(map(str, comparison.differing)) or "a repeat; nothing that is recorded differs"
    interval = f", 95% CI {interval_text(_ci95(mean))}" if mean.ci95 else ""
    figure = f"mean latency in graph mode {pct_text(_improvement(mean))} ({_times(mean)} ms){interval}"
    headline = headline_of(comparison.verdict, "The second run is", "Both runs")
    table = Table(
        _SHOWN, tuple(map(_shown_row, _shown(comparison))), notes=(NOTE, f"Noise floor: {comparison.noise_source}.")
    )
    commands = "\n\n".join(command_text(run.record.command) for run in comparison.runs)
    return Document(
        name="vitgraph export --compare",
        title=" → ".join(", ".join(run.name for run in side) for side in (comparison.firsts, comparison.seconds)),
        what=(model_of(first.record), *_shared(first, second), *map(str, comparison.differing), *_paired(comparison)),
        verdict=Verdict(comparison.verdict, headline, comparison.verdict_reason, figure, (f"Compared: {compared}.",)),
        sections=sections(
            section("", table),
            section("Charts", *_charts(comparison, first, second)),
            section("", _SIDES.table(_side_rows(first, second))),
            section("", *(Text(note, "dim") for run in comparison.runs for note in run.notes)),
            section("Commands", Code(commands), is_detail=True),
        ),
        tables=(COMPARISON.table(comparison_rows(comparison)),),
        explanation="how_to_read_comparison.html",
    )


def comparison_rows(comparison: RunComparison) -> Iterable[Row]:
    """The tidy rows of a comparison."""
    for row in comparison.rows:
        low, high = _ci95(row) or (None, None)
        yield {
            "first": ", ".join(run.name for run in comparison.firsts),
            "second": ", ".join(run.name for run in comparison.seconds),
            "series": row.mode,
            "requests": row.n,
            "improvement_pct": _improvement(row),
            "improvement_low_pct": low,
            "improvement_high_pct": high,
            **{name: getattr(row, name) for name in _COPIED},
        }


_COPIED = ("metric", "first_ms", "second_ms", "noise_floor_pct", "verdict", "is_control")


def comparison_summary(comparison: RunComparison) -> Mapping[str, Any]:
    """A comparison as one JSON object: what differs, the verdict, and the tidy rows."""
    return {
        "first": ", ".join(run.name for run in comparison.firsts),
        "second": ", ".join(run.name for run in comparison.seconds),
        "differing": [{"name": one.name, "first": one.first, "second": one.second} for one in comparison.differing],
        "requests": comparison.requests,
        "verdict": comparison.verdict,
        "verdict_reason": comparison.verdict_reason,
        "noise_source": comparison.noise_source,
        "rows": list(comparison_rows(comparison)),
    }


def _improvement(row: DeltaRow) -> float | None:
    return row.improvement_pct


def _ci95(row: DeltaRow) -> tuple[float, float] | None:
    return row.ci95


def _shown(comparison: RunComparison) -> list[DeltaRow]:
    """The rows to look at, graph mode first; a P99 of too few requests is left to the tidy table."""
    return sorted((row for row in comparison.rows if row.is_supported), key=lambda row: row.mode != "graph")


def _shown_row(row: DeltaRow) -> Row:
    floor = row.noise_floor_pct
    return {
        "series": MODE_NAMES[row.mode],
        "metric": _metric(row),
        "times": _times(row),
        "improvement": pct_text(_improvement(row)),
        "interval": interval_text(_ci95(row)) or NO_VALUE,
        "floor": NO_VALUE if floor is None else f"±{number_text(floor, 2)}%",
        "verdict": Cell("control", tone="dim") if row.is_control else Cell(row.verdict, tone=row.verdict),
    }


def _metric(row: DeltaRow) -> str:
    return row.metric if row.metric == "mean" else row.metric.upper()


def _times(row: DeltaRow) -> str:
    return f"{ms_text(row.first_ms)}→{ms_text(row.second_ms)}"


def _shared(first: SavedRun, second: SavedRun) -> Iterable[str]:
    """What was run in both."""
    theirs = set(conditions(second.record))
    return (phrase for phrase in conditions(first.record) if phrase in theirs)


def _paired(comparison: RunComparison) -> Iterable[str]:
    few = f"; P99 needs {P99_MIN_SAMPLES}" if comparison.requests < P99_MIN_SAMPLES else ""
    if len(comparison.runs) > 2:
        yield f"{len(comparison.firsts)} and {len(comparison.seconds)} runs"
    yield f"{comparison.requests:,} requests paired{few}"


def _side_rows(first: SavedRun, second: SavedRun) -> Iterable[Row]:
    sides = [dict(_side(run)) for run in (first, second)]
    for name in sides[0]:
        yield {"fact": name, "first": sides[0][name], "second": sides[1][name]}


def _side(run: SavedRun) -> Iterable[tuple[str, str]]:
    record, graph, resolved = run.record, run.record.result.graph, run.record.resolved
    yield "Backend", backend_of(record)
    yield "Blocks compiled", "yes" if resolved and resolved.compile else "no"
    yield "Packing", graph.policy or NO_VALUE
    yield "Token budgets", budgets_text(resolved.token_budgets) if resolved else NO_VALUE
    yield "Hits", f"{share_text(graph.hit_rate)} of {graph.items:,}"
    yield "Waste", share_text(graph.waste)
    yield "Graphs", str(graph.graphs)
    yield "Capture", f"{number_text(graph.capture_s, 2)} s"
    yield "Graph pool", bytes_text(graph.pool_bytes)
    yield "Buffers", bytes_text(graph.buffer_bytes)
    yield "Measured", record.created_at


def _charts(comparison: RunComparison, first: SavedRun, second: SavedRun) -> Iterable[Chart]:
    subtitle = " · ".join((model_of(first.record), *_shared(first, second)))
    bars = [
        ImprovementBar(f"{MODE_NAMES[row.mode]} {_metric(row)}", row.mode, improvement, _ci95(row), row.noise_floor_pct)
        for row in _shown(comparison)
        if (improvement := _improvement(row)) is not None
    ]
    title = "What the second run gains"
    if bars:
        drawn = partial(draw_improvements, title, subtitle, bars)
        yield Chart("improvements", "Improvements of the second run with their 95 % intervals", drawn)
    times = {}
    for run, place in ((first, "first"), (second, "second")):
        if run.samples is not None:
            pair = run.samples.paired(["eager", "graph"])
            times[place] = np.repeat(pair.times["graph"], pair.requests)
    if len(times) == 2 and all(of.size for of in times.values()):
        of = ("Latency distribution in graph mode", subtitle, "Latency of a request (ms)", "requests", times)
        yield Chart(
            "distribution", "Cumulative share of requests over latency, both runs", partial(draw_distribution, *of)
        )
