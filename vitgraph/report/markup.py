"""Writes a document as Markdown, as LaTeX and as one page of HTML; every text of a record is shown as it is."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from vitgraph import __version__
from vitgraph.report import say
from vitgraph.report.charts import page_svg
from vitgraph.report.columns import Cell, Table
from vitgraph.report.document import TONES, Block, Code, Document, Facts, Section, Text
from vitgraph.report.say import clean, sentence

if TYPE_CHECKING:
    from jinja2 import Environment

_SPECIAL = frozenset("\\`*_[]<>|~#&")


def to_markdown(document: Document) -> str:
    """The document without its charts and details, with the command that made it."""
    lines = [f"### {markdown_text(document.headline)}", ""]
    if document.what:
        lines += [f"{markdown_text(' · '.join(document.what))}", ""]
    if document.warning:
        lines += [f"**{markdown_text(sentence(document.warning))}**", ""]
    if document.verdict is not None:
        verdict = document.verdict
        words = [f"**{markdown_text(verdict.headline)}**", markdown_text(verdict.figure), markdown_text(verdict.reason)]
        lines += [f"{': '.join(filter(None, words))}", "", *(f"{markdown_text(one)}\n" for one in verdict.lines)]
    for section in document.sections:
        if not section.is_detail:
            lines += _markdown_section(section)
    if document.command:
        lines += ["To reproduce:", "", *_markdown_fence(say.command(document.command)), ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def markdown_text(value: str) -> str:
    """Text that Markdown prints as it is."""
    return "".join(f"\\{character}" if character in _SPECIAL else character for character in clean(value))


def markdown_row(cells: Iterable[str]) -> str:
    """A markdown_row of a table; the cells must be escaped."""
    return f"| {' | '.join(cells)} |"


def _markdown_section(section: Section) -> Iterator[str]:
    lines = [line for block in section.blocks for line in _markdown_block(block)]
    if lines and section.title:
        yield from (f"#### {markdown_text(section.title)}", "")
    yield from lines


def _markdown_block(block: Block) -> Iterator[str]:
    if isinstance(block, Facts):
        yield from (f"- {markdown_text(name)}: {_markdown_cell(value)}" for name, value in block.pairs)
    elif isinstance(block, Text):
        yield markdown_text(block.text)
    elif isinstance(block, Code):
        yield from _markdown_fence(block.text)
    elif isinstance(block, Table):
        yield from (f"{markdown_text(block.heading)}:", "") if block.heading else ()
        yield markdown_row(markdown_text(column.header) for column in block.shown)
        yield markdown_row("--:" if column.is_numeric else ":--" for column in block.shown)
        yield from (markdown_row(map(_markdown_cell, cells)) for cells in block.cells())
        yield from (f"\n{markdown_text(note)}" for note in block.notes)
    else:
        return
    yield ""


def _markdown_cell(value: str | Cell) -> str:
    if isinstance(value, str):
        return markdown_text(value)
    return markdown_text(value.text) + (f"<br>{markdown_text(value.note)}" if value.note else "")


def _markdown_fence(content: str) -> list[str]:
    lines = [clean(line) for line in content.split("\n")]
    # A fence longer than any in the content cannot be closed by it.
    longest = max((len(line) - len(line.lstrip("`")) for line in (one.strip() for one in lines)), default=0)
    fence = "`" * max(3, longest + 1)
    return [f"{fence}text", *lines, fence]


PACKAGES = r"% Needs \usepackage{booktabs,adjustbox}."
_ESCAPES = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "%": r"\%",
    "_": r"\_",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "→": r"$\rightarrow$",
    "…": r"\dots{}",
    "–": "--",
    "−": "$-$",
    "±": r"$\pm$",
    "×": r"$\times$",
    "·": r"$\cdot$",
    "≥": r"$\geq$",
    "°": r"$^\circ$",
    "<": r"$<$",
    ">": r"$>$",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "`": r"\textasciigrave{}",
    "✓": "yes",
    **{bar: rf"\rule{{{0.06 * eighths:.2f}em}}{{1.2ex}}" for eighths, bar in enumerate("▏▎▍▌▋▊▉█", 1)},
}
_LAST_LETTER = "ſ"
"""End of Latin Extended-A: what pdfLaTeX prints without further packages."""


def to_latex(document: Document) -> str:
    """The tables that the document shows, without details."""
    tables = [
        block
        for section in document.sections
        if not section.is_detail
        for block in section.blocks
        if isinstance(block, Table)
    ]
    context = f"{'; '.join((document.headline, *document.what))}."
    if document.warning:
        context += f" {sentence(document.warning)}"
    labels: list[str] = []
    for table in tables:
        name = re.sub(r"[^a-z0-9]+", "-", f"{document.name} {table.name}".lower()).strip("-")
        labels.append(f"{name}-{len(labels) + 1}" if name in labels else name)
    return "\n".join([PACKAGES, *(_latex_float(*pair, context) for pair in zip(tables, labels, strict=True))])


def latex_text(value: str) -> str:
    """Text as LaTeX prints it; a minus before a digit becomes a real one, and a foreign letter its number."""
    value = clean(value)
    characters = []
    for index, character in enumerate(value):
        starts_number = character == "-" and value[index + 1 : index + 2].isdigit()
        is_minus = starts_number and (index == 0 or value[index - 1] in " (")
        foreign = f"[U+{ord(character):04X}]" if character > _LAST_LETTER else character
        characters.append("$-$" if is_minus else _ESCAPES.get(character, foreign))
    return "".join(characters)


def _latex_float(table: Table, label: str, context: str) -> str:
    caption = " ".join(filter(None, (sentence(table.heading), context, *map(sentence, table.notes))))
    alignment = "".join("r" if column.is_numeric else "l" for column in table.shown)
    lines = [
        r"\begin{table}",
        r"  \centering",
        f"  \\caption{{{latex_text(caption)}}}",
        f"  \\label{{tab:{label}}}",
        r"  \begin{adjustbox}{max width=\linewidth, max totalheight=0.8\textheight}",
        f"  \\begin{{tabular}}{{{alignment}}}",
        r"    \toprule",
        f"    {_latex_row([latex_text(column.header) for column in table.shown])}",
        r"    \midrule",
        *(line for cells in table.cells() for line in _latex_rows(cells)),
        r"    \bottomrule",
        r"  \end{tabular}",
        r"  \end{adjustbox}",
        r"\end{table}",
        "",
    ]
    return "\n".join(lines)


def _latex_rows(cells: Sequence[Cell]) -> list[str]:
    lines = [f"    {_latex_row([latex_text(cell.text) for cell in cells])}"]
    if any(cell.note for cell in cells):
        notes = [rf"{{\footnotesize {latex_text(cell.note)}}}" if cell.note else "" for cell in cells]
        lines.append(f"    {_latex_row(notes)}")
    return lines


def _latex_row(cells: Sequence[str]) -> str:
    return f"{' & '.join(cells)} \\\\"


_TEMPLATES = Path(__file__).parent / "templates"


def to_html(document: Document) -> str:
    """The whole page; its parts follow it, each with an anchor of its own."""
    from markupsafe import Markup

    found = [chart for one in (document, *document.parts) for chart in one.charts]
    charts = {id(chart): Markup(page_svg(chart, f"c{number}")) for number, chart in enumerate(found)}
    page = _environment().get_template("page.html")
    return page.render(document=document, charts=charts, version=__version__, shell=say.command, identity=id)


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    def finalize(value: object) -> object:
        # Every text of a record passes here; what is markup already comes from the templates and charts.
        return value if isinstance(value, Markup) else clean(value)

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=finalize,
    )
    environment.filters["sentence"] = say.sentence
    environment.filters["lines"] = lambda text: text.split("\n")
    environment.filters["kind"] = lambda block: type(block).__name__.lower()
    environment.globals["signs"] = {tone: sign for tone, (_, sign) in TONES.items()}
    return environment
