"""Writes bench runs as one Markdown table, a run a line: of many models, one each, on the same device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vitgraph.records.bench_record import RunRecord
from vitgraph.records.saved_runs import SavedRun
from vitgraph.report.claims import (
    IMPROVEMENT_NOTE,
    LAUNCH_GAP_MEANING,
    NO_VERDICT,
    Claim,
    backend_text,
    claim_of,
    model_text,
    remark_of,
    size_text,
    verdict_of,
    workload_name,
)
from vitgraph.report.text_tables import markdown_row, markdown_text
from vitgraph.report.units import NO_VALUE, bytes_text, count_text, ratio_text, share_text

_SHARED: Mapping[str, Callable[[RunRecord], str]] = {
    "Device": lambda record: record.device_name or "unknown device",
    "Weights": lambda record: model_text(record) or "dtype not recorded",
    "Backend": backend_text,
    "Ranks": lambda record: count_text(record.ranks, "rank"),
    "Measured": size_text,
}
"""What is said once above the table where all runs have it in common, and in a column of its own where they differ."""

_MEASURED = (
    "Mean ms, eager→graph",
    "Mean improvement",
    "P99 ms, eager→graph",
    "P99 improvement",
    "Slower requests",
    "Launch gap",
    "Waste",
    "Graph pool",
    "Verdict",
)


def rows_markdown(runs: Sequence[SavedRun]) -> str:
    """The table, with what all runs have in common above it and what a reader must know of single ones beneath.

    Args:
        runs: The runs, in the order of the table's lines.
    """
    records = [run.record for run in runs]
    found = {name: [read(record) for record in records] for name, read in _SHARED.items()}
    differing = [name for name, values in found.items() if len(set(values)) > 1]
    shared = [values[0] for name, values in found.items() if name not in differing]
    # Two runs of one model are told apart by their folders.
    subjects = [_subject(record) for record in records]
    lines = []
    if shared:
        lines += [f"{markdown_text('; '.join(shared))}.", ""]
    headers = ("Row", "Model", "Trace", *differing, *_MEASURED)
    lines += [markdown_row(headers), markdown_row([":--"] * (3 + len(differing)) + ["--:"] * 8 + [":--"])]
    for index, (run, subject) in enumerate(zip(runs, subjects, strict=True)):
        row, model = subject
        name = model if subjects.count(subject) == 1 else f"{model} ({run.name})"
        varying = (found[column][index] for column in differing)
        cells = [name, workload_name(run.record), *varying, *_measured(run.record)]
        lines.append(markdown_row([f"`{row}`", *map(markdown_text, cells)]))
    lines += ["", f"{IMPROVEMENT_NOTE} In brackets: the ends of the 95% interval."]
    lines.append(
        f"Slower requests: by more than 2% than eager. Launch gap: {LAUNCH_GAP_MEANING}. Waste: padding among the "
        "replayed rows."
    )
    remarks = [f"{run.name}: {remark}" for run in runs if (remark := remark_of(run.record))]
    lines += [f"\n{markdown_text(remark)}." for remark in remarks]
    return "\n".join(lines) + "\n"


def _subject(record: RunRecord) -> tuple[str, str]:
    return record["settings"]["resolved"]["row"], record.model_name


def _measured(record: RunRecord) -> list[str]:
    graph, comparison = record["graph"] or {}, record["comparison"] or {}
    slower = comparison.get("slower_than_eager") if comparison.get("requests") else None
    return [
        *_claim_cells(claim_of(record, "mean")),
        *_claim_cells(claim_of(record, "p99")),
        _slower(slower) if slower else NO_VALUE,
        ratio_text(graph.get("launch_gap")),
        share_text(graph.get("waste")),
        bytes_text(graph.get("pool_bytes")),
        _verdict(record),
    ]


def _slower(slower: Mapping[str, Any]) -> str:
    return f"{slower['over_2pct_count']:,} of {slower['n']:,} ({share_text(slower['over_2pct_share'])})"


def _claim_cells(claim: Claim) -> tuple[str, str]:
    """Both times, and the improvement with its interval; a maximum in the place of a P99 is named."""
    if not claim.times:
        return NO_VALUE, NO_VALUE
    name = "max " if claim.metric == "Max" else ""
    interval = claim.interval.removeprefix("95% CI ").removesuffix("%")
    return f"{name}{claim.times.removesuffix(' ms')}", claim.improvement + (f" ({interval})" if interval else "")


def _verdict(record: RunRecord) -> str:
    if record["status"] != "complete":
        return str(record["status"])
    verdict = verdict_of(record).verdict
    tail = claim_of(record, "p99")
    differs = tail.metric == "P99" and verdict not in (NO_VERDICT, "invalid") and tail.verdict != verdict
    return f"{verdict} (P99: {tail.verdict})" if differs else verdict
