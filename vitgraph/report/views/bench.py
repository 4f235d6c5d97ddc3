"""The document of a bench run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from vitgraph.records.record import BenchRecord
from vitgraph.records.sample_table import Samples
from vitgraph.records.series import Improvement, Latency
from vitgraph.records.stats import CPU_REPLAY_REASON
from vitgraph.report import say
from vitgraph.report.columns import Cell, Table, column, fields, table_of, texts
from vitgraph.report.document import NO_VERDICT, Chart, Code, Document, Facts, Section, Text, Verdict, section
from vitgraph.report.draw import draw_by_tokens, draw_distribution, draw_paths
from vitgraph.report.views import claims, graph_tables
from vitgraph.report.views.conditions import Ran, dropped_lines, list_graphs
from vitgraph.report.views.graph_tables import MONOLITHIC
from vitgraph.report.views.ranks import rank_section, ranks_table

SERIES_NAMES = {
    "eager": "eager",
    "graph": "graph",
    "monolithic": "monolithic graph",
    "itemwise": "eager, item by item",
    "hf": "transformers",
}
_SLOWING_WASTE = 0.2
"""Waste that likely explains slower graphs: they compute a quarter more rows than eager."""
_GRAPHS_UNFOLDED = 24
_METRICS = ("mean", "p50", "p90", "p99", "max", "std", "gpu_mean")
_SERIES = column("series", "`eager`, `graph`, `monolithic`, or `hf` for the stock transformers forward")

IMPROVEMENTS = table_of(
    "improvements",
    *texts(backend="Backend", mean="Mean latency improvement", p99="P99 latency improvement"),
    counts="requests",
)
LATENCY = table_of(
    "latency",
    *texts(series="Series"),
    *claims.latency_columns(
        mean_ms="Mean", p50_ms="P50", p90_ms="P90", p99_ms="P99", max_ms="Max", gpu_mean_ms="GPU mean"
    ),
    *fields(Latency, "of", times_speed_of_light="Of the limit", requests="Requests", outliers="Outliers kept"),
    title="Milliseconds a request",
    counts="requests",
)
SUMMARY = table_of(
    "summary",
    _SERIES,
    column("metric", "`mean`, `p50`, `p90`, `p99`, `max`, `std`, `gpu_mean` or `outliers`"),
    column("value", "the figure; a P99 of fewer than 300 requests is a maximum", kind="number", unit="see `unit`"),
    column("unit", "`ms` a request, or `requests`"),
    *fields(Latency, "of", "requests", "calls"),
    *claims.improvement_columns("found", " over eager; series of graphs only"),
    *fields(Improvement, "found", "noise_floor_pct"),
    one_row="a series and metric",
    counts="requests",
)


def bench_document(record: BenchRecord, samples: Samples | None = None, notes: Sequence[str] = ()) -> Document:
    """The report of one run.

    Args:
        record: The run; an incomplete one shows what it has and why it ended.
        samples: Its samples; without them there are no charts of latency.
    """
    result = record.result
    settings = Code(json.dumps(record.settings, indent=1, ensure_ascii=False))
    return Ran(record).document(
        "vitgraph bench",
        _latency_section(record),
        section("Charts", *_latency_charts(record, samples)),
        section("What the graphs did", Facts.of(_graph_facts(record)), graph_tables.shown_paths(result.graph)),
        section("", *_use_blocks(record)),
        graph_tables.monolithic_section(record),
        rank_section(result.latency, record),
        section("Checks", Facts.of(_check_facts(record))),
        _memory_section(record),
        after=(
            section("All settings", settings, is_detail=True, is_folded=True),
            section("", *(Text(note, "dim") for note in notes)),
        ),
        verdict=verdict_of(record),
        tables=bench_tables(record),
        explanation="bench",
    )


def bench_tables(record: BenchRecord) -> tuple[Table, ...]:
    """The tidy tables of a run."""
    graph, monolithic = record.result.graph, record.result.monolithic
    misses = ({"reason": reason, "items": items} for reason, items in graph.misses_by_reason.items())
    dropped = graph_tables.by_key("dropped", graph, monolithic).values()
    return (
        SUMMARY.of(_summary_rows(record)),
        graph_tables.per_budget_table(graph, monolithic),
        graph_tables.per_path_table(graph, monolithic),
        graph_tables.monolithic_table(record),
        graph_tables.MISSES.filled(misses),
        graph_tables.DROPPED.of({"key": one} for one in dropped),
        ranks_table(record.result.latency),
    )


def _summary_rows(record: BenchRecord) -> Iterable[dict[str, Any]]:
    """Rows of `summary.csv`, with None for what was not measured."""
    for series, of in record.result.latency.items():
        pair = record.result.comparison.pair("eager", series)
        for metric in _METRICS:
            found, value = getattr(pair, metric, None), getattr(of, f"{metric}_ms")
            yield {"series": series, "of": of, "metric": metric, "value": value, "unit": "ms", "found": found}
        yield {"series": series, "of": of, "metric": "outliers", "value": of.outliers, "unit": "requests"}


def verdict_of(record: BenchRecord) -> Verdict:
    """The verdict on a run; an incomplete one says why it ended."""
    result, reason = record.result, record.result.comparison.verdict_reason
    if result.correctness is not None and result.correctness.status == "incorrect":
        return Verdict("failed", "Outputs are wrong: nothing was timed", str(record.status_reason or ""))
    found = claims.claims_of(record)
    if not found:
        return Verdict(NO_VERDICT, "Nothing was compared", record.status_reason or reason)
    if Ran(record).is_cpu:
        return Verdict(NO_VERDICT, "No verdict: replayed on a CPU", CPU_REPLAY_REASON)
    word, mean, tail = result.comparison.verdict, found["mean"], found["p99"]
    slower = claims.slower_text(result.comparison.pair("eager", "graph"))
    tail_line = f"{tail.name} latency {tail.headline}: {tail.verdict}{say.ci95(tail.ci95, ', ')}"
    return Verdict(
        word,
        claims.headline_of(word, "Graphs are", "Graphs and eager"),
        reason + (_cause_of_slower(record) if word == "slower" else ""),
        f"mean latency {mean.headline}{say.ci95(mean.ci95, ', ')}",
        tuple(f"{line}." for line in ("" if word == "invalid" else tail_line, slower) if line),
    )


def _cause_of_slower(record: BenchRecord) -> str:
    """Why graphs are likely slower, to go on with after the reason of the verdict; empty where waste is no cause."""
    graph = record.result.graph
    if (graph.waste or 0.0) < _SLOWING_WASTE or not graph.tokens_replayed:
        return ""
    factor = graph.budget_tokens_replayed / graph.tokens_replayed
    return (
        f"; likely because the graphs compute {factor:.1f} times the rows of eager (waste {say.share(graph.waste)}) "
        "and GPU time binds, not launches: use budgets nearer to the items' sizes"
    )


# -- latency -----------------------------------------------------------------------------------------------------------


def _latency_section(record: BenchRecord) -> Section:
    latency, found = record.result.latency, claims.claims_of(record)
    blocks: list[Any] = []
    if found:
        row = {"backend": Ran(record).backend, "mean": found["mean"].cell, "p99": found["p99"].cell}
        blocks.append(IMPROVEMENTS.filled([row], notes=(claims.IMPROVEMENT_NOTE,)))
    elif not latency:
        blocks.append("No request was measured in both modes, so there is nothing to compare.")
    rows = ({"series": SERIES_NAMES.get(series, series), "of": of} for series, of in latency.items())
    table = LATENCY.of(rows, notes=tuple(_latency_notes(record)))
    blocks.append(table.without_empty("p99_ms", "gpu_mean_ms", "times_speed_of_light"))
    for series, text in claims.moved_by_one(latency).items():
        blocks.append(Text(f"{series}: {text}, which alone moves its mean.", "warning"))
    return section("Latency", *blocks, Facts.of(_measured_facts(record)))


def _latency_notes(record: BenchRecord) -> Iterable[str]:
    latency = record.result.latency
    if any(entry.times_speed_of_light is not None for entry in latency.values()):
        limit = next(entry.speed_of_light_ms for entry in latency.values() if entry.speed_of_light_ms is not None)
        yield f"The limit: {say.ms(limit)} ms for the arithmetic of a mean request at the measured matrix rate."
    if any(not entry.p99_supported for entry in latency.values()):
        yield f"A P99 takes more requests than were measured; claims of it are of the {claims.TAIL_OF_FEW}."


def _measured_facts(record: BenchRecord) -> Iterable[tuple[str, str | None]]:
    comparison = record.result.comparison
    if not comparison.requests:
        return
    yield "Measured", claims.measured_text(comparison, "series interleaved")
    pair = comparison.pair("eager", "graph")
    if pair is not None:
        yield "Slower requests", claims.slower_text(pair)
        found = (("mean", pair.mean), ("P99", pair.p99))
        floors = ", ".join(f"{name} {claims.floor_text(of.noise_floor_pct if of else None)}" for name, of in found)
        yield "Noise floor", f"{floors} (eager against eager)"


def _latency_charts(record: BenchRecord, samples: Samples | None) -> Iterable[Chart]:
    compared = [name for name in ("eager", "graph", MONOLITHIC) if samples and name in samples.series]
    if samples is None or not {"eager", "graph"} <= set(compared):
        return
    pair = samples.paired(compared)
    if not pair.calls.size:
        return
    subtitle = Ran(record).subtitle()
    rows = samples.calls[samples.calls["series"] == "graph"].drop_duplicates("call").set_index("call").loc[pair.calls]
    tokens, misses = (rows[name].to_numpy(dtype=np.float64) for name in ("tokens", "misses"))
    budgets = sorted({graph.token_budget for graph in record.result.graph.captured})
    calls = {name: times * pair.requests for name, times in pair.times.items()}
    draw = partial(draw_by_tokens, subtitle, tokens, calls, misses, budgets)
    yield Chart("latency_by_tokens", "Latency of each call over its output tokens, by series", draw)
    # Each request of a call has an equal share of its time.
    times = {name: np.repeat(of, pair.requests) for name, of in pair.times.items()}
    title = "Latency distribution"
    of = partial(draw_distribution, title, subtitle, "Latency of a request (ms)", "requests", times)
    yield Chart("latency_distribution", f"{title}: cumulative share of requests over latency", of)


# -- graphs ------------------------------------------------------------------------------------------------------------


def _graph_facts(record: BenchRecord) -> Iterable[tuple[str, str | None]]:
    graph = record.result.graph
    if not (graph.items or graph.captured):
        return
    yield from graph_tables.counter_facts(graph, graph.policy)
    gap = graph.launch_gap
    yield "Launch gap", say.NOT_MEASURED if gap is None else f"{say.gap(gap)} ({claims.GAP_MEANING})"
    if graph.host_steps_ms:
        steps = (f"{say.words(name)} {say.ms(value)}" for name, value in graph.host_steps_ms.items())
        yield "Host steps", f"{', '.join(steps)} ms"
    for call in (graph.call_overheads or ())[:1]:
        shape = f"{say.count(call.items, 'item')}, {say.count(call.tokens, 'token')}"
        parts = f"{shape}: whole {say.ms(call.call_ms)}, replays {say.ms(call.replays_ms)} ms"
        overhead = f"{say.ms(call.overhead_ms)} ms" if call.overhead_ms >= 0 else say.WITHIN_NOISE
        yield "Call overhead", f"{overhead} outside the replays of the most frequent call ({parts})"
    yield "Memory", graph_tables.memory_text(graph)
    yield "Capture", graph_tables.capture_text(graph)
    yield "Attention", Ran(record).chosen


def _use_blocks(record: BenchRecord) -> Iterable[Table | Text | Chart | str]:
    graph, monolithic, subtitle = record.result.graph, record.result.monolithic, Ran(record).subtitle()
    replayed = graph_tables.replayed_table(graph, monolithic)
    yield replayed
    rows = graph_tables.graph_rows(graph, monolithic).values()
    idle = [row["key"] for row in rows if row["graph"] and not row["key"].replays]
    if idle and replayed.rows:
        yield f"Captured and never replayed: {list_graphs(idle)}"
    for facts in (graph, monolithic):
        yield from (Text(line, "warning") for line in dropped_lines(facts.dropped if facts else ()))
    if not graph.items:
        return
    alt = "Items that hit and that missed, and what each token budget replays and wastes"
    title = "Hits, misses and waste by token budget"
    yield graph_tables.budgets_chart("budgets", alt, title, subtitle, "Items replayed", graph, monolithic)
    if graph_tables.shown_paths(graph) is not None:
        waste = {"two paths": {path.path: path.waste for path in graph.per_path}}
        waste |= {MONOLITHIC: {part.path: part.waste for part in monolithic.parts}} if monolithic else {}
        draw = partial(draw_paths, subtitle, waste, {path.path: path.replay_ms for path in graph.per_path})
        yield Chart("paths", "Waste and time of each encoder path", draw)
    if not replayed.rows:
        yield Text("Nothing was replayed.", "warning")


def _memory_section(record: BenchRecord) -> Section:
    graph, rows = record.result.graph, graph_tables.graph_rows(record.result.graph, record.result.monolithic)
    table = graph_tables.compact(graph_tables.CAPTURED.of(row for row in rows.values() if row["graph"]))
    total = f"Total: {graph_tables.capture_text(graph)}; {graph_tables.memory_text(graph)}."
    is_folded, title = len(table.rows) > _GRAPHS_UNFOLDED, f"Memory of {len(table.rows)} graphs"
    return section(title, *((table, total) if table.rows else ()), is_detail=True, is_folded=is_folded)


def _check_facts(record: BenchRecord) -> Iterable[tuple[str, str | Cell | None]]:
    found = record.result.correctness
    if found is None or found.status == "unchecked":
        yield "Correctness", "not checked"
    else:
        text = (
            f"{found.status}: graph against eager on {say.count(found.checked, 'call')} before anything was timed, "
            f"largest relative L2 difference {say.error(found.max_rel_l2)}, tolerance {say.error(found.tolerance)}"
        )
        yield "Correctness", Cell(text, tone="" if found.status == "ok" else "failed")
    yield "Skipped inputs", Ran(record).skipped
