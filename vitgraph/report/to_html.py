"""Writes a document as one page that loads nothing, in light and dark, for a desk or a phone."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from vitgraph import __version__
from vitgraph.report import say
from vitgraph.report.charts import page_svg
from vitgraph.report.document import TONES, Document
from vitgraph.report.say import clean

if TYPE_CHECKING:
    from jinja2 import Environment

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
