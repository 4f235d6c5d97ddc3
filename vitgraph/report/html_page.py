"""Builds the one page of saved runs: verdict, table, charts, hits, waste, memory, environment, command, how to read.

The page is a single file that loads nothing, in light and dark, and reads on a phone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from vitgraph.records.bench_record import RunRecord, encode
from vitgraph.records.saved_runs import SavedRun
from vitgraph.records.stats import P99_MIN_SAMPLES
from vitgraph.report.claims import (
    IMPROVEMENT_NOTE,
    NO_VERDICT,
    backend_text,
    claim_of,
    command_text,
    model_text,
    size_text,
    verdict_of,
    workload_name,
)
from vitgraph.report.html_parts import (
    Markup,
    code,
    details,
    escape,
    page,
    read_template,
    table,
    tiles,
    toned,
    verdict_box,
)
from vitgraph.report.html_sections import (
    capture_text,
    charts_section,
    checks_section,
    claim_cells,
    environment_section,
    hits_section,
    latency_section,
    memory_section,
    monolithic_section,
)
from vitgraph.report.units import NO_VALUE, bytes_text, count_text, is_number, share_text


def runs_page(runs: Sequence[SavedRun]) -> str:
    """The page of one run, or of several with a table of their verdicts before them."""
    if len(runs) == 1:
        record = runs[0].record
        title = f"{record.model_name} on {record.device_name or 'unknown device'}"
        return page(f"vitgraph: {title}", _head(record) + _run_sections(runs[0]) + read_template("how_to_read.html"))
    articles = "".join(
        f'<article id="run-{index}"><p class="eyebrow">Run {escape(run.name)}</p>'
        f"{_title(run.record)}{_run_sections(run)}</article>"
        for index, run in enumerate(runs)
    )
    body = (
        f'<p class="eyebrow">vitgraph bench</p><h1>{len(runs)} runs</h1>{_overview(runs)}'
        f"{articles}{read_template('how_to_read.html')}"
    )
    return page(f"vitgraph: {len(runs)} runs", body)


def _head(record: RunRecord) -> str:
    return f'<p class="eyebrow">vitgraph bench, {escape(record["created_at"])}</p>{_title(record)}'


def _title(record: RunRecord) -> str:
    weights = model_text(record)
    parts = [
        record.device_name or "unknown device",
        backend_text(record),
        weights,
        workload_name(record),
        size_text(record),
    ]
    return f'<h1>{escape(record.model_name)}</h1><p class="sub">{escape(" · ".join(filter(None, parts)))}</p>'


def _overview(runs: Sequence[SavedRun]) -> str:
    rows = []
    for index, run in enumerate(runs):
        record = run.record
        verdict = verdict_of(record)
        rows.append(
            (
                Markup(f'<a href="#run-{index}">{escape(run.name)}</a>'),
                toned(verdict.verdict, verdict.verdict if verdict.verdict != NO_VERDICT else verdict.headline),
                *claim_cells(record),
                record.model_name,
                record.device_name or NO_VALUE,
                backend_text(record),
                workload_name(record),
            )
        )
    headers = ("Run", "Verdict", "Mean improvement", "P99 improvement", "Model", "Device", "Backend", "Workload")
    return table(headers, rows, numeric_from=len(headers)) + f'<p class="note">{IMPROVEMENT_NOTE}</p>'


def _run_sections(run: SavedRun) -> str:
    record = run.record
    sections = [
        _verdict(record),
        latency_section(record),
        monolithic_section(record),
        charts_section(run),
        hits_section(record),
        memory_section(record),
        checks_section(record),
        environment_section(record),
        f"<h2>Command</h2>{code(command_text(record['command']))}",
        details("All settings", code(json.dumps(encode(record["settings"]), indent=1, ensure_ascii=False))),
        "".join(f'<p class="note">{escape(note)}</p>' for note in run.notes),
    ]
    return "".join(sections)


def _verdict(record: RunRecord) -> str:
    verdict, mean, tail = verdict_of(record), claim_of(record, "mean"), claim_of(record, "p99")
    lines = []
    if record["status"] != "complete":
        lines.append(f"The run is incomplete ({record['status']}): {record['status_reason']}")
    if verdict.verdict not in (NO_VERDICT, "invalid"):
        interval = f", {tail.interval}" if tail.interval else ""
        lines.append(f"{_metric_label(tail.metric)} latency {tail.headline}: {tail.verdict}{interval}.")
    slower = (record["comparison"] or {}).get("slower_than_eager") or {}
    if slower.get("n") and verdict.verdict != NO_VERDICT:
        share = share_text(slower["over_2pct_share"])
        lines.append(
            f"{slower['over_2pct_count']} of {slower['n']} requests ({share}) are slower than eager by more than 2%."
        )
    figure = ""
    if mean.times and verdict.verdict != NO_VERDICT:
        figure = f"Mean latency {mean.headline}{f', {mean.interval}' if mean.interval else ''}"
    return verdict_box(verdict, figure, lines) + _tiles(record)


def _tiles(record: RunRecord) -> str:
    graph = record["graph"] or {}
    entries = []
    for metric in ("mean", "p99"):
        claim = claim_of(record, metric)
        if claim.times:
            more = claim.times if claim.verdict == NO_VERDICT else f"{claim.times}, {claim.verdict}"
            entries.append((f"{_metric_label(claim.metric)} improvement", claim.improvement, more))
    if graph.get("items"):
        entries.append(
            ("Hits", share_text(graph["hit_rate"]), f"{graph['hits']} of {count_text(graph['items'], 'item')}")
        )
    if graph.get("replays"):
        entries.append(("Waste", share_text(graph["waste"]), "of the replayed rows is padding"))
    if is_number(graph.get("pool_bytes")):
        held = graph["pool_bytes"] + (graph["buffer_bytes"] or 0)
        entries.append(("Memory", bytes_text(held), f"graph pool and buffers, {capture_text(graph)}"))
    return tiles(entries)


def _metric_label(metric: str) -> str:
    return f"Max (n<{P99_MIN_SAMPLES})" if metric == "Max" else metric
