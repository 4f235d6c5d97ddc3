"""Prints a document on a terminal: every header and cell whole at any width from 80 columns on.

A table that is wider than the terminal is laid out in parts, each with the column that names its rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text as Line

from vitgraph.report.columns import Cell, Table
from vitgraph.report.document import TONES, Block, Code, Document, Facts, Section, Text
from vitgraph.report.say import clean

_GAP = 2
_LONGEST_WORD = 30
"""Words of a text column up to this length are not broken."""


def render(document: Document, console: Console) -> None:
    """Prints a document."""
    console.print(line(document.headline, "bold"))
    if document.what:
        console.print(line(" · ".join(document.what), "dim"))
    if document.warning:
        console.print(line(document.warning, "bold yellow"))
    if (verdict := document.verdict) is not None:
        text = line(verdict.headline, f"bold {TONES[verdict.word][0]}")
        for part in filter(None, (verdict.figure, verdict.reason)):
            text.append(f": {clean(part)}", style="not bold default")
        console.print()
        for one in (text, *map(line, verdict.lines)):
            console.print(one)
    for section in document.sections:
        if not section.is_detail:
            _print_section(section, console)


def line(text: str, style: str = "") -> Line:
    """A line of text; a name may hold square brackets or control characters, and nothing of it is obeyed."""
    return Line(clean(text), style=style)


def _print_section(section: Section, console: Console) -> None:
    blocks = [block for block in section.blocks if isinstance(block, Facts | Table | Text | Code)]
    if not blocks:
        return
    console.print()
    if section.title:
        console.print(line(section.title, "bold"))
    for before, block in zip([None, *blocks], blocks, strict=False):
        if isinstance(block, Table) and before is not None:
            console.print()
        _print_block(block, console)


def _print_block(block: Block, console: Console) -> None:
    if isinstance(block, Facts):
        grid = Grid.grid(padding=(0, _GAP, 0, 0))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(overflow="fold")
        for name, value in block.pairs:
            grid.add_row(line(name), _cell(value if isinstance(value, Cell) else Cell(value)))
        console.print(grid)
    elif isinstance(block, Text):
        console.print(line(block.text, TONES[block.tone][0] if block.tone else ""))
    elif isinstance(block, Code):
        for one in block.text.split("\n"):
            console.print(line(one), soft_wrap=True)
    elif isinstance(block, Table):
        if block.heading:
            console.print(line(block.heading, "bold"))
        for number, grid in enumerate(_grids(block, console.width)):
            if number:
                console.print()
            console.print(grid)
        for note in block.notes:
            console.print(line(note, "dim"))


def _cell(cell: Cell) -> Line:
    style = TONES[cell.tone][0] if cell.tone else ""
    if not cell.note:
        return line(cell.text, style)
    return line(cell.text, "bold").append(f"\n{clean(cell.note)}", style=f"not bold {style}")


def _grids(table: Table, width: int) -> Iterator[Grid]:
    """The table, in as many parts as it takes for none to be wider than the terminal."""
    headers = [clean(column.header) for column in table.shown]
    rows = [[_cell(cell) for cell in row] for row in table.cells()]
    is_numeric = [column.is_numeric for column in table.shown]
    least = [_least_width(header, [row[i] for row in rows], is_numeric[i]) for i, header in enumerate(headers)]
    most = [
        max([cell_len(header), *(cell_len(part) for row in rows for part in row[i].plain.split("\n"))])
        for i, header in enumerate(headers)
    ]
    least = [min(pair) for pair in zip(least, most, strict=True)]
    for part in _parts(least, width):
        grid = Grid(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
        widths = _widths([least[i] for i in part], [most[i] for i in part], width)
        for i, wide in zip(part, widths, strict=True):
            justify = "right" if is_numeric[i] else "left"
            grid.add_column(headers[i], width=wide, justify=justify, overflow="fold")  # type: ignore[arg-type]
        for row in rows:
            grid.add_row(*(row[i] for i in part))
        yield grid


def _least_width(header: str, cells: Sequence[Line], is_numeric: bool) -> int:
    """The width below which a word of the header, or a figure, would be broken."""
    words = [cell_len(word) for word in header.split()]
    for cell in cells:
        for text in cell.plain.split("\n"):
            if is_numeric:
                words.append(cell_len(text))
            else:
                words += [min(cell_len(word), _LONGEST_WORD) for word in text.split()]
    return max(words, default=1)


def _parts(least: Sequence[int], width: int) -> list[list[int]]:
    """Columns in groups that fit, each after the first column, which names the rows."""
    groups: list[list[int]] = [[0]]
    for column in range(1, len(least)):
        taken = sum(least[i] + _GAP for i in groups[-1])
        if taken + least[column] > width and len(groups[-1]) > 1:
            groups.append([0])
        groups[-1].append(column)
    # A column alone is little of a table; it takes its neighbour with it.
    if len(groups) > 1 and len(groups[-1]) == 2 and len(groups[-2]) > 3:
        moved = groups[-2].pop()
        if sum(least[i] + _GAP for i in (0, moved)) + least[groups[-1][1]] <= width:
            groups[-1].insert(1, moved)
        else:
            groups[-2].append(moved)
    return groups


def _widths(least: Sequence[int], most: Sequence[int], width: int) -> list[int]:
    """Widths that fit: what is narrow keeps its whole width, and the wide ones share the rest."""
    room = width - _GAP * (len(least) - 1)
    if sum(most) <= room:
        return list(most)
    cap = 1
    while sum(max(low, min(high, cap + 1)) for low, high in zip(least, most, strict=True)) <= room:
        cap += 1
    return [max(low, min(high, cap)) for low, high in zip(least, most, strict=True)]
