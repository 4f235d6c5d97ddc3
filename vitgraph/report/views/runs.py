"""The document of several bench runs: one table, a run a row, and each run's own report behind it."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from vitgraph.records.record import BenchRecord
from vitgraph.records.sample_table import COLUMNS, MEANINGS
from vitgraph.records.saved_runs import SavedRun
from vitgraph.report.columns import (
    RUN_COLUMN,
    Cell,
    Column,
    Table,
    TableSpec,
    budgets_text,
    bytes_text,
    count_text,
    gap_text,
    interval_text,
    join_tables,
    pct_text,
    share_text,
)
from vitgraph.report.document import NO_VERDICT, Code, Document, Text, command_text, section, sections
from vitgraph.report.views.bench import bench_document, claims_of, verdict_of
from vitgraph.report.views.claims import GAP_MEANING, IMPROVEMENT_NOTE, Claim
from vitgraph.report.views.conditions import (
    backend_of,
    budgets_of,
    compiled_of,
    device_of,
    dropped_lines,
    dtype_of,
    model_of,
    packing_of,
    per_call_of,
    weights_of,
    workload_of,
)
from vitgraph.report.views.scaling import scaling_sections, scaling_table

_SHARED: Mapping[str, tuple[str, Callable[[BenchRecord], str]]] = {
    "device": ("Device", device_of),
    "weights": ("Weights", weights_of),
    "backend": ("Backend", backend_of),
    "compiled": ("Blocks", compiled_of),
    "packing": ("Packing", packing_of),
    "budgets": ("Budgets", lambda record: budgets_of(record.resolved.token_budgets) if record.resolved else ""),
    "measured": ("Measured", lambda record: _size_text(record)),
}
"""What is said once above the table where all runs have it in common, and in a column of its own where they differ."""

OVERVIEW = TableSpec(
    "overview",
    "",
    "a run",
    (
        RUN_COLUMN,
        Column("row", "text", "", "row of the table of supported models", "Row"),
        Column("model", "text", "", "model as given", "Model"),
        Column("workload", "text", "", "name of the workload", "Workload"),
        *(Column(name, "text", "", header.lower(), header) for name, (header, _) in _SHARED.items()),
        Column("mean_ms", "text", "ms", "mean, eager→graph", "Mean ms, eager→graph"),
        Column("mean", "text", "%", "improvement of the mean, with its interval", "Mean improvement"),
        Column("p99_ms", "text", "ms", "P99, eager→graph", "P99 ms, eager→graph"),
        Column("p99", "text", "%", "improvement of the P99, with its interval", "P99 improvement"),
        Column("slower", "text", "", "requests slower than eager by more than 2 %", "Slower requests"),
        Column("launch_gap", "number", "ratio", GAP_MEANING, "Launch gap", gap_text),
        Column("waste", "number", "share", "padding among the replayed rows", "Waste"),
        Column("pool_bytes", "integer", "bytes", "memory of the graphs' pool", "Graph pool", bytes_text),
        Column("verdict", "text", "", "on the mean, and on the P99 where that differs", "Verdict"),
    ),
    "requests",
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
        Column("status", "text", "", "`complete`, `interrupted` or `error`"),
        Column("status_reason", "text", "", "why the run is incomplete"),
        Column("created_at", "text", "", "start of the run, ISO 8601 in UTC"),
        Column("vitgraph_version", "text", "", "version that measured"),
        Column("model", "text", "", "model as given: preset, hub id or folder"),
        Column("load_format", "text", "", "`auto` for checkpoint weights, `dummy` for random ones"),
        Column("dtype", "text", "", "dtype of weights and activations"),
        Column("device", "text", "", "device that was measured"),
        Column("ranks", "integer", "ranks", "processes that shared every call"),
        Column("backend_requested", "text", "", "attention backend asked for; empty where it was left open"),
        Column("backend_used", "text", "", "attention backend that ran"),
        Column("compiled", "truth", "", "the repeated blocks were compiled, in every series alike"),
        Column("torch", "text", "", "version of torch"),
        Column("workload", "text", "", "name of the workload"),
        Column("fingerprint", "text", "", "hash of the ordered item sizes; equal for equal requests"),
        Column("requests", "integer", "requests", "requests of the workload"),
        Column("items", "integer", "items", "images and videos in them"),
        Column("images", "integer", "items", "images among the items"),
        Column("videos", "integer", "items", "videos among the items"),
        Column("rounds", "integer", "rounds", "times that the calls were measured in every series"),
        Column("requests_per_call", "integer", "requests", "requests that are encoded together"),
        Column("graph_mode", "text", "", "`cuda`, or `cpu-replay` where no launch is saved"),
        Column("packing", "text", "", "packing policy"),
        Column("token_budgets", "text", "tokens", "budgets of the paths, ascending"),
        Column("max_vision_items_per_batch", "integer", "items", "items that a replay may hold"),
        Column("max_frames_per_batch", "integer", "frames", "video frames that a replay may hold; 0 for images only"),
        Column("graphs_captured", "integer", "graphs", "graphs that were captured"),
        Column("graphs_dropped", "integer", "graphs", "graphs that could not be captured"),
        Column("hits", "integer", "items", "items all of whose non-empty paths were replayed"),
        Column("misses", "integer", "items", "items with any eager path"),
        Column("hit_rate", "number", "share", "hits over items"),
        Column("replays", "integer", "replays", "graph replays of one round"),
        Column("waste", "number", "share", "padding among the replayed rows"),
        Column("launch_gap", "number", "ratio", GAP_MEANING),
        Column("capture_s", "number", "s", "time of all captures, warm-up included"),
        Column("pool_bytes", "integer", "bytes", "memory of the pool that all graphs share"),
        Column("buffer_bytes", "integer", "bytes", "memory of the static buffers that all graphs share"),
        Column("correctness", "text", "", "`ok` or `incorrect`: graph against eager before anything was timed"),
        Column("max_rel_l2", "number", "ratio", "largest relative L2 distance of graph from eager"),
        Column("verdict", "text", "", "on the mean: `faster`, `slower`, `same`, `undecided` or `invalid`"),
        Column("verdict_reason", "text", "", "why that verdict"),
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
        title=count_text(len(runs), "run"),
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
    records = [run.record for run in runs]
    found = {name: [read(record) for record in records] for name, (_, read) in _SHARED.items()}
    shared = {name: values[0] for name, values in found.items() if len(set(values)) == 1}
    # Two runs of one model are told apart by their folders.
    subjects = [(model_of(record), workload_of(record)) for record in records]
    hidden = {*shared, *(() if len(set(subjects)) < len(subjects) else ("run",))}
    rows = (
        {"run": run.name, **{name: values[index] for name, values in found.items()}, **_measured(run.record)}
        for index, run in enumerate(runs)
    )
    table = Table(OVERVIEW, tuple(rows), hidden=frozenset(hidden), notes=_NOTES)
    return tuple(filter(None, shared.values())), table.without_empty("row")


def _measured(record: BenchRecord) -> dict[str, Any]:
    graph, claims, comparison = record.result.graph, claims_of(record), record.result.comparison
    pair = comparison.pair("eager", "graph")
    slower = pair.slower if pair and comparison.requests else None
    share = "" if slower is None else share_text(slower.over_2pct_share)
    return {
        "row": record.resolved.row if record.resolved else None,
        "model": model_of(record),
        "workload": workload_of(record),
        **{name: value for metric in ("mean", "p99") for name, value in _claim_cells(metric, claims.get(metric))},
        "slower": f"{slower.over_2pct_count:,} of {slower.requests:,} ({share})" if slower else None,
        **{name: getattr(graph, name) for name in ("launch_gap", "waste", "pool_bytes")},
        "verdict": _verdict(record, claims),
    }


def _claim_cells(metric: str, claim: Claim | None) -> Iterable[tuple[str, str]]:
    """Both times, and the improvement with its interval; a maximum in the place of a P99 is named."""
    if claim is None:
        return
    yield f"{metric}_ms", f"max {claim.times}" if claim.is_tail_of_few else claim.times
    interval = interval_text(claim.ci95).removesuffix("%")
    yield metric, pct_text(claim.improvement_pct) + (f" ({interval})" if interval else "")


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
    parts = [count_text(record.workload.requests, "request"), count_text(rounds, "round"), per_call_of(record.resolved)]
    return ", ".join(parts)


def _remark(record: BenchRecord) -> str:
    """Why a run is incomplete, not valid or no measurement of a GPU; empty where a reader need not be told anything."""
    if record.status != "complete":
        return f"{record.status}: {record.status_reason}"
    verdict = verdict_of(record)
    lines = [f"no verdict: {verdict.reason}"] if verdict.word in (NO_VERDICT, "invalid") else []
    return "; ".join([*lines, *dropped_lines(record.result.graph.dropped)])


def _run_table(run: SavedRun) -> Table:
    record, graph = run.record, run.record.result.graph
    resolved, environment, workload = record.resolved, record.environment, record.workload
    comparison, correctness = record.result.comparison, record.result.correctness
    is_compared = bool(comparison.requests)
    row: dict[str, Any] = {
        **{name: getattr(record, name) for name in ("status", "status_reason", "created_at", "vitgraph_version")},
        **{name: getattr(resolved, name, None) for name in _RESOLVED},
        **{name: getattr(workload, name, None) for name in ("fingerprint", "requests", "items", "images", "videos")},
        **{name: getattr(graph, name) for name in _GRAPH},
        "dtype": dtype_of(record),
        "device": environment.device if environment else None,
        "backend_requested": resolved.attn_backend if resolved else None,
        "backend_used": environment.encoder.attn_backend if environment and environment.encoder else None,
        "compiled": resolved.compile if resolved else None,
        "torch": environment.libraries.get("torch") if environment else None,
        "workload": workload.name if workload else None,
        "rounds": comparison.rounds if is_compared else None,
        "token_budgets": budgets_text(resolved.token_budgets) if resolved else None,
        "graph_mode": graph.mode,
        "packing": graph.policy,
        "graphs_captured": graph.graphs,
        "graphs_dropped": len(graph.dropped),
        "correctness": correctness.status if correctness else None,
        "max_rel_l2": correctness.max_rel_l2 if correctness else None,
        "verdict": comparison.verdict if is_compared else None,
        "verdict_reason": comparison.verdict_reason if is_compared else None,
        "command": shlex.join(record.command),
    }
    return RUNS.table((row,))


_RESOLVED = ("model", "load_format", "ranks", "requests_per_call", "max_vision_items_per_batch", "max_frames_per_batch")
_GRAPH = ("hits", "misses", "hit_rate", "replays", "waste", "launch_gap", "capture_s", "pool_bytes", "buffer_bytes")


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
