"""What all charts share: style and colours, titles, axes, and how a figure becomes a file or a part of a page.

Every figure is drawn once. As a file it is light; in a page its colours are the page's own, so they follow light and
dark. Series differ in marker, line or hatch as well as in colour. Text is drawn as it is, never as a formula.
"""

from __future__ import annotations

import html
import io
import re
import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import numpy.typing as npt

from vitgraph.report.say import clean

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

    from vitgraph.report.document import Chart

FloatArray = npt.NDArray[np.float64]

BLUE, VERMILLION, GREEN, PINK, ORANGE, SKY = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"
"""Okabe and Ito's palette: distinct for every common colour vision."""
GREY, PALE_GREY, GRID_GREY = "#5f5f5f", "#b8b8b8", "#e4e4e4"
_PAGE_COLORS = {
    BLUE: "graph",
    VERMILLION: "eager",
    GREEN: "waste",
    PINK: "monolithic",
    ORANGE: "orange",
    SKY: "sky",
    GREY: "soft",
    PALE_GREY: "budget",
    GRID_GREY: "grid",
    "#000000": "ink",
    "#ffffff": "ground",
}
"""The page's own colours, by those of the files."""
MODE_LOOKS: dict[str, dict[str, Any]] = {
    "eager": {"color": VERMILLION, "dashes": (0, (5, 2)), "marker": "o", "hatch": "//"},
    "graph": {"color": BLUE, "dashes": "solid", "marker": "^", "hatch": ""},
    "monolithic": {"color": PINK, "dashes": (0, (1, 1)), "marker": "s", "hatch": ".."},
    "first": {"color": GREY, "dashes": (0, (5, 2)), "marker": "o", "hatch": ""},
    "second": {"color": "#000000", "dashes": "solid", "marker": "^", "hatch": ""},
}

WIDTH = 6.0
"""Inches; with text of `POINTS` it is still read on a phone, whose screen is as wide as the figure then."""
POINTS = 13
_PNG_DPI = 160
_LOG_SPAN = 4.0
_CHARACTERS = 57
"""Characters of a line above the axes."""
_THIN_FROM = 400
_THIN_GRID = 500
_STYLE: dict[str, Any] = {
    "text.parse_math": False,
    "font.size": POINTS,
    "axes.labelsize": POINTS,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.titlesize": 15,
    "figure.titleweight": "bold",
    "legend.frameon": False,
    "legend.fontsize": POINTS,
    "hatch.linewidth": 0.8,
    "svg.hashsalt": "vitgraph",
}


@contextmanager
def _style(**more: Any) -> Iterator[None]:
    from matplotlib import rc_context

    with rc_context(cast("Any", {**_STYLE, **more})), warnings.catch_warnings():
        # A name may hold characters that the font has not; they are drawn as boxes.
        warnings.filterwarnings("ignore", message="Glyph")
        yield


def chart_files(charts: Sequence[Chart]) -> dict[str, bytes]:
    """Charts as PNG and SVG, by file name; the same record gives the same bytes."""
    files: dict[str, bytes] = {}
    for chart in charts:
        with _style():
            figure = chart.draw()
            for ending in ("png", "svg"):
                content = io.BytesIO()
                metadata = {"Date": None} if ending == "svg" else {}
                figure.savefig(content, format=ending, dpi=_PNG_DPI, metadata=metadata)
                files[f"{chart.name}.{ending}"] = content.getvalue()
    return files


def page_svg(chart: Chart, prefix: str) -> str:
    """A chart as an SVG element of a page, whose text is text and whose colours are variables of the page.

    Args:
        prefix: Goes before its ids, which must be its own in the page.
    """
    with _style(**{"svg.fonttype": "none"}):
        content = io.StringIO()
        figure = chart.draw()
        figure.savefig(content, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = content.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r' fill="(#[0-9a-f]{6})"', r' style="fill: \1"', svg)
    for color, name in _PAGE_COLORS.items():
        svg = svg.replace(color, f"var(--{name})")
    used = set(re.findall(r'(?:url\(#|href="#)([\w.-]+)', svg))
    svg = re.sub(r' id="([\w.-]+)"', lambda found: f' id="{prefix}-{found[1]}"' if found[1] in used else "", svg)
    svg = re.sub(r'(url\(#|href="#)([\w.-]+)', rf"\1{prefix}-\2", svg)
    points = 72 * figure.get_figwidth()
    attributes = f'class="chart" role="img" aria-label="{html.escape(clean(chart.title))}" style="min-width: '
    head = f'<svg {attributes}{points * 10.2 / POINTS:.0f}px; max-width: {1.3 * points:.0f}px"'
    svg = re.sub(r'<svg[^>]*?(viewBox="[^"]*")[^>]*>', lambda found: f"{head} {found[1]}>", svg, count=1)
    return re.sub(r"\n\s*", "\n", re.sub(r"<!--.*?-->|<\?.*?\?>|font-family:[^;\"]*;?", "", svg, flags=re.DOTALL))


def new_figure(title: str, subtitle: str, height: float) -> Figure:
    """An empty figure that no window shows, with its title and, beneath it, what was measured on what."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = wrapped(subtitle)
    count = lines.count("\n") + 1
    height += 0.25 * (count - 1)
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    FigureCanvasAgg(figure)
    # The title's empty lines hold the room of what stands beneath it. The layout puts it at a distance in inches.
    figure.suptitle(clean(title) + "\n" * count, x=0.01, ha="left")
    figure.text(0.01, 1 - (0.08 + 21 / 72) / height, lines, va="top", color=GREY)
    return figure


def new_axes(title: str, subtitle: str, height: float, rows: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure with axes one under the other."""
    figure = new_figure(title, subtitle, height)
    return figure, list(figure.subplots(rows, 1, squeeze=False)[:, 0])


def wrapped(text: str, characters: int = _CHARACTERS) -> str:
    """Text in lines of at most so many characters."""
    return "\n".join(textwrap.wrap(clean(text), characters, break_on_hyphens=False))


def series_label(text: str, characters: int = 32) -> str:
    """The name of a series for a legend, in which matplotlib would leave out one that starts with an underscore."""
    cleaned = wrapped(text, characters)
    return f" {cleaned}" if cleaned.startswith("_") else cleaned


def with_legend(figure: Figure, columns: int = 2) -> Figure:
    """The figure with a legend of all axes under them, where it covers no data."""
    found: dict[str, Any] = {}
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        for handle, label in zip(handles, labels, strict=True):
            found.setdefault(label, handle)
    figure.legend(
        found.values(),
        found.keys(),
        loc="outside lower left",
        ncols=columns,
        handlelength=2.4,
        columnspacing=1.4,
        handletextpad=0.6,
    )
    return figure


def scale_axis(axes: Axes, name: Literal["x", "y"], low: float, high: float) -> None:
    """Logarithmic with ticks at 1, 2 and 5 where the values span enough for that, else linear."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    if not (low > 0.0 and high >= _LOG_SPAN * low and np.isfinite(high)):
        return
    subs = (1.0, 2.0, 5.0) if high < 500 * low else (1.0, 3.0) if high < 1e4 * low else (1.0,)
    axes.set(**{f"{name}scale": "log"})
    axis: Axis = axes.xaxis if name == "x" else axes.yaxis
    axis.set_major_locator(LogLocator(base=10.0, subs=subs, numticks=20))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 1000:g}k" if value >= 10000 else f"{value:g}"))


def thinned(x: FloatArray, y: FloatArray) -> npt.NDArray[np.bool_]:
    """Which points to draw: of many, one where several fall together, so that a page stays small."""
    keep = np.ones(x.size, dtype=bool)
    if x.size < _THIN_FROM:
        return keep
    places = []
    for values in (x, y):
        scaled = np.log(values) if values.min() > 0 else values
        span = float(np.ptp(scaled)) or 1.0
        places.append(np.round(_THIN_GRID * (scaled - scaled.min()) / span))
    _, first = np.unique(np.stack(places), axis=1, return_index=True)
    keep[:] = False
    keep[first] = True
    return keep


def mode_look(mode: str, index: int = 0) -> Mapping[str, Any]:
    """Colour, line, marker and hatch of a series; those without a look of their own take one by their place."""
    if mode in MODE_LOOKS:
        return MODE_LOOKS[mode]
    colors, markers = (GREEN, ORANGE, SKY, PINK, GREY), "sDvP*"
    dashes = ((0, (5, 2, 1, 2)), (0, (9, 2)), (0, (3, 1, 1, 1, 1, 1)), (0, (1, 1.5)), (0, (4, 4)))
    place = index % len(colors)
    return {"color": colors[place], "dashes": dashes[place], "marker": markers[place], "hatch": ""}
