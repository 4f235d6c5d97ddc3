"""Prints what a workload is made of: its sizes, and for each model the tokens of an item, with a histogram."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vitgraph.report.terminal import new_table
from vitgraph.report.units import NO_VALUE, count_text, is_number, share_text

_COLUMNS = ("min", "p5", "p25", "p50", "p75", "p95", "p99", "max", "mean")
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_MOST_BAR = 60
_LISTED = 5
_COLUMN_GAP = 3


def render_workload(facts: Mapping[str, Any], console: Console) -> None:
    """Prints a workload.

    Args:
        facts: `WorkloadFacts.as_dict()`.
        console: Where to print; widths from 80 columns on are laid out without cut cells.
    """
    console.print(Text(f"workload {facts['name']}, fingerprint {facts['fingerprint']}", "bold"))
    console.print(
        Text(
            f"{count_text(facts['requests'], 'request')}, {count_text(facts['images'], 'image')}, "
            f"{count_text(facts['videos'], 'video')}, {len(facts['skipped'])} left out, "
            f"{count_text(facts['distinct_sizes'], 'distinct size')}"
        )
    )
    statement = facts["provenance"].get("statement")
    if statement:
        console.print(Text(str(statement), "dim"))
    console.print()
    console.print(_distributions(facts))
    console.print(_common(facts["common_sizes"]))
    _print_skipped(facts["skipped"], console)
    for model in facts["models"]:
        console.print()
        _print_model(model, console)


def render_saved_trace(facts: Mapping[str, Any], console: Console) -> None:
    """Prints what was written as a trace, what was left out, and how to replay it.

    Args:
        facts: `path`, `requests`, `items`, `videos`, `fingerprint`, `skipped` and `provenance` of the workload.
        console: Where to print.
    """
    console.print(
        Text(
            f"{facts['path']}: {count_text(facts['requests'], 'request')}, {count_text(facts['items'], 'item')} "
            f"({count_text(facts['videos'], 'video')}), fingerprint {facts['fingerprint']}"
        )
    )
    without = facts["provenance"].get("lines_without_size")
    if without:
        console.print(Text(f"{count_text(without, 'line')} of {facts['provenance']['lines']} named no size", "yellow"))
    _print_skipped(facts["skipped"], console)
    command = shlex.join(["vitgraph", "bench", "--dataset-name", "trace", "--dataset-path", facts["path"]])
    console.print(Text(f"replay it with: {command}"), soft_wrap=True)


def _distributions(facts: Mapping[str, Any]) -> Table:
    rows = [
        ("items a request", facts["items_per_request"], 0),
        ("width, px", facts["width"], 0),
        ("height, px", facts["height"], 0),
        ("megapixels", facts["megapixels"], 2),
        ("width / height", facts["aspect_ratio"], 2),
        ("frames a video", facts["frames_per_video"], 0),
    ]
    return _percentile_table([row for row in rows if row[1]["n"]])


def _percentile_table(rows: Sequence[tuple[str, Mapping[str, Any], int]]) -> Table:
    table = new_table(padding=(0, 1, 0, 0))
    table.add_column("")
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for name, values, decimals in rows:
        table.add_row(name, *(_figure(values[column], decimals, column) for column in _COLUMNS))
    return table


def _figure(value: Any, decimals: int, column: str) -> str:
    if not is_number(value):
        return NO_VALUE
    # A percentile of whole numbers may lie between two of them; the mean nearly always does.
    places = decimals if decimals or float(value).is_integer() or (column != "mean" and value >= 100) else 1
    return f"{value:.{places}f}"


def _common(sizes: Sequence[Mapping[str, Any]]) -> Text:
    parts = []
    for size in sizes[:_LISTED]:
        frames = "" if size["frames"] == 1 else f"x{size['frames']}"
        parts.append(f"{size['width']}x{size['height']}{frames} ({share_text(size['share'])})")
    return Text(f"most frequent: {', '.join(parts)}")


def _print_skipped(skipped: Sequence[Mapping[str, Any]], console: Console) -> None:
    for item in skipped[:_LISTED]:
        console.print(Text(f"left out: {item['source']}: {item['reason']}", "yellow"))
    if len(skipped) > _LISTED:
        console.print(Text(f"left out: {len(skipped) - _LISTED} more; --json names all", "yellow"))


def _print_model(model: Mapping[str, Any], console: Console) -> None:
    console.print(Text(f"output tokens with {model['model']} ({model['row']})", "bold"))
    if model["refused"]:
        count = sum(model["refused"].values())
        console.print(
            Text(f"{count_text(count, 'item')} not taken, for example: {next(iter(model['refused']))}", "yellow")
        )
    if not model["tokens_per_item"]["n"]:
        console.print(Text("The model takes none of the items."))
        return
    rows = [
        ("tokens an item", model["tokens_per_item"], 0),
        ("tokens a request", model["tokens_per_request"], 0),
        ("segments an item", model["segments_per_item"], 0),
    ]
    console.print(_percentile_table(rows))
    common = ", ".join(
        f"{entry['tokens']} ({share_text(entry['share'])})" for entry in model["common_tokens"][:_LISTED]
    )
    console.print(Text(f"{count_text(model['distinct_tokens'], 'distinct count')}; most frequent: {common}"))
    console.print()
    console.print(_bars(model["histogram"], console))


def _bars(histogram: Sequence[Mapping[str, int]], console: Console) -> Table:
    names = [
        f"{entry['low']}" if entry["low"] == entry["high"] else f"{entry['low']}–{entry['high']}" for entry in histogram
    ]
    most = max(entry["items"] for entry in histogram)
    total = sum(entry["items"] for entry in histogram)
    headers = ("tokens", "items", "share")
    cells = (max(map(len, names)), len(str(most)), len(share_text(most / total)))
    taken = sum(max(len(header), cell) + _COLUMN_GAP for header, cell in zip(headers, cells, strict=True))
    width = max(10, min(_MOST_BAR, console.width - taken))
    is_unicode = "utf" in (console.encoding or "").lower()
    table = new_table()
    for header in headers:
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for name, entry in zip(names, histogram, strict=True):
        bar = _bar(entry["items"] / most * width, is_unicode)
        table.add_row(name, str(entry["items"]), share_text(entry["items"] / total), Text(bar, "cyan"))
    return table


def _bar(length: float, is_unicode: bool) -> str:
    if not is_unicode:
        return "#" * round(length)
    eighths = round(length * 8) or (1 if length else 0)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()
