"""Lays out verification results for a terminal: one line a model, then every fault and where it was found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vitgraph.report.terminal import new_table
from vitgraph.report.units import NO_VALUE, count_text, is_number, number_text

_STATUS_STYLES = {"ok": "green", "failed": "bold red", "error": "bold red", "skipped": "dim"}


def render_verify(
    results: Sequence[Mapping[str, Any]],
    console: Console,
    *,
    show_checks: bool | None = None,
    stopped: str | None = None,
) -> None:
    """Prints what `verify` found.

    Args:
        results: `VerifyResult.as_dict()` of each encoder, or the same from a file.
        console: Where to print.
        show_checks: List every check of every encoder; None does so where there is one encoder. Checks that failed
            are always listed.
        stopped: Why the run is not complete, in words.
    """
    console.print(_result_table(results))
    for result in results:
        _print_details(result, console, len(results) == 1 if show_checks is None else show_checks)
    console.print(_summary(results, stopped))


def _result_table(results: Sequence[Mapping[str, Any]]) -> Table:
    table = new_table()
    table.add_column("Model", overflow="fold")
    table.add_column("Status", no_wrap=True)
    for name in ("Rel. L2", "Graphs", "Calls", "Items", "Seconds"):
        table.add_column(name, justify="right", no_wrap=True)
    for result in results:
        dropped = f" (-{result['graphs_dropped']})" if result["graphs_dropped"] else ""
        table.add_row(
            Text(_name(result)),
            Text(result["status"], style=_STATUS_STYLES[result["status"]]),
            _distance(result["max_rel_l2"]),
            f"{result['graphs_captured']}{dropped}",
            str(result["calls"]),
            str(result["items"]),
            number_text(result["seconds"], 1),
        )
    return table


def _name(result: Mapping[str, Any]) -> str:
    return str(result["preset"] or result["row"] or result["architecture"])


def _distance(value: Any) -> str:
    if is_number(value):
        return f"{value:.1e}"
    return NO_VALUE if value is None else str(value)


def _print_details(result: Mapping[str, Any], console: Console, show_all: bool) -> None:
    listed = [check for check in result["checks"] if show_all or check["status"] == "failed"]
    if not listed and result["error"] is None:
        return
    console.print()
    console.print(Text(_name(result), style="bold"))
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True)
    grid.add_column()
    for check in listed:
        more = f" (and {check['failures'] - 1} more)" if check["failures"] > 1 else ""
        grid.add_row(
            f"  {check['name']}",
            Text(check["status"], style=_STATUS_STYLES[check["status"]]),
            Text(f"{check['detail']}{more}"),
        )
    if listed:
        console.print(grid)
    if result["error"] is not None:
        console.print(Text(f"  Not verified: {result['error']}", style="bold red"))


def _summary(results: Sequence[Mapping[str, Any]], stopped: str | None) -> Text:
    passed = sum(result["status"] == "ok" for result in results)
    is_sound = passed == len(results) and stopped is None
    whole = f"{passed} of {count_text(len(results), 'encoder')} verified" if stopped is None else f"{passed} verified"
    text = Text(f"\n{whole}", style="bold green" if is_sound else "bold red")
    if stopped is not None:
        text.append(f"; {stopped}")
    for setting in dict.fromkeys(_setting(result) for result in results if result["tolerance"] is not None):
        text.append(f"\n{setting}", style="not bold default")
    return text


def _setting(result: Mapping[str, Any]) -> str:
    """What the figures of a result hold for."""
    requested, used = result["backend_requested"], result["backend_used"] or NO_VALUE
    backend = used if requested in (None, used) else f"{used} (asked for {requested})"
    compiled = ", blocks compiled" if result.get("compiled_blocks") else ""
    place = f"{result['dtype']} on {result['device']}, {backend}{compiled}"
    return f"Relative L2 distance from eager of at most {result['tolerance']:g}; {place}"
