"""Writes a document as Markdown; every text of a record is escaped, so that it is shown as it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vitgraph.report.columns import Cell, Table
from vitgraph.report.document import Block, Code, Document, Facts, Section, Text, command_text, sentence
from vitgraph.report.say import clean

_SPECIAL = frozenset("\\`*_[]<>|~#&")


def to_markdown(document: Document) -> str:
    """The document without its charts and details, with the command that made it."""
    lines = [f"### {text(document.headline)}", ""]
    if document.what:
        lines += [f"{text(' · '.join(document.what))}", ""]
    if document.warning:
        lines += [f"**{text(sentence(document.warning))}**", ""]
    if document.verdict is not None:
        verdict = document.verdict
        words = [f"**{text(verdict.headline)}**", text(verdict.figure), text(verdict.reason)]
        lines += [f"{': '.join(filter(None, words))}", "", *(f"{text(one)}\n" for one in verdict.lines)]
    for section in document.sections:
        if not section.is_detail:
            lines += _section(section)
    if document.command:
        lines += ["To reproduce:", "", *_fence(command_text(document.command)), ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def text(value: str) -> str:
    """Text that Markdown prints as it is."""
    return "".join(f"\\{character}" if character in _SPECIAL else character for character in clean(value))


def row(cells: Sequence[str]) -> str:
    """A row of a table; the cells must be escaped."""
    return f"| {' | '.join(cells)} |"


def table_lines(table: Table) -> list[str]:
    """A table and its notes."""
    columns = table.shown
    lines = [row([text(column.header) for column in columns])]
    lines.append(row(["--:" if column.is_numeric else ":--" for column in columns]))
    lines += [row([_cell(cell) for cell in cells]) for cells in table.cells()]
    return [*lines, "", *(f"{text(note)}\n" for note in table.notes)]


def _section(section: Section) -> Iterator[str]:
    lines = [line for block in section.blocks for line in _block(block)]
    if not lines:
        return
    if section.title:
        yield from (f"#### {text(section.title)}", "")
    yield from lines


def _block(block: Block) -> list[str]:
    if isinstance(block, Facts):
        return [*(f"- {text(name)}: {_cell(value)}" for name, value in block.pairs), ""]
    if isinstance(block, Text):
        return [text(block.text), ""]
    if isinstance(block, Code):
        return [*_fence(block.text), ""]
    if isinstance(block, Table):
        return [*([f"{text(block.heading)}:", ""] if block.heading else []), *table_lines(block)]
    return []


def _cell(value: str | Cell) -> str:
    if isinstance(value, str):
        return text(value)
    return text(value.text) + (f"<br>{text(value.note)}" if value.note else "")


def _fence(content: str) -> list[str]:
    lines = [clean(line) for line in content.split("\n")]
    # A fence longer than any in the content cannot be closed by it.
    longest = max((len(line) - len(line.lstrip("`")) for line in (one.strip() for one in lines)), default=0)
    fence = "`" * max(3, longest + 1)
    return [f"{fence}text", *lines, fence]
