"""Prints what a machine can run, and why not the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vitgraph.report.terminal import new_table
from vitgraph.report.units import NO_VALUE, bytes_text, number_text

YES, NO = "yes", "no"


def render_doctor(facts: Mapping[str, Any], console: Console) -> None:
    """Prints `doctor.examine()`: the machine, its GPUs, the libraries, the backends, the verdict and the advice."""
    console.print(_machine(facts))
    console.print()
    console.print(_libraries(facts["libraries"]))
    console.print()
    if facts["backends"]:
        console.print(_backends(facts["backends"]))
    if facts["backends_problem"]:
        console.print(Text(f"attention backends could not be examined: {facts['backends_problem']}", "red"))
    console.print()
    for line in facts["can_run"] or ["nothing: see below"]:
        console.print(Text(f"can run: {line}", "bold" if facts["can_run"] else "bold red"))
    for line in facts["advice"]:
        console.print(Text(f"advice: {line}"))


def _machine(facts: Mapping[str, Any]) -> Table:
    hub, memory = facts["hub"], facts["memory"]
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    rows = [
        ("vitgraph", f"{facts['vitgraph']}, Python {facts['python']}"),
        ("system", facts["platform"]),
        (
            "host",
            f"{facts['cpu_count']} CPUs, {bytes_text(memory['available_bytes'])} of "
            f"{bytes_text(memory['total_bytes'])} memory available",
        ),
        ("torch", _torch(facts)),
        ("driver", facts["driver"] or NO_VALUE),
        *((f"GPU {gpu['index']}", _gpu(gpu)) for gpu in facts["gpus"]),
        ("hub", f"{hub['endpoint']} " + ("answers" if hub["reachable"] else f"is not reachable: {hub['reason']}")),
    ]
    for name, value in rows:
        table.add_row(Text(name), Text(str(value)))
    return table


def _torch(facts: Mapping[str, Any]) -> str:
    if facts["torch"] is None:
        return str(facts["torch_problem"])
    toolkit = [f"{name} {facts[key]}" for name, key in (("CUDA", "cuda"), ("HIP", "hip")) if facts[key]]
    built = ", ".join([facts["torch"], *toolkit])
    return f"{built}; {facts['torch_problem']}" if facts["torch_problem"] else built


def _gpu(gpu: Mapping[str, Any]) -> str:
    parts = [
        f"{gpu['name']}, compute capability {gpu['compute_capability']}",
        f"{bytes_text(gpu['free_bytes'])} of {bytes_text(gpu['total_bytes'])} free",
    ]
    if gpu["throttled_by"] is None:
        return "; ".join([*parts, "clocks unknown without nvidia-smi"])
    parts += [
        f"SM clock {number_text(gpu['sm_clock_mhz'], 0)} of {number_text(gpu['max_sm_clock_mhz'], 0)} MHz",
        f"{number_text(gpu['power_draw_w'], 0)} of {number_text(gpu['power_limit_w'], 0)} W",
        f"{number_text(gpu['temperature_c'], 0)} °C",
        f"throttled by {', '.join(gpu['throttled_by'])}" if gpu["throttled_by"] else "not throttled",
        f"other processes on it: {gpu['other_processes']}",
    ]
    return "; ".join(parts)


def _libraries(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("Library", "Installed", "Wanted", "Fits")
    for row in rows:
        fits = {True: YES, False: NO, None: NO_VALUE}[row["fits"]]
        style = "red" if row["fits"] is False else ""
        wanted = "optional" if row["wanted"] is None else row["wanted"] or "any"
        table.add_row(Text(row["name"], style), row["installed"] or NO_VALUE, Text(wanted), Text(fits, style))
    return table


def _backends(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("Attention backend", "Runs", "Graphs", "Head widths", "Why not")
    for row in rows:
        reason = row["unavailable_reason"]
        table.add_row(
            Text(row["name"]),
            Text(NO if reason else YES, "dim" if reason else "green"),
            YES if row["is_capture_safe"] else NO,
            Text(row["head_widths"]),
            Text(reason or ""),
        )
        generations = row["generations"] or {}
        # Where the backend has none, its own reason is enough.
        for version, why in generations.items() if reason is None else ():
            table.add_row(Text(f"  generation {version}"), NO if why else YES, "", "", Text(why or ""))
    return table


def _table(*columns: str) -> Table:
    table = new_table()
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
