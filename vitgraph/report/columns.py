"""Columns of tables, each declared once for every medium and the reference, and how a figure becomes text."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

Kind = Literal["text", "integer", "number", "truth"]
Row = Mapping[str, Any]

NOT_MEASURED = "not measured"
WITHIN_NOISE = "within noise"
NO_VALUE = "–"
_MEBIBYTE, _GIBIBYTE = 2**20, 2**30
_HIDDEN_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def clean(text: object) -> str:
    """Text in which control characters and bidirectional marks are visible escapes; a line break is a space.

    Names come from users and checkpoints; what a terminal or a page would obey must not reach it.
    """
    return "".join(
        " "
        if character in "\n\t"
        else character
        if unicodedata.category(character) not in _HIDDEN_CATEGORIES
        else character.encode("unicode_escape", "backslashreplace").decode("ascii")
        for character in str(text)
    )


def is_number(value: Any) -> bool:
    """True for what was measured, also where it is not finite; False for None and anything else."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def number_text(value: Any, decimals: int) -> str:
    """A number with fixed decimals, `nan` and `inf` by name, a dash for no number."""
    if not is_number(value):
        return NO_VALUE
    # The zero turns a negative zero, as -0.04 rounds to, into a plain one.
    return f"{round(value, decimals) + 0.0:.{decimals}f}" if math.isfinite(value) else str(value)


def ms_text(value: Any) -> str:
    """Milliseconds without their unit: two decimals, three below one."""
    return number_text(value, 3 if is_number(value) and abs(value) < 0.995 else 2)


def short_number(value: float) -> str:
    """A figure for a label: two decimals, one from a hundred on, none from a thousand."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.2f}"


def pct_text(value: Any) -> str:
    """Percent with its sign and one decimal."""
    if not is_number(value) or not math.isfinite(value):
        return NO_VALUE
    return f"{round(value, 1) + 0.0:+.1f}%"


def share_text(value: Any) -> str:
    """A share between 0 and 1 in percent with one decimal."""
    return f"{number_text(100 * value, 1)}%" if is_number(value) else NO_VALUE


def ratio_text(value: Any) -> str:
    """A factor with two decimals and its sign."""
    return f"{number_text(value, 2)}×" if is_number(value) else NO_VALUE


def gap_text(value: Any) -> str:
    """A launch gap; wall time cannot be below the GPU-busy time in it, so what is below 1 was not told from noise."""
    return WITHIN_NOISE if is_number(value) and value < 1.0 else ratio_text(value)


def bytes_text(value: Any) -> str:
    """Bytes in the binary unit that suits them."""
    if not is_number(value):
        return NO_VALUE
    if value < _MEBIBYTE:
        return f"{value / 2**10:.1f} KiB"
    return f"{value / _MEBIBYTE:.1f} MiB" if value < _GIBIBYTE else f"{value / _GIBIBYTE:.2f} GiB"


def error_text(value: Any) -> str:
    """A relative distance, in scientific notation; one that is not finite by name."""
    return f"{value:.1e}" if is_number(value) else NO_VALUE if value is None else str(value)


def count_text(number: int, noun: str) -> str:
    """A number and its noun, in the plural but for one."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def misses_text(number: int) -> str:
    """How many items missed."""
    return "1 miss" if number == 1 else f"{number:,} misses"


def interval_text(ci95: Sequence[float] | None) -> str:
    """The ends of a 95 % interval of an improvement: `+1.8 … +2.4%`; empty where there is none."""
    if ci95 is None:
        return ""
    low, high = (pct_text(end) for end in ci95)
    return f"{low.removesuffix('%')} … {high}"


def budgets_text(budgets: Mapping[str, Sequence[int]] | Sequence[int]) -> str:
    """Token budgets of the paths on one line; a single path goes without its name."""
    if not isinstance(budgets, Mapping):
        return " ".join(map(str, budgets))
    if list(budgets) == ["default"]:
        return " ".join(map(str, budgets["default"]))
    return "; ".join(f"{path}: {' '.join(map(str, values))}" for path, values in budgets.items())


_UNIT_TEXTS: dict[str, Callable[[Any], str]] = {
    "ms": ms_text,
    "%": pct_text,
    "share": share_text,
    "ratio": ratio_text,
    "bytes": bytes_text,
    "s": lambda value: number_text(value, 2),
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
        text: Turns a value into a cell for readers; None does so by the unit.
    """

    name: str
    kind: Kind
    unit: str
    meaning: str
    header: str = ""
    text: Callable[[Any], str] | None = None

    @property
    def is_numeric(self) -> bool:
        return self.kind in ("integer", "number")

    def cell(self, value: Any) -> Cell:
        """The cell of a value, as a reader sees it."""
        if isinstance(value, Cell):
            return value
        if value is None:
            return Cell(NO_VALUE)
        if self.text is not None:
            return Cell(self.text(value))
        if self.kind == "integer":
            return Cell(f"{value:,}")
        if self.kind == "number":
            return Cell(_UNIT_TEXTS.get(self.unit, lambda number: number_text(number, 2))(value))
        return Cell(("no", "yes")[value] if self.kind == "truth" else str(value))


@dataclass(frozen=True, slots=True)
class Cell:
    """What stands in a cell, or for a fact.

    Attributes:
        text: Its text.
        note: What stands beneath it, smaller.
        tone: A word of `vitgraph.report.document.TONES` that colours it, or empty.
    """

    text: str
    note: str = ""
    tone: str = ""


@dataclass(frozen=True, slots=True)
class TableSpec:
    """What a table is, whatever its rows.

    Attributes:
        name: Name of its files.
        title: Its title for readers; may be empty.
        one_row: What a row stands for.
        columns: Its columns, in order.
        counts: What its counts and means are over: `calls`, `requests`, `items`; empty where it has none.
        digits: Significant digits of its numbers in CSV; Parquet holds them whole.
        is_optional: It is of no use to most records, and its files are left out where there is no row of it.
    """

    name: str
    title: str
    one_row: str
    columns: tuple[Column, ...]
    counts: str = ""
    digits: int = 6
    is_optional: bool = False

    def table(self, rows: Iterable[Row], **options: Any) -> Table:
        """The table of some rows."""
        return Table(self, tuple(rows), **options)


@dataclass(frozen=True, slots=True)
class Table:
    """A table with its rows.

    Attributes:
        spec: Its name and columns.
        rows: Values, or whole cells, by column; a value that is left out or None was not measured.
        title: Its title for readers, where not that of the spec.
        hidden: Columns that readers are not shown here, beside those without a header.
        notes: What a reader must know, beneath it.
    """

    spec: TableSpec
    rows: tuple[Row, ...]
    title: str | None = None
    hidden: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()

    @property
    def heading(self) -> str:
        """Its title, with what it counts where it counts anything."""
        title = self.spec.title if self.title is None else self.title
        return f"{title} (counts {self.spec.counts})" if self.spec.counts and title else title

    @property
    def shown(self) -> tuple[Column, ...]:
        """The columns that readers see."""
        return tuple(column for column in self.spec.columns if column.header and column.name not in self.hidden)

    def cells(self) -> list[list[Cell]]:
        """The cells that readers see, row by row."""
        columns = self.shown
        return [[column.cell(row.get(column.name)) for column in columns] for row in self.rows]

    def without_empty(self, *names: str) -> Table:
        """The table without those of the named columns that have a value in no row."""
        empty = {name for name in names if all(row.get(name) in (None, "", Cell("")) for row in self.rows)}
        return replace(self, hidden=self.hidden | empty)

    def of_rows(self, keep: Callable[[Row], bool]) -> Table:
        """The table with the rows that pass."""
        return replace(self, rows=tuple(row for row in self.rows if keep(row)))


RUN_COLUMN = Column("run", "text", "", "name of the run: the end of its folder's path", "Run")


def join_tables(named: Mapping[str, Sequence[Table]]) -> list[Table]:
    """The tables of several records, those of one spec as one, each row with the name of its record before it."""
    rows: dict[str, list[Row]] = {}
    specs: dict[str, TableSpec] = {}
    for name, tables in named.items():
        for table in tables:
            specs.setdefault(table.spec.name, table.spec)
            rows.setdefault(table.spec.name, []).extend({"run": name, **row} for row in table.rows)
    return [
        replace(spec, columns=(RUN_COLUMN, *spec.columns), one_row=f"a run and {spec.one_row}").table(rows[name])
        for name, spec in specs.items()
    ]
