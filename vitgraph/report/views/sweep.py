"""The document of a sweep: what became of each run, and the figures of runs that go together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vitgraph.report.columns import Column, Table, TableSpec, count_text
from vitgraph.report.document import Document, Text, section, sections

SWEEP = TableSpec(
    "sweep",
    "",
    "a run of a sweep",
    (
        Column("run", "text", "", "what sets it apart; its folder's name", "Run"),
        Column("status", "text", "", "`complete`, `failed`, `interrupted` or `not run`", "Status"),
        Column("exit_status", "integer", "", "exit status of its process; empty where none ended", "Exit"),
        Column("seconds", "number", "s", "how long it took", "Seconds"),
        Column("found", "text", "", "its verdict, or why it failed", "Found"),
    ),
)


def sweep_document(
    command: str, runs: Sequence[Mapping[str, Any]], verdicts: Sequence[str], figures: Document | None
) -> Document:
    """The report of a sweep.

    Args:
        command: What was run.
        runs: Each run by field.
        verdicts: What each run found.
        figures: The report of the runs together; None where they are of a kind that does not go into one table.
    """
    rows = tuple(
        {
            **{name: run[name] for name in ("status", "exit_status", "seconds")},
            "run": run["name"],
            "found": run["reason"] or verdict,
        }
        for run, verdict in zip(runs, verdicts, strict=True)
    )
    table = Table(SWEEP, rows)
    counts = {
        status: sum(run["status"] == status for run in runs) for status in dict.fromkeys(r["status"] for r in runs)
    }
    said = ", ".join(f"{count} {status}" for status, count in counts.items())
    return Document(
        name="vitgraph sweep",
        title=f"{count_text(len(runs), 'run')} of {command}",
        what=(said,),
        sections=sections(
            section("", table.without_empty("exit_status", "seconds", "found")),
            section("", Text("Figures of the runs that are complete:")) if figures else None,
            *(figures.sections if figures else ()),
        ),
        tables=(table, *(figures.tables if figures else ())),
        explanation=figures.explanation if figures else "",
        parts=figures.parts if figures else (),
    )
