"""Charts of bars, a row a thing: budgets in use, hits and misses, encoder paths, backends, where a call's time goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vitgraph.report import charts, say
from vitgraph.report.charts import BLUE, GREEN, ORANGE, PINK, SKY, VERMILLION
from vitgraph.report.say import clean

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_ROWS = 40
_LEAST_NAMED_SHARE = 0.11
_LABEL_BOX = {"boxstyle": "round,pad=0.15", "facecolor": "#ffffff", "edgecolor": "none", "alpha": 0.9}
_PART_LOOKS = (
    (BLUE, ""),
    (SKY, "//"),
    (GREEN, ".."),
    (ORANGE, "\\\\"),
    (VERMILLION, "xx"),
    (PINK, "++"),
    (charts.GREY, ""),
    (charts.GRID_GREY, ""),
)
_SIDE_LOOKS: Mapping[str, Mapping[str, Any]] = {
    "two paths": {"color": GREEN, "hatch": "//"},
    "monolithic": {"color": PINK, "hatch": ".."},
}


def draw_rows(
    axes: Axes, names: Sequence[str], values: Sequence[float], labels: Sequence[str], place: float = 0.0, **style: Any
) -> None:
    """A bar a name with a figure at its end; `place` moves it from the middle of its row."""
    style = {"height": 0.7, "edgecolor": "#ffffff", **style}
    bars = axes.barh(np.arange(len(names)) + place, values, **style)
    axes.bar_label(bars, labels=list(labels), fontsize=charts.POINTS, padding=2)
    name_rows(axes, names)


def name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Names of rows at the left, the first at the top."""
    axes.set_yticks(range(len(names)), list(map(clean, names)))
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)


@dataclass(frozen=True, slots=True)
class BudgetUse:
    """How a token budget was used, its slots and axis keys together.

    Attributes:
        name: The budget, with its path where there are several.
        count: Items, or replays.
        waste_pct: Share of the computed rows that is padding, in percent.
    """

    name: str
    count: int
    waste_pct: float


def draw_budgets(
    title: str, subtitle: str, counted: str, uses: Sequence[BudgetUse], outcomes: Sequence[tuple[str, int, bool]] = ()
) -> Figure:
    """What each token budget replays and wastes, a row a budget, beneath hits and misses.

    Args:
        title: What it shows.
        subtitle: What was measured on what.
        counted: What `BudgetUse.count` counts.
        uses: The budgets, ascending; of very many the most used.
        outcomes: Name, items, and whether they are misses; those that are part of others are for the text.
    """
    chosen = sorted(uses, key=lambda use: -use.count)[:_MOST_ROWS]
    uses = [use for use in uses if use in chosen]
    heights = [*([0.7 + 0.34 * len(outcomes)] if outcomes else []), *([0.8 + 0.3 * len(uses)] if uses else [])]
    figure = charts.new_figure(title, subtitle, 0.9 + sum(heights))
    grid = figure.add_gridspec(len(heights), 2, height_ratios=heights)
    if outcomes:
        names, counts, is_miss = zip(*outcomes, strict=True)
        labels = [f"{count:,} ({100 * count / (sum(counts) or 1):.1f}%)" for count in counts]
        axes = figure.add_subplot(grid[0, :])
        draw_rows(axes, names, counts, labels, color=[VERMILLION if missed else BLUE for missed in is_miss])
        axes.set_xlabel("Items")
    if uses:
        left, right = (figure.add_subplot(grid[-1, column]) for column in range(2))
        names, counts, wastes = zip(*((use.name, use.count, use.waste_pct) for use in uses), strict=True)
        draw_rows(left, names, counts, [f"{count:,}" for count in counts], color=BLUE)
        draw_rows(right, [""] * len(uses), wastes, [f"{waste:.0f}" for waste in wastes], color=GREEN, hatch="//")
        left.set(xlabel=counted, ylabel="Token budget")
        right.set(xlabel="Waste (% of the rows)")
    for axes in figure.axes:
        axes.margins(x=0.24)
    return figure


def draw_paths(
    subtitle: str, waste: Mapping[str, Mapping[str, float | None]], replay_ms: Mapping[str, float | None]
) -> Figure:
    """Waste of each encoder path, and the time of its replays where that was measured.

    Args:
        subtitle: What was measured on what.
        waste: Share of padding by path, by how the paths are captured: `two paths`, `monolithic`.
        replay_ms: Milliseconds a request in replays of a path; a path that was not timed has None.
    """
    names = list(dict.fromkeys(path for shares in waste.values() for path in shares))
    has_times = any(value is not None for value in replay_ms.values())
    height = 1.6 + 0.45 * len(names) * (len(waste) + has_times) + has_times
    figure = charts.new_figure("Encoder paths", subtitle, height)
    waste_axes, *time_axes = charts.new_axes(figure, 1 + has_times)
    for number, (side, shares) in enumerate(waste.items()):
        values = [shares.get(name) for name in names]
        labels = ["" if value is None else f"{100 * value:.1f}" for value in values]
        place = (number - (len(waste) - 1) / 2) * 0.8 / len(waste)
        style = {**_SIDE_LOOKS[side], "height": 0.8 / len(waste), "label": side}
        draw_rows(waste_axes, names, [100 * (value or 0.0) for value in values], labels, place, **style)
    waste_axes.set(xlabel="Waste (% of the rows)", xlim=(0, 112))
    for axes in time_axes:
        times = [replay_ms.get(name) for name in names]
        labels = ["not measured" if time is None else say.short(time) for time in times]
        draw_rows(axes, names, [time or 0.0 for time in times], labels, color=BLUE)
        axes.set_xlabel("Replays alone (ms a request)")
        axes.margins(x=0.2)
    if len(waste) > 1:
        charts.legend_below(figure)
    return figure


@dataclass(frozen=True, slots=True)
class Series:
    """The latency of one backend and mode, for its bars.

    Attributes:
        mean_ms: Mean, milliseconds a request.
        tail_ms: P99, or the maximum of too few requests for one.
        mark: What its bars must be marked with: that one request moves them; empty for most.
    """

    mean_ms: float
    tail_ms: float
    mark: str = ""


def draw_backends(
    title: str,
    subtitle: str,
    names: Sequence[str],
    series: Mapping[tuple[str, str], Series],
    missing: Mapping[tuple[str, str], str],
    tail_name: str,
) -> Figure:
    """Mean and tail latency of every backend, a bar a mode; a bar that one request moves is marked.

    Args:
        title: What it shows.
        subtitle: What was measured on what.
        names: Backends, a row each.
        series: Latency by backend and mode.
        missing: Why a backend and mode has none.
        tail_name: What the tail is.
    """
    figure = charts.new_figure(title, subtitle, 2.2 + 1.5 * len(names))
    for axes, field, label in zip(charts.new_axes(figure, 2), ("mean_ms", "tail_ms"), ("Mean", tail_name), strict=True):
        usual = [getattr(one, field) for one in series.values() if not one.mark]
        end = 1.35 * max(usual or [getattr(one, field) for one in series.values()])
        for place, mode in ((-0.2, "eager"), (0.2, "graph")):
            rows = {row: series[name, mode] for row, name in enumerate(names) if (name, mode) in series}
            look = {name: charts.MODE_LOOKS[mode][name] for name in ("color", "hatch")}
            lengths = [min(getattr(one, field), 0.98 * end) for one in rows.values()]
            axes.barh([row + place for row in rows], lengths, 0.38, label=mode, edgecolor="#ffffff", **look)
            for row, one in rows.items():
                _label_bar(axes, getattr(one, field), row + place, one.mark, end)
            for row, name in enumerate(names):
                if (name, mode) in missing:
                    style = {"va": "center", "color": charts.GREY}
                    axes.text(0.01 * end, row + place, clean(missing[name, mode]), **style)  # type: ignore[arg-type]
        name_rows(axes, names)
        axes.set(xlabel=f"{label} of a request (ms)", xlim=(0.0, end))
    charts.legend_below(figure)
    return figure


def _label_bar(axes: Axes, value: float, place: float, mark: str, end: float) -> None:
    """Its figure at the end of a bar; its mark goes on in the bar itself where there is no room behind it."""
    reach, is_long = min(value, 0.98 * end), value > 0.45 * end
    text = f"{say.short(value)}{f' ! {mark}' if mark and not is_long else ''}"
    is_cut = value > reach
    at = {"ha": "right", "bbox": _LABEL_BOX} if is_cut else {"ha": "left"}
    axes.text(reach + (-0.01 if is_cut else 0.01) * end, place, text, va="center", **at)  # type: ignore[arg-type]
    if mark and is_long:
        axes.text(0.01 * end, place, f"! {mark}", va="center", bbox=_LABEL_BOX)


def draw_parts(
    title: str, subtitle: str, xlabel: str, parts: Sequence[str], bars: Mapping[str, Mapping[str, float]]
) -> Figure:
    """Stacked bars, a row each, of the same parts in the same order and look.

    Args:
        title: What it shows.
        subtitle: What was measured on what.
        xlabel: What their length is.
        parts: All parts that a bar may have, in the order of their looks.
        bars: Milliseconds by part, by bar.
    """
    figure = charts.new_figure(title, subtitle, 2.6 + 0.75 * len(bars))
    (axes,) = charts.new_axes(figure)
    longest = max(sum(bar.values()) for bar in bars.values())
    for place, bar in enumerate(bars.values()):
        start = 0.0
        for part, value in bar.items():
            color, hatch = _PART_LOOKS[parts.index(part)]
            style: dict[str, Any] = {"color": color, "hatch": hatch, "edgecolor": "#ffffff", "height": 0.62}
            axes.barh(place, value, left=start, label=charts.series_label(part), **style)
            if value / longest >= _LEAST_NAMED_SHARE:
                axes.text(start + value / 2, place, say.short(value), ha="center", va="center", bbox=_LABEL_BOX)
            start += value
        axes.text(start + 0.01 * longest, place, say.short(start), va="center")
    name_rows(axes, list(bars))
    axes.set(xlabel=xlabel, xlim=(0.0, 1.16 * longest))
    charts.legend_below(figure)
    return figure
