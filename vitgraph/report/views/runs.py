"""The documents of several runs: one table, a run a row, and each run's report behind it; a sweep; two compared."""

from __future__ import annotations

import dataclasses
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from vitgraph.records.record import BenchRecord, Record
from vitgraph.records.results import Correctness
from vitgraph.records.sample_table import MEANINGS
from vitgraph.records.sections import Resolved, Workload
from vitgraph.records.series import GraphFacts
from vitgraph.records.stats import P99_MIN_SAMPLES
from vitgraph.records.two_runs import DeltaRow, RunComparison, SavedRun
from vitgraph.report import say
from vitgraph.report.columns import Cell, Row, Table, column, fields, table_of, texts
from vitgraph.report.document import NO_VERDICT, Chart, Code, Document, Text, Verdict, document, section
from vitgraph.report.draw import draw_distribution, draw_improvements
from vitgraph.report.views import claims
from vitgraph.report.views.bench import SERIES_NAMES, bench_document, verdict_of
from vitgraph.report.views.claims import GAP_MEANING, IMPROVEMENT_NOTE, Claim, claims_of, label_of
from vitgraph.report.views.conditions import Ran, dropped_lines
from vitgraph.report.views.ranks import scaling

RUN_COLUMN = column("run", "name of the run: the end of its folder's path", "Run")
_SHARED = {
    "device": "Device",
    "weights": "Weights",
    "backend": "Backend",
    "compiled": "Blocks",
    "packing": "Packing",
    "budgets": "Budgets",
    "measured": "Measured",
}
"""What is said once above the table where all runs have it in common, and in a column of its own where they differ."""

OVERVIEW = table_of(
    "overview",
    RUN_COLUMN,
    *texts(row="Row", model="Model", workload="Workload", **_SHARED),
    *texts(mean_ms="Mean ms, eager→graph", mean="Mean improvement"),
    *texts(p99_ms="P99 ms, eager→graph", p99="P99 improvement", slower="Slower requests"),
    *fields(GraphFacts, "graph", launch_gap="Launch gap", waste="Waste", pool_bytes="Graph pool"),
    *texts(verdict="Verdict"),
    counts="requests",
)
_NOTES = (
    f"{IMPROVEMENT_NOTE} In brackets: the ends of the 95% interval.",
    f"Slower requests: by more than 2% than eager. Launch gap: {GAP_MEANING}. Waste: padding among the replayed rows.",
)

RUNS = table_of(
    "runs",
    *fields(Record, "record", "status", "status_reason", "created_at", "vitgraph_version"),
    *fields(Resolved, "record.resolved", "model", "load_format"),
    column("dtype", "dtype of weights and activations", of="ran.dtype"),
    column("device", "device that was measured", of="record.environment.device"),
    *fields(Resolved, "record.resolved", "ranks"),
    column("backend_requested", "attention backend asked for", of="record.resolved.attn_backend"),
    column("backend_used", "attention backend that ran", of="ran.backend_used"),
    column("compiled", "blocks were compiled, in every series", of="record.resolved.compile", kind="truth"),
    column("torch", "version of torch", of="record.environment.libraries.torch"),
    column("workload", "name of the workload", of="record.workload.name"),
    *fields(Workload, "record.workload", "fingerprint", "requests", "items", "images", "videos"),
    column("rounds", "times that the calls were measured", of="compared.rounds"),
    *fields(Resolved, "record.resolved", "requests_per_call"),
    column("graph_mode", "`cuda`, or `cpu-replay` where no launch is saved", of="graph.mode"),
    column("packing", "packing policy", of="graph.policy"),
    column("token_budgets", "budgets of the paths, ascending", kind="text", unit="tokens"),
    *fields(Resolved, "record.resolved", "max_vision_items_per_batch", "max_frames_per_batch"),
    column("graphs_captured", "graphs that were captured", of="graph.graphs", unit="graphs"),
    column("graphs_dropped", "graphs that could not be captured", unit="graphs"),
    *fields(GraphFacts, "graph", "hits", "misses", "hit_rate", "replays", "waste", "launch_gap", "capture_s"),
    *fields(GraphFacts, "graph", "pool_bytes", "buffer_bytes"),
    column("correctness", "`ok` or `incorrect`: graph against eager", of="record.result.correctness.status"),
    *fields(Correctness, "record.result.correctness", "max_rel_l2"),
    column("verdict", "on the mean", of="compared.verdict"),
    column("verdict_reason", "why that verdict", of="compared.verdict_reason"),
    column("command", "the command as it was given"),
    one_row="a run",
)
SAMPLES = table_of(
    "samples",
    *tuple(
        column(name, of)
        if name.endswith("_ms")
        else column(name, of, kind="text" if name in ("requests", "series") else "integer", unit="")
        for name, of in MEANINGS.items()
    ),
    one_row="a timed call, or a rank's part of one",
    counts="calls",
    # A nanosecond in a time of seconds.
    digits=10,
)


def run_document(run: SavedRun) -> Document:
    """The report of one saved run."""
    return bench_document(run.record, run.samples, run.notes)


def join_tables(named: Mapping[str, Sequence[Table]]) -> list[Table]:
    """The tables of several records, those of one name as one, each row with the name of its record before it."""
    rows: dict[str, list[Row]] = {}
    first: dict[str, Table] = {}
    for name, tables in named.items():
        for table in tables:
            first.setdefault(table.name, table)
            rows.setdefault(table.name, []).extend({"run": name, **row} for row in table.rows)
    return [
        one.filled(rows[name], columns=(RUN_COLUMN, *one.columns), one_row=f"a run and {one.one_row}")
        for name, one in first.items()
    ]


def runs_document(runs: Sequence[SavedRun]) -> Document:
    """One table of runs, with what all have in common above it and what a reader must know of single ones beneath."""
    parts = {run.name: run_document(run) for run in runs}
    tables = join_tables({run.name: [_run_table(run), *parts[run.name].tables, _sample_table(run)] for run in runs})
    scaled, scaling_sections = scaling(runs)
    tables += [scaled] if scaled.rows else []
    if len(runs) == 1:
        return dataclasses.replace(parts[runs[0].name], tables=tuple(tables))
    shared, overview = _overview(runs)
    return document(
        "vitgraph bench",
        say.count(len(runs), "run"),
        section("", overview, *(f"{run.name}: {remark}." for run in runs if (remark := _remark(run.record)))),
        *scaling_sections,
        section("Commands", _commands(runs), is_detail=True, is_folded=True),
        what=shared,
        tables=tuple(tables),
        explanation="bench",
        # The name of a part is that of its folder of plots.
        parts=tuple(dataclasses.replace(part, name=name, explanation="") for name, part in parts.items()),
    )


def _commands(runs: Sequence[SavedRun]) -> Code:
    """Their commands, each once."""
    return Code("\n\n".join(dict.fromkeys(say.command(run.record.command) for run in runs)))


def _overview(runs: Sequence[SavedRun]) -> tuple[tuple[str, ...], Table]:
    ran = [Ran(run.record) for run in runs]
    said = [{name: getattr(one, name) for name in _SHARED} | {"measured": _size_text(one)} for one in ran]
    shared = {name: said[0][name] for name in _SHARED if len({one[name] for one in said}) == 1}
    # Two runs of one model are told apart by their folders.
    subjects = {(one.model, one.workload) for one in ran}
    rows = ({"run": run.name, **one, **_measured(run.record)} for run, one in zip(runs, said, strict=True))
    table = OVERVIEW.of(rows, notes=_NOTES).without(*shared, "run" if len(subjects) == len(runs) else "")
    return tuple(filter(None, shared.values())), table.without_empty("row")


def _size_text(ran: Ran) -> str:
    requests, rounds = ran.at("workload.requests"), ran.at("result.comparison.rounds") or ran.at("resolved.rounds") or 1
    if requests is None or ran.record.resolved is None:
        return ""
    return say.joined(say.count(requests, "request"), say.count(rounds, "round"), ran.per_call)


def _measured(record: BenchRecord) -> dict[str, Any]:
    found, comparison, ran = claims_of(record), record.result.comparison, Ran(record)
    pair = comparison.pair("eager", "graph")
    slower = pair.slower if pair and comparison.requests else None
    share = "" if slower is None else say.share(slower.over_2pct_share)
    row = {"row": ran.at("resolved.row"), "model": ran.model, "workload": ran.workload, "graph": record.result.graph}
    row["slower"] = f"{slower.over_2pct_count:,} of {slower.requests:,} ({share})" if slower else None
    for metric in ("mean", "p99") if found else ():
        # A maximum in the place of a P99 is named.
        claim, ends = found[metric], say.interval(found[metric].ci95).removesuffix("%")
        row[f"{metric}_ms"] = f"max {claim.times}" if claim.is_tail_of_few else claim.times
        row[metric] = say.pct(claim.improvement_pct) + (f" ({ends})" if ends else "")
    return row | {"verdict": _verdict(record, found)}


def _verdict(record: BenchRecord, found: Mapping[str, Claim]) -> Cell:
    if record.status != "complete":
        return Cell(record.status, tone="warning")
    word, tail = verdict_of(record).word, found.get("p99")
    differs = tail and not tail.is_tail_of_few and word not in (NO_VERDICT, "invalid") and tail.verdict != word
    return Cell(f"{word} (P99: {tail.verdict})" if tail and differs else word, tone=word)


def _remark(record: BenchRecord) -> str:
    """Why a run is incomplete, not valid or no measurement of a GPU; empty where a reader need not be told anything."""
    if record.status != "complete":
        return f"{record.status}: {record.status_reason}"
    verdict = verdict_of(record)
    lines = [f"no verdict: {verdict.reason}"] if verdict.word in (NO_VERDICT, "invalid") else []
    return "; ".join([*lines, *dropped_lines(record.result.graph.dropped)])


def _run_table(run: SavedRun) -> Table:
    record, comparison = run.record, run.record.result.comparison
    row = {
        "record": record,
        "ran": Ran(record),
        "graph": record.result.graph,
        "compared": comparison if comparison.requests else None,
        "token_budgets": say.budgets(record.resolved.token_budgets) if record.resolved else None,
        "graphs_dropped": len(record.result.graph.dropped),
        "command": shlex.join(record.command),
    }
    return RUNS.of([row])


def _sample_table(run: SavedRun) -> Table:
    if run.samples is None:
        return SAMPLES.filled(())
    # A number that may be missing is read as a float.
    frame = run.samples.frame.astype({"rank": "Int64"}).astype(object)
    return SAMPLES.of(frame.where(frame.notna(), None).to_dict("records"))


# -- a sweep -----------------------------------------------------------------------------------------------------------

SWEEP = table_of(
    "sweep",
    column("run", "what sets it apart; its folder's name", "Run", of="name"),
    column("status", "`complete`, `failed`, `interrupted` or `not run`", "Status"),
    column("exit_status", "exit status of its process; empty where none ended", "Exit", kind="integer"),
    column("seconds", "how long it took", "Seconds"),
    column("found", "its verdict, or why it failed", "Found"),
    one_row="a run of a sweep",
)


def sweep_document(
    command: str, runs: Sequence[Mapping[str, Any]], verdicts: Sequence[str], figures: Document | None
) -> Document:
    """The report of a sweep.

    Args:
        runs: Each run by field.
        verdicts: What each run found.
        figures: The report of the runs together; None where they are of a kind that does not go into one table.
    """
    table = SWEEP.of({**run, "found": run["reason"] or said} for run, said in zip(runs, verdicts, strict=True))
    counts = Counter(run["status"] for run in runs)
    beside = figures or Document("", "")
    return document(
        "vitgraph sweep",
        f"{say.count(len(runs), 'run')} of {command}",
        section("", table.without_empty("exit_status", "seconds", "found")),
        section("", "Figures of the benches that are complete:") if figures else None,
        *beside.sections,
        what=(", ".join(f"{count} {status}" for status, count in counts.items()),),
        tables=(table, *beside.tables),
        explanation=beside.explanation,
        parts=beside.parts,
    )


# -- two runs, or several of either setting ----------------------------------------------------------------------------

_NOTE = "Improvement = (first - second) / first: positive = second run faster; milliseconds a request, first→second."
_IMPROVEMENT, _LOW, _HIGH, _WORD = claims.improvement_columns("row.found", " of the second run over the first")
COMPARISON = table_of(
    "comparison",
    column("first", "run that percentages refer to"),
    column("second", "run that is judged"),
    column("series", "`eager`, `graph` or `hf`", of="row.mode"),
    column("metric", "`mean`, `p50` or `p99`", of="row.metric"),
    column("requests", "requests in both; a P99 of below 300 is a maximum", of="row.n"),
    column("first_ms", "the metric in the first run, a request", of="row.first_ms"),
    column("second_ms", "the metric in the second run, a request", of="row.second_ms"),
    *(_IMPROVEMENT, _LOW, _HIGH),
    column("noise_floor_pct", "what two measurements of one thing differ by", of="row.found.noise_floor_pct"),
    _WORD,
    column("is_control", "both runs did the same here: the difference is noise", of="row.is_control", kind="truth"),
    one_row="a series and metric",
    counts="requests",
)
_SHOWN = table_of(
    "comparison",
    column("series", "the series", "Series", of=lambda row: SERIES_NAMES[row.mode]),
    column("metric", "the metric", "Metric", of=lambda row: label_of(row.metric)),
    column("times", "both times", "First→second ms", of=lambda row: _times(row)),
    column("improvement", "what it gains", "Improvement", say.pct, "found.improvement_pct"),
    column("ci95", "its interval", "95% CI", say.interval, "found.ci95"),
    column("floor", "noise floor", "Noise floor", claims.floor_text, "found.noise_floor_pct"),
    column("verdict", "on the second run", "Verdict", of=lambda row: _word(row)),
    title="Improvements",
    counts="requests",
)
_SIDES = table_of("sides", *texts(fact=" ", first="First", second="Second"), title="Both runs")


def two_runs_document(comparison: RunComparison) -> Document:
    """The report of a comparison, verdict first."""
    runs, sides = comparison.runs, (comparison.firsts, comparison.seconds)
    first, second = (Ran(side[0].record) for side in sides)
    mean, differing = comparison.row("graph", "mean"), tuple(map(str, comparison.differing))
    gain = f"{say.pct(mean.found.improvement_pct)} ({_times(mean)} ms){say.ci95(mean.found.ci95, ', ')}"
    headline = claims.headline_of(comparison.verdict, "The second run is", "Both runs")
    compared = f"Compared: {', '.join(differing) or 'a repeat; nothing that is recorded differs'}."
    shared = [phrase for phrase in first.conditions() if phrase in second.conditions()]
    few = f"; P99 needs {P99_MIN_SAMPLES}" if comparison.requests < P99_MIN_SAMPLES else ""
    counted = [f"{len(sides[0])} and {len(sides[1])} runs"] if len(runs) > 2 else []
    facts = zip(_side(sides[0][0]), _side(sides[1][0]), strict=True)
    return document(
        "vitgraph export --compare",
        " → ".join(map(_names, sides)),
        section("", _SHOWN.of(_shown(comparison), notes=(_NOTE, f"Noise floor: {comparison.noise_source}."))),
        section("Charts", *_charts(comparison, " · ".join((first.model, *shared)))),
        section("", _SIDES.filled({"fact": name, "first": a, "second": b} for (name, a), (_, b) in facts)),
        section("", *(Text(note, "dim") for run in runs for note in run.notes)),
        section("Commands", _commands(runs), is_detail=True),
        what=(first.model, *shared, *differing, *counted, f"{comparison.requests:,} requests paired{few}"),
        verdict=Verdict(
            comparison.verdict, headline, comparison.verdict_reason, f"mean latency in graph mode {gain}", (compared,)
        ),
        tables=(COMPARISON.filled(comparison_summary(comparison)["rows"]),),
        explanation="comparison",
    )


def comparison_summary(comparison: RunComparison) -> Mapping[str, Any]:
    """A comparison as one JSON object: what differs, the verdict, and the tidy rows."""
    names = {"first": _names(comparison.firsts), "second": _names(comparison.seconds)}
    return {
        **names,
        "differing": [{"name": one.name, "first": one.first, "second": one.second} for one in comparison.differing],
        **{name: getattr(comparison, name) for name in ("requests", "verdict", "verdict_reason", "noise_source")},
        "rows": list(COMPARISON.of({**names, "row": row} for row in comparison.rows).rows),
    }


def _names(runs: Iterable[SavedRun]) -> str:
    return ", ".join(run.name for run in runs)


def _shown(comparison: RunComparison) -> list[DeltaRow]:
    """The rows to look at, graph mode first; a P99 of too few requests is left to the tidy table."""
    known = (row for row in comparison.rows if row.metric != "p99" or row.n >= P99_MIN_SAMPLES)
    return sorted(known, key=lambda row: row.mode != "graph")


def _times(row: DeltaRow) -> str:
    return say.change(row.first_ms, row.second_ms)


def _word(row: DeltaRow) -> Cell:
    return Cell("control", tone="dim") if row.is_control else Cell(row.found.verdict, tone=row.found.verdict)


def _side(run: SavedRun) -> Iterable[tuple[str, str]]:
    ran, graph, resolved = Ran(run.record), run.record.result.graph, run.record.resolved
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
    yield "Measured", run.record.created_at


def _charts(comparison: RunComparison, subtitle: str) -> Iterable[Chart]:
    known = (row for row in _shown(comparison) if row.found.improvement_pct is not None)
    bars = {f"{SERIES_NAMES[row.mode]} {label_of(row.metric)}": row for row in known}
    if bars:
        drawn = partial(draw_improvements, "What the second run gains", subtitle, bars)
        yield Chart("improvements", "Improvements of the second run with their 95 % intervals", drawn)
    times = {}
    for (run, *_), place in ((comparison.firsts, "first"), (comparison.seconds, "second")):
        if run.samples is not None:
            pair = run.samples.paired(["eager", "graph"])
            times[place] = np.repeat(pair.times["graph"], pair.requests)
    if len(times) == 2 and all(of.size for of in times.values()):
        of = ("Latency distribution in graph mode", subtitle, "Latency of a request (ms)", "requests", times)
        title = "Cumulative share of requests over latency, both runs"
        yield Chart("distribution", title, partial(draw_distribution, *of))
