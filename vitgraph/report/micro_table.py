"""Lays out the timing of attention alone: one line a case, one column a backend, the arithmetic limit beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vitgraph.report.terminal import new_table
from vitgraph.report.units import NO_VALUE, is_number, number_text, share_text

_OK = "ok"
_TITLES = {"length": "Segments of equal length", "slots": "One segment, the other slots empty"}


def render_micro(record: Mapping[str, Any], console: Console) -> None:
    """Prints the rows of a `compare-backends --micro` record.

    Args:
        record: The record; rows as `run_micro` gives them.
        console: Where to print.
    """
    heads = f"{record['heads']} heads of {record['head_width']}, {record['dtype']}"
    model, device = record["settings"]["model"]["model"], record["environment"]["device"]
    console.print(Text(f"vitgraph compare-backends --micro: {model} ({heads}) on {device}", style="bold"))
    if record["status"] != "complete":
        console.print(Text(f"{record['status'].capitalize()}: {record['status_reason']}", style="bold yellow"))
    timed = [row for row in record["rows"] if row["sweep"]]
    for sweep in dict.fromkeys(row["sweep"] for row in timed):
        console.print()
        console.print(_sweep_table(sweep, [row for row in timed if row["sweep"] == sweep]))
    console.print()
    limit = record["matrix_rate_tflops"]
    note = "Milliseconds of one call."
    if is_number(limit):
        note += (
            f" The limit is its arithmetic at the measured {limit:.0f} TFLOP/s; in brackets the share that is reached."
        )
    console.print(Text(note, style="dim"))
    modes = {row["backend"]: row["timed_as"] for row in timed if row["status"] == _OK}
    for mode in dict.fromkeys(modes.values()):
        names = ", ".join(name for name, timed_as in modes.items() if timed_as == mode)
        console.print(Text(f"Timed as {'one graph of many calls' if mode == 'graph' else 'eager calls'}: {names}"))
    reasons = {(row["backend"], row["status"], row["reason"]): None for row in record["rows"] if row["status"] != _OK}
    for backend, status, reason in reasons:
        console.print(Text(f"{backend} {status.replace('_', ' ')}: {reason}", style="yellow"))


def _sweep_table(sweep: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    table = new_table(_TITLES[sweep], collapse_padding=True)
    columns = ("segments", "segment_length") if sweep == "length" else ("segment_length", "slots")
    names = {"segments": "Segments", "segment_length": "Rows each", "slots": "Slots"}
    backends = list(dict.fromkeys(row["backend"] for row in rows))
    has_limit = any(is_number(row["limit_ms"]) for row in rows)
    for column in columns:
        table.add_column(names[column], justify="right")
    for backend in backends:
        table.add_column(backend, justify="right")
    if has_limit:
        table.add_column("Limit", justify="right")
    cases: dict[tuple[Any, ...], dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        cases.setdefault(tuple(row[column] for column in columns), {})[row["backend"]] = row
    for case, found in cases.items():
        limit = next(iter(found.values()))["limit_ms"]
        cells = [_case_cell(found.get(backend)) for backend in backends]
        table.add_row(*map(str, case), *cells, *([number_text(limit, 4)] if has_limit else []))
    return table


def _case_cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return NO_VALUE
    if row["status"] != _OK:
        return str(row["status"]).replace("_", " ")
    share = f" ({share_text(row['limit_share']).split('.')[0]}%)" if is_number(row["limit_share"]) else ""
    return f"{number_text(row['milliseconds'], 4)}{share}"
