"""Charts of single values: latency over tokens, distributions, improvements with their intervals, settings, sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from vitgraph.records.kinds.tune import Evaluation
from vitgraph.records.stats import P99_MIN_SAMPLES
from vitgraph.records.two_runs import DeltaRow
from vitgraph.report import charts, say
from vitgraph.report.charts import BLUE, GREEN, GREY, ORANGE, PALE_GREY, PINK, VERMILLION, FloatArray, mode_look
from vitgraph.report.charts_of_bars import name_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BUDGET_REACH = 1.5


def draw_by_tokens(
    subtitle: str,
    tokens: FloatArray,
    times_ms: Mapping[str, FloatArray],
    misses: FloatArray,
    budgets: Sequence[int],
    a_call: str = "call",
) -> Figure:
    """Scatter of latency over output tokens, with the token budgets as vertical lines.

    Args:
        subtitle: What was measured on what.
        tokens: Output tokens; shape `[n]`, as of all that follow.
        times_ms: Milliseconds by series; `graph` is drawn apart where something missed.
        misses: Items that ran eagerly in graph mode.
        budgets: Token budgets that were captured.
        a_call: What a point is.
    """
    figure = charts.new_figure("Latency by tokens", subtitle, 4.6)
    (axes,) = charts.new_axes(figure)
    axes.set(xlabel=f"Output tokens of a {a_call}", ylabel=f"Latency of a {a_call} (ms)")
    every = np.concatenate(list(times_ms.values()))
    charts.scale_axis(axes, "x", tokens.min(), tokens.max())
    charts.scale_axis(axes, "y", every.min(), every.max())
    for budget in budgets:
        if tokens.min() <= budget <= _BUDGET_REACH * tokens.max():
            axes.axvline(budget, color=PALE_GREY, linewidth=0.8, zorder=0, label="token budget")
    for index, (mode, times) in enumerate(times_ms.items()):
        look = mode_look(mode, index)
        parts = [(mode, np.ones(tokens.size, dtype=bool), look["marker"])]
        if mode == "graph":
            missed = misses > 0
            parts = [("graph", ~missed, "^"), ("graph, with an eager fallback", missed, "x")]
        for label, chosen, marker in parts:
            if chosen.any():
                _scatter(axes, tokens[chosen], times[chosen], label, marker, look["color"])
    charts.legend_below(figure)
    return figure


def _scatter(axes: Axes, x: FloatArray, y: FloatArray, label: str, marker: str, color: str) -> None:
    kept = charts.thinned(x, y)
    style: dict[str, Any] = {"color": color} if marker in "x^" else {"facecolors": "none", "edgecolors": color}
    style |= {"s": 26, "linewidths": 1.0, "alpha": 0.75, "marker": marker}
    axes.scatter(x[kept], y[kept], label=charts.series_label(label), **style)


def draw_distribution(
    title: str, subtitle: str, xlabel: str, share_of: str, series: Mapping[str, FloatArray], unit: str = "ms"
) -> Figure:
    """Cumulative share over a value, a line a series, with its mean and P99 (or the maximum) marked.

    Args:
        title: What is distributed.
        subtitle: What was measured on what.
        xlabel: The value.
        share_of: What the share is of.
        series: Values by name.
        unit: Unit of the figures in the legend; empty for whole numbers.
    """
    figure = charts.new_figure(title, subtitle, 4.2 + 0.3 * len(series))
    (axes,) = charts.new_axes(figure)
    axes.set(xlabel=xlabel, ylabel=f"Share of {share_of} (%)", ylim=(0, 103))
    every = np.concatenate(list(series.values()))
    charts.scale_axis(axes, "x", every.min(), every.max())
    for index, (name, values) in enumerate(series.items()):
        look = mode_look(name, index)
        ordered = np.sort(values)
        has_p99 = ordered.size >= P99_MIN_SAMPLES
        tail_name = "P99" if has_p99 else "max"
        mean, tail = float(np.mean(ordered)), float(np.percentile(ordered, 99) if has_p99 else ordered[-1])
        said = [f"{say.short(one)} {unit}" if unit else f"{one:,.0f}" for one in (mean, tail)]
        label = f"{name} (n={ordered.size:,}): mean {said[0]}, {tail_name} {said[1]}"
        shares = 100.0 * np.arange(ordered.size + 1) / ordered.size
        line: dict[str, Any] = {"color": look["color"], "linestyle": look["dashes"], "linewidth": 2.0}
        places = np.insert(ordered, 0, ordered[0])
        axes.step(places, shares, where="post", label=charts.series_label(label, 50), **line)
        for marker, value in (("o", mean), ("D", tail)):
            height = 100.0 * float(np.mean(ordered <= value))
            axes.plot(value, height, marker, color=look["color"], markersize=9, markeredgecolor="#ffffff", zorder=3)
    for marker, name in (("o", "mean"), ("D", tail_name)):
        axes.plot([], [], marker, color=GREY, markersize=8, label=name)
    axes.grid(axis="y", color=charts.GRID_GREY, linewidth=0.8)
    axes.set_axisbelow(True)
    charts.legend_below(figure, columns=1)
    return figure


def draw_improvements(title: str, subtitle: str, rows: Mapping[str, DeltaRow]) -> Figure:
    """Improvements with their 95 % intervals, a row each by name, over the band of the noise floor."""
    figure = charts.new_figure(title, subtitle, 1.9 + 0.42 * len(rows))
    (axes,) = charts.new_axes(figure)
    for place, row in enumerate(rows.values()):
        look, floor, gain = mode_look(row.mode, place), row.noise_floor_pct, row.improvement_pct or 0.0
        if floor is not None:
            axes.barh(place, 2 * floor, 0.7, -floor, color=GREY, alpha=0.25, label="noise floor")
        if row.ci95 is not None:
            ends = np.abs(np.subtract(row.ci95, gain))[:, None]
            axes.errorbar(gain, place, xerr=ends, color=look["color"], capsize=5, linewidth=2)
        axes.plot(gain, place, look["marker"], color=look["color"], markersize=9, label=row.mode)
    axes.axvline(0.0, color="#000000", linewidth=0.8)
    name_rows(axes, list(rows))
    axes.set_xlabel("Improvement (%), positive = faster")
    charts.legend_below(figure, columns=3)
    return figure


_SETTING_LOOKS = {"tuned": ("*", BLUE, 17), "automatic list": ("s", ORANGE, 9), "vLLM's nine": ("D", PINK, 8)}


def draw_pareto(
    subtitle: str,
    found: Sequence[Evaluation],
    named: Mapping[str, Evaluation],
    eager: tuple[float, float, float],
    oracle_ms: float,
) -> Figure:
    """Mean latency over graphs, and over their memory: the best found, the choice, the baselines, eager, the oracle.

    Args:
        subtitle: The workload and what predicts its times.
        found: Settings that no other beats in graphs, memory and latency at once.
        named: The choice and the baselines.
        eager: Mean latency of eager, and the ends of what it is in doubt by.
        oracle_ms: Mean latency that no setting can beat.
    """
    figure = charts.new_figure("Predicted mean latency by graphs and memory", subtitle, 8.2)
    mean, low, high = eager
    panels = (("graphs", 1, "Graphs"), ("memory_bytes", 2**20, "Memory (MiB)"))
    for axes, (field, scale, label) in zip(charts.new_axes(figure, 2), panels, strict=True):
        front = _front(found, field)
        places, means = [getattr(one, field) / scale for one in front], [one.latency.mean_ms for one in front]
        axes.plot(places, means, "-", color=BLUE, linewidth=1.2, marker=".", label="best found")
        for name, one in named.items():
            marker, color, size = _SETTING_LOOKS[name]
            at = getattr(one, field) / scale, one.latency.mean_ms
            axes.plot(*at, marker, color=color, markersize=size, label=name)
        if high > low:
            axes.axhspan(low, high, color=VERMILLION, alpha=0.16, linewidth=0, label="eager ± its error")
        axes.axhline(mean, color=VERMILLION, linestyle=(0, (5, 2)), linewidth=1.4, label="eager")
        axes.axhline(oracle_ms, color=GREEN, linestyle=(0, (1, 1)), linewidth=1.4, label="oracle")
        axes.set(xlabel=label, ylabel="Mean of a request (ms)")
        if places:
            charts.scale_axis(axes, "x", max(min(places), 1e-9), max(places))
    charts.legend_below(figure, columns=3)
    return figure


def _front(rows: Sequence[Evaluation], field: str) -> list[Evaluation]:
    """The settings of which none has both less of `field` and a lower mean."""
    front: list[Evaluation] = []
    for row in sorted(rows, key=lambda row: (getattr(row, field), row.latency.mean_ms)):
        if not front or row.latency.mean_ms < front[-1].latency.mean_ms:
            front.append(row)
    return front


def draw_sizes(subtitle: str, sizes: Mapping[tuple[int, int, int], int]) -> Figure:
    """Height over width of every distinct size; the area of a mark grows with the items that have it.

    Args:
        subtitle: The workload.
        sizes: How many items have each (width, height, frames).
    """
    figure = charts.new_figure("Sizes of the items", f"{subtitle} · a larger mark: more of them", 6.2)
    (axes,) = charts.new_axes(figure)
    axes.set(xlabel="Width (pixels)", ylabel="Height (pixels)")
    marks: dict[tuple[bool, int, int], int] = {}
    for (width, height, frames), count in sizes.items():
        key = (frames > 1, width, height)
        marks[key] = marks.get(key, 0) + count
    sides = [side for width, height, _ in sizes for side in (width, height)]
    low, high = min(sides) / 1.15, max(sides) * 1.15
    axes.plot([low, high], [low, high], color=PALE_GREY, linewidth=0.8, zorder=0, label="square")
    for label, marker, color, is_video in (("image", "o", BLUE, False), ("video", "^", VERMILLION, True)):
        chosen = [(width, height, count) for (video, width, height), count in marks.items() if video == is_video]
        if chosen:
            widths, heights, counts = np.array(chosen, dtype=np.float64).T
            style: dict[str, Any] = {"marker": marker, "color": color, "alpha": 0.45, "linewidths": 0.9}
            axes.scatter(widths, heights, s=14.0 + 260.0 * counts / max(marks.values()), **style)
            axes.plot([], [], marker, color=color, markersize=7, label=label)
    charts.scale_axis(axes, "x", low, high)
    charts.scale_axis(axes, "y", low, high)
    axes.set(xlim=(low, high), ylim=(low, high), aspect="equal")
    charts.legend_below(figure, columns=3)
    return figure


def draw_attention(
    subtitle: str, lines: Mapping[str, Mapping[str, Sequence[tuple[int, float]]]], marks: Mapping[str, Sequence[float]]
) -> Figure:
    """Time of attention over the rows of a segment, a line a backend; where one overtakes another is marked.

    Args:
        subtitle: What was measured.
        lines: `(rows of a segment, ms)` by the calls' segments and the backend.
        marks: Rows at which the fastest backend changes, by the calls' segments.
    """
    figure = charts.new_figure("Attention alone", subtitle, 1.2 + 3.4 * len(lines))
    names = list(dict.fromkeys(name for panel in lines.values() for name in panel))
    for axes, (calls, panel) in zip(charts.new_axes(figure, len(lines)), lines.items(), strict=True):
        for name, points in panel.items():
            look = names.index(name) % len(_BACKEND_LOOKS)
            color, marker = _BACKEND_LOOKS[look]
            axes.plot(*zip(*sorted(points), strict=True), color=color, marker=marker, label=name)
        for at in marks.get(calls, ()):
            axes.axvline(at, color=GREY, linestyle=(0, (1, 1)))
            axes.annotate(f"{at:,.0f}", (at, 1.0), xycoords=("data", "axes fraction"), ha="center", va="bottom")
        axes.set(xlabel=f"Rows of a segment, {calls}", ylabel="Time of a call (ms)")
        every = [point for points in panel.values() for point in points]
        for axis, values in zip(_AXES, zip(*every, strict=True), strict=True):
            charts.scale_axis(axes, axis, min(values), max(values))
    charts.legend_below(figure)
    return figure


_AXES: tuple[Literal["x", "y"], ...] = ("x", "y")
_BACKEND_LOOKS = ((BLUE, "^"), (VERMILLION, "o"), (GREEN, "s"), (PINK, "D"), (ORANGE, "v"))
