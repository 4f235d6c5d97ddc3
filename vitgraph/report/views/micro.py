"""The document of `compare-backends --micro`: attention alone, a row a case, a column a backend."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vitgraph.records.kinds.micro import MicroRow
from vitgraph.records.record import MicroRecord
from vitgraph.report.columns import NO_VALUE, Column, Table, TableSpec, number_text
from vitgraph.report.document import Document, Text, section, sections
from vitgraph.report.views.conditions import UNKNOWN_DEVICE, environment_facts, model_of, warning_of

_TITLES = {"length": "Segments of equal length", "slots": "One segment, the other slots empty"}
_CASES = {
    "length": (("segments", "Segments"), ("segment_length", "Rows each")),
    "slots": (("segment_length", "Rows each"), ("slots", "Slots")),
}

MICRO = TableSpec(
    "micro",
    "",
    "a backend and case of attention alone",
    (
        Column("backend", "text", "", "attention backend"),
        Column("implementation", "text", "", "what ran behind the name"),
        Column("status", "text", "", "`ok`, or what went wrong"),
        Column("reason", "text", "", "the same in words"),
        Column("sweep", "text", "", "`length` or `slots`: what is varied"),
        Column("segment_length", "integer", "rows", "rows of a segment"),
        Column("segments", "integer", "segments", "segments of the call"),
        Column("slots", "integer", "segments", "segment slots of the call"),
        Column("rows", "integer", "rows", "rows of the call"),
        Column("timed_as", "text", "", "`graph` of many calls, or `eager` calls one by one"),
        Column("milliseconds", "number", "ms", "time of one call"),
        Column("first_call_ms", "number", "ms", "time of the first call"),
        Column("relative_error", "number", "ratio", "relative distance from float32"),
        Column("limit_ms", "number", "ms", "time of the arithmetic at the matrix rate"),
        Column("limit_share", "number", "ratio", "`limit_ms` over `milliseconds`"),
    ),
    "calls",
)


def micro_document(record: MicroRecord) -> Document:
    """The report of one record."""
    result = record.result
    timed = [row for row in result.rows if row.sweep]
    device = record.environment.device if record.environment else UNKNOWN_DEVICE
    return Document(
        name="vitgraph compare-backends --micro",
        title=f"{model_of(record)} on {device}",
        what=(device, "attention alone", f"{result.heads} heads of {result.head_width}", result.dtype),
        warning=warning_of(record),
        sections=sections(
            *(
                section("", _sweep_table(sweep, [row for row in timed if row.sweep == sweep]))
                for sweep in dict.fromkeys(row.sweep for row in timed if row.sweep)
            ),
            section("", *_notes(record, timed), *_failures(result.rows)),
            section("Environment", environment_facts(record), is_detail=True),
        ),
        tables=(micro_table(result.rows),),
        command=record.command,
    )


def micro_table(rows: Sequence[MicroRow]) -> Table:
    """One row a backend and case."""
    return MICRO.table({column.name: getattr(row, column.name) for column in MICRO.columns} for row in rows)


def _sweep_table(sweep: str, rows: Sequence[MicroRow]) -> Table:
    cases = _CASES[sweep]
    backends = list(dict.fromkeys(row.backend for row in rows))
    columns = [Column(name, "integer", "", "the case", header) for name, header in cases]
    columns += [Column(f"of {name}", "number", "ms", "time of a call", name, str) for name in backends]
    columns.append(Column("limit_ms", "number", "ms", "the limit", "Limit", lambda ms: number_text(ms, 4)))
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        case = tuple(getattr(row, name) for name, _ in cases)
        entry = found.setdefault(case, {name: value for (name, _), value in zip(cases, case, strict=True)})
        entry |= {f"of {row.backend}": _case_text(row), "limit_ms": row.limit_ms}
    table = TableSpec(sweep, _TITLES[sweep], "a case", tuple(columns)).table(found.values())
    return table.without_empty("limit_ms")


def _case_text(row: MicroRow) -> str:
    if row.status != "ok":
        return row.status.replace("_", " ")
    share = f" ({100 * row.limit_share:.0f}%)" if row.limit_share is not None else ""
    return f"{number_text(row.milliseconds, 4)}{share}"


def _notes(record: MicroRecord, timed: Sequence[MicroRow]) -> Iterable[Text]:
    rate = record.environment.matrix_rate_tflops if record.environment else None
    note = "Milliseconds of one call."
    if rate is not None:
        note += (
            f" The limit is its arithmetic at the measured {rate:.0f} TFLOP/s; in brackets the share that is reached."
        )
    yield Text(note, "dim")
    modes = {row.backend: row.timed_as for row in timed if row.status == "ok"}
    for mode in dict.fromkeys(modes.values()):
        names = ", ".join(name for name, timed_as in modes.items() if timed_as == mode)
        yield Text(f"Timed as {'one graph of many calls' if mode == 'graph' else 'eager calls'}: {names or NO_VALUE}")


def _failures(rows: Sequence[MicroRow]) -> Iterable[Text]:
    reasons = {(row.backend, row.status, row.reason): None for row in rows if row.status != "ok"}
    for backend, status, reason in reasons:
        yield Text(f"{backend} {status.replace('_', ' ')}: {reason}", "warning")
