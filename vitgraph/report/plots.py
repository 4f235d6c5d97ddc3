"""Draws a saved run, each figure as PNG and SVG: latency by tokens, latency distribution, budgets in use, paths.

Eager and graph differ in marker and line as well as in colour, so the figures also read in grey.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from vitgraph.records.bench_record import RunRecord, Sample
from vitgraph.records.samples import EAGER, GRAPH, MONOLITHIC, RequestTimes, compared_modes, request_times
from vitgraph.records.stats import Summary, summarize
from vitgraph.report.figures import (
    BLUE,
    CPU_NOTE,
    GREEN,
    GREY,
    GRID_GREY,
    PALE_GREY,
    PINK,
    VERMILLION,
    add_title,
    draw_budget_bars,
    figure_files,
    legend_beside,
    new_figure,
    report_style,
    scale_axis,
)
from vitgraph.report.files import write_files
from vitgraph.report.paths_view import all_graphs, path_rows
from vitgraph.report.units import NOT_MEASURED, is_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LATENCY_BY_TOKENS = "latency_by_tokens"
LATENCY_DISTRIBUTION = "latency_distribution"
BUDGETS = "budgets"
PATHS = "paths"

_LINES = {
    EAGER: (VERMILLION, (0, (5, 2)), 12),
    GRAPH: (BLUE, "solid", 8),
    MONOLITHIC: (PINK, (0, (1, 1)), 10),
}
"""Colour, line and marker size of a mode in the distribution."""
_BUDGET_REACH = 1.5


def write_plots(
    record: RunRecord, samples: Sequence[Sample], folder: Path | str, overwrite: bool = False
) -> list[Path]:
    """Draws what the run has data for: no figure is made of nothing.

    Args:
        record: The run.
        samples: Its samples; the latency figures use requests that were measured in both modes.
        folder: Where the files go; created if needed.
        overwrite: Whether files of the same names may be replaced.

    Returns:
        The written files, PNG before SVG.

    Raises:
        UsageError: A file exists and `overwrite` is off.
        RecordFileError: A file could not be written; the message names those before it.
    """
    files = plot_files(record, samples)
    return write_files({Path(folder) / name: content for name, content in files.items()}, overwrite)


def plot_files(record: RunRecord, samples: Sequence[Sample]) -> dict[str, bytes]:
    """The figures that the run has data for, by file name."""
    pair = request_times(samples, compared_modes(samples))
    with report_style():
        figures: dict[str, Figure] = {}
        if pair.requests:
            figures[LATENCY_BY_TOKENS] = draw_latency_by_tokens(record, samples, pair)
            figures[LATENCY_DISTRIBUTION] = draw_latency_distribution(record, pair)
        if record["graph"] and record["graph"]["items"]:
            figures[BUDGETS] = draw_budgets(record)
            if path_rows(record["graph"]):
                figures[PATHS] = draw_paths(record)
        return figure_files(figures)


def draw_latency_by_tokens(record: RunRecord, samples: Sequence[Sample], pair: RequestTimes) -> Figure:
    """Scatter of a request's latency over its output tokens, every mode, with the budgets as vertical lines."""
    rows = {sample.request: sample for sample in samples if sample.mode == GRAPH}
    tokens = np.array([rows[request].tokens for request in pair.requests], dtype=np.float64)
    has_miss = np.array([rows[request].misses > 0 for request in pair.requests])
    eager, graph = pair.times[EAGER], pair.times[GRAPH]
    figure, axes = _run_figure(record, "Latency by tokens")
    axes.set(xlabel="Output tokens a request", ylabel="Latency a request (ms)")
    scale_axis(axes, "x", tokens.min(), tokens.max())
    _scale_times(axes, "y", pair)
    low, high = tokens.min(), _BUDGET_REACH * tokens.max()
    budgets = [budget for budget in _captured_budgets(record["graph"]) if low <= budget <= high]
    for budget in budgets:
        label = "token budget" if budget == budgets[0] else None
        axes.axvline(budget, color=PALE_GREY, linewidth=0.8, zorder=0, label=label)
    common: dict[str, Any] = {"s": 26, "linewidths": 0.9, "alpha": 0.75}
    axes.scatter(tokens, eager, marker="o", facecolors="none", edgecolors=VERMILLION, label="eager", **common)
    replayed = ~has_miss
    axes.scatter(tokens[replayed], graph[replayed], marker="^", color=BLUE, label="graph", **common)
    if has_miss.any():
        label = "graph, with an\neager fallback"
        axes.scatter(tokens[has_miss], graph[has_miss], marker="x", color=BLUE, label=label, **common)
    if MONOLITHIC in pair.times:
        style: dict[str, Any] = {"marker": "s", "facecolors": "none", "edgecolors": PINK}
        axes.scatter(tokens, pair.times[MONOLITHIC], label="monolithic", **style, **common)
    legend_beside(axes)
    return figure


def draw_latency_distribution(record: RunRecord, pair: RequestTimes) -> Figure:
    """Cumulative share of requests over latency, every mode, with mean and P99 (or the maximum) marked."""
    figure, axes = _run_figure(record, "Latency distribution")
    axes.set(xlabel="Latency a request (ms)", ylabel="Share of requests (%)", ylim=(0, 103))
    _scale_times(axes, "x", pair)
    for mode, times in pair.times.items():
        color, dashes, size = _LINES[mode]
        ordered = np.sort(times)
        summary = summarize(ordered)
        share = 100.0 * np.arange(ordered.size + 1) / ordered.size
        label = _describe(mode, summary)
        axes.step(
            np.insert(ordered, 0, ordered[0]),
            share,
            where="post",
            color=color,
            linestyle=dashes,
            linewidth=2.0,
            label=label,
        )
        for marker, time_ms in (("o", float(np.mean(ordered))), ("D", _tail(summary))):
            height = 100.0 * float(np.mean(ordered <= time_ms))
            axes.plot(time_ms, height, marker, color=color, markersize=size, markeredgecolor="white", zorder=3)
    tail_name = "P99" if summary.is_p99_supported else "maximum"
    for marker, name in (("o", "mean"), ("D", tail_name)):
        axes.plot([], [], marker, color=GREY, markersize=9, label=name)
    axes.grid(axis="y", color=GRID_GREY, linewidth=0.8)
    axes.set_axisbelow(True)
    legend_beside(axes, handlelength=2.6, labelspacing=1.0)
    return figure


def draw_budgets(record: RunRecord) -> Figure:
    """Items and waste of each token budget, slots and axis keys together, and hits and misses by reason."""
    graph = record["graph"]
    reasons = sorted(((count, name) for name, count in graph["misses_by_reason"].items() if count), reverse=True)
    others = [("partly replayed misses", graph["partial_hits"])] if graph["partial_hits"] else []
    rows = len(reasons) + len(others)
    figure = new_figure(9.6, 6.4 + 0.3 * rows)
    grid = figure.add_gridspec(3, 1, height_ratios=(3.0, 3.0, 0.7 + 0.5 * rows))
    items_axes, waste_axes, outcome_axes = (figure.add_subplot(grid[row, 0]) for row in range(3))
    names, items, waste = _budget_bars(graph)
    draw_budget_bars(items_axes, names, items, "%d", color=BLUE)
    draw_budget_bars(waste_axes, names, waste, "%.0f", color=GREEN, hatch="//")
    _add_title(items_axes, record, "Items and waste by token budget")
    items_axes.set_ylabel("Items replayed")
    items_axes.tick_params(axis="x", labelbottom=False)
    waste_axes.set(ylabel="Waste (%)", xlabel="Token budget")
    _draw_outcomes(outcome_axes, graph["hits"], reasons, others)
    if MONOLITHIC in graph:
        outcome_axes.set_xlabel("Items, with two paths")
    return figure


def draw_paths(record: RunRecord) -> Figure:
    """Waste of each encoder path, inside monolithic graphs too where they were measured, and its replays' time."""
    graph = record["graph"]
    paths = graph["per_path"]
    times = [row.get("replay_ms") for row in paths]
    has_times = any(map(is_number, times))
    figure = new_figure(9.6, 4.2 + 2.4 * has_times)
    waste_axes, *time_axes = figure.subplots(1 + has_times, 1, squeeze=False)[:, 0]
    _add_title(waste_axes, record, "Encoder paths")
    sides = {"two paths": paths, **({MONOLITHIC: graph["monolithic"]["parts"]} if MONOLITHIC in graph else {})}
    names = list(dict.fromkeys(row["path"] for rows in sides.values() for row in rows))
    styles = {"two paths": {"color": GREEN, "hatch": "//"}, MONOLITHIC: {"color": PINK}}
    width = 0.8 / len(sides)
    for number, (side, rows) in enumerate(sides.items()):
        waste = {row["path"]: 100 * row["waste"] for row in rows if row["waste"] is not None}
        places = [names.index(path) + (number - (len(sides) - 1) / 2) * width for path in waste]
        bars = waste_axes.bar(places, waste.values(), width=width, edgecolor="white", label=side, **styles[side])
        waste_axes.bar_label(bars, fmt="%.1f", fontsize=10, padding=1)
    waste_axes.set(ylabel="Waste (%)", ylim=(0, 108))
    waste_axes.set_xticks(range(len(names)), names)
    legend_beside(waste_axes)
    for axes in time_axes:
        bars = axes.bar(range(len(paths)), [time_ms or 0.0 for time_ms in times], width=0.6, color=BLUE)
        labels = [f"{time_ms:.2f}" if is_number(time_ms) else NOT_MEASURED for time_ms in times]
        axes.bar_label(bars, labels, fontsize=10, padding=1)
        axes.set_xticks(range(len(paths)), [row["path"] for row in paths])
        axes.set_ylabel("Replays alone\n(ms a request)")
        axes.margins(y=0.12)
    return figure


def _draw_outcomes(
    axes: Axes, hits: int, reasons: Sequence[tuple[int, str]], others: Sequence[tuple[str, int]]
) -> None:
    """Bars of hits and misses; `others` are parts of these and count towards no total."""
    names = ["hit", *(f"miss: {name.replace('_', ' ')}" for _, name in reasons), *(name for name, _ in others)]
    counts = [hits, *(count for count, _ in reasons)]
    total = sum(counts)
    counts += [count for _, count in others]
    colors = [BLUE, *[VERMILLION] * len(reasons), *[GREY] * len(others)]
    bars = axes.barh(range(len(names)), counts, height=0.7, color=colors)
    labels = [f"{count} ({100 * count / total:.1f}%)" for count in counts]
    axes.bar_label(bars, labels=labels, fontsize=10, padding=4)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("Items")
    axes.margins(x=0.16)
    axes.tick_params(axis="y", length=0)


def _budget_bars(graph: Mapping[str, Any]) -> tuple[list[str], list[int], list[float]]:
    """Names, items and waste in percent of the paths and budgets that were replayed, ascending."""
    totals: dict[tuple[str, int], tuple[int, int, int]] = {}
    for entry in all_graphs(graph, "per_budget"):
        if entry["replays"]:
            key = entry["path"], entry["token_budget"]
            replays, items, tokens = totals.get(key, (0, 0, 0))
            totals[key] = replays + entry["replays"], items + entry["items"], tokens + entry["tokens"]
    has_paths = any(path != "default" for path, _ in totals)
    keys = sorted(totals)
    names = [f"{path} {budget}" if has_paths else str(budget) for path, budget in keys]
    items_of = [totals[key][1] for key in keys]
    waste = [100.0 * (1.0 - totals[key][2] / (totals[key][0] * key[1])) for key in keys]
    return names, items_of, waste


def _scale_times(axes: Axes, name: Literal["x", "y"], pair: RequestTimes) -> None:
    times = np.concatenate(list(pair.times.values()))
    scale_axis(axes, name, times.min(), times.max())


def _captured_budgets(graph: Mapping[str, Any] | None) -> list[int]:
    return sorted({entry["token_budget"] for entry in (graph or {}).get("captured", [])})


def _run_figure(record: RunRecord, title: str) -> tuple[Figure, Axes]:
    figure = new_figure(9.6, 5.4)
    axes = figure.add_subplot()
    _add_title(axes, record, title)
    return figure, axes


def _add_title(axes: Axes, record: RunRecord, title: str) -> None:
    model = record.model_name.rsplit("/", 1)[-1]
    parts = (model, record.device_name, record.backend_used, CPU_NOTE if record.is_cpu_replay else None)
    add_title(axes, title, " · ".join(part for part in parts if part))


def _tail(summary: Summary) -> float:
    tail = summary.p99 if summary.is_p99_supported else summary.max
    return math.nan if tail is None else tail


def _describe(mode: str, summary: Summary) -> str:
    name = "P99" if summary.is_p99_supported else "max"
    return f"{mode} (n={summary.n})\nmean {summary.mean:.2f} ms\n{name} {_tail(summary):.2f} ms"
