"""Draws a backend comparison: eager and graph latency of every backend, mean and P99, as PNG and SVG.

Eager bars are hatched and graph bars are not, and every bar carries its figure, so it also reads in grey.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitgraph.records.compare_record import CompareRecord
from vitgraph.records.stats import P99_MIN_SAMPLES
from vitgraph.report.figures import (
    CPU_NOTE,
    GREY,
    MODE_COLORS,
    add_title,
    figure_files,
    legend_beside,
    new_figure,
    report_style,
    short_number,
)
from vitgraph.report.files import write_files

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BACKENDS_PLOT = "backends"

_HATCHES = {"eager": "//", "graph": ""}
_BAR_WIDTH = 0.38


def write_compare_plots(record: CompareRecord, folder: Path, overwrite: bool = False) -> list[Path]:
    """Writes `backends.png` and `backends.svg`; nothing where no backend was measured.

    Raises:
        UsageError: A file exists and `overwrite` is off.
        RecordFileError: A file could not be written.
    """
    return write_files({folder / name: content for name, content in compare_plot_files(record).items()}, overwrite)


def compare_plot_files(record: CompareRecord) -> dict[str, bytes]:
    """The figure by file name; nothing where no backend was measured."""
    if not any(row["eager"] or row["graph"] for row in record.rows):
        return {}
    with report_style():
        return figure_files({BACKENDS_PLOT: draw_backends(record)})


def draw_backends(record: CompareRecord) -> Figure:
    """Grouped bars of every backend: mean latency, and P99 or the maximum where there are too few requests for it."""
    rows = record.rows
    latencies = [row[mode] for row in rows for mode in MODE_COLORS if row[mode]]
    is_supported = any(latency["p99_supported"] for latency in latencies)
    tail, name = ("p99_ms", "P99") if is_supported else ("max_ms", f"maximum (n<{P99_MIN_SAMPLES})")
    figure = new_figure(max(8.0, 2.6 + 1.7 * len(rows)), 8.0)
    upper, lower = figure.subplots(2, 1, sharex=True)
    parts = (
        record.model_name.rsplit("/", 1)[-1],
        record.device_name,
        record["workload"].get("name"),
        f"n={latencies[0]['n']}",
        CPU_NOTE if record.is_cpu_replay else None,
    )
    add_title(upper, "Attention backends, eager and graph", " · ".join(str(part) for part in parts if part))
    _draw_panel(upper, record, "mean_ms", "Mean latency a request (ms)")
    _draw_panel(lower, record, tail, f"{name[0].upper()}{name[1:]} a request (ms)")
    legend_beside(upper)
    lower.set_xticks(range(len(rows)), [row["requested"] for row in rows])
    for axes in (upper, lower):
        axes.tick_params(axis="x", length=0)
    return figure


def _draw_panel(axes: Axes, record: CompareRecord, field: str, label: str) -> None:
    rows = record.rows
    for offset, mode in zip((-0.5, 0.5), MODE_COLORS, strict=True):
        present = [(place, row[mode][field]) for place, row in enumerate(rows) if row[mode]]
        bars = axes.bar(
            [place + offset * _BAR_WIDTH for place, _ in present],
            [value for _, value in present],
            width=_BAR_WIDTH,
            color=MODE_COLORS[mode],
            hatch=_HATCHES[mode],
            edgecolor="white",
            label=mode,
        )
        axes.bar_label(bars, labels=[short_number(value) for _, value in present], fontsize=10, padding=2)
        _name_missing(axes, rows, mode, offset)
    axes.set_ylabel(label)
    axes.margins(y=0.14)
    axes.set(xlim=(-0.6, len(rows) - 0.4), ylim=(0.0, None))


def _name_missing(axes: Axes, rows: Sequence[Any], mode: str, offset: float) -> None:
    """Puts the status where a bar would stand; once where both modes lack for the same reason."""
    for place, row in enumerate(rows):
        other = "graph" if mode == "eager" else "eager"
        state, its = row["modes"][mode], row["modes"][other]
        if row[mode]:
            continue
        is_shared = not row[other] and state == its
        if is_shared and mode == "graph":
            continue
        word = "not measured" if state["status"] == "ok" else state["status"].replace("_", " ")
        axes.annotate(
            word if is_shared else f"{mode}: {word}",
            (place + (0.0 if is_shared else offset * _BAR_WIDTH), 0.0),
            xytext=(0, 6),
            textcoords="offset points",
            rotation=90,
            ha="center",
            va="bottom",
            fontsize=10,
            color=GREY,
        )
