"""Pieces that the terminal reports share: plain lines, lists of facts, tables, and the colours of verdicts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

VERDICT_STYLES = {
    "best": "bold green",
    "faster": "green",
    "slower": "red",
    "same": "cyan",
    "undecided": "yellow",
    "invalid": "red",
    "none": "default",
}


def line(text: str, style: str = "") -> Text:
    """A line of text; a model name may hold square brackets, and `Text` takes none of them for markup."""
    return Text(text, style=style)


def fact_list(pairs: Iterable[tuple[str, str | Text]]) -> Table:
    """Names and values in two columns."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    for label, value in pairs:
        grid.add_row(label, value if isinstance(value, Text) else line(value))
    return grid


def new_table(title: str | None = None, **options: Any) -> Table:
    """An empty table in the style of all reports.

    Args:
        title: Printed above it, bold.
        options: Further options of `rich.table.Table`.
    """
    style: dict[str, Any] = {"box": SIMPLE_HEAD, "show_edge": False, "pad_edge": False}
    return Table(title=title, title_justify="left", title_style="bold", **style, **options)


def add_numeric_columns(table: Table, names: Sequence[str]) -> None:
    """Adds columns of numbers; in a narrow terminal only headers of two words may break."""
    for name in names:
        table.add_column(name, justify="right", no_wrap=" " not in name)
