"""What all plots share: their style and colours, titles, logarithmic axes, and how they become files.

matplotlib is imported inside, so that tables need none of it.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, cast

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.legend import Legend

PNG_DPI = 150
BLUE, VERMILLION, GREEN, PINK, ORANGE, SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"
"""Okabe and Ito's palette: distinct for every common colour vision."""
GREY, PALE_GREY, GRID_GREY = "#5F5F5F", "#B8B8B8", "#E4E4E4"
MODE_COLORS = {"eager": VERMILLION, "graph": BLUE}
CPU_NOTE = "replay on a CPU, no speed-up claimed"

_STYLE: dict[str, Any] = {
    "font.size": 12,
    "axes.titlesize": 14,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 11,
    "hatch.linewidth": 0.8,
    "svg.hashsalt": "vitgraph",
}
_LOG_SPAN = 4.0
_LABELLED_BARS = 14
_NAMED_BARS = 20
_LEAST_BARS = 7
_UPRIGHT_CHARACTERS = 70
_NAME_GAP = 2


@contextmanager
def report_style() -> Iterator[None]:
    """Draws in the style of all plots."""
    from matplotlib import rc_context

    with rc_context(cast(Any, _STYLE)):
        yield


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, inches wide and high, that no window shows."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def add_title(axes: Axes, title: str, subtitle: str) -> None:
    """A title with a grey line beneath it that says what was measured on what."""
    axes.set_title(title, pad=26)
    axes.annotate(
        subtitle,
        (0.0, 1.0),
        xytext=(0, 7),
        xycoords="axes fraction",
        textcoords="offset points",
        fontsize=10.5,
        color=GREY,
    )


def legend_beside(axes: Axes, **options: Any) -> Legend:
    """A legend to the right of the axes, where it covers no data."""
    return axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0, **options)


def scale_axis(axes: Axes, name: Literal["x", "y"], low: float, high: float) -> None:
    """Logarithmic with ticks at 1, 2 and 5 where the values span enough for that, else linear."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    if low <= 0.0 or high < _LOG_SPAN * low:
        return
    axes.set(**{f"{name}scale": "log"})
    axis: Axis = axes.xaxis if name == "x" else axes.yaxis
    axis.set_major_locator(LogLocator(base=10.0, subs=(1.0, 2.0, 5.0)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 1000:g}k" if value >= 10000 else f"{value:g}"))


def draw_budget_bars(axes: Axes, names: Sequence[str], heights: Sequence[float], label: str, **style: Any) -> None:
    """One bar a token budget, with its figure where there are few.

    Args:
        axes: Where to draw.
        names: Budgets, with their paths where there are several.
        heights: Heights of the bars, none below zero.
        label: Format of a bar's figure.
        style: Further options of the bars.
    """
    bars = axes.bar(range(len(names)), heights, width=0.7, edgecolor="white", **style)
    if len(names) <= _LABELLED_BARS:
        axes.bar_label(bars, fmt=label, fontsize=10, padding=1)
    # Of many budgets only some are named, and those of two paths are too long to stand side by side.
    every = max(1, -(-len(names) // _NAMED_BARS))
    is_crowded = sum(len(name) + _NAME_GAP for name in names[::every]) > _UPRIGHT_CHARACTERS
    turned: dict[str, Any] = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"} if is_crowded else {}
    axes.set_xticks(range(0, len(names), every), names[::every], **turned)
    axes.tick_params(axis="x", length=0)
    # A few bars stay narrow, and bars of nothing stand on the axis.
    beside = max(0.0, (_LEAST_BARS - len(names)) / 2)
    axes.set(xlim=(-0.6 - beside, len(names) - 0.4 + beside), ylim=(0.0, 1.12 * max(heights, default=0.0) or 1.0))


def short_number(value: float) -> str:
    """A figure for a label: two decimals, one from a hundred on."""
    return f"{value:.1f}" if value >= 100 else f"{value:.2f}"


def figure_files(figures: Mapping[str, Figure]) -> dict[str, bytes]:
    """Figures as PNG and SVG, by file name, PNG before SVG; must be called in `report_style`."""
    files: dict[str, bytes] = {}
    for name, figure in figures.items():
        for ending in ("png", "svg"):
            content = io.BytesIO()
            # Without a date in it, the same run gives the same file.
            metadata = {"Date": None} if ending == "svg" else {}
            figure.savefig(content, format=ending, dpi=PNG_DPI, metadata=metadata)
            files[f"{name}.{ending}"] = content.getvalue()
    return files
