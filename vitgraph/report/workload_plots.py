"""Draws a workload: the sizes of its items, and how many output tokens models make of them; each as PNG and SVG."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitgraph.report.figures import (
    BLUE,
    GREEN,
    GRID_GREY,
    ORANGE,
    PALE_GREY,
    PINK,
    SKY,
    VERMILLION,
    add_title,
    figure_files,
    legend_beside,
    new_figure,
    report_style,
    scale_axis,
)
from vitgraph.report.files import write_files

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZES, TOKENS = "sizes", "tokens"

# Dashes differ too, so that the figures also read in grey.
_COLORS = (BLUE, VERMILLION, GREEN, PINK, ORANGE, SKY)
_DASHES: tuple[Any, ...] = (
    "solid",
    (0, (5, 2)),
    (0, (1, 1.5)),
    (0, (5, 2, 1, 2)),
    (0, (9, 2)),
    (0, (3, 1, 1, 1, 1, 1)),
)


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
    with report_style():
        figures = {SIZES: draw_sizes(name, sizes)}
        series = {model: values for model, values in tokens.items() if values}
        if series:
            figures[TOKENS] = draw_tokens(name, series)
        files = figure_files(figures)
    return write_files({folder / name: content for name, content in files.items()}, overwrite)


def draw_sizes(name: str, sizes: Mapping[tuple[int, int, int], int]) -> Figure:
    """Height over width of every distinct size; the area of a mark grows with the items that have it."""
    items = sum(sizes.values())
    figure, axes = _titled_figure(
        "Sizes of the items", f"{name} · {items} items · a larger mark: more of them", (8.4, 6.4)
    )
    axes.set(xlabel="Width (pixels)", ylabel="Height (pixels)")
    marks: Counter[tuple[bool, int, int]] = Counter()
    for (width, height, frames), count in sizes.items():
        marks[frames > 1, width, height] += count
    most = max(marks.values())
    sides = [side for width, height, _ in sizes for side in (width, height)]
    low, high = min(sides) / 1.15, max(sides) * 1.15
    axes.plot([low, high], [low, high], color=PALE_GREY, linewidth=0.8, zorder=0, label="square")
    for label, marker, is_video in (("image", "o", False), ("video", "^", True)):
        chosen = [(width, height, count) for (video, width, height), count in marks.items() if video == is_video]
        if chosen:
            widths, heights, counts = (np.array(column, dtype=np.float64) for column in zip(*chosen, strict=True))
            area = 14.0 + 260.0 * counts / most
            color = _COLORS[is_video]
            style: dict[str, Any] = {"marker": marker, "color": color, "edgecolors": color, "alpha": 0.45}
            axes.scatter(widths, heights, s=area, linewidths=0.9, label=label, **style)
    scale_axis(axes, "x", low, high)
    scale_axis(axes, "y", low, high)
    axes.set(xlim=(low, high), ylim=(low, high), aspect="equal")
    legend = legend_beside(axes)
    for handle in legend.legend_handles[1:]:
        handle.set_sizes([36.0])  # type: ignore[union-attr]
    return figure


def draw_tokens(name: str, tokens: Mapping[str, Sequence[int]]) -> Figure:
    """Cumulative share of the items over their output tokens, one line a model."""
    figure, axes = _titled_figure("Output tokens of an item", name, (9.6, 5.4))
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
    scale_axis(axes, "x", values.min(), values.max())
    axes.grid(axis="y", color=GRID_GREY, linewidth=0.8)
    axes.set_axisbelow(True)
    legend_beside(axes, handlelength=2.6, labelspacing=1.0)
    return figure


def _titled_figure(title: str, subtitle: str, inches: tuple[float, float]) -> tuple[Figure, Axes]:
    figure = new_figure(*inches)
    axes = figure.add_subplot()
    add_title(axes, title, subtitle)
    return figure, axes
