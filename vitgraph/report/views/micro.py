"""The document of `compare-backends --micro`: attention alone, a row a case, a column a backend."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from vitgraph.records.kinds.micro import Crossing, MicroResult, MicroRow
from vitgraph.records.record import MicroRecord
from vitgraph.report import say
from vitgraph.report.charts_of_times import draw_attention
from vitgraph.report.columns import Column, Table, TableSpec, fields
from vitgraph.report.document import Chart, Document, Text, section
from vitgraph.report.views.conditions import Ran

_TITLES = {"length": "Segments of equal length", "slots": "One segment, the other slots empty"}
_CASES = {
    "length": {"segments": "Segments", "segment_length": "Rows each"},
    "slots": {"segment_length": "Rows each", "slots": "Slots"},
}

MICRO = TableSpec(
    "micro",
    "",
    "a backend and case of attention alone",
    (
        *fields(MicroRow, "", "backend", "implementation", "status", "reason", "sweep", "segment_length", "segments"),
        *fields(MicroRow, "", "slots", "rows", "timed_as", "milliseconds", "first_call_ms", "relative_error"),
        *fields(MicroRow, "", "limit_ms", "limit_share"),
    ),
    "calls",
)


CROSSINGS = TableSpec(
    "crossings",
    "Where one overtakes another",
    "a size at which the fastest backend changes",
    fields(
        Crossing,
        sweep="Varied",
        segments="Segments",
        segment_length="Rows each",
        below="Fastest below",
        equal_at=("Equal at", "{:,.0f}".format),
        above="Fastest above",
        low="Measured at",
        high="and at",
    ),
)


def micro_document(record: MicroRecord) -> Document:
    """The report of one record."""
    result, ran = record.result, Ran(record)
    timed = [row for row in result.rows if row.sweep]
    sweeps = dict.fromkeys(row.sweep for row in timed if row.sweep)
    return ran.document(
        "vitgraph compare-backends --micro",
        *(section("", _sweep_table(sweep, [row for row in timed if row.sweep == sweep])) for sweep in sweeps),
        section("", *_crossings(result)),
        section("", *_charts(ran.model, result)),
        section("", *_notes(record, timed), *_failures(result.rows)),
        title=f"{ran.model} on {ran.device}",
        what=(ran.device, "attention alone", f"{result.heads} heads of {result.head_width}", result.dtype),
        tables=(MICRO.of(result.rows), CROSSINGS.of(result.crossings)),
    )


def _crossings(result: MicroResult) -> Iterable[Table | Text]:
    if result.crossings:
        yield CROSSINGS.of(result.crossings).without_empty("segments", "segment_length")
    elif len({row.backend for row in result.rows if row.milliseconds}) > 1:
        yield Text("No backend overtakes another: the fastest at the smallest size stays so.")


def _charts(model: str, result: MicroResult) -> Iterable[Chart]:
    lines: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for row in result.rows:
        if row.sweep == "length" and row.milliseconds and row.segment_length:
            panel = lines.setdefault(say.count(row.segments or 1, "segment"), {})
            panel.setdefault(row.backend, []).append((row.segment_length, row.milliseconds))
    marks: dict[str, list[float]] = {}
    for one in result.crossings:
        if one.sweep == "length":
            marks.setdefault(say.count(one.segments or 1, "segment"), []).append(float(one.equal_at))
    if lines:
        draw = partial(draw_attention, f"{model}, {result.heads} heads of {result.head_width}", lines, marks)
        yield Chart("micro", "Time of attention over the rows of a segment, by backend", draw)


def _sweep_table(sweep: str, rows: Sequence[MicroRow]) -> Table:
    cases = fields(MicroRow, **_CASES[sweep])
    backends = dict.fromkeys(row.backend for row in rows)
    columns = (
        *cases,
        *(Column(f"of {name}", "number", "ms", "time of a call", name, str) for name in backends),
        Column("limit_ms", "number", "ms", "the limit", "Limit", lambda ms: say.number(ms, 4)),
    )
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        case = {column.name: column.value(row) for column in cases}
        entry = found.setdefault(tuple(case.values()), case)
        entry |= {f"of {row.backend}": _case_text(row), "limit_ms": row.limit_ms}
    return TableSpec(sweep, _TITLES[sweep], "a case", columns).table(found.values()).without_empty("limit_ms")


def _case_text(row: MicroRow) -> str:
    if row.status != "ok":
        return row.status.replace("_", " ")
    share = f" ({100 * row.limit_share:.0f}%)" if row.limit_share is not None else ""
    return f"{say.number(row.milliseconds, 4)}{share}"


def _notes(record: MicroRecord, timed: Sequence[MicroRow]) -> Iterable[Text]:
    rate = record.environment.matrix_rate_tflops if record.environment else None
    limit = (
        f" The limit is its arithmetic at the measured {rate or 0:.0f} TFLOP/s; in brackets the share that is reached."
    )
    yield Text(f"Milliseconds of one call.{limit if rate is not None else ''}", "dim")
    modes = {row.backend: row.timed_as for row in timed if row.status == "ok"}
    for mode in dict.fromkeys(modes.values()):
        names = ", ".join(name for name, timed_as in modes.items() if timed_as == mode)
        yield Text(
            f"Timed as {'one graph of many calls' if mode == 'graph' else 'eager calls'}: {names or say.NO_VALUE}"
        )


def _failures(rows: Sequence[MicroRow]) -> Iterable[Text]:
    reasons = {(row.backend, row.status, row.reason): None for row in rows if row.status != "ok"}
    for backend, status, reason in reasons:
        yield Text(f"{backend} {status.replace('_', ' ')}: {reason}", "warning")
