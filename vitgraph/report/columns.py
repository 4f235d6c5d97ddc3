"""Columns of tables, each declared once for every medium and the reference."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from vitgraph.records.sections import value_at
from vitgraph.report import say

if TYPE_CHECKING:
    from pydantic import BaseModel

Kind = Literal["text", "integer", "number", "truth"]
Row = Mapping[str, Any]

_UNIT_TEXTS: dict[str, Callable[[Any], str]] = {
    "ms": say.ms,
    "%": say.pct,
    "share": say.share,
    "ratio": say.ratio,
    "bytes": say.size,
    "s": lambda value: say.number(value, 2),
}


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        name: Its key in rows, and its header in files.
        kind: `text`, `integer`, `number` or `truth`.
        unit: Unit of its values; empty where they have none.
        meaning: What it holds, for the reference.
        header: Its header for readers; empty where it is for files alone.
        text: Turns a value into a cell for readers, or its number of decimals; None does so by the unit.
        of: Where its value is in what a row is of: names with dots between, or a function; empty for its own name.
    """

    name: str
    kind: Kind
    unit: str
    meaning: str
    header: str = ""
    text: Callable[[Any], str] | int | None = None
    of: str | Callable[[Any], Any] = ""

    @property
    def is_numeric(self) -> bool:
        return self.kind in ("integer", "number")

    def value(self, thing: Any) -> Any:
        """Its value of one thing; None where something on the way to it is missing."""
        return self.of(thing) if callable(self.of) else value_at(thing, self.of or self.name)

    def cell(self, value: Any) -> Cell:
        """The cell of a value, as a reader sees it."""
        if isinstance(value, Cell):
            return value
        if value is None:
            return Cell(say.NO_VALUE)
        if self.text is not None:
            return Cell(say.number(value, self.text) if isinstance(self.text, int) else self.text(value))
        if self.kind == "integer" and self.unit != "bytes":
            return Cell(f"{value:,}")
        if self.is_numeric:
            return Cell(_UNIT_TEXTS.get(self.unit, lambda number: say.number(number, 2))(value))
        return Cell(("no", "yes")[value] if self.kind == "truth" else str(value))


_UNITS = (
    ("ms|milliseconds", "ms"),
    ("bytes", "bytes"),
    ("pct", "%"),
    ("s|seconds", "s"),
    ("share|rate|waste|fill", "share"),
    ("gap|light|imbalance|l2|error|float32", "ratio"),
    ("budget|tokens", "tokens"),
    ("slots|segments", "segments"),
    ("hits|misses|items|images|videos|vision_items_per_batch", "items"),
    ("length|rows", "rows"),
    ("frames_per_batch", "frames"),
    ("call|requests|outliers", "requests"),
    ("calls|replays|runs|graphs|ranks|rounds|kernels", r"\1"),
)
"""Units by the last word of a field's name."""
_FRACTIONS = frozenset({"ms", "%", "s", "share", "ratio"})
_TEXTS: dict[str, Callable[[Any], str]] = {"launch_gap": say.gap, "token_budget": str}


def unit_of(name: str) -> str:
    """The unit of a field, which its name ends with; empty where it has none."""
    for words, unit in _UNITS:
        if found := re.fullmatch(f"(?:.*_)?({words})", name):
            return found.expand(unit)
    return ""


def fields(
    section: type[BaseModel], at: str = "", *unseen: str, **headers: str | tuple[str, Callable[[Any], str] | int]
) -> tuple[Column, ...]:
    """Columns of a record's fields, with the meaning, kind and unit that the record gives them.

    Args:
        at: Where it is in what a row is of: names with dots between; empty where the row is of it.
        unseen: Fields for files alone.
        headers: By the field's name, the header for readers, or it and `Column.text`.
    """
    found = []
    for name, header in {**dict.fromkeys(unseen, ""), **headers}.items():
        field = section.model_fields[name]
        kind = _kind_of(field.annotation)
        title, text = (header, _TEXTS.get(name)) if isinstance(header, str) else header
        words = " ".join((field.description or "").split()).rstrip(".")
        meaning = words[:1].lower() + words[1:]
        unit = unit_of(name) if kind in ("integer", "number") else ""
        found.append(Column(name, kind, unit, meaning, title, text, f"{at}.{name}" if at else ""))
    return tuple(found)


def column(
    name: str,
    meaning: str,
    header: str = "",
    text: Callable[[Any], str] | int | None = None,
    of: str | Callable[[Any], Any] = "",
    *,
    kind: Kind | None = None,
    unit: str | None = None,
) -> Column:
    """A column that is no field of a record; its unit is that of its name, and its kind that of its unit."""
    found = unit_of(name) if unit is None else unit
    usual: Kind = "text" if not found else "number" if found in _FRACTIONS else "integer"
    return Column(name, kind or usual, found, meaning, header, text, of)


def texts(**headers: str) -> tuple[Column, ...]:
    """Columns of text that only readers see, with their headers by name."""
    return tuple(Column(name, "text", "", "", header) for name, header in headers.items())


_KINDS: dict[Any, Kind] = {int: "integer", float: "number", bool: "truth"}


def _kind_of(annotation: Any) -> Kind:
    """The kind of a field, which may be optional or have rules; what is none of numbers and truths is a text."""
    parts = get_args(annotation)
    if get_origin(annotation) in (Union, UnionType, Annotated):
        kinds = {_kind_of(part) for part in parts[: 1 if get_origin(annotation) is Annotated else None]}
        return max(kinds, key=lambda kind: kind != "text")
    return _KINDS.get(annotation, "text")


@dataclass(frozen=True, slots=True)
class Cell:
    """What stands in a cell, or for a fact.

    Attributes:
        note: What stands beneath it, smaller.
        tone: A word of `vitgraph.report.document.TONES` that colours it, or empty.
    """

    text: str
    note: str = ""
    tone: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """A table: what it is, and its rows, which are none where it is declared.

    Attributes:
        name: Name of its files.
        columns: Its columns, in order.
        title: Its title for readers; may be empty.
        one_row: What a row stands for; empty where only readers see the table.
        counts: What its counts and means are over: `calls`, `requests`, `items`; empty where it has none.
        digits: Significant digits of its numbers in CSV; Parquet holds them whole.
        is_optional: It is of no use to most records, and its files are left out where there is no row of it.
        rows: Values, or whole cells, by column; a value that is left out or None was not measured.
        hidden: Columns that readers are not shown here, beside those without a header.
        notes: What a reader must know, beneath it.
    """

    name: str
    columns: tuple[Column, ...]
    title: str = ""
    one_row: str = ""
    counts: str = ""
    digits: int = 6
    is_optional: bool = False
    rows: tuple[Row, ...] = ()
    hidden: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()

    def filled(self, rows: Iterable[Row], **changes: Any) -> Table:
        """The table with some rows."""
        return replace(self, rows=tuple(rows), **changes)

    def of(self, things: Iterable[Any], **changes: Any) -> Table:
        """The table of some things, a row each, whose values the columns find in them."""
        return self.filled(({column.name: column.value(one) for column in self.columns} for one in things), **changes)

    @property
    def heading(self) -> str:
        """Its title, with what it counts where it counts anything."""
        return f"{self.title} (counts {self.counts})" if self.counts and self.title else self.title

    @property
    def shown(self) -> tuple[Column, ...]:
        """The columns that readers see."""
        return tuple(column for column in self.columns if column.header and column.name not in self.hidden)

    def cells(self) -> list[list[Cell]]:
        """The cells that readers see, row by row."""
        columns = self.shown
        return [[column.cell(row.get(column.name)) for column in columns] for row in self.rows]

    def without_empty(self, *names: str) -> Table:
        """The table without those of the named columns that have a value in no row."""
        return self.without(
            *(name for name in names if all(row.get(name) in (None, "", Cell("")) for row in self.rows))
        )

    def without(self, *names: str) -> Table:
        """The table without the named columns."""
        return replace(self, hidden=self.hidden.union(names))


def table_of(name: str, *columns: Column, **more: Any) -> Table:
    """A table with these columns and no rows yet; `more` is of `Table`."""
    return Table(name, columns, **more)
