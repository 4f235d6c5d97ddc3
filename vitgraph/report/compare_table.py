"""Lays out a backend comparison for a terminal: one table, the advice beneath it, then reasons and facts.

Tables print improvements, positive = graph faster than the same backend's eager; the record holds the opposite sign.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vitgraph.records.bench_record import ranks_of
from vitgraph.records.compare_record import CompareRecord
from vitgraph.records.stats import P99_MIN_SAMPLES
from vitgraph.report.terminal import VERDICT_STYLES, fact_list, line, new_table
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
    signed_pct_text,
)

WIDE_CONSOLE = 140
SIGN_CONVENTION = "Positive = graph faster than the same backend's eager; milliseconds a request, eager→graph."

_OK = "ok"
_EAGER, _GRAPH = MODES = ("eager", "graph")


def render_compare(record: CompareRecord, console: Console) -> None:
    """Prints everything a comparison found.

    Args:
        record: A loaded or fresh record; an incomplete one prints what it has and why it ended.
        console: Where to print; widths from 80 columns on are laid out without cut cells.
    """
    device = record.device_name or "unknown device"
    workload = record["workload"].get("name", "unknown")
    title = f"vitgraph compare-backends: {record.model_name} on {device}, workload {workload}"
    console.print(line(title, "bold"))
    if record["status"] != "complete":
        console.print(line(f"{record['status'].capitalize()}: {record['status_reason']}", "bold yellow"))
    console.print()
    console.print(_wide_table(record) if console.width >= WIDE_CONSOLE else _narrow_table(record))
    console.print(line(SIGN_CONVENTION, "dim"))
    console.print()
    advice = record["recommendation"]
    console.print(line(advice["text"], "bold green" if advice["sure"] == "clear" else "bold yellow"))
    console.print()
    console.print(fact_list([*_reasons(record), *_facts(record)]))


def render_availability(backends: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Prints which backends could run on this device, for a dry run; rows as `describe_backends` gives them."""
    pairs = [
        (row["name"], f"unavailable: {row['unavailable_reason']}") for row in backends if row["unavailable_reason"]
    ]
    here = [(row["name"], "available") for row in backends if not row["unavailable_reason"]]
    console.print(fact_list([*here, *pairs]))


# -- the table -------------------------------------------------------------------------------------------------------


def _wide_table(record: CompareRecord) -> Table:
    table = new_table(collapse_padding=True)
    tail = "P99" if _has_p99(record) else f"Maximum (n<{P99_MIN_SAMPLES})"
    table.add_column("Backend", no_wrap=True)
    for name in ("Mean", tail):
        table.add_column(f"{name} latency improvement", no_wrap=True)
    for name in ("GPU-busy ms", "Launch gap", "Graph memory", "Error"):
        table.add_column(name, justify="right")
    table.add_column("Against the best", no_wrap=True)
    for row in record.rows:
        if _is_nothing(row):
            table.add_row(row["requested"], _status_text(row, _EAGER), *[Text(NO_VALUE)] * 5, "")
            continue
        cells = [_gain_cell(record, row, "mean", " "), _gain_cell(record, row, "p99", " ")]
        error = _error_cell(row)
        busy, gap = number_text(row["gpu_busy_ms"], 2), ratio_text(row["launch_gap"])
        table.add_row(row["requested"], *cells, busy, gap, _memory(row), error, _standing_cell(record, row, ", "))
    return table


def _narrow_table(record: CompareRecord) -> Table:
    """The same cells on more lines, with GPU-busy time over launch gap and memory over error."""
    table = new_table(collapse_padding=True)
    table.add_column("Backend", no_wrap=True)
    tail = "P99 ms" if _has_p99(record) else f"Max ms\n(n<{P99_MIN_SAMPLES})"
    for name in ("Mean ms", tail, "Against\nthe best"):
        table.add_column(name)
    for name in ("Busy ms,\ngap", "Memory,\nerror"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in record.rows:
        if _is_nothing(row):
            table.add_row(row["requested"], _status_text(row, _EAGER), *[Text(NO_VALUE)] * 4)
            continue
        cells = [_gain_cell(record, row, "mean", "\n"), _gain_cell(record, row, "p99", "\n")]
        busy = _pair(number_text(row["gpu_busy_ms"], 2), ratio_text(row["launch_gap"]))
        memory = _pair(_memory(row), _error_cell(row))
        table.add_row(row["requested"], *cells, _standing_cell(record, row, "\n"), busy, memory)
    return table


def _has_p99(record: CompareRecord) -> bool:
    return any(row[mode] and row[mode]["p99_supported"] for row in record.rows for mode in MODES)


def _is_nothing(row: Mapping[str, Any]) -> bool:
    return row[_EAGER] is None and row[_GRAPH] is None


def _status_text(row: Mapping[str, Any], mode: str) -> Text:
    status = row["modes"][mode]["status"]
    return Text("not measured" if status == _OK else status.replace("_", " "), style="yellow")


def _gain_cell(record: CompareRecord, row: Mapping[str, Any], metric: str, gap: str) -> Text:
    """Improvement and both latencies as upstream prints them, and beneath them what may be claimed.

    Args:
        record: The run.
        row: A backend with at least one mode measured.
        metric: `mean` or `p99`; too few requests for a P99 show the maximum, of which nothing is claimed.
        gap: Between the improvement and the latencies.
    """
    is_tail = metric == "p99"
    field = "max_ms" if is_tail and not _has_p99(record) else f"{metric}_ms"
    missing = [mode for mode in MODES if row[mode] is None]
    if missing:
        (mode,) = (mode for mode in MODES if mode not in missing)
        cell = Text(f"{mode}{gap}{_short_ms(row[mode][field])}", style="bold")
        return cell if is_tail else cell.append(f"\n{missing[0]}{gap}").append(_status_text(row, missing[0]))
    eager, graph = row[_EAGER][field], row[_GRAPH][field]
    improvement = 100 * (1 - graph / eager) if eager else None
    times = f"{_short_ms(eager)}→{_short_ms(graph)}"
    latencies = f"({times} ms)" if gap == " " else times
    cell = Text(f"{signed_pct_text(improvement)}{gap}{latencies}", style="bold")
    entry = row["improvement"][metric]
    if field == "max_ms":
        return cell
    if record.is_cpu_replay:
        return cell.append("\nnot a GPU", style="not bold")
    cell.append(f"\n{entry['verdict']}", style=f"not bold {VERDICT_STYLES[entry['verdict']]}")
    if entry["ci95"] is not None and entry["verdict"] != "invalid" and gap == " ":
        low, high = (signed_pct_text(-end).removesuffix("%") for end in reversed(entry["ci95"]))
        cell.append(f", 95% CI {low} … {high}%", style="not bold")
    return cell


def _standing_cell(record: CompareRecord, row: Mapping[str, Any], gap: str) -> Text:
    """The backend's faster mode against the fastest of all: the verdict, how much slower, and the interval."""
    entry = row["verdict_vs_best"]
    if entry is None or record.is_cpu_replay:
        return Text("not a GPU" if record.is_cpu_replay else NO_VALUE)
    verdict = entry["verdict"]
    cell = Text(verdict, style=VERDICT_STYLES[verdict])
    if entry["delta_pct"] == 0.0:
        return cell.append(f"{gap}{entry['mode']}", style="not bold default")
    cell.append(f"{gap}{entry['mode']} {signed_pct_text(entry['delta_pct'])}", style="default")
    if entry["ci95"] is not None and verdict != "invalid":
        low, high = (signed_pct_text(end).removesuffix("%") for end in entry["ci95"])
        cell.append(f"\n{'95% CI ' if gap != chr(10) else ''}{low} … {high}%", style="default")
    return cell


def _pair(above: str, below: str) -> str:
    return above if (above, below) == (NO_VALUE, NO_VALUE) else f"{above}\n{below}"


def _short_ms(value: Any) -> str:
    return number_text(value, 1) if is_number(value) and value >= 100 else ms_text(value)


def _memory(row: Mapping[str, Any]) -> str:
    sizes = [row[name] for name in ("pool_bytes", "buffer_bytes")]
    return bytes_text(sum(sizes)) if all(is_number(size) for size in sizes) else NO_VALUE


def _error_cell(row: Mapping[str, Any]) -> str:
    errors = [error for error in row["error_vs_float32"].values() if is_number(error)]
    return f"{max(errors):.1e}" if errors else NO_VALUE


# -- what is beneath it ----------------------------------------------------------------------------------------------


def _reasons(record: CompareRecord) -> Iterable[tuple[str, str]]:
    for row in record.rows:
        states = {mode: row["modes"][mode] for mode in MODES if row["modes"][mode]["status"] != _OK}
        if len(states) == len(MODES) and states[_EAGER] == states[_GRAPH]:
            yield row["requested"], f"{_named(states[_EAGER]['status'])}: {states[_EAGER]['reason']}"
        else:
            for mode, state in states.items():
                yield f"{row['requested']} {mode}", f"{_named(state['status'])}: {state['reason']}"


def _named(status: str) -> str:
    return str(status).replace("_", " ")


def _facts(record: CompareRecord) -> Iterable[tuple[str, str]]:
    comparison = record["comparison"]
    measured = [row for row in record.rows if not _is_nothing(row)]
    if comparison["requests"]:
        size = f"{count_text(comparison['requests'], 'request')} × {count_text(comparison['rounds'], 'round')}"
        how = _processes(comparison["isolated"], ranks_of(record["settings"]))
        left_out = comparison["unpaired_samples"]
        note = f"; {count_text(left_out, 'sample')} without a partner left out" if left_out else ""
        yield "Measured", f"{size}, {count_text(len(measured), 'backend')}, {how}{note}"
        yield "Noise floor", _noise_fact(comparison)
    if comparison["reference"]:
        yield "Checked", _reference_fact(comparison["reference"])
    use = _per_backend(measured, _use_fact)
    if use:
        yield "Hits", use
    busy = _per_backend(measured, _busy_fact)
    if busy:
        yield "GPU-busy share", f"{busy} of the latency of whole calls"
    slower = _per_backend(measured, _slower_fact)
    if slower:
        yield "Slower requests", f"{slower} slower than the backend's own eager by more than 2%"
    captured = _per_backend(measured, _capture_fact)
    if captured:
        yield "Capture", captured
    ran = [f"{row['requested']}: {row['implementation']}" for row in measured if row["implementation"]]
    if ran:
        yield "Ran", "; ".join(ran)
    skipped = record["workload"].get("skipped", [])
    if skipped:
        yield "Skipped inputs", f"{len(skipped)}, first: {skipped[0]['source']}: {skipped[0]['reason']}"


def _processes(is_isolated: bool, ranks: int) -> str:
    """Which processes measured the backends."""
    if is_isolated:
        return "each backend in a process of its own" if ranks == 1 else f"each backend on {ranks} ranks of its own"
    return "interleaved in one process" if ranks == 1 else f"interleaved on {ranks} ranks"


def _per_backend(rows: Sequence[Mapping[str, Any]], fact: Callable[[Mapping[str, Any]], str | None]) -> str:
    """One fact a backend; backends that share it are named together, and not at all where it is everyone's."""
    names: dict[str, list[str]] = {}
    for row in rows:
        text = fact(row)
        if text is not None:
            names.setdefault(text, []).append(row["requested"])
    if len(names) == 1 and len(next(iter(names.values()))) == len(rows):
        return next(iter(names))
    return "; ".join(f"{', '.join(sharing)} {text}" for text, sharing in names.items())


def _noise_fact(comparison: Mapping[str, Any]) -> str:
    floors = comparison["noise_floor_pct"]
    parts = [
        f"{mode} ±{number_text(floors[mode]['mean'], 2)}%"
        if is_number(floors[mode]["mean"])
        else f"{mode} {NOT_MEASURED}"
        for mode in MODES
    ]
    return f"mean {', '.join(parts)} (calls measured twice by the same backend in the same mode)"


def _reference_fact(reference: Mapping[str, Any]) -> str:
    own = f"{reference['own_error']:.1e}" if is_number(reference["own_error"]) else NO_VALUE
    return (
        f"{count_text(reference['calls'], 'call')} with every backend and mode against the same tower in float32; "
        f"relative L2 up to {reference['limit']:.1e} passes ({reference['backend']} in this dtype: {own})"
    )


def _use_fact(row: Mapping[str, Any]) -> str | None:
    use = row["use"]
    if use is None:
        return None
    waste = f", waste {share_text(use['waste'])}" if is_number(use["waste"]) else ""
    return f"{use['hits']} of {count_text(use['items'], 'item')}, {count_text(use['replays'], 'replay')}{waste}"


def _busy_fact(row: Mapping[str, Any]) -> str | None:
    shares = [row["busy"][mode]["share"] if row["busy"][mode] else None for mode in MODES]
    if not any(is_number(share) for share in shares):
        return None
    return "→".join(share_text(share) for share in shares)


def _slower_fact(row: Mapping[str, Any]) -> str | None:
    slower = row["slower_than_eager"]
    return None if slower is None else f"{slower['over_2pct_count']} of {slower['n']}"


def _capture_fact(row: Mapping[str, Any]) -> str | None:
    if row["captured"] is None:
        return None
    dropped = f" (-{len(row['dropped'])})" if row["dropped"] else ""
    return f"{count_text(row['captured'], 'graph')}{dropped} in {number_text(row['capture_s'], 2)} s"
