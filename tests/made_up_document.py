"""A made-up report with every kind of block, and texts in it that some medium would obey."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from vitgraph.report.columns import Cell, Column, Table
from vitgraph.report.document import Chart, Code, Document, Facts, Text, Verdict, section
from vitgraph.report.draw import draw_by_tokens
from vitgraph.report.to_terminal import render

ODD = "a\x1b[31m_b\u202e[red]<i>|`$\\frac{$ 5% #1\x07"
"""A name that a terminal, a page, Markdown, LaTeX and a chart must each show and not obey."""
COLUMNS = (
    Column("name", "text", "", "whose row it is", "Encoder with a name"),
    *(Column(f"mean_{n}", "number", "ms", "a mean", f"Mean latency improvement {n}") for n in range(9)),
    Column("why", "text", "", "why", "Reason"),
)
SPEC = Table("odd", COLUMNS, "Odd things", "a thing", "requests")


def made_up_document(**changes: Any) -> Document:
    import numpy as np

    rows = [
        {"name": ODD, **{f"mean_{n}": 1000.0 * n for n in range(9)}, "why": "because " * 9},
        {"name": "=1+1", "mean_0": -0.5, "why": Cell("+12.0%", "faster, 95% CI", "faster")},
    ]

    def draw() -> Any:
        tokens, times = np.array([10.0, 20.0]), np.array([1.0, 2.0])
        return draw_by_tokens(ODD, tokens, {ODD: times, "_hidden": times}, np.zeros(2), [16])

    found = {
        "name": "vitgraph test",
        "title": ODD,
        "what": ("NVIDIA H200", ODD, "blocks not compiled", "greedy packing", "9 budgets", "1 request a call"),
        "verdict": Verdict("faster", "Graphs are faster", ODD, "+1.0%", (ODD,)),
        "sections": (
            section("Things", SPEC.filled(rows), Facts.of([("Fact", ODD), ("None", None)]), Text(ODD, "warning")),
            section("Charts", Chart("latency", ODD, draw)),
            section("", Code(f"run {ODD}\n```\nthen")),
        ),
        "tables": (SPEC.filled([{name: value for name, value in row.items() if name != "why"} for row in rows]),),
        "command": ("vitgraph", "test", "--model", ODD),
    }
    return Document(**{**found, **changes})


def terminal_text(document: Document, width: int) -> str:
    """What a terminal shows, without the blanks with which tables fill their last column."""
    console = Console(file=io.StringIO(), width=width, color_system=None)
    render(document, console)
    assert isinstance(console.file, io.StringIO)
    return "".join(f"{line.rstrip()}\n" for line in console.file.getvalue().splitlines())
