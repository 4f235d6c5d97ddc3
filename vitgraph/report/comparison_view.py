"""Shows a comparison of two runs: on a terminal, as tidy rows, Markdown, LaTeX, and as one HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from vitgraph.records.samples import EAGER, GRAPH, request_times
from vitgraph.records.stats import P99_MIN_SAMPLES
from vitgraph.records.two_runs import MODE_NAMES, DeltaRow, RunComparison
from vitgraph.report import svg_charts
from vitgraph.report.claims import VerdictText, backend_text, command_text, model_text, size_text, workload_name
from vitgraph.report.html_parts import code, details, escape, page, read_template, table, toned, verdict_box
from vitgraph.report.terminal import VERDICT_STYLES, fact_list, new_table
from vitgraph.report.text_tables import latex_text, markdown_row, markdown_text
from vitgraph.report.tidy_tables import Column, budgets_text
from vitgraph.report.units import (
    NO_VALUE,
    bytes_text,
    is_number,
    ms_text,
    number_text,
    share_text,
    signed_pct_text,
)

DELTA_NOTE = "Delta = (second − first) / first: negative = second run faster; milliseconds a request, first→second."
COMPARISON_COLUMNS = (
    Column("first", "text", "", "run that percentages refer to"),
    Column("second", "text", "", "run that is judged"),
    Column("mode", "text", "", "`eager`, `graph` or `hf`"),
    Column("metric", "text", "", "`mean`, `p50` or `p99`"),
    Column("n", "integer", "requests", "requests measured in both runs; below 300 a P99 is a maximum in disguise"),
    Column("first_ms", "number", "ms", "the metric in the first run, a request"),
    Column("second_ms", "number", "ms", "the metric in the second run, a request"),
    Column("delta_pct", "number", "%", "second minus first in percent of first, negative = second faster"),
    Column("ci95_low_pct", "number", "%", "lower end of the 95 % interval of `delta_pct`"),
    Column("ci95_high_pct", "number", "%", "upper end of the 95 % interval of `delta_pct`"),
    Column("noise_floor_pct", "number", "%", "what two measurements of the same thing differ by"),
    Column("verdict", "text", "", "`faster`, `slower`, `same`, `undecided` or `invalid`, of the second run"),
    Column("is_control", "truth", "", "both runs did the same in this mode, so the delta is noise between runs"),
)
"""Columns of `comparison.csv` and `comparison.parquet`, one row a mode and metric."""

_HEADLINES = {
    "faster": "The second run is faster",
    "slower": "The second run is slower",
    "same": "No difference beyond the noise",
    "undecided": "Undecided",
    "invalid": "No verdict: a measurement is not valid",
}
_HEADERS = ("Mode", "Metric", "First→second ms", "Delta", "95% CI", "Noise floor", "Verdict")


def comparison_rows(comparison: RunComparison) -> list[Mapping[str, Any]]:
    """The tidy rows of a comparison."""
    rows: list[Mapping[str, Any]] = []
    for row in comparison.rows:
        low, high = row.ci95 or (None, None)
        copied = (
            "mode",
            "metric",
            "n",
            "first_ms",
            "second_ms",
            "delta_pct",
            "noise_floor_pct",
            "verdict",
            "is_control",
        )
        names = {"first": comparison.first.name, "second": comparison.second.name}
        rows.append(
            {**names, **{name: getattr(row, name) for name in copied}, "ci95_low_pct": low, "ci95_high_pct": high}
        )
    return rows


def comparison_summary(comparison: RunComparison) -> dict[str, Any]:
    """A comparison as one JSON object: what differs, the verdict, and the tidy rows."""
    return {
        "first": comparison.first.name,
        "second": comparison.second.name,
        "differing": [
            {"name": difference.name, "first": difference.first, "second": difference.second}
            for difference in comparison.differing
        ],
        "requests": comparison.requests,
        "verdict": comparison.verdict,
        "verdict_reason": comparison.verdict_reason,
        "noise_source": comparison.noise_source,
        "rows": comparison_rows(comparison),
    }


def render_comparison(comparison: RunComparison, console: Console) -> None:
    """Prints the deltas of two runs, what they hold for, and the verdict."""
    console.print(Text(f"{comparison.first.name} → {comparison.second.name}", style="bold"))
    console.print(Text(f"{_conditions(comparison)}\nCompared: {_compared(comparison)}"))
    console.print()
    grid = new_table()
    for index, header in enumerate(_HEADERS):
        grid.add_column(header, justify="left" if index in (0, 1, 6) else "right", no_wrap=" " not in header)
    for row in _shown(comparison):
        *cells, verdict = _cells(row)
        grid.add_row(*cells, Text(verdict, style="dim" if row.is_control else VERDICT_STYLES[row.verdict]))
    console.print(grid)
    console.print(Text(DELTA_NOTE, style="dim"))
    console.print()
    judged = Text(comparison.verdict, style=f"bold {VERDICT_STYLES[comparison.verdict]}")
    facts: list[tuple[str, str | Text]] = [
        (name, f"{first} → {second}" if first != second else first) for name, first, second in _side_by_side(comparison)
    ]
    facts.append(("Noise floor", comparison.noise_source))
    facts.append(("Verdict", judged.append(f": {comparison.verdict_reason}", style="not bold default")))
    console.print(fact_list(facts))


def comparison_markdown(comparison: RunComparison) -> str:
    """The deltas as a Markdown table with the commands of both runs."""
    lines = [
        f"### {markdown_text(comparison.first.name)} → {markdown_text(comparison.second.name)}",
        "",
        f"{markdown_text(_conditions(comparison))}",
        f"Compared: {markdown_text(_compared(comparison))}.",
        "",
        f"**{comparison.verdict}**: {markdown_text(comparison.verdict_reason)}.",
        "",
        markdown_row(_HEADERS),
        markdown_row([":--", ":--", "--:", "--:", "--:", "--:", ":--"]),
        *(markdown_row([markdown_text(cell) for cell in _cells(row)]) for row in _shown(comparison)),
        "",
        DELTA_NOTE,
        "",
        f"Noise floor: {markdown_text(comparison.noise_source)}.",
        "",
        "To reproduce:",
        "",
        "```bash",
        "\n\n".join(command_text(run.record["command"]) for run in (comparison.first, comparison.second)),
        "```",
        "",
    ]
    return "\n".join(lines)


def comparison_latex(comparison: RunComparison) -> str:
    """The deltas as a LaTeX table."""
    caption = (
        f"{comparison.first.name} → {comparison.second.name}. {_conditions(comparison)} "
        f"Compared: {_compared(comparison)}. Verdict: {comparison.verdict}, {comparison.verdict_reason}. {DELTA_NOTE}"
    )
    lines = [
        "% Needs \\usepackage{booktabs}.",
        r"\begin{table}",
        r"  \centering",
        f"  \\caption{{{latex_text(caption)}}}",
        r"  \begin{tabular}{llrrrrl}",
        r"    \toprule",
        f"    {' & '.join(map(latex_text, _HEADERS))} \\\\",
        r"    \midrule",
        *(f"    {' & '.join(map(latex_text, _cells(row)))} \\\\" for row in _shown(comparison)),
        r"    \bottomrule",
        r"  \end{tabular}",
        r"\end{table}",
        "",
    ]
    return "\n".join(lines)


def comparison_page(comparison: RunComparison) -> str:
    """The comparison as one self-contained HTML page, verdict first."""
    first, second = comparison.first, comparison.second
    mean = comparison.row(GRAPH, "mean")
    verdict = VerdictText(comparison.verdict, _HEADLINES[comparison.verdict], comparison.verdict_reason)
    interval = f", 95% CI {_interval(mean)}" if mean.ci95 else ""
    figure = f"Mean latency in graph mode {signed_pct_text(mean.delta_pct)} ({_times(mean)} ms){interval}"
    rows = [
        (*cells[:-1], cells[-1] if row.is_control else toned(row.verdict, row.verdict))
        for row in _shown(comparison)
        for cells in [_cells(row)]
    ]
    facts = [(name, one, other) for name, one, other in _side_by_side(comparison)]
    body = [
        '<p class="eyebrow">vitgraph export --compare</p>',
        f"<h1>{escape(first.name)} → {escape(second.name)}</h1>",
        f'<p class="sub">{escape(_conditions(comparison))}</p>',
        verdict_box(verdict, figure, [f"Compared: {_compared(comparison)}."]),
        "<h2>Deltas</h2>",
        table(_HEADERS, rows, numeric_from=2, numeric_to=6),
        f'<p class="note">{escape(DELTA_NOTE)} Noise floor: {escape(comparison.noise_source)}.</p>',
        f'<div class="charts">{_charts(comparison)}</div>',
        "<h2>Both runs</h2>",
        table(("", "First", "Second"), facts, numeric_from=3),
        "<h2>Commands</h2>",
        *(f"<h3>{escape(run.name)}</h3>{code(command_text(run.record['command']))}" for run in (first, second)),
        *(
            details(f"Notes on {run.name}", f"<p>{escape(' '.join(run.notes))}</p>")
            for run in (first, second)
            if run.notes
        ),
        read_template("how_to_read_comparison.html"),
    ]
    return page(f"vitgraph: {first.name} → {second.name}", "".join(body))


def _charts(comparison: RunComparison) -> str:
    intervals = [
        svg_charts.Interval(
            f"{MODE_NAMES[row.mode]} {row.metric if row.metric == 'mean' else row.metric.upper()}",
            "graph" if row.mode == GRAPH else "eager",
            row.delta_pct,
            row.ci95,
            row.noise_floor_pct,
        )
        for row in _shown(comparison)
        if row.delta_pct is not None
    ]
    series = []
    for run, place in ((comparison.first, "first"), (comparison.second, "second")):
        times = request_times(run.samples, (EAGER, GRAPH)).times[GRAPH]
        series.append(svg_charts.Series(f"{place} run", place, times))
    distribution = svg_charts.latency_distribution(series, "Latency distribution in graph mode")
    return svg_charts.interval_rows(intervals) + distribution


def _shown(comparison: RunComparison) -> Sequence[DeltaRow]:
    """The rows to look at, graph mode first; a P99 of too few requests is left to the tidy table."""
    rows = [row for row in comparison.rows if row.is_supported]
    return sorted(rows, key=lambda row: row.mode != GRAPH)


def _cells(row: DeltaRow) -> tuple[str, ...]:
    floor = f"±{number_text(row.noise_floor_pct, 2)}%" if is_number(row.noise_floor_pct) else NO_VALUE
    return (
        MODE_NAMES[row.mode],
        row.metric if row.metric == "mean" else row.metric.upper(),
        _times(row),
        signed_pct_text(row.delta_pct),
        _interval(row),
        floor,
        "control" if row.is_control else row.verdict,
    )


def _times(row: DeltaRow) -> str:
    return f"{ms_text(row.first_ms)}→{ms_text(row.second_ms)}"


def _interval(row: DeltaRow) -> str:
    if row.ci95 is None:
        return NO_VALUE
    low, high = (signed_pct_text(end) for end in row.ci95)
    return f"{low.removesuffix('%')} … {high}"


def _conditions(comparison: RunComparison) -> str:
    """What both runs have in common, on one line."""
    record, other = comparison.first.record, comparison.second.record
    names = {difference.name for difference in comparison.differing}
    model = "" if "model" in names else f"{record.model_name}"
    weights = model_text(record)
    if weights != model_text(other):
        weights = ""
    what = f"{model} ({weights})" if model and weights else model or weights
    sizes = list(dict.fromkeys(size_text(run.record) for run in (comparison.first, comparison.second)))
    few = f"; P99 needs {P99_MIN_SAMPLES}" if comparison.requests < P99_MIN_SAMPLES else ""
    place = f"{record.device_name or 'unknown device'}, workload {workload_name(record)} ({' against '.join(sizes)})"
    paired = f"{comparison.requests} requests paired{few}."
    return f"{what} on {place}; {paired}" if what else f"{place}; {paired}"


def _compared(comparison: RunComparison) -> str:
    return ", ".join(map(str, comparison.differing)) or "a repeat; nothing that is recorded differs"


def _side_by_side(comparison: RunComparison) -> list[tuple[str, str, str]]:
    """Facts of both runs that stand beside the deltas."""
    columns = [_facts(run.record) for run in (comparison.first, comparison.second)]
    return [(name, columns[0][name], columns[1][name]) for name in columns[0]]


def _facts(record: Any) -> dict[str, str]:
    graph = record["graph"] or {}
    return {
        "Backend": backend_text(record),
        "Packing": str(graph.get("policy") or NO_VALUE),
        "Token budgets": budgets_text(record["settings"]["resolved"]["token_budgets"]),
        "Hits": f"{share_text(graph.get('hit_rate'))} of {graph.get('items', 0)}",
        "Waste": share_text(graph.get("waste")),
        "Graphs": str(len(graph.get("captured", []))),
        "Capture": f"{number_text(graph.get('capture_s'), 2)} s",
        "Graph pool": bytes_text(graph.get("pool_bytes")),
        "Buffers": bytes_text(graph.get("buffer_bytes")),
        "Measured": str(record["created_at"]),
    }
