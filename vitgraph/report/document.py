"""A report as data: what was run, the verdict, and sections of facts, tables, charts and text.

A view builds one from a record; the renderers show it on a terminal, as a page, as Markdown, LaTeX and files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vitgraph.report.columns import Cell, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NO_VERDICT = "none"
TONES = {
    "best": ("bold green", "▲"),
    "faster": ("green", "▲"),
    "slower": ("red", "▼"),
    "same": ("cyan", "="),
    "undecided": ("yellow", "?"),
    "invalid": ("red", "✕"),
    NO_VERDICT: ("default", "–"),
    "ok": ("green", "✓"),
    "failed": ("bold red", "✕"),
    "warning": ("yellow", "!"),
    "dim": ("dim", ""),
    "strong": ("bold", ""),
}
"""By tone, which is a verdict or a kind of text: its style on a terminal, and the sign that tells it without colour."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a report says first.

    Attributes:
        word: A tone: `faster`, `slower`, `same`, `undecided`, `invalid`, `none`, `ok` or `failed`.
        figure: The figure that it rests on; may be empty.
        lines: What else must be known before it is acted on.
    """

    word: str
    headline: str
    reason: str = ""
    figure: str = ""
    lines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Facts:
    """Names and values; a value of None or an empty one is left out."""

    pairs: tuple[tuple[str, str | Cell], ...]

    @classmethod
    def of(cls, pairs: Iterable[tuple[str, str | Cell | None]]) -> Facts:
        """Those of the pairs that have a value."""
        return cls(tuple((name, value) for name, value in pairs if value))


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph; `tone` colours it."""

    text: str
    tone: str = ""


@dataclass(frozen=True, slots=True)
class Code:
    """A command, or lines to paste, as they are."""

    text: str


@dataclass(frozen=True, slots=True)
class Chart:
    """A figure."""

    name: str
    title: str
    draw: Callable[[], Figure]


Block = Facts | Table | Text | Code | Chart


@dataclass(frozen=True, slots=True)
class Section:
    """Blocks under a heading.

    Attributes:
        is_detail: It is for the page alone, where there is room.
        is_folded: The page lets the reader open it.
    """

    title: str
    blocks: tuple[Block, ...]
    is_detail: bool = False
    is_folded: bool = False


@dataclass(frozen=True, slots=True)
class Document:
    """A report.

    Attributes:
        name: What made it, as `vitgraph bench`.
        title: What it is of.
        sections: What follows; those without a block are left out.
        what: What was run, in phrases: device, backend, compiled or not, packing, budgets, requests a call.
        verdict: What it says first; None where the record judges nothing.
        warning: Why it is incomplete; empty where it is complete.
        tables: Tables of files, whole, whether or not a section shows them.
        command: The command that made it; empty where it is of several.
        explanation: How to read its page: `bench` or `comparison`; empty for none.
        parts: Documents that its page shows one after the other.
    """

    name: str
    title: str
    sections: tuple[Section, ...] = ()
    what: tuple[str, ...] = ()
    verdict: Verdict | None = None
    warning: str = ""
    tables: tuple[Table, ...] = ()
    command: tuple[str, ...] = ()
    explanation: str = ""
    parts: tuple[Document, ...] = ()

    @property
    def headline(self) -> str:
        """The first line of it in every medium."""
        return f"{self.name}: {self.title}"

    @property
    def charts(self) -> tuple[Chart, ...]:
        """Its charts, in the order in which they stand."""
        return tuple(block for section in self.sections for block in section.blocks if isinstance(block, Chart))


def section(title: str, *blocks: Block | str | None, **how: bool) -> Section:
    """A section of those blocks that there are; a string is a paragraph, and facts or rows that are none go."""
    found = (Text(block) if isinstance(block, str) else block for block in blocks if block)
    kept = (
        one for one in found if (one.pairs if isinstance(one, Facts) else one.rows if isinstance(one, Table) else True)
    )
    return Section(title, tuple(kept), **how)


def document(name: str, title: str, *found: Section | None, **more: Any) -> Document:
    """A report of those sections that have a block, with further parts of `Document`."""
    return Document(name, title, tuple(one for one in found if one is not None and one.blocks), **more)
