"""Writes the tables of a document as LaTeX floats: each fits the page, says what was run, and has a label."""

from __future__ import annotations

import re
from collections.abc import Sequence

from vitgraph.report.columns import Cell, Table
from vitgraph.report.document import Document
from vitgraph.report.say import clean, sentence

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
    context = sentence("; ".join((document.headline, *document.what)))
    if document.warning:
        context += f" {sentence(document.warning)}"
    labels: list[str] = []
    for table in tables:
        name = re.sub(r"[^a-z0-9]+", "-", f"{document.name} {table.name}".lower()).strip("-")
        labels.append(f"{name}-{len(labels) + 1}" if name in labels else name)
    return "\n".join([PACKAGES, *(_float(*pair, context) for pair in zip(tables, labels, strict=True))])


def text(value: str) -> str:
    """Text as LaTeX prints it; a minus before a digit becomes a real one, and a foreign letter its number."""
    value = clean(value)
    characters = []
    for index, character in enumerate(value):
        starts_number = character == "-" and value[index + 1 : index + 2].isdigit()
        is_minus = starts_number and (index == 0 or value[index - 1] in " (")
        foreign = f"[U+{ord(character):04X}]" if character > _LAST_LETTER else character
        characters.append("$-$" if is_minus else _ESCAPES.get(character, foreign))
    return "".join(characters)


def _float(table: Table, label: str, context: str) -> str:
    caption = " ".join(sentence(part) for part in (table.heading, context, *table.notes) if part)
    alignment = "".join("r" if column.is_numeric else "l" for column in table.shown)
    lines = [
        r"\begin{table}",
        r"  \centering",
        f"  \\caption{{{text(caption)}}}",
        f"  \\label{{tab:{label}}}",
        r"  \begin{adjustbox}{max width=\linewidth, max totalheight=0.8\textheight}",
        f"  \\begin{{tabular}}{{{alignment}}}",
        r"    \toprule",
        f"    {_row([text(column.header) for column in table.shown])}",
        r"    \midrule",
        *(line for cells in table.cells() for line in _rows(cells)),
        r"    \bottomrule",
        r"  \end{tabular}",
        r"  \end{adjustbox}",
        r"\end{table}",
        "",
    ]
    return "\n".join(lines)


def _rows(cells: Sequence[Cell]) -> list[str]:
    lines = [f"    {_row([text(cell.text) for cell in cells])}"]
    if any(cell.note for cell in cells):
        notes = [rf"{{\footnotesize {text(cell.note)}}}" if cell.note else "" for cell in cells]
        lines.append(f"    {_row(notes)}")
    return lines


def _row(cells: Sequence[str]) -> str:
    return f"{' & '.join(cells)} \\\\"
