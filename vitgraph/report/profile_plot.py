"""Draws where the time of one call goes: a stacked bar for eager, for replay and for the arithmetic limit.

Every kind has a hatch as well as a colour and its figure inside, so the plot also reads in grey.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitgraph.report.figures import (
    BLUE,
    GREEN,
    GREY,
    GRID_GREY,
    ORANGE,
    PINK,
    SKY,
    VERMILLION,
    add_title,
    figure_files,
    legend_beside,
    new_figure,
    report_style,
    short_number,
)
from vitgraph.report.files import write_files
from vitgraph.report.profile_table import GAPS, KIND_LABELS, describe_items

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PROFILE_PLOT = "profile"
UNDIVIDED = "arithmetic"
"""The limit of records in which it is not divided into attention and products."""

_LOOKS = {
    "attention": (BLUE, ""),
    "product": (SKY, "//"),
    "norm": (GREEN, ".."),
    "element-wise": (ORANGE, "\\\\"),
    "copy": (VERMILLION, "xx"),
    "other": (PINK, "++"),
    UNDIVIDED: (GREY, ""),
    GAPS: (GRID_GREY, ""),
}
_LEAST_NAMED_SHARE = 0.045


def write_profile_plot(record: Mapping[str, Any], folder: Path, overwrite: bool = False) -> list[Path]:
    """Writes `profile.png` and `profile.svg`.

    Args:
        record: The record, as `run_profile` returns it.
        folder: Where the files go; created if needed.
        overwrite: Whether files of the same names may be replaced.

    Raises:
        UsageError: A file exists and `overwrite` is off.
        RecordFileError: A file could not be written.
    """
    return write_files({folder / name: content for name, content in profile_plot_files(record).items()}, overwrite)


def profile_plot_files(record: Mapping[str, Any]) -> dict[str, bytes]:
    """`profile.png` and `profile.svg` by name."""
    with report_style():
        return figure_files({PROFILE_PLOT: draw_profile(record)})


def profile_bars(record: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Milliseconds of each kind and of the gaps by bar; the limit's bar is there where it was measured.

    Where kernels overlap, the kinds of a mode are scaled to the time in which anything ran, so that a bar is as long as
    the call.
    """
    bars: dict[str, dict[str, float]] = {}
    for mode, entry in record["modes"].items():
        total = sum(found["ms"] for found in entry["kinds"].values())
        scale = min(1.0, entry["busy_ms"] / total) if total else 1.0
        bars[mode] = {kind: found["ms"] * scale for kind, found in entry["kinds"].items() if found["ms"]}
        bars[mode][GAPS] = entry["gap_ms"]
    limit = record["speed_of_light"]
    if limit:
        known = {kind: limit[f"{kind}_ms"] for kind in ("attention", "product") if limit[f"{kind}_ms"] is not None}
        bars["limit"] = known or {UNDIVIDED: limit["total_ms"]}
    return bars


def draw_profile(record: Mapping[str, Any]) -> Figure:
    """The stacked bars of a profile."""
    bars = profile_bars(record)
    figure = new_figure(10.5, 1.9 + 0.85 * len(bars))
    axes = figure.subplots()
    longest = max(sum(parts.values()) for parts in bars.values())
    named: set[str] = set()
    for place, parts in enumerate(bars.values()):
        start = 0.0
        for kind, value in parts.items():
            color, hatch = _LOOKS[kind]
            label = None if kind in named else KIND_LABELS.get(kind, kind)
            named.add(kind)
            axes.barh(place, value, left=start, height=0.62, color=color, hatch=hatch, edgecolor="white", label=label)
            if value / longest >= _LEAST_NAMED_SHARE:
                box = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}
                axes.text(
                    start + value / 2, place, short_number(value), ha="center", va="center", fontsize=10, bbox=box
                )
            start += value
        axes.text(start + 0.008 * longest, place, f"{short_number(start)} ms", va="center", fontsize=11)
    model = record["settings"]["model"]["model"].rsplit("/", 1)[-1]
    call = f"{describe_items(record['call']['items'])}, {record['traced']}"
    add_title(axes, "Where the time of a call goes", f"{model} · {record['environment']['device']} · {call}")
    axes.set_yticks(range(len(bars)), list(bars))
    axes.invert_yaxis()
    noun = "kernel" if record["traced"] == "GPU kernels" else "operator"
    axes.set(xlabel=f"ms from the first {noun} to the last", xlim=(0.0, 1.1 * longest))
    axes.tick_params(axis="y", length=0)
    legend_beside(axes)
    return figure
