"""Pieces of a self-contained HTML page: the frame with its inline style, escaped tables, lists of facts, tiles."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from pathlib import Path
from string import Template

from vitgraph import __version__
from vitgraph.report.claims import VerdictText
from vitgraph.report.svg_charts import MARKERS

TEMPLATES = Path(__file__).parent / "templates"

_NUMBER = ' class="number"'
_ICONS = {"faster": "▲", "slower": "▼", "same": "=", "undecided": "?", "invalid": "✕", "none": "–"}


class Markup(str):
    """Text that already is HTML and must not be escaped again."""


def page(title: str, body: str) -> str:
    """A whole page that loads nothing.

    Args:
        title: Title of the page.
        body: Its content, as HTML.
    """
    frame = Template(read_template("page.html"))
    return frame.substitute(
        title=escape(title), style=read_template("page.css"), markers=MARKERS, body=body, version=escape(__version__)
    )


def read_template(name: str) -> str:
    """A file of the templates folder."""
    return (TEMPLATES / name).read_text(encoding="utf-8").rstrip("\n")


def escape(value: object) -> str:
    """Text for HTML; markup stays as it is."""
    return value if isinstance(value, Markup) else html.escape(str(value))


def table(headers: Sequence[str], rows: Iterable[Sequence[object]], numeric_from: int = 1, numeric_to: int = 99) -> str:
    """A table that scrolls in itself where the screen is narrower.

    Args:
        headers: One a column.
        rows: Cells, escaped unless they are `Markup`.
        numeric_from: First column whose cells are numbers, aligned to the right.
        numeric_to: First column after them.
    """

    def cells(tag: str, values: Sequence[object]) -> str:
        return "".join(
            f"<{tag}{_NUMBER if numeric_from <= index < numeric_to else ''}>{escape(value)}</{tag}>"
            for index, value in enumerate(values)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return (
        f'<div class="scroll"><table><thead><tr>{cells("th", headers)}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def facts(rows: Iterable[tuple[str, object]]) -> str:
    """A table of names and values; rows without a value are left out."""
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>'
        for name, value in rows
        if value not in (None, "")
    )
    return f'<table class="facts"><tbody>{body}</tbody></table>'


def tiles(entries: Iterable[tuple[str, str, str]]) -> str:
    """Large figures, each with its name above and what qualifies it beneath."""
    items = "".join(
        f'<li><span class="name">{escape(name)}</span><span class="value">{escape(value)}</span>'
        f'<span class="more">{escape(more)}</span></li>'
        for name, value, more in entries
    )
    return f'<ul class="tiles">{items}</ul>'


def verdict_box(verdict: VerdictText, figure: str, lines: Iterable[str]) -> str:
    """The verdict: its word, its figure, its reason, and further lines."""
    paragraphs = "".join(f"<p>{escape(line)}</p>" for line in lines)
    figure_line = f'<p class="figure">{escape(figure)}</p>' if figure else ""
    icon = f'<span aria-hidden="true">{_ICONS[verdict.verdict]} </span>'
    return (
        f'<section class="verdict {verdict.verdict}"><p class="word">{icon}{escape(verdict.headline)}</p>{figure_line}'
        f"<p>{escape(_sentence(verdict.reason))}</p>{paragraphs}</section>"
    )


def toned(verdict: str, text: str) -> Markup:
    """Text in the colour of a verdict, after its sign."""
    return Markup(f'<span class="tone {verdict}">{_ICONS[verdict]} {escape(text)}</span>')


def claim_cell(headline: str, note: str) -> Markup:
    """A figure with what may be claimed of it beneath."""
    return Markup(f'{escape(headline)}<span class="claim">{escape(note)}</span>')


def code(text: str) -> str:
    """A command or other text as it is."""
    return f"<pre><code>{escape(text)}</code></pre>"


def details(summary: str, content: str) -> str:
    """Content that a reader opens."""
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith('.') else '.'}"
