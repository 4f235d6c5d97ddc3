"""Draws a backend comparison: eager and graph latency of every backend, mean and P99, as PNG and SVG.

Eager bars are hatched and graph bars are not, and every bar carries its figure, so it also reads in grey.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from vitgraph.bench.compare_record import CompareRecord
from vitgraph.result_files import RecordFileError, os_reason, refuse_to_replace, write_atomically
from vitgraph.stats import P99_MIN_SAMPLES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BACKENDS_PLOT = "backends"
PNG_DPI = 150

# Vermillion and blue of Okabe and Ito's palette, as in the plots of a run.
_COLORS = {"eager": "#D55E00", "graph": "#0072B2"}
_HATCHES = {"eager": "//", "graph": ""}
_GREY = "#5F5F5F"
_BAR_WIDTH = 0.38
_STYLE: dict[str, Any] = {
    "font.size": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 11,
    "hatch.linewidth": 0.8,
    "svg.hashsalt": "vitgraph",
}


def write_compare_plots(record: CompareRecord, folder: Path, overwrite: bool = False) -> list[Path]:
    """Writes `backends.png` and `backends.svg`; nothing where no backend was measured.

    Raises:
        UsageError: A file exists and `overwrite` is off.
        RecordFileError: A file could not be written.
    """
    from matplotlib import rc_context

    if not any(row["eager"] or row["graph"] for row in record.rows):
        return []
    targets = [folder / f"{BACKENDS_PLOT}.{ending}" for ending in ("png", "svg")]
    for path in () if overwrite else targets:
        refuse_to_replace(path)
    with rc_context(cast(Any, _STYLE)):
        figure = draw_backends(record)
        for path in targets:
            content = io.BytesIO()
            # Without a date in it, the same run gives the same file.
            metadata = {"Date": None} if path.suffix == ".svg" else {}
            figure.savefig(content, format=path.suffix[1:], dpi=PNG_DPI, metadata=metadata)
            try:
                folder.mkdir(parents=True, exist_ok=True)
                write_atomically(path, content.getvalue())
            except OSError as error:
                raise RecordFileError(f"cannot write {path}: {os_reason(error)}") from error
    return targets


def draw_backends(record: CompareRecord) -> Figure:
    """Grouped bars of every backend: mean latency, and P99 or the maximum where there are too few requests for it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = record.rows
    latencies = [row[mode] for row in rows for mode in _COLORS if row[mode]]
    is_supported = any(latency["p99_supported"] for latency in latencies)
    tail, name = ("p99_ms", "P99") if is_supported else ("max_ms", f"maximum (n<{P99_MIN_SAMPLES})")
    figure = Figure(figsize=(max(8.0, 2.6 + 1.7 * len(rows)), 8.0), layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True)
    parts = (
        record.model_name.rsplit("/", 1)[-1],
        record.device_name,
        record["workload"].get("name"),
        f"n={latencies[0]['n']}",
        "replay on a CPU, no speed-up claimed" if record.is_cpu_replay else None,
    )
    figure.suptitle("Attention backends, eager and graph", x=0.01, ha="left", fontsize=14, fontweight="bold")
    upper.set_title(" · ".join(str(part) for part in parts if part), loc="left", fontsize=10.5, color=_GREY, pad=14)
    _draw_panel(upper, record, "mean_ms", "Mean latency a request (ms)")
    _draw_panel(lower, record, tail, f"{name[0].upper()}{name[1:]} a request (ms)")
    upper.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0)
    lower.set_xticks(range(len(rows)), [row["requested"] for row in rows])
    for axes in (upper, lower):
        axes.tick_params(axis="x", length=0)
    return figure


def _draw_panel(axes: Axes, record: CompareRecord, field: str, label: str) -> None:
    rows = record.rows
    for offset, mode in zip((-0.5, 0.5), _COLORS, strict=True):
        present = [(place, row[mode][field]) for place, row in enumerate(rows) if row[mode]]
        bars = axes.bar(
            [place + offset * _BAR_WIDTH for place, _ in present],
            [value for _, value in present],
            width=_BAR_WIDTH,
            color=_COLORS[mode],
            hatch=_HATCHES[mode],
            edgecolor="white",
            label=mode,
        )
        axes.bar_label(bars, labels=[_short(value) for _, value in present], fontsize=10, padding=2)
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
            color=_GREY,
        )


def _short(value: float) -> str:
    return f"{value:.1f}" if value >= 100 else f"{value:.2f}"
