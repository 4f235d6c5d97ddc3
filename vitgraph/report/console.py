"""Prints a saved run as tables and facts for a terminal; the only module beside the CLI that prints.

Tables print improvements, positive = graph faster; the record holds the opposite sign.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vitgraph.records.bench_record import CPU_REPLAY_REASON, RunRecord
from vitgraph.report.claims import LAUNCH_GAP_MEANING, Claim, backend_text, claim_of, verdict_of, workload_name
from vitgraph.report.csv_tables import graph_key
from vitgraph.report.paths_view import (
    MONOLITHIC_HEADERS,
    MONOLITHIC_TITLE,
    PATH_HEADERS,
    PATHS_NOTE,
    PATHS_TITLE,
    all_graphs,
    has_monolithic,
    monolithic_claims,
    monolithic_rows,
    path_rows,
)
from vitgraph.report.terminal import VERDICT_STYLES, add_numeric_columns, fact_list, line, new_table
from vitgraph.report.units import (
    NO_VALUE,
    NOT_MEASURED,
    bytes_text,
    count_text,
    is_number,
    ms_text,
    number_text,
    ratio_text,
    share_text,
)

SIGN_CONVENTION = "positive = graph faster; milliseconds a request, eager→graph"

_CELL_WIDTH = 32
_WIDE_CONSOLE = 100
_GRAPHS_LISTED = 8


def render_bench(record: RunRecord, console: Console) -> None:
    """Prints everything a `bench` run found: improvements, facts, verdict, and its replays by token budget.

    Args:
        record: A loaded or fresh record; an incomplete one prints what it has and why it ended.
        console: Where to print; widths from 80 columns on are laid out without cut cells.
    """
    device = record.device_name or "unknown device"
    console.print(line(f"vitgraph bench: {record.model_name} on {device}, workload {workload_name(record)}", "bold"))
    if record["status"] != "complete":
        console.print(line(f"{record['status'].capitalize()}: {record['status_reason']}", "bold yellow"))
    console.print()
    comparison = record["comparison"] or {}
    if comparison.get("requests"):
        console.print(_improvement_table(record, console.width))
        console.print(line(SIGN_CONVENTION, "dim"))
    else:
        console.print(line("No request was measured in both modes, so there is nothing to compare."))
    console.print()
    console.print(fact_list([*_fact_lines(record), ("Verdict", _verdict_text(record))]))
    if record.is_cpu_replay:
        console.print(line(f"{CPU_REPLAY_REASON[0].upper()}{CPU_REPLAY_REASON[1:]}."))
    if has_monolithic(record):
        console.print()
        console.print(cell_table(MONOLITHIC_TITLE, MONOLITHIC_HEADERS, monolithic_rows(record)))
        for claim in monolithic_claims(record):
            console.print(line(claim))
    if record["graph"]:
        console.print()
        print_paths(record["graph"], console)
        _print_per_budget(record["graph"], console)
        _print_dropped(record["graph"], console)


def print_paths(graph: Mapping[str, Any], console: Console) -> None:
    """Prints what was done on each encoder path; nothing for a model with one."""
    rows = path_rows(graph)
    if rows:
        console.print(cell_table(PATHS_TITLE, PATH_HEADERS, rows))
        console.print(line(PATHS_NOTE, "dim"))
        console.print()


def cell_table(title: str, headers: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table of texts whose first column names the row."""
    table = new_table(title, collapse_padding=True)
    table.add_column(headers[0], no_wrap=True)
    add_numeric_columns(table, headers[1:])
    for row in rows:
        table.add_row(*row)
    return table


def render_captures(record: RunRecord, console: Console) -> None:
    """Prints what was captured: time and memory of each graph, the totals, and what could not be captured."""
    graph = record["graph"] or {}
    captured = all_graphs(graph, "captured")
    if captured:
        replays = {graph_key(entry): entry["replays"] for entry in all_graphs(graph, "per_budget")}
        table = _graph_table(f"Captured graphs ({graph['mode']})", captured)
        add_numeric_columns(table, ("Capture ms", "Pool", "Buffers", "Replays"))
        for entry in captured:
            table.add_row(
                *_graph_cells(entry, captured),
                number_text(entry["capture_ms"], 1),
                bytes_text(entry["pool_bytes"]),
                bytes_text(entry["buffer_bytes"]),
                str(replays.get(graph_key(entry), 0)),
            )
        console.print(table)
        console.print(line(f"Total: {_capture_fact(graph)}; {_memory_fact(graph)}"))
    else:
        console.print(line("No graph was captured."))
    _print_dropped(graph, console)


def _improvement_table(record: RunRecord, width: int) -> Table:
    table = new_table()
    table.add_column("Backend")
    table.add_column("Mean latency improvement")
    table.add_column("P99 latency improvement")
    cells = (_claim_cell(claim_of(record, metric), width) for metric in ("mean", "p99"))
    table.add_row(_backend(record), *cells)
    return table


def _backend(record: RunRecord) -> Text:
    return Text(backend_text(record).replace(" (asked for ", "\n(asked for\n"))


def _claim_cell(claim: Claim, width: int) -> Text:
    """The improvement as upstream prints it, and beneath it what may be claimed of it."""
    cell = Text(f"{claim.headline}\n", style="bold")
    style = f"not bold {VERDICT_STYLES[claim.verdict]}"
    if not claim.interval:
        return cell.append(claim.qualifier, style=style)
    fits = width >= _WIDE_CONSOLE or len(claim.note) <= _CELL_WIDTH
    return cell.append(claim.note if fits else f"{claim.qualifier},\n{claim.interval}", style=style)


def _fact_lines(record: RunRecord) -> Iterable[tuple[str, str]]:
    comparison, graph = record["comparison"] or {}, record["graph"]
    is_compared = bool(comparison.get("requests"))
    if is_compared:
        left_out = comparison["unpaired_samples"]
        note = f"; {count_text(left_out, 'sample')} without a partner left out" if left_out else ""
        size = f"{count_text(comparison['requests'], 'request')} × {count_text(comparison['rounds'], 'round')}"
        yield "Measured", f"{size}, modes interleaved{note}"
    for mode, label in (("eager", "Eager"), ("graph", "Graph"), ("monolithic", "Monolithic"), ("hf", "Transformers")):
        if record["summary"].get(mode, {}).get("n"):
            yield label, _latency_fact(record["summary"][mode])
    if record["summary"].get("eager", {}).get("speed_of_light_ms") is not None:
        yield "Speed of light", _speed_of_light_fact(record["summary"])
    if graph:
        yield from _graph_facts(graph)
    if is_compared:
        yield "Slower requests", _slower_fact(comparison["slower_than_eager"])
        floors = [comparison[metric]["noise_floor_pct"] for metric in ("mean", "p99")]
        mean, p99 = (f"±{number_text(floor, 2)}%" if is_number(floor) else NOT_MEASURED for floor in floors)
        yield "Noise floor", f"mean {mean}, P99 {p99} (eager against eager)"
    yield "Correctness", _correctness_fact(record["correctness"])
    skipped = record["workload"].get("skipped", [])
    if skipped:
        yield "Skipped inputs", f"{len(skipped)}, first: {skipped[0]['source']}: {skipped[0]['reason']}"


def _latency_fact(entry: Mapping[str, Any]) -> str:
    names = ["mean", "p50", "p90", *(["p99"] if entry["p99_supported"] else []), "max"]
    parts = [f"{name.capitalize() if name != 'mean' else name} {ms_text(entry[f'{name}_ms'])}" for name in names]
    gpu = entry["gpu_mean_ms"]
    gpu_note = f"GPU time {ms_text(gpu)} mean" if is_number(gpu) else f"GPU time {NOT_MEASURED}"
    parts[-1] = parts[-1].lower()
    return f"{', '.join(parts)} ms; {gpu_note}; {count_text(entry['outliers'], 'outlier')} kept"


def _speed_of_light_fact(summary: Mapping[str, Any]) -> str:
    times = [f"{mode} {ratio_text(entry.get('times_speed_of_light'))}" for mode, entry in summary.items()]
    limit = ms_text(summary["eager"]["speed_of_light_ms"])
    return f"{limit} ms for the arithmetic of a mean request; {', '.join(times)} of it"


def _graph_facts(graph: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    rate = f" ({share_text(graph['hit_rate'])})" if graph["hit_rate"] is not None else ""
    partial = f", {graph['partial_hits']} of them with some path replayed" if graph["partial_hits"] else ""
    yield "Items", f"{graph['items']}: {count_text(graph['hits'], 'hit')}{rate}, {_misses(graph['misses'])}{partial}"
    reasons = sorted(graph["misses_by_reason"].items(), key=lambda pair: (-pair[1], pair[0]))
    if graph["misses"]:
        yield "Misses by reason", ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in reasons if count)
    used, rows = graph["tokens_replayed"], graph["budget_tokens_replayed"]
    waste = f", waste {share_text(graph['waste'])} ({used:,} of {rows:,} rows used)" if graph["replays"] else ""
    yield "Replays", f"{graph['replays']} ({graph['policy']} packing){waste}"
    gap = graph.get("launch_gap")
    yield (
        "Launch gap",
        f"{ratio_text(gap)} ({LAUNCH_GAP_MEANING})" if is_number(gap) else NOT_MEASURED,
    )
    steps = graph.get("host_steps_ms")
    if steps:
        named = (f"{name.replace('_', ' ')} {ms_text(value)}" for name, value in steps.items())
        yield "Host steps", f"{', '.join(named)} ms"
    if graph.get("call_overheads"):
        yield "Call overhead", _overhead_fact(graph["call_overheads"][0])
    yield "Memory", _memory_fact(graph)
    yield "Capture", _capture_fact(graph)


def _overhead_fact(call: Mapping[str, Any]) -> str:
    shape = f"{count_text(call['items'], 'item')}, {count_text(call['tokens'], 'token')}"
    parts = f"whole {ms_text(call['call_ms'])}, replays {ms_text(call['replays_ms'])}"
    return f"{ms_text(call['overhead_ms'])} ms outside the replays of the most frequent call ({shape}: {parts} ms)"


def _misses(number: int) -> str:
    return "1 miss" if number == 1 else f"{number} misses"


def _memory_fact(graph: Mapping[str, Any]) -> str:
    sizes = (("graph pool", graph.get("pool_bytes")), ("buffers", graph.get("buffer_bytes")))
    return ", ".join(f"{name} {bytes_text(size) if is_number(size) else NOT_MEASURED}" for name, size in sizes)


def _capture_fact(graph: Mapping[str, Any]) -> str:
    captured, dropped = len(graph.get("captured", [])), len(graph.get("dropped", []))
    seconds = f" in {number_text(graph['capture_s'], 2)} s" if is_number(graph.get("capture_s")) else ""
    failed = f", {dropped} not captured (listed below)" if dropped else ""
    return f"{count_text(captured, 'graph')}{seconds}{failed}"


def _slower_fact(slower: Mapping[str, Any]) -> str:
    n, over = slower["n"], slower["over_2pct_count"]
    fixed = f"{over} of {n} ({share_text(slower['over_2pct_share'])}) slower than eager by more than 2%"
    if slower["count"] is None:
        return f"{fixed}; request noise {NOT_MEASURED}"
    threshold = f"the request noise of {number_text(slower['threshold_pct'], 1)}%"
    return f"{fixed}; {slower['count']} ({share_text(slower['share'])}) by more than {threshold}"


def _correctness_fact(correctness: Mapping[str, Any] | None) -> str:
    if correctness is None:
        return "not checked"
    error, tolerance = correctness["max_rel_l2"], correctness["tolerance"]
    difference, limit = (f"{value:.1e}" if is_number(value) else NOT_MEASURED for value in (error, tolerance))
    return (
        f"{correctness['status']}: graph against eager on {count_text(correctness['checked'], 'call')}, "
        f"largest relative L2 difference {difference}, tolerance {limit}"
    )


def _verdict_text(record: RunRecord) -> Text:
    comparison = record["comparison"] or {}
    if not comparison.get("requests"):
        return Text("none: nothing was compared", style="bold")
    if record.is_cpu_replay:
        return Text("none, not a GPU", style="bold")
    verdict, p99 = comparison["verdict"], comparison["p99"]["verdict"]
    text = Text(f"{verdict}", style=f"bold {VERDICT_STYLES[verdict]}")
    if verdict != "invalid":
        text.append(f" (P99: {p99})")
    return text.append(f": {verdict_of(record).reason}", style="not bold default")


def _graph_table(title: str, entries: Sequence[Mapping[str, Any]]) -> Table:
    """A table whose first columns name a graph; path and axis key only where some graph needs them."""
    table = new_table(title, collapse_padding=True)
    if _has_paths(entries):
        table.add_column("Path", no_wrap=True)
    add_numeric_columns(table, ("Budget", "Slots"))
    if _has_axes(entries):
        add_numeric_columns(table, ("Axis",))
    return table


def _graph_cells(entry: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]) -> list[str]:
    path = [str(entry["path"])] if _has_paths(entries) else []
    axis = ["×".join(map(str, entry["axis_key"])) or NO_VALUE] if _has_axes(entries) else []
    return [*path, str(entry["token_budget"]), str(entry["segment_slots"]), *axis]


def _has_paths(entries: Sequence[Mapping[str, Any]]) -> bool:
    return any(entry["path"] != "default" for entry in entries)


def _has_axes(entries: Sequence[Mapping[str, Any]]) -> bool:
    return any(entry["axis_key"] for entry in entries)


def _print_per_budget(graph: Mapping[str, Any], console: Console) -> None:
    replayed = [entry for entry in all_graphs(graph, "per_budget") if entry["replays"]]
    if not replayed:
        console.print(line("Nothing was replayed.", "bold yellow"))
        return
    table = _graph_table("Replays by token budget", replayed)
    add_numeric_columns(table, ("Replays", "Items", "Fill", "Waste", "Replay ms", "Launch gap"))
    for entry in replayed:
        waste = entry["waste"]
        table.add_row(
            *_graph_cells(entry, replayed),
            str(entry["replays"]),
            str(entry["items"]),
            share_text(1 - waste) if is_number(waste) else NO_VALUE,
            share_text(waste),
            ms_text(entry.get("replay_ms")),
            ratio_text(entry.get("launch_gap")),
        )
    console.print(table)
    used = {graph_key(entry) for entry in replayed}
    idle = [entry for entry in all_graphs(graph, "captured") if graph_key(entry) not in used]
    if idle:
        console.print(line(f"Captured and never replayed: {_list_graphs(idle)}"))


def _print_dropped(graph: Mapping[str, Any], console: Console) -> None:
    by_reason: dict[str, list[Mapping[str, Any]]] = {}
    for entry in all_graphs(graph, "dropped"):
        by_reason.setdefault(entry["reason"], []).append(entry)
    for reason, entries in by_reason.items():
        console.print(line(f"Not captured: {_list_graphs(entries)}: {reason}", "yellow"))


def _list_graphs(entries: Sequence[Mapping[str, Any]]) -> str:
    names = []
    for entry in entries[:_GRAPHS_LISTED]:
        path = "" if entry["path"] == "default" else f"{entry['path']} "
        axis = f", {'×'.join(map(str, entry['axis_key']))}" if entry["axis_key"] else ""
        names.append(f"{path}{entry['token_budget']} ({count_text(entry['segment_slots'], 'slot')}{axis})")
    more = len(entries) - _GRAPHS_LISTED
    return ", ".join(names) + (f" and {more} more" if more > 0 else "")
