"""Draws a workload: the sizes of its items, and how many output tokens models make of them; each as PNG and SVG."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from vitgraph.result_files import RecordFileError, os_reason, refuse_to_replace, write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

SIZES, TOKENS = "sizes", "tokens"
PNG_DPI = 150

# Okabe and Ito's palette; dashes differ too, so that the figures also read in grey.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_DASHES: tuple[Any, ...] = (
    "solid",
    (0, (5, 2)),
    (0, (1, 1.5)),
    (0, (5, 2, 1, 2)),
    (0, (9, 2)),
    (0, (3, 1, 1, 1, 1, 1)),
)
_GREY = "#5F5F5F"
_STYLE: dict[str, Any] = {
    "font.size": 12,
    "axes.titlesize": 14,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 11,
    "svg.hashsalt": "vitgraph",
}
_LOG_SPAN = 4.0


def write_workload_plots(
    name: str,
    sizes: Mapping[tuple[int, int, int], int],
    tokens: Mapping[str, Sequence[int]],
    folder: Path,
    *,
    overwrite: bool = False,
) -> list[Path]:
    """Writes `sizes` and, where a model takes any item, `tokens`.

    Args:
        name: Name of the workload.
        sizes: How many items have each (width, height, frames).
        tokens: Output tokens of every item, by model.
        folder: Where the files go; created if needed.
        overwrite: Whether files of the same names may be replaced.

    Returns:
        The files, PNG before SVG.

    Raises:
        UsageError: A file exists and `overwrite` is off.
        RecordFileError: A file could not be written.
    """
    from matplotlib import rc_context

    with rc_context(cast(Any, _STYLE)):
        figures = {SIZES: draw_sizes(name, sizes)}
        series = {model: values for model, values in tokens.items() if values}
        if series:
            figures[TOKENS] = draw_tokens(name, series)
        targets = [folder / f"{figure}.{ending}" for figure in figures for ending in ("png", "svg")]
        for path in () if overwrite else targets:
            refuse_to_replace(path)
        for path in targets:
            content = io.BytesIO()
            # Without a date in it, the same workload gives the same file.
            metadata = {"Date": None} if path.suffix == ".svg" else {}
            figures[path.stem].savefig(content, format=path.suffix[1:], dpi=PNG_DPI, metadata=metadata)
            try:
                folder.mkdir(parents=True, exist_ok=True)
                write_atomically(path, content.getvalue())
            except OSError as error:
                raise RecordFileError(f"cannot write {path}: {os_reason(error)}") from error
    return targets


def draw_sizes(name: str, sizes: Mapping[tuple[int, int, int], int]) -> Figure:
    """Height over width of every distinct size; the area of a mark grows with the items that have it."""
    items = sum(sizes.values())
    figure, axes = _new_figure(
        "Sizes of the items", f"{name} · {items} items · a larger mark: more of them", (7.6, 6.4)
    )
    axes.set(xlabel="Width (pixels)", ylabel="Height (pixels)")
    marks: Counter[tuple[bool, int, int]] = Counter()
    for (width, height, frames), count in sizes.items():
        marks[frames > 1, width, height] += count
    most = max(marks.values())
    sides = [side for width, height, _ in sizes for side in (width, height)]
    low, high = min(sides) / 1.15, max(sides) * 1.15
    axes.plot([low, high], [low, high], color="#B8B8B8", linewidth=0.8, zorder=0, label="square")
    for label, marker, is_video in (("image", "o", False), ("video", "^", True)):
        chosen = [(width, height, count) for (video, width, height), count in marks.items() if video == is_video]
        if chosen:
            widths, heights, counts = (np.array(column, dtype=np.float64) for column in zip(*chosen, strict=True))
            area = 14.0 + 260.0 * counts / most
            color = _COLORS[is_video]
            style: dict[str, Any] = {"marker": marker, "color": color, "edgecolors": color, "alpha": 0.45}
            axes.scatter(widths, heights, s=area, linewidths=0.9, label=label, **style)
    if high >= _LOG_SPAN * low:
        _use_log_scale(axes, "x")
        _use_log_scale(axes, "y")
    axes.set(xlim=(low, high), ylim=(low, high), aspect="equal")
    legend = axes.legend(loc="upper left")
    for handle in legend.legend_handles[1:]:
        handle.set_sizes([36.0])  # type: ignore[union-attr]
    return figure


def draw_tokens(name: str, tokens: Mapping[str, Sequence[int]]) -> Figure:
    """Cumulative share of the items over their output tokens, one line a model."""
    figure, axes = _new_figure("Output tokens of an item", name, (9.6, 5.4))
    axes.set(xlabel="Output tokens an item", ylabel="Share of items (%)", ylim=(0, 103))
    values = np.concatenate([np.asarray(series, dtype=np.float64) for series in tokens.values()])
    for index, (model, series) in enumerate(tokens.items()):
        ordered = np.sort(np.asarray(series, dtype=np.float64))
        share = 100.0 * np.arange(ordered.size + 1) / ordered.size
        axes.step(
            np.insert(ordered, 0, ordered[0]),
            share,
            where="post",
            color=_COLORS[index % len(_COLORS)],
            linestyle=_DASHES[index % len(_DASHES)],
            linewidth=2.0,
            label=f"{model.rsplit('/', 1)[-1]}\nmedian {np.median(ordered):.0f}, max {ordered[-1]:.0f}",
        )
    if values.min() > 0 and values.max() >= _LOG_SPAN * values.min():
        _use_log_scale(axes, "x")
    axes.grid(axis="y", color="#E4E4E4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0, handlelength=2.6, labelspacing=1.0)
    return figure


def _use_log_scale(axes: Axes, name: Literal["x", "y"]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set(**{f"{name}scale": "log"})
    axis: Axis = axes.xaxis if name == "x" else axes.yaxis
    axis.set_major_locator(LogLocator(base=10.0, subs=(1.0, 2.0, 5.0)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 1000:g}k" if value >= 10000 else f"{value:g}"))


def _new_figure(title: str, subtitle: str, inches: tuple[float, float]) -> tuple[Figure, Axes]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=inches, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(title, pad=26)
    axes.annotate(
        subtitle,
        (0.0, 1.0),
        xytext=(0, 7),
        xycoords="axes fraction",
        textcoords="offset points",
        fontsize=10.5,
        color=_GREY,
    )
    return figure, axes
