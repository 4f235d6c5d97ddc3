"""Draws a saved run, each figure as PNG and SVG: latency by tokens, latency distribution, budgets in use, paths.

Eager and graph differ in marker and line as well as in colour, so the figures also read in grey.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from vitgraph.records import RunRecord, Sample
from vitgraph.report.paths_view import all_graphs, path_rows
from vitgraph.result_files import RecordFileError, os_reason, refuse_to_replace, write_atomically
from vitgraph.samples import EAGER, GRAPH, MONOLITHIC, RequestTimes, compared_modes, request_times
from vitgraph.stats import FloatArray, Summary, summarize

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

LATENCY_BY_TOKENS = "latency_by_tokens"
LATENCY_DISTRIBUTION = "latency_distribution"
BUDGETS = "budgets"
PATHS = "paths"
PNG_DPI = 150

# Vermillion, blue, green, grey and purple of Okabe and Ito's palette: distinct for every common colour vision.
_EAGER_COLOR, _GRAPH_COLOR, _WASTE_COLOR, _GREY = "#D55E00", "#0072B2", "#009E73", "#5F5F5F"
_MONOLITHIC_COLOR = "#CC79A7"
_LINES = {
    EAGER: (_EAGER_COLOR, (0, (5, 2)), 12),
    GRAPH: (_GRAPH_COLOR, "solid", 8),
    MONOLITHIC: (_MONOLITHIC_COLOR, (0, (1, 1)), 10),
}
"""Colour, line and marker size of a mode in the distribution."""
_LABELLED_BARS = 14
_NAMED_BARS = 20
_UPRIGHT_CHARACTERS = 70
_NAME_GAP = 2
_LOG_SPAN = 4.0
_BUDGET_REACH = 1.5
_STYLE: dict[str, Any] = {
    "font.size": 12,
    "axes.titlesize": 14,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 11,
    "svg.hashsalt": "vitgraph",
}


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
        RecordFileError: A file could not be written; the message lists the ones that were.
    """
    from matplotlib import rc_context

    pair = request_times(samples, compared_modes(samples))
    with rc_context(cast(Any, _STYLE)):
        figures: dict[str, Figure] = {}
        if pair.requests:
            figures[LATENCY_BY_TOKENS] = draw_latency_by_tokens(record, samples, pair)
            figures[LATENCY_DISTRIBUTION] = draw_latency_distribution(record, pair)
        if record["graph"] and record["graph"]["items"]:
            figures[BUDGETS] = draw_budgets(record)
            if path_rows(record["graph"]):
                figures[PATHS] = draw_paths(record)
        return _save(figures, Path(folder), overwrite)


def draw_latency_by_tokens(record: RunRecord, samples: Sequence[Sample], pair: RequestTimes) -> Figure:
    """Scatter of a request's latency over its output tokens, every mode, with the budgets as vertical lines."""
    rows = {sample.request: sample for sample in samples if sample.mode == GRAPH}
    tokens = np.array([rows[request].tokens for request in pair.requests], dtype=np.float64)
    has_miss = np.array([rows[request].misses > 0 for request in pair.requests])
    eager, graph = pair.times[EAGER], pair.times[GRAPH]
    figure, axes = _new_figure(record, "Latency by tokens")
    axes.set(xlabel="Output tokens a request", ylabel="Latency a request (ms)")
    _scale_axis(axes, "x", tokens)
    _scale_axis(axes, "y", np.concatenate(list(pair.times.values())))
    low, high = tokens.min(), _BUDGET_REACH * tokens.max()
    budgets = [budget for budget in _captured_budgets(record["graph"]) if low <= budget <= high]
    for budget in budgets:
        label = "token budget" if budget == budgets[0] else None
        axes.axvline(budget, color="#B8B8B8", linewidth=0.8, zorder=0, label=label)
    common: dict[str, Any] = {"s": 26, "linewidths": 0.9, "alpha": 0.75}
    axes.scatter(tokens, eager, marker="o", facecolors="none", edgecolors=_EAGER_COLOR, label="eager", **common)
    replayed = ~has_miss
    axes.scatter(tokens[replayed], graph[replayed], marker="^", color=_GRAPH_COLOR, label="graph", **common)
    if has_miss.any():
        label = "graph, with an\neager fallback"
        axes.scatter(tokens[has_miss], graph[has_miss], marker="x", color=_GRAPH_COLOR, label=label, **common)
    if MONOLITHIC in pair.times:
        style: dict[str, Any] = {"marker": "s", "facecolors": "none", "edgecolors": _MONOLITHIC_COLOR}
        axes.scatter(tokens, pair.times[MONOLITHIC], label="monolithic", **style, **common)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0)
    return figure


def draw_latency_distribution(record: RunRecord, pair: RequestTimes) -> Figure:
    """Cumulative share of requests over latency, every mode, with mean and P99 (or the maximum) marked."""
    figure, axes = _new_figure(record, "Latency distribution")
    axes.set(xlabel="Latency a request (ms)", ylabel="Share of requests (%)", ylim=(0, 103))
    _scale_axis(axes, "x", np.concatenate(list(pair.times.values())))
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
        axes.plot([], [], marker, color=_GREY, markersize=9, label=name)
    axes.grid(axis="y", color="#E4E4E4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0, handlelength=2.6, labelspacing=1.0)
    return figure


def draw_budgets(record: RunRecord) -> Figure:
    """Items and waste of each token budget, slots and axis keys together, and hits and misses by reason."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    graph = record["graph"]
    reasons = sorted(((count, name) for name, count in graph["misses_by_reason"].items() if count), reverse=True)
    others = [("partly replayed misses", graph["partial_hits"])] if graph["partial_hits"] else []
    rows = len(reasons) + len(others)
    figure = Figure(figsize=(9.6, 6.4 + 0.3 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(3, 1, height_ratios=(3.0, 3.0, 0.7 + 0.5 * rows))
    items_axes, waste_axes, outcome_axes = (figure.add_subplot(grid[row, 0]) for row in range(3))
    names, items, waste = _budget_bars(graph)
    _draw_bars(items_axes, names, items, "%d", color=_GRAPH_COLOR)
    _draw_bars(waste_axes, names, waste, "%.0f", color=_WASTE_COLOR, hatch="//")
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
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    graph = record["graph"]
    paths = graph["per_path"]
    has_times = all(row.get("replay_ms") is not None for row in paths)
    figure = Figure(figsize=(9.6, 4.2 + 2.4 * has_times), layout="constrained")
    FigureCanvasAgg(figure)
    waste_axes, *time_axes = figure.subplots(1 + has_times, 1, squeeze=False)[:, 0]
    _add_title(waste_axes, record, "Encoder paths")
    sides = {"two paths": paths, **({MONOLITHIC: graph["monolithic"]["parts"]} if MONOLITHIC in graph else {})}
    names = list(dict.fromkeys(row["path"] for rows in sides.values() for row in rows))
    styles = {"two paths": {"color": _WASTE_COLOR, "hatch": "//"}, MONOLITHIC: {"color": _MONOLITHIC_COLOR}}
    width = 0.8 / len(sides)
    for number, (side, rows) in enumerate(sides.items()):
        waste = {row["path"]: 100 * row["waste"] for row in rows if row["waste"] is not None}
        places = [names.index(path) + (number - (len(sides) - 1) / 2) * width for path in waste]
        bars = waste_axes.bar(places, waste.values(), width=width, edgecolor="white", label=side, **styles[side])
        waste_axes.bar_label(bars, fmt="%.1f", fontsize=10, padding=1)
    waste_axes.set(ylabel="Waste (%)", ylim=(0, 108))
    waste_axes.set_xticks(range(len(names)), names)
    waste_axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0)
    for axes in time_axes:
        bars = axes.bar(range(len(paths)), [row["replay_ms"] for row in paths], width=0.6, color=_GRAPH_COLOR)
        axes.bar_label(bars, fmt="%.2f", fontsize=10, padding=1)
        axes.set_xticks(range(len(paths)), [row["path"] for row in paths])
        axes.set_ylabel("Replays alone\n(ms a request)")
        axes.margins(y=0.12)
    return figure


def _draw_bars(axes: Axes, names: Sequence[str], heights: Sequence[float], label: str, **style: Any) -> None:
    bars = axes.bar(range(len(names)), heights, width=0.7, edgecolor="white", **style)
    if len(names) <= _LABELLED_BARS:
        axes.bar_label(bars, fmt=label, fontsize=10, padding=1)
    # Of many budgets only some are named, and those of two paths are too long to stand side by side.
    every = max(1, -(-len(names) // _NAMED_BARS))
    is_crowded = sum(len(name) + _NAME_GAP for name in names[::every]) > _UPRIGHT_CHARACTERS
    turned: dict[str, Any] = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"} if is_crowded else {}
    axes.set_xticks(range(0, len(names), every), names[::every], **turned)
    axes.tick_params(axis="x", length=0)
    axes.margins(x=0.02, y=0.12)


def _draw_outcomes(
    axes: Axes, hits: int, reasons: Sequence[tuple[int, str]], others: Sequence[tuple[str, int]] = ()
) -> None:
    """Bars of hits and misses; `others` are parts of these and count towards no total."""
    names = ["hit", *(f"miss: {name.replace('_', ' ')}" for _, name in reasons), *(name for name, _ in others)]
    counts = [hits, *(count for count, _ in reasons)]
    total = sum(counts)
    counts += [count for _, count in others]
    colors = [_GRAPH_COLOR, *[_EAGER_COLOR] * len(reasons), *[_GREY] * len(others)]
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


def _captured_budgets(graph: Mapping[str, Any] | None) -> list[int]:
    return sorted({entry["token_budget"] for entry in (graph or {}).get("captured", [])})


def _new_figure(record: RunRecord, title: str) -> tuple[Figure, Axes]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 5.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _add_title(axes, record, title)
    return figure, axes


def _add_title(axes: Axes, record: RunRecord, title: str) -> None:
    model = record.model_name.rsplit("/", 1)[-1]
    parts = [
        model,
        record.device_name,
        record.backend_used,
        "replay on a CPU, no speed-up claimed" if record.is_cpu_replay else None,
    ]
    axes.set_title(title, pad=26)
    axes.annotate(
        " · ".join(part for part in parts if part),
        (0.0, 1.0),
        xytext=(0, 7),
        xycoords="axes fraction",
        textcoords="offset points",
        fontsize=10.5,
        color=_GREY,
    )


def _tail(summary: Summary) -> float:
    tail = summary.p99 if summary.is_p99_supported else summary.max
    return math.nan if tail is None else tail


def _describe(mode: str, summary: Summary) -> str:
    name = "P99" if summary.is_p99_supported else "max"
    return f"{mode} (n={summary.n})\nmean {summary.mean:.2f} ms\n{name} {_tail(summary):.2f} ms"


def _scale_axis(axes: Axes, name: Literal["x", "y"], values: FloatArray) -> None:
    """Logarithmic with ticks at 1, 2 and 5 where the values span enough for that, else linear."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    low, high = float(values.min()), float(values.max())
    if low <= 0.0 or high < _LOG_SPAN * low:
        return
    axes.set(**{f"{name}scale": "log"})
    axis: Axis = axes.xaxis if name == "x" else axes.yaxis
    axis.set_major_locator(LogLocator(base=10.0, subs=(1.0, 2.0, 5.0)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _save(figures: Mapping[str, Figure], folder: Path, overwrite: bool) -> list[Path]:
    targets = [folder / f"{name}.{ending}" for name in figures for ending in ("png", "svg")]
    if not overwrite:
        for path in targets:
            refuse_to_replace(path)
    written: list[Path] = []
    for path in targets:
        content = io.BytesIO()
        # Without a date in it, the same run gives the same file.
        metadata = {"Date": None} if path.suffix == ".svg" else {}
        figures[path.stem].savefig(content, format=path.suffix[1:], dpi=PNG_DPI, metadata=metadata)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(path, content.getvalue())
        except OSError as error:
            done = ", ".join(file.name for file in written) or "none"
            raise RecordFileError(f"cannot write {path}: {os_reason(error)}. Written figures: {done}") from error
        written.append(path)
    return written
