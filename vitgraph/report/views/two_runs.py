"""The document of two runs compared: what differs, the verdict, and what the second gains over the first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np

from vitgraph.records.saved_runs import SavedRun
from vitgraph.records.stats import P99_MIN_SAMPLES
from vitgraph.records.two_runs import MODE_NAMES, DeltaRow, RunComparison
from vitgraph.report import say
from vitgraph.report.charts_of_times import draw_distribution, draw_improvements
from vitgraph.report.columns import Cell, Column, Row, TableSpec, texts
from vitgraph.report.document import Chart, Code, Document, Text, Verdict, command_text, section, sections
from vitgraph.report.views.claims import floor_text, headline_of, improvement_columns
from vitgraph.report.views.conditions import Ran

NOTE = "Improvement = (first - second) / first: positive = second run faster; milliseconds a request, first→second."
_IMPROVEMENT, _LOW, _HIGH, _VERDICT = improvement_columns("row", " of the second run over the first")
COMPARISON = TableSpec(
    "comparison",
    "",
    "a series and metric",
    (
        Column("first", "text", "", "run that percentages refer to"),
        Column("second", "text", "", "run that is judged"),
        Column("series", "text", "", "`eager`, `graph` or `hf`", of="row.mode"),
        Column("metric", "text", "", "`mean`, `p50` or `p99`", of="row.metric"),
        Column("requests", "integer", "requests", "requests in both; a P99 of below 300 is a maximum", of="row.n"),
        Column("first_ms", "number", "ms", "the metric in the first run, a request", of="row.first_ms"),
        Column("second_ms", "number", "ms", "the metric in the second run, a request", of="row.second_ms"),
        *(_IMPROVEMENT, _LOW, _HIGH),
        Column(
            "noise_floor_pct", "number", "%", "what two measurements of one thing differ by", of="row.noise_floor_pct"
        ),
        _VERDICT,
        Column("is_control", "truth", "", "both runs did the same here: the difference is noise", of="row.is_control"),
    ),
    "requests",
)
_SHOWN = TableSpec(
    "comparison",
    "Improvements",
    columns=(
        Column("series", "text", "", "the series", "Series", of=lambda row: MODE_NAMES[row.mode]),
        Column("metric", "text", "", "the metric", "Metric", of=lambda row: _metric(row)),
        Column("times", "text", "ms", "both times", "First→second ms", of=lambda row: _times(row)),
        Column("improvement", "text", "%", "what it gains", "Improvement", say.pct, "improvement_pct"),
        Column("ci95", "text", "%", "its interval", "95% CI", say.interval),
        Column("floor", "text", "%", "noise floor", "Noise floor", of=lambda row: _floor(row)),
        Column("verdict", "text", "", "on the second run", "Verdict", of=lambda row: _verdict(row)),
    ),
    counts="requests",
)
_SIDES = TableSpec("sides", "Both runs", columns=texts(fact=" ", first="First", second="Second"))


def two_runs_document(comparison: RunComparison) -> Document:
    """The report of a comparison, verdict first."""
    first, second = Ran(comparison.first.record), Ran(comparison.second.record)
    mean = comparison.row("graph", "mean")
    compared = ", ".join(map(str, comparison.differing)) or "a repeat; nothing that is recorded differs"
    interval = f", 95% CI {say.interval(mean.ci95)}" if mean.ci95 else ""
    figure = f"mean latency in graph mode {say.pct(mean.improvement_pct)} ({_times(mean)} ms){interval}"
    headline = headline_of(comparison.verdict, "The second run is", "Both runs")
    shared = [phrase for phrase in first.conditions() if phrase in second.conditions()]
    few = f"; P99 needs {P99_MIN_SAMPLES}" if comparison.requests < P99_MIN_SAMPLES else ""
    counted = [f"{len(comparison.firsts)} and {len(comparison.seconds)} runs"] if len(comparison.runs) > 2 else []
    what = (
        first.model,
        *shared,
        *map(str, comparison.differing),
        *counted,
        f"{comparison.requests:,} requests paired{few}",
    )
    commands = "\n\n".join(command_text(run.record.command) for run in comparison.runs)
    sides = (
        {"fact": name, "first": a, "second": b} for (name, a), (_, b) in zip(_side(first), _side(second), strict=True)
    )
    return Document(
        name="vitgraph export --compare",
        title=" → ".join(", ".join(run.name for run in side) for side in (comparison.firsts, comparison.seconds)),
        what=what,
        verdict=Verdict(comparison.verdict, headline, comparison.verdict_reason, figure, (f"Compared: {compared}.",)),
        sections=sections(
            section("", _SHOWN.of(_shown(comparison), notes=(NOTE, f"Noise floor: {comparison.noise_source}."))),
            section("Charts", *_charts(comparison, " · ".join((first.model, *shared)))),
            section("", _SIDES.table(sides)),
            section("", *(Text(note, "dim") for run in comparison.runs for note in run.notes)),
            section("Commands", Code(commands), is_detail=True),
        ),
        tables=(COMPARISON.table(comparison_rows(comparison)),),
        explanation="how_to_read_comparison.html",
    )


def _names(runs: Iterable[SavedRun]) -> str:
    return ", ".join(run.name for run in runs)


def comparison_rows(comparison: RunComparison) -> tuple[Row, ...]:
    """The tidy rows of a comparison."""
    names = {"first": _names(comparison.firsts), "second": _names(comparison.seconds)}
    return COMPARISON.of({**names, "row": row} for row in comparison.rows).rows


def comparison_summary(comparison: RunComparison) -> Mapping[str, Any]:
    """A comparison as one JSON object: what differs, the verdict, and the tidy rows."""
    return {
        "first": _names(comparison.firsts),
        "second": _names(comparison.seconds),
        "differing": [{"name": one.name, "first": one.first, "second": one.second} for one in comparison.differing],
        **{name: getattr(comparison, name) for name in ("requests", "verdict", "verdict_reason", "noise_source")},
        "rows": list(comparison_rows(comparison)),
    }


def _shown(comparison: RunComparison) -> list[DeltaRow]:
    """The rows to look at, graph mode first; a P99 of too few requests is left to the tidy table."""
    return sorted((row for row in comparison.rows if row.is_supported), key=lambda row: row.mode != "graph")


def _metric(row: DeltaRow) -> str:
    return row.metric if row.metric == "mean" else row.metric.upper()


def _times(row: DeltaRow) -> str:
    return f"{say.ms(row.first_ms)}→{say.ms(row.second_ms)}"


def _floor(row: DeltaRow) -> str | None:
    return None if row.noise_floor_pct is None else floor_text(row.noise_floor_pct)


def _verdict(row: DeltaRow) -> Cell:
    return Cell("control", tone="dim") if row.is_control else Cell(row.verdict, tone=row.verdict)


def _side(ran: Ran) -> Iterable[tuple[str, str]]:
    graph, resolved = ran.record.result.graph, ran.record.resolved  # type: ignore[attr-defined]
    yield "Backend", ran.backend
    yield "Blocks compiled", "yes" if resolved and resolved.compile else "no"
    yield "Packing", graph.policy or say.NO_VALUE
    yield "Token budgets", say.budgets(resolved.token_budgets) if resolved else say.NO_VALUE
    yield "Hits", f"{say.share(graph.hit_rate)} of {graph.items:,}"
    yield "Waste", say.share(graph.waste)
    yield "Graphs", str(graph.graphs)
    yield "Capture", f"{say.number(graph.capture_s, 2)} s"
    yield "Graph pool", say.size(graph.pool_bytes)
    yield "Buffers", say.size(graph.buffer_bytes)
    yield "Measured", ran.record.created_at


def _charts(comparison: RunComparison, subtitle: str) -> Iterable[Chart]:
    known = (row for row in _shown(comparison) if row.improvement_pct is not None)
    bars = {f"{MODE_NAMES[row.mode]} {_metric(row)}": row for row in known}
    if bars:
        drawn = partial(draw_improvements, "What the second run gains", subtitle, bars)
        yield Chart("improvements", "Improvements of the second run with their 95 % intervals", drawn)
    times = {}
    for run, place in ((comparison.first, "first"), (comparison.second, "second")):
        if run.samples is not None:
            pair = run.samples.paired(["eager", "graph"])
            times[place] = np.repeat(pair.times["graph"], pair.requests)
    if len(times) == 2 and all(of.size for of in times.values()):
        of = ("Latency distribution in graph mode", subtitle, "Latency of a request (ms)", "requests", times)
        title = "Cumulative share of requests over latency, both runs"
        yield Chart("distribution", title, partial(draw_distribution, *of))
