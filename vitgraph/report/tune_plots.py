"""Draws a tuning result: latency against graphs and memory, and replays and waste by budget; each as PNG and SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitgraph.report.figures import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    VERMILLION,
    add_title,
    draw_budget_bars,
    figure_files,
    legend_beside,
    new_figure,
    report_style,
)
from vitgraph.report.files import write_files
from vitgraph.report.tune_tables import NAMES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PARETO, TUNED_BUDGETS = "pareto", "tuned_budgets"

_TUNED, _AUTOMATIC, _NINE, _EAGER, _ORACLE = BLUE, ORANGE, PINK, VERMILLION, GREEN
_MEBIBYTE = 2**20


def write_tune_plots(data: Mapping[str, Any], folder: Path, *, overwrite: bool = False) -> list[Path]:
    """Writes `pareto` and `tuned_budgets`, as PNG and SVG.

    Args:
        data: `TuneResult.as_dict()`.
        folder: Where the files go; created if needed.
        overwrite: Whether files of the same names may be replaced.

    Returns:
        The files; no budgets figure where nothing is replayed.

    Raises:
        UsageError: A file exists and `overwrite` is off.
        RecordFileError: A file could not be written.
    """
    return write_files({folder / name: content for name, content in tune_plot_files(data).items()}, overwrite)


def tune_plot_files(data: Mapping[str, Any]) -> dict[str, bytes]:
    """The figures by file name."""
    with report_style():
        figures = {PARETO: draw_pareto(data)}
        if data["by_budget"]:
            figures[TUNED_BUDGETS] = draw_tuned_budgets(data)
        return figure_files(figures)


def draw_pareto(data: Mapping[str, Any]) -> Figure:
    """Mean latency over graphs, and over their memory: the front, the choice, the baselines, eager and the oracle."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    figure = new_figure(9.6, 5.4)
    left, right = figure.subplots(1, 2, sharey=True)
    # The title of one panel alone would widen it, so it stands over both.
    figure.suptitle("Mean latency by graphs and memory, predicted\n", x=0.01, ha="left", fontsize=14, fontweight="bold")
    figure.text(0.012, 0.925, _setting(data), fontsize=10.5, color=GREY)
    panels = (left, "graphs", 1, "Graphs"), (right, "memory_bytes", _MEBIBYTE, "Memory (MiB)")
    for axes, column, scale, label in panels:
        front = _front(data["pareto"], column)
        places = [row[column] / scale for row in front]
        axes.plot(
            places, [row["mean_ms"] for row in front], "-", color=_TUNED, linewidth=1.2, marker=".", label="best found"
        )
        points = (
            ("tuned", data["predicted"], "*", _TUNED, 17),
            (NAMES["automatic"], data["baselines"].get("automatic"), "s", _AUTOMATIC, 9),
            (NAMES["seed_nine"], data["baselines"].get("seed_nine"), "D", _NINE, 8),
        )
        for name, row, marker, color, size in points:
            if row is not None:
                axes.plot(row[column] / scale, row["mean_ms"], marker, color=color, markersize=size, label=name)
        for name, dashes, color in (("eager", (0, (5, 2)), _EAGER), ("oracle", (0, (1, 1)), _ORACLE)):
            axes.axhline(data["baselines"][name]["mean_ms"], color=color, linestyle=dashes, linewidth=1.4, label=name)
        axes.set_xlabel(label)
        if max(places, default=0) > 8 * max(min(places, default=1), 1e-9):
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(base=10.0, subs=(1.0, 3.0)))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    left.set_ylabel("Mean latency a request (ms)")
    legend_beside(right)
    return figure


def _front(rows: Sequence[Mapping[str, Any]], column: str) -> list[Mapping[str, Any]]:
    """The rows of which none has both less of `column` and a lower mean."""
    front: list[Mapping[str, Any]] = []
    for row in sorted(rows, key=lambda row: (row[column], row["mean_ms"])):
        if not front or row["mean_ms"] < front[-1]["mean_ms"]:
            front.append(row)
    return front


def draw_tuned_budgets(data: Mapping[str, Any]) -> Figure:
    """Replays and waste of each budget, slots and axis keys together."""
    totals: dict[tuple[str, int], list[int]] = {}
    for row in data["by_budget"]:
        entry = totals.setdefault((row["path"], row["token_budget"]), [0, 0])
        entry[0] += row["replays"]
        entry[1] += row["tokens"]
    keys = sorted(totals)
    names = [str(budget) if path == "default" else f"{path} {budget}" for path, budget in keys]
    replays = [totals[key][0] for key in keys]
    waste = [100.0 * (1.0 - totals[key][1] / (totals[key][0] * key[1])) for key in keys]
    figure = new_figure(9.6, 6.4)
    upper, lower = figure.subplots(2, 1, sharex=True)
    misses = sum(row["items"] for row in data["misses"])
    outcome = f"{data['hits']} hits, {misses} misses"
    add_title(upper, "Replays and waste by token budget", f"{_setting(data)} · {outcome}, predicted")
    draw_budget_bars(upper, names, replays, "%d", color=_TUNED)
    upper.set_ylabel("Replays")
    draw_budget_bars(lower, names, waste, "%.0f", color=_ORACLE, hatch="//")
    lower.set(ylabel="Waste (%)", xlabel="Token budget")
    return figure


def _setting(data: Mapping[str, Any]) -> str:
    """The workload and what predicts its times."""
    return f"{data['workload'].get('name', 'the workload')} · {data['profile']['label']}"
