"""Prints where the time of one call goes: a line a kind of work, a column a mode, the arithmetic limit beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vitgraph.report.terminal import new_table
from vitgraph.report.units import NO_VALUE, count_text, ms_text, ratio_text, share_text

KIND_LABELS = {
    "attention": "attention",
    "product": "matrix products",
    "norm": "norms",
    "element-wise": "element-wise",
    "copy": "copies and gathers",
    "other": "other",
}
GAPS = "gaps"
_LISTED = 8
_LEAST_NAME_WIDTH, _OTHER_COLUMNS_WIDTH = 24, 40


def render_profile(record: Mapping[str, Any], console: Console) -> None:
    """Prints a `profile` record.

    Args:
        record: The record, as `run_profile` returns it.
        console: Where to print.
    """
    environment, call = record["environment"], record["call"]
    title = f"vitgraph profile: {record['settings']['model']['model']} on {environment['device']}"
    console.print(Text(title, style="bold"))
    tokens = count_text(call["tokens"], "token")
    console.print(Text(f"{describe_items(call['items'])}, {tokens}; {_replays_text(call)}"))
    if environment.get("compiled_blocks"):
        console.print(Text(f"{environment['compiled_blocks']} blocks compiled, in both modes"))
    console.print()
    console.print(_kinds_table(record))
    for note in _notes(record):
        console.print(Text(note, style="dim"))
    for mode, entry in record["modes"].items():
        console.print()
        console.print(_top_table(mode, entry, max(_LEAST_NAME_WIDTH, console.width - _OTHER_COLUMNS_WIDTH)))


def describe_items(items: Sequence[Sequence[int]]) -> str:
    """The items of a call as a user would name them: `20 × 336×336`."""
    parts = []
    for size, group in groupby(tuple(item) for item in items):
        count = len(list(group))
        width, height, frames = size
        name = f"{width}×{height}" + (f"×{frames} frames" if frames > 1 else "")
        parts.append(name if count == 1 else f"{count} × {name}")
    return ", ".join(parts)


def _replays_text(call: Mapping[str, Any]) -> str:
    budgets = ", ".join(
        ("" if replay["path"] == "default" else f"{replay['path']} ") + str(replay["token_budget"])
        for replay in call["replays"]
    )
    eager = f", {count_text(call['eager_items'], 'item')} eager" if call["eager_items"] else ""
    return f"{count_text(len(call['replays']), 'replay')} (token budget {budgets}){eager}"


def _kinds_table(record: Mapping[str, Any]) -> Table:
    modes, limit = record["modes"], record["speed_of_light"]
    table = new_table(collapse_padding=True)
    table.add_column("ms a call")
    count = "Kernels" if record["traced"] == "GPU kernels" else "Operators"
    for mode in modes:
        for name in (mode.capitalize(), "Share", count):
            table.add_column(name, justify="right", no_wrap=True)
    if limit:
        table.add_column("Limit", justify="right", no_wrap=True)
    for kind, label in KIND_LABELS.items():
        if not any(entry["kinds"][kind]["kernels"] for entry in modes.values()):
            continue
        cells = []
        for entry in modes.values():
            found = entry["kinds"][kind]
            cells += [ms_text(found["ms"]), _share(found["ms"], entry["span_ms"]), f"{found['kernels']:.0f}"]
        table.add_row(label, *cells, *([ms_text(limit.get(f"{kind}_ms"))] if limit else []))
    gaps = [(ms_text(entry["gap_ms"]), _share(entry["gap_ms"], entry["span_ms"]), "") for entry in modes.values()]
    table.add_row(GAPS, *(cell for cells in gaps for cell in cells), *([NO_VALUE] if limit else []))
    table.add_section()
    spans = [(ms_text(entry["span_ms"]), "", f"{entry['kernels']:.0f}") for entry in modes.values()]
    table.add_row(
        "first to last", *(cell for cells in spans for cell in cells), *([ms_text(limit["total_ms"])] if limit else [])
    )
    walls = [(ms_text(entry["wall_ms"]), "", "") for entry in modes.values()]
    table.add_row("whole call", *(cell for cells in walls for cell in cells), *([""] if limit else []))
    if limit:
        times = [(ratio_text(entry["wall_ms"] / limit["total_ms"]), "", "") for entry in modes.values()]
        table.add_row("over the limit", *(cell for cells in times for cell in cells), "")
    return table


def _share(part: float, whole: float) -> str:
    return share_text(part / whole) if whole else NO_VALUE


def _notes(record: Mapping[str, Any]) -> list[str]:
    repeats = count_text(record["settings"]["repeats"], "trace")
    notes = []
    if record["traced"] == "GPU kernels":
        notes.append(f"Times of GPU kernels, mean of {repeats}; gaps: what no kernel covers; whole call: wall clock.")
    else:
        notes.append(
            f"Times of CPU operators, mean of {repeats}, not of GPU kernels: they show what the call is made of and "
            "say nothing of a GPU. A replay on a CPU is the forward again; gaps are Python and the profiler's own work."
        )
    limit = record["speed_of_light"]
    if limit:
        rate = f"{limit['matrix_rate_tflops']:.0f} TFLOP/s of a large matrix product, measured in this run"
        notes.append(f"The limit is the arithmetic of the unpadded call at the {rate}.")
    if record["trace_files"]:
        notes.append(f"Traces for chrome://tracing or Perfetto: {', '.join(record['trace_files'])}")
    return notes


def _top_table(mode: str, entry: Mapping[str, Any], name_width: int) -> Table:
    table = new_table(f"{mode.capitalize()}: what takes longest", collapse_padding=True)
    for name in ("ms", "Times"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("Kind", no_wrap=True)
    table.add_column("Name", no_wrap=True)
    for found in entry["top"][:_LISTED]:
        name = found["name"] if len(found["name"]) <= name_width else f"{found['name'][: name_width - 1]}…"
        table.add_row(ms_text(found["ms"]), f"{found['kernels']:.0f}", KIND_LABELS[found["kind"]], Text(name))
    return table
