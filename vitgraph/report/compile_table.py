"""Prints the rows of `bench --compile-rows`: eager and graph, plain and compiled, and what each step gains.

Records of several models go into one Markdown table, a model a line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vitgraph.records.compare_record import CompareRecord
from vitgraph.records.stats import P99_MIN_SAMPLES
from vitgraph.report.claims import LAUNCH_GAP_MEANING
from vitgraph.report.terminal import new_table
from vitgraph.report.text_tables import markdown_row, markdown_text
from vitgraph.report.units import (
    NO_VALUE,
    NOT_MEASURED,
    count_text,
    is_number,
    ms_text,
    number_text,
    ratio_text,
    signed_pct_text,
)

_SERIES = (
    ("eager", "plain", "eager"),
    ("eager+compile", "compiled", "eager"),
    ("graph", "plain", "graph"),
    ("graph+compile", "compiled", "graph"),
)
_GAINS = (("eager", "graph+compile"), ("eager+compile", "graph+compile"))
_MARKDOWN_FACTS = ("Launch gap, plain→compiled", "Error, plain→compiled", "Compiling")


def render_compile_rows(record: CompareRecord, console: Console) -> None:
    """Prints a record of kind `compile-rows`.

    Args:
        record: The record; an incomplete one prints what it has and why it ended.
        console: Where to print.
    """
    device = record.device_name or "unknown device"
    workload = record["workload"].get("name", "unknown")
    title = f"vitgraph bench --compile-rows: {record.model_name} on {device}, workload {workload}"
    console.print(Text(title, style="bold"))
    if record["status"] != "complete":
        console.print(Text(f"{record['status'].capitalize()}: {record['status_reason']}", style="bold yellow"))
    console.print()
    console.print(_latency_table(record))
    if record.is_cpu_replay:
        console.print(Text("Replay on a CPU is the forward again: no speed-up is claimed.", style="yellow"))
    elif record["comparison"].get("contrasts"):
        console.print(Text("Milliseconds a request.", style="dim"))
        console.print()
        console.print(_gain_table(record))
        console.print(Text("Positive = the second is faster; 95 % interval in brackets.", style="dim"))
    console.print()
    for line in _facts(record):
        console.print(Text(line))


def compile_rows_markdown(records: Sequence[CompareRecord]) -> str:
    """One table of records of kind `compile-rows`, in their order.

    Args:
        records: The records; what was not measured in one has a dash.
    """
    gains = [f"{first} → {second}" for first, second in _GAINS]
    headers = ("Row", "Model", "Workload", *(label for label, *_ in _SERIES), *gains, *_MARKDOWN_FACTS)
    lines = [markdown_row(headers), markdown_row([":--"] * 3 + ["--:"] * (len(headers) - 3))]
    for record in records:
        workload = record["workload"]
        row = record["settings"]["resolved"]["row"]
        cells = [record.model_name, f"{workload.get('name')}, {workload.get('requests')}", *_mean_cells(record)]
        lines.append(markdown_row([f"`{row}`", *map(markdown_text, cells)]))
    lines += [
        "",
        "Mean milliseconds a request. Positive = the second is faster, with its 95% interval. Launch gap: "
        f"{LAUNCH_GAP_MEANING}. Error: relative L2 distance from float32.",
    ]
    return "\n".join(lines) + "\n"


def _mean_cells(record: CompareRecord) -> list[str]:
    rows = {row["requested"]: row for row in record.rows}
    plain, compiled = rows["plain"], rows["compiled"]
    contrasts = record["comparison"].get("contrasts") or ()
    found = {(entry["first"], entry["second"]): entry for entry in contrasts if entry["metric"] == "mean"}
    errors = [row["error_vs_float32"]["graph"] for row in (plain, compiled)]
    compile_s = compiled.get("compile_s")
    return [
        *(ms_text(rows[name][mode]["mean_ms"]) if rows[name][mode] else NO_VALUE for _, name, mode in _SERIES),
        *(_gain(found.get(pair)) for pair in _GAINS),
        "→".join(ratio_text(row["launch_gap"]) for row in (plain, compiled)),
        "→".join(f"{error:.1e}" if is_number(error) else NO_VALUE for error in errors),
        f"{number_text(compile_s, 1)} s" if is_number(compile_s) else NO_VALUE,
    ]


def _latency_table(record: CompareRecord) -> Table:
    rows = {row["requested"]: row for row in record.rows}
    limit = record["comparison"].get("speed_of_light_ms")
    has_p99 = any(rows[name][mode] and rows[name][mode]["p99_supported"] for _, name, mode in _SERIES)
    tail, field = ("P99", "p99_ms") if has_p99 else (f"Max (n<{P99_MIN_SAMPLES})", "max_ms")
    table = new_table(collapse_padding=True)
    table.add_column("Row", no_wrap=True)
    for name in ("Mean", "P50", tail, "GPU mean", "Launch gap", "Over the limit", "Error"):
        table.add_column(name, justify="right")
    for label, name, mode in _SERIES:
        row = rows[name]
        latency = row[mode]
        if latency is None:
            state = row["modes"][mode]
            word = "not measured" if state["status"] == "ok" else state["status"].replace("_", " ")
            table.add_row(label, word, *[NO_VALUE] * 6)
            continue
        error = row["error_vs_float32"][mode]
        table.add_row(
            label,
            ms_text(latency["mean_ms"]),
            ms_text(latency["p50_ms"]),
            ms_text(latency[field]),
            ms_text(latency["gpu_mean_ms"]),
            ratio_text(row["launch_gap"]) if mode == "graph" else "",
            ratio_text(latency["mean_ms"] / limit) if limit else NO_VALUE,
            f"{error:.1e}" if is_number(error) else NO_VALUE,
        )
    return table


def _gain_table(record: CompareRecord) -> Table:
    table = new_table(collapse_padding=True)
    table.add_column("Improvement", no_wrap=True)
    for name in ("Mean", "P99"):
        table.add_column(name)
    pairs: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
    for entry in record["comparison"]["contrasts"]:
        pairs.setdefault((entry["first"], entry["second"]), {})[entry["metric"]] = entry
    for (first, second), found in pairs.items():
        table.add_row(f"{first} → {second}", _gain(found.get("mean")), _gain(found.get("p99")))
    return table


def _gain(entry: Mapping[str, Any] | None) -> str:
    if entry is None or entry["ci95"] is None or not is_number(entry["delta_pct"]):
        return NO_VALUE
    low, high = (signed_pct_text(-end) for end in reversed(entry["ci95"]))
    interval = f" ({low} … {high})" if entry["verdict"] != "invalid" else ""
    return f"{signed_pct_text(-entry['delta_pct'])}{interval} {entry['verdict']}"


def _facts(record: CompareRecord) -> list[str]:
    rows = {row["requested"]: row for row in record.rows}
    compiled = rows["compiled"]
    lines = []
    if is_number(compiled.get("compile_s")):
        cache = compiled["compile_cache"]
        lines.append(
            f"Compilation: {number_text(compiled['compile_s'], 1)} s in "
            f"{count_text(compiled['compilations'], 'compilation')}, {cache['hits']} of them from the cache in "
            f"{compiled['compile_cache_dir'] or 'a temporary folder'}"
        )
    else:
        lines.append(f"Compilation: {NOT_MEASURED}")
    for row in record.rows:
        for mode, state in row["modes"].items():
            if state["status"] != "ok":
                lines.append(f"{row['requested']} {mode}: {state['status'].replace('_', ' ')}: {state['reason']}")
    reasons = record["comparison"]["invalid_reasons"]
    if reasons and not record.is_cpu_replay:
        lines.append(f"No verdict: {'; '.join(reasons)}")
    return lines
