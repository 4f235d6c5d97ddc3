"""Writes a document as Markdown; every text of a record is escaped, so that it is shown as it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from vitgraph.report import say
from vitgraph.report.columns import Cell, Table
from vitgraph.report.document import Block, Code, Document, Facts, Section, Text
from vitgraph.report.say import clean, sentence

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
        lines += ["To reproduce:", "", *_fence(say.command(document.command)), ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def text(value: str) -> str:
    """Text that Markdown prints as it is."""
    return "".join(f"\\{character}" if character in _SPECIAL else character for character in clean(value))


def row(cells: Iterable[str]) -> str:
    """A row of a table; the cells must be escaped."""
    return f"| {' | '.join(cells)} |"


def _section(section: Section) -> Iterator[str]:
    lines = [line for block in section.blocks for line in _block(block)]
    if lines and section.title:
        yield from (f"#### {text(section.title)}", "")
    yield from lines


def _block(block: Block) -> Iterator[str]:
    if isinstance(block, Facts):
        yield from (f"- {text(name)}: {_cell(value)}" for name, value in block.pairs)
    elif isinstance(block, Text):
        yield text(block.text)
    elif isinstance(block, Code):
        yield from _fence(block.text)
    elif isinstance(block, Table):
        yield from (f"{text(block.heading)}:", "") if block.heading else ()
        yield row(text(column.header) for column in block.shown)
        yield row("--:" if column.is_numeric else ":--" for column in block.shown)
        yield from (row(map(_cell, cells)) for cells in block.cells())
        yield from (f"\n{text(note)}" for note in block.notes)
    else:
        return
    yield ""


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
