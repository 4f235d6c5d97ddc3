"""The charts: budgets, paths, backends, where time goes, latency over tokens, distributions, gains, settings, sizes.

The subtitle of each says what was measured on what.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vitgraph.records.results import COMPARED_MODES
from vitgraph.records.series import Latency
from vitgraph.records.stats import P99_MIN_SAMPLES
from vitgraph.records.tune_result import Evaluation
from vitgraph.records.two_runs import DeltaRow
from vitgraph.report import charts, say
from vitgraph.report.charts import BLUE, GREEN, GREY, GRID_GREY, ORANGE, PALE_GREY, PINK, SKY, VERMILLION, FloatArray
from vitgraph.report.say import clean

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_ROWS = 40
_LEAST_NAMED_SHARE = 0.11
_LABEL_BOX = {"boxstyle": "round,pad=0.15", "facecolor": "#ffffff", "edgecolor": "none", "alpha": 0.9}
_PART_COLORS = (BLUE, SKY, GREEN, ORANGE, VERMILLION, PINK, GREY, GRID_GREY)
_PART_HATCHES = ("", "//", "..", "\\\\", "xx", "++", "", "")
_SIDE_LOOKS = {"two paths": (GREEN, "//"), "monolithic": (PINK, "..")}
_BUDGET_REACH = 1.5
_SETTING_LOOKS = {"tuned": ("*", BLUE, 17), "automatic list": ("s", ORANGE, 9), "vLLM's nine": ("D", PINK, 8)}
_BACKEND_LOOKS = ((BLUE, "^"), (VERMILLION, "o"), (GREEN, "s"), (PINK, "D"), (ORANGE, "v"))


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


def draw_budgets(
    title: str, subtitle: str, counted: str, uses: pd.DataFrame, outcomes: Sequence[tuple[str, int, bool]] = ()
) -> Figure:
    """What each token budget replays and wastes, a row a budget, beneath hits and misses.

    Args:
        uses: A row a budget, ascending, with its `name`, `count` and `waste_pct`, the share of the computed rows that
            is padding; of very many the most used are drawn.
        outcomes: Name, items, and whether they are misses; those that are part of others are for the text.
    """
    uses = uses.sort_values("count", ascending=False, kind="stable").head(_MOST_ROWS).sort_index()
    heights = [*([0.7 + 0.34 * len(outcomes)] if outcomes else []), *([0.8 + 0.3 * len(uses)] if len(uses) else [])]
    figure = charts.new_figure(title, subtitle, 0.9 + sum(heights))
    grid = figure.add_gridspec(len(heights), 2, height_ratios=heights)
    if outcomes:
        names, counts, is_miss = zip(*outcomes, strict=True)
        labels = [f"{count:,} ({100 * count / (sum(counts) or 1):.1f}%)" for count in counts]
        axes = figure.add_subplot(grid[0, :])
        draw_rows(axes, names, counts, labels, color=[VERMILLION if missed else BLUE for missed in is_miss])
        axes.set_xlabel("Items")
    if len(uses):
        left, right = (figure.add_subplot(grid[-1, column]) for column in range(2))
        budgets, totals, wastes = (uses[column].tolist() for column in ("name", "count", "waste_pct"))
        draw_rows(left, budgets, totals, [f"{total:,}" for total in totals], color=BLUE)
        draw_rows(right, [""] * len(uses), wastes, [f"{waste:.0f}" for waste in wastes], color=GREEN, hatch="//")
        left.set(xlabel=counted, ylabel="Token budget")
        right.set(xlabel="Waste (% of the rows)")
    for axes in figure.axes:
        axes.margins(x=0.24)
    return figure


def draw_calls(facts: Mapping[str, Any]) -> Figure:
    """Share of the calls with so many requests, a row a number."""
    rows = facts["sizes"]
    subtitle = f"{facts['name']} · {facts['calls']:,} calls of {facts['requests']:,} requests"
    figure, (axes,) = charts.new_axes("Requests a call", subtitle, 1.6 + 0.32 * len(rows))
    names, shares = [row["requests"] for row in rows], [100 * row["share"] for row in rows]
    draw_rows(axes, names, shares, [f"{row['calls']:,}" for row in rows], color=BLUE)
    axes.set(xlabel="Share of the calls (%), with how many calls that is", ylabel="Requests a call")
    axes.margins(x=0.12)
    return figure


def draw_paths(
    subtitle: str, waste: Mapping[str, Mapping[str, float | None]], replay_ms: Mapping[str, float | None]
) -> Figure:
    """Waste of each encoder path, and the time of its replays where that was measured.

    Args:
        waste: Share of padding by path, by how the paths are captured: `two paths`, `monolithic`.
        replay_ms: Milliseconds a request in replays of a path; a path that was not timed has None.
    """
    names = list(dict.fromkeys(path for shares in waste.values() for path in shares))
    has_times = any(value is not None for value in replay_ms.values())
    height = 1.6 + 0.45 * len(names) * (len(waste) + has_times) + has_times
    figure, (waste_axes, *time_axes) = charts.new_axes("Encoder paths", subtitle, height, 1 + has_times)
    for number, (side, shares) in enumerate(waste.items()):
        values = [shares.get(name) for name in names]
        labels = ["" if value is None else f"{100 * value:.1f}" for value in values]
        place = (number - (len(waste) - 1) / 2) * 0.8 / len(waste)
        color, hatch = _SIDE_LOOKS[side]
        style: dict[str, Any] = {"color": color, "hatch": hatch, "height": 0.8 / len(waste), "label": side}
        draw_rows(waste_axes, names, [100 * (value or 0.0) for value in values], labels, place, **style)
    waste_axes.set(xlabel="Waste (% of the rows)", xlim=(0, 112))
    for axes in time_axes:
        times = [replay_ms.get(name) for name in names]
        labels = ["not measured" if time is None else say.short(time) for time in times]
        draw_rows(axes, names, [time or 0.0 for time in times], labels, color=BLUE)
        axes.set_xlabel("Replays alone (ms a request)")
        axes.margins(x=0.2)
    return charts.with_legend(figure) if len(waste) > 1 else figure


def draw_backends(
    subtitle: str,
    names: Sequence[str],
    latencies: Mapping[tuple[str, str], Latency],
    words: Mapping[tuple[str, str], str],
    tail: str,
) -> Figure:
    """Mean and tail latency of every backend, a bar a mode; a bar that one request moves is marked.

    Args:
        words: Why a backend and mode has none, or what its bars must be marked with: that one request moves them.
        tail: `p99_ms`, or `max_ms` where there are too few requests for one.
    """
    title = "Attention backends, eager and graph"
    figure, panels = charts.new_axes(title, subtitle, 2.2 + 1.5 * len(names), 2)
    labels = ("Mean", "P99" if tail == "p99_ms" else f"Max (n<{P99_MIN_SAMPLES})")
    for axes, field, label in zip(panels, ("mean_ms", tail), labels, strict=True):
        values: dict[tuple[str, str], float] = {key: getattr(of, field) or 0.0 for key, of in latencies.items()}
        end = 1.35 * max([value for key, value in values.items() if key not in words] or values.values())
        for place, mode in zip((-0.2, 0.2), COMPARED_MODES, strict=True):
            rows = {row: values[name, mode] for row, name in enumerate(names) if (name, mode) in values}
            look = {name: charts.MODE_LOOKS[mode][name] for name in ("color", "hatch")}
            lengths = [min(value, 0.98 * end) for value in rows.values()]
            axes.barh([row + place for row in rows], lengths, 0.38, label=mode, edgecolor="#ffffff", **look)
            for row, value in rows.items():
                _label_bar(axes, value, row + place, words.get((names[row], mode), ""), end)
            for row, name in enumerate(names):
                if row not in rows:
                    axes.text(0.01 * end, row + place, clean(words[name, mode]), va="center", color=GREY)
        name_rows(axes, names)
        axes.set(xlabel=f"{label} of a request (ms)", xlim=(0.0, end))
    return charts.with_legend(figure)


def _label_bar(axes: Axes, value: float, place: float, mark: str, end: float) -> None:
    """Its figure at the end of a bar; its mark goes on in the bar itself where there is no room behind it."""
    reach, is_long = min(value, 0.98 * end), value > 0.45 * end
    text = f"{say.short(value)}{f' ! {mark}' if mark and not is_long else ''}"
    is_cut = value > reach
    at = {"ha": "right", "bbox": _LABEL_BOX} if is_cut else {"ha": "left"}
    # Half of the width holds a mark in small type, so that none runs out of the picture.
    at |= {"va": "center", "size": "x-small" if mark and not is_long else "medium"}
    axes.text(reach + (-0.01 if is_cut else 0.01) * end, place, text, **at)  # type: ignore[arg-type]
    if mark and is_long:
        axes.text(0.01 * end, place, f"! {mark}", va="center", size="x-small", bbox=_LABEL_BOX)


def draw_parts(
    title: str, subtitle: str, xlabel: str, parts: Sequence[str], bars: Mapping[str, Mapping[str, float]]
) -> Figure:
    """Stacked bars, a row each, of the same parts in the same order and look."""
    figure, (axes,) = charts.new_axes(title, subtitle, 2.6 + 0.75 * len(bars))
    longest = max(sum(bar.values()) for bar in bars.values())
    for place, bar in enumerate(bars.values()):
        start = 0.0
        for part, value in bar.items():
            color, hatch = _PART_COLORS[parts.index(part)], _PART_HATCHES[parts.index(part)]
            style: dict[str, Any] = {"color": color, "hatch": hatch, "edgecolor": "#ffffff", "height": 0.62}
            axes.barh(place, value, left=start, label=charts.series_label(part), **style)
            if value / longest >= _LEAST_NAMED_SHARE:
                axes.text(start + value / 2, place, say.short(value), ha="center", va="center", bbox=_LABEL_BOX)
            start += value
        axes.text(start + 0.01 * longest, place, say.short(start), va="center")
    name_rows(axes, list(bars))
    axes.set(xlabel=xlabel, xlim=(0.0, 1.16 * longest))
    return charts.with_legend(figure)


def draw_by_tokens(
    subtitle: str,
    tokens: FloatArray,
    times_ms: Mapping[str, FloatArray],
    misses: FloatArray,
    budgets: Sequence[int],
) -> Figure:
    """Scatter of latency over output tokens, with the token budgets as vertical lines.

    Args:
        tokens: Output tokens; shape `[n]`, as of all that follow.
        times_ms: Milliseconds by series; `graph` is drawn apart where something missed.
        misses: Items that ran eagerly in graph mode.
    """
    figure, (axes,) = charts.new_axes("Latency by tokens", subtitle, 4.6)
    axes.set(xlabel="Output tokens of a call", ylabel="Latency of a call (ms)")
    every = np.concatenate(list(times_ms.values()))
    charts.scale_axis(axes, "x", tokens.min(), tokens.max())
    charts.scale_axis(axes, "y", every.min(), every.max())
    for budget in budgets:
        if tokens.min() <= budget <= _BUDGET_REACH * tokens.max():
            axes.axvline(budget, color=PALE_GREY, linewidth=0.8, zorder=0, label="token budget")
    for index, (mode, times) in enumerate(times_ms.items()):
        look = charts.mode_look(mode, index)
        parts = [(mode, np.ones(tokens.size, dtype=bool), look["marker"])]
        if mode == "graph":
            parts = [("graph", misses <= 0, "^"), ("graph, with an eager fallback", misses > 0, "x")]
        for label, chosen, marker in parts:
            x, y = tokens[chosen], times[chosen]
            kept = charts.thinned(x, y)
            style: dict[str, Any] = {"s": 26, "linewidths": 1.0, "alpha": 0.75, "marker": marker}
            own = {"color": look["color"]} if marker in "x^" else {"facecolors": "none", "edgecolors": look["color"]}
            if x.size:
                axes.scatter(x[kept], y[kept], label=charts.series_label(label), **own, **style)
    return charts.with_legend(figure)


def draw_distribution(
    title: str, subtitle: str, xlabel: str, share_of: str, series: Mapping[str, FloatArray], unit: str = "ms"
) -> Figure:
    """Cumulative share over a value, a line a series, with its mean and P99 (or the maximum) marked.

    Args:
        unit: Unit of the figures in the legend; empty for whole numbers.
    """
    figure, (axes,) = charts.new_axes(title, subtitle, 4.2 + 0.3 * len(series))
    axes.set(xlabel=xlabel, ylabel=f"Share of {share_of} (%)", ylim=(0, 103))
    every = np.concatenate(list(series.values()))
    charts.scale_axis(axes, "x", every.min(), every.max())
    for index, (name, values) in enumerate(series.items()):
        look = charts.mode_look(name, index)
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
    axes.grid(axis="y", color=GRID_GREY, linewidth=0.8)
    axes.set_axisbelow(True)
    return charts.with_legend(figure, columns=1)


def draw_improvements(title: str, subtitle: str, rows: Mapping[str, DeltaRow]) -> Figure:
    """Improvements with their 95 % intervals, a row each by name, over the band of the noise floor."""
    figure, (axes,) = charts.new_axes(title, subtitle, 1.9 + 0.42 * len(rows))
    for place, row in enumerate(rows.values()):
        look, floor, gain = (
            charts.mode_look(row.mode, place),
            row.found.noise_floor_pct,
            row.found.improvement_pct or 0.0,
        )
        if floor is not None:
            axes.barh(place, 2 * floor, 0.7, -floor, color=GREY, alpha=0.25, label="noise floor")
        if row.found.ci95 is not None:
            ends = np.abs(np.subtract(row.found.ci95, gain))[:, None]
            axes.errorbar(gain, place, xerr=ends, color=look["color"], capsize=5, linewidth=2)
        axes.plot(gain, place, look["marker"], color=look["color"], markersize=9, label=row.mode)
    axes.axvline(0.0, color="#000000", linewidth=0.8)
    name_rows(axes, list(rows))
    axes.set_xlabel("Improvement (%), positive = faster")
    return charts.with_legend(figure, columns=3)


def draw_pareto(
    subtitle: str,
    found: Sequence[Evaluation],
    named: Mapping[str, Evaluation],
    eager: tuple[float, float, float],
    oracle_ms: float,
) -> Figure:
    """Mean latency over graphs, and over their memory: the best found, the choice, the baselines, eager, the oracle.

    Args:
        eager: Mean latency of eager, and the ends of what it is in doubt by.
    """
    figure, both = charts.new_axes("Predicted mean latency by graphs and memory", subtitle, 8.2, 2)
    mean, low, high = eager
    panels = (("graphs", 1, "Graphs"), ("memory_bytes", 2**20, "Memory (MiB)"))
    for axes, (field, scale, label) in zip(both, panels, strict=True):
        # The settings of which none has both less of the field and a lower mean.
        points = np.array(sorted((getattr(one, field) / scale, one.latency.mean_ms) for one in found)).reshape(-1, 2)
        front = points[points[:, 1] < np.minimum.accumulate(np.append(np.inf, points[:-1, 1]))]
        axes.plot(*front.T, "-", color=BLUE, linewidth=1.2, marker=".", label="best found")
        for name, one in named.items():
            marker, color, size = _SETTING_LOOKS[name]
            at = getattr(one, field) / scale, one.latency.mean_ms
            axes.plot(*at, marker, color=color, markersize=size, label=name)
        if high > low:
            axes.axhspan(low, high, color=VERMILLION, alpha=0.16, linewidth=0, label="eager ± its error")
        axes.axhline(mean, color=VERMILLION, linestyle=(0, (5, 2)), linewidth=1.4, label="eager")
        axes.axhline(oracle_ms, color=GREEN, linestyle=(0, (1, 1)), linewidth=1.4, label="oracle")
        axes.set(xlabel=label, ylabel="Mean of a request (ms)")
        if len(front):
            charts.scale_axis(axes, "x", max(front[0, 0], 1e-9), front[-1, 0])
    return charts.with_legend(figure, columns=3)


def draw_sizes(subtitle: str, sizes: Mapping[tuple[int, int, int], int]) -> Figure:
    """Height over width of every distinct (width, height, frames); the area of a mark grows with its items."""
    figure, (axes,) = charts.new_axes("Sizes of the items", f"{subtitle} · a larger mark: more of them", 6.2)
    axes.set(xlabel="Width (pixels)", ylabel="Height (pixels)")
    marks: Counter[tuple[bool, int, int]] = Counter()
    for (width, height, frames), count in sizes.items():
        marks[frames > 1, width, height] += count
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
    return charts.with_legend(figure, columns=3)


def draw_attention(
    subtitle: str, lines: Mapping[str, Mapping[str, Sequence[tuple[int, float]]]], marks: Mapping[str, Sequence[float]]
) -> Figure:
    """Time of attention over the rows of a segment, a line a backend; where one overtakes another is marked.

    Args:
        lines: `(rows of a segment, ms)` by the calls' segments and the backend.
        marks: Rows at which the fastest backend changes, by the calls' segments.
    """
    figure, panels = charts.new_axes("Attention alone", subtitle, 1.2 + 3.4 * len(lines), len(lines))
    names = list(dict.fromkeys(name for panel in lines.values() for name in panel))
    for axes, (calls, panel) in zip(panels, lines.items(), strict=True):
        for name, points in panel.items():
            color, marker = _BACKEND_LOOKS[names.index(name) % len(_BACKEND_LOOKS)]
            axes.plot(*zip(*sorted(points), strict=True), color=color, marker=marker, label=name)
        for at in marks.get(calls, ()):
            axes.axvline(at, color=GREY, linestyle=(0, (1, 1)))
            axes.annotate(f"{at:,.0f}", (at, 1.0), xycoords=("data", "axes fraction"), ha="center", va="bottom")
        axes.set(xlabel=f"Rows of a segment, {calls}", ylabel="Time of a call (ms)")
        rows, times = zip(*(point for points in panel.values() for point in points), strict=True)
        charts.scale_axis(axes, "x", min(rows), max(rows))
        charts.scale_axis(axes, "y", min(times), max(times))
    return charts.with_legend(figure)
