"""The document of several bench runs: one table, a run a row, and each run's own report behind it."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vitgraph.records.graph_facts import GraphFacts
from vitgraph.records.kinds.bench import Correctness
from vitgraph.records.record import BenchRecord, Record
from vitgraph.records.sample_table import COLUMNS, MEANINGS
from vitgraph.records.saved_runs import SavedRun
from vitgraph.records.sections import Resolved, Workload
from vitgraph.report import say
from vitgraph.report.columns import RUN_COLUMN, Cell, Column, Table, TableSpec, fields, join_tables, texts
from vitgraph.report.document import NO_VERDICT, Code, Document, Text, command_text, section, sections
from vitgraph.report.views.bench import bench_document, verdict_of
from vitgraph.report.views.claims import GAP_MEANING, IMPROVEMENT_NOTE, Claim, claims_of
from vitgraph.report.views.conditions import Ran, dropped_lines
from vitgraph.report.views.ranks import scaling_sections, scaling_table

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

OVERVIEW = TableSpec(
    "overview",
    columns=(
        RUN_COLUMN,
        *texts(row="Row", model="Model", workload="Workload", **_SHARED),
        *texts(mean_ms="Mean ms, eager→graph", mean="Mean improvement"),
        *texts(p99_ms="P99 ms, eager→graph", p99="P99 improvement", slower="Slower requests"),
        *fields(GraphFacts, "graph", launch_gap="Launch gap", waste="Waste", pool_bytes="Graph pool"),
        *texts(verdict="Verdict"),
    ),
    counts="requests",
)
_NOTES = (
    f"{IMPROVEMENT_NOTE} In brackets: the ends of the 95% interval.",
    f"Slower requests: by more than 2% than eager. Launch gap: {GAP_MEANING}. Waste: padding among the replayed rows.",
)

RUNS = TableSpec(
    "runs",
    "",
    "a run",
    (
        *fields(Record, "record", "status", "status_reason", "created_at", "vitgraph_version"),
        *fields(Resolved, "record.resolved", "model", "load_format"),
        Column("dtype", "text", "", "dtype of weights and activations", of="ran.dtype"),
        Column("device", "text", "", "device that was measured", of="record.environment.device"),
        *fields(Resolved, "record.resolved", "ranks"),
        Column("backend_requested", "text", "", "attention backend asked for", of="record.resolved.attn_backend"),
        Column("backend_used", "text", "", "attention backend that ran", of="ran.backend_used"),
        Column("compiled", "truth", "", "blocks were compiled, in every series", of="record.resolved.compile"),
        Column("torch", "text", "", "version of torch", of="record.environment.libraries.torch"),
        Column("workload", "text", "", "name of the workload", of="record.workload.name"),
        *fields(Workload, "record.workload", "fingerprint", "requests", "items", "images", "videos"),
        Column("rounds", "integer", "rounds", "times that the calls were measured", of="compared.rounds"),
        *fields(Resolved, "record.resolved", "requests_per_call"),
        Column("graph_mode", "text", "", "`cuda`, or `cpu-replay` where no launch is saved", of="graph.mode"),
        Column("packing", "text", "", "packing policy", of="graph.policy"),
        Column("token_budgets", "text", "tokens", "budgets of the paths, ascending"),
        *fields(Resolved, "record.resolved", "max_vision_items_per_batch", "max_frames_per_batch"),
        Column("graphs_captured", "integer", "graphs", "graphs that were captured", of="graph.graphs"),
        Column("graphs_dropped", "integer", "graphs", "graphs that could not be captured"),
        *fields(GraphFacts, "graph", "hits", "misses", "hit_rate", "replays", "waste", "launch_gap", "capture_s"),
        *fields(GraphFacts, "graph", "pool_bytes", "buffer_bytes"),
        Column(
            "correctness", "text", "", "`ok` or `incorrect`: graph against eager", of="record.result.correctness.status"
        ),
        *fields(Correctness, "record.result.correctness", "max_rel_l2"),
        Column("verdict", "text", "", "on the mean", of="compared.verdict"),
        Column("verdict_reason", "text", "", "why that verdict", of="compared.verdict_reason"),
        Column("command", "text", "", "the command as it was given"),
    ),
)
_SAMPLE_KINDS = {
    "requests": "text",
    "series": "text",
    **dict.fromkeys(("wall_ms", "gpu_ms", "encode_ms", "gather_ms"), "number"),
}
SAMPLES = TableSpec(
    "samples",
    "",
    "a timed call, or a rank's part of one",
    tuple(
        Column(name, _SAMPLE_KINDS.get(name, "integer"), "ms" if name.endswith("_ms") else "", MEANINGS[name])  # type: ignore[arg-type]
        for name in COLUMNS
    ),
    "calls",
    # A nanosecond in a time of seconds.
    digits=10,
)


def run_document(run: SavedRun) -> Document:
    """The report of one saved run."""
    return bench_document(run.record, run.samples, run.notes)


def runs_document(runs: Sequence[SavedRun]) -> Document:
    """One table of runs, with what all have in common above it and what a reader must know of single ones beneath.

    Args:
        runs: The runs, in the order of the table's rows; of a single one its own report with the tables of an export.
    """
    parts = {run.name: run_document(run) for run in runs}
    tables = join_tables({run.name: [_run_table(run), *parts[run.name].tables, _sample_table(run)] for run in runs})
    tables += [table for table in [scaling_table(runs)] if table.rows]
    if len(runs) == 1:
        return dataclasses.replace(parts[runs[0].name], tables=tuple(tables))
    records = [run.record for run in runs]
    shared, overview = _overview(runs)
    remarks = [Text(f"{run.name}: {remark}.") for run in runs if (remark := _remark(run.record))]
    commands = "\n\n".join(dict.fromkeys(command_text(record.command) for record in records))
    return Document(
        name="vitgraph bench",
        title=say.count(len(runs), "run"),
        what=shared,
        sections=sections(
            section("", overview, *remarks),
            *scaling_sections(runs),
            section("Commands", Code(commands), is_detail=True, is_folded=True),
        ),
        tables=tuple(tables),
        explanation="how_to_read.html",
        # The name of a part is that of its folder of plots.
        parts=tuple(dataclasses.replace(part, name=name, explanation="") for name, part in parts.items()),
    )


def _overview(runs: Sequence[SavedRun]) -> tuple[tuple[str, ...], Table]:
    said = [
        {name: getattr(Ran(run.record), name) for name in _SHARED} | {"measured": _size_text(run.record)}
        for run in runs
    ]
    shared = {name: said[0][name] for name in _SHARED if len({one[name] for one in said}) == 1}
    # Two runs of one model are told apart by their folders.
    subjects = {(Ran(run.record).model, Ran(run.record).workload) for run in runs}
    rows = ({"run": run.name, **one, **_measured(run.record)} for run, one in zip(runs, said, strict=True))
    table = OVERVIEW.of(rows, notes=_NOTES).without(*shared, "run" if len(subjects) == len(runs) else "")
    return tuple(filter(None, shared.values())), table.without_empty("row")


def _measured(record: BenchRecord) -> dict[str, Any]:
    claims, comparison = claims_of(record), record.result.comparison
    pair = comparison.pair("eager", "graph")
    slower = pair.slower if pair and comparison.requests else None
    share = "" if slower is None else say.share(slower.over_2pct_share)
    return {
        "row": record.resolved.row if record.resolved else None,
        "model": Ran(record).model,
        "workload": Ran(record).workload,
        **{name: value for metric in ("mean", "p99") for name, value in _claim_cells(metric, claims.get(metric))},
        "slower": f"{slower.over_2pct_count:,} of {slower.requests:,} ({share})" if slower else None,
        "graph": record.result.graph,
        "verdict": _verdict(record, claims),
    }


def _claim_cells(metric: str, claim: Claim | None) -> Iterable[tuple[str, str]]:
    """Both times, and the improvement with its interval; a maximum in the place of a P99 is named."""
    if claim is None:
        return
    yield f"{metric}_ms", f"max {claim.times}" if claim.is_tail_of_few else claim.times
    interval = say.interval(claim.ci95).removesuffix("%")
    yield metric, say.pct(claim.improvement_pct) + (f" ({interval})" if interval else "")


def _verdict(record: BenchRecord, claims: Mapping[str, Claim]) -> Cell:
    if record.status != "complete":
        return Cell(record.status, tone="warning")
    word, tail = verdict_of(record).word, claims.get("p99")
    differs = tail and not tail.is_tail_of_few and word not in (NO_VERDICT, "invalid") and tail.verdict != word
    return Cell(f"{word} (P99: {tail.verdict})" if tail and differs else word, tone=word)


def _size_text(record: BenchRecord) -> str:
    if record.workload is None or record.resolved is None:
        return ""
    rounds = record.result.comparison.rounds or record.resolved.rounds or 1
    parts = [say.count(record.workload.requests, "request"), say.count(rounds, "round"), Ran(record).per_call]
    return ", ".join(parts)


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
        return SAMPLES.table(())
    frame = run.samples.frame.astype(object)
    rows = frame.where(frame.notna(), None).to_dict("records")
    # A number that may be missing is read as a float.
    return SAMPLES.table(
        {str(name): int(value) if name == "rank" and value is not None else value for name, value in row.items()}
        for row in rows
    )
