"""The document of a sweep: what became of each run, and the figures of runs that go together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from vitgraph.report import say
from vitgraph.report.columns import Column, TableSpec
from vitgraph.report.document import Document, Text, section, sections

SWEEP = TableSpec(
    "sweep",
    "",
    "a run of a sweep",
    (
        Column("run", "text", "", "what sets it apart; its folder's name", "Run", of="name"),
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
    table = SWEEP.of({**run, "found": run["reason"] or said} for run, said in zip(runs, verdicts, strict=True))
    counts = Counter(run["status"] for run in runs)
    beside = figures or Document("", "")
    return Document(
        name="vitgraph sweep",
        title=f"{say.count(len(runs), 'run')} of {command}",
        what=(", ".join(f"{count} {status}" for status, count in counts.items()),),
        sections=sections(
            section("", table.without_empty("exit_status", "seconds", "found")),
            section("", Text("Figures of the runs that are complete:")) if figures else None,
            *beside.sections,
        ),
        tables=(table, *beside.tables),
        explanation=beside.explanation,
        parts=beside.parts,
    )
