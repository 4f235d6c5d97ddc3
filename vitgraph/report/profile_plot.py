"""Draws where the time of one call goes: a stacked bar for eager, for replay and for the arithmetic limit.

Every kind has a hatch as well as a colour and its figure inside, so the plot also reads in grey.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from vitgraph.report.profile_table import GAPS, KIND_LABELS, describe_items
from vitgraph.result_files import RecordFileError, os_reason, refuse_to_replace, write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PROFILE_PLOT = "profile"
PNG_DPI = 150

# Okabe and Ito's palette.
_LOOKS = {
    "attention": ("#0072B2", ""),
    "product": ("#56B4E9", "//"),
    "norm": ("#009E73", ".."),
    "element-wise": ("#E69F00", "\\\\"),
    "copy": ("#D55E00", "xx"),
    "other": ("#CC79A7", "++"),
    GAPS: ("#E4E4E4", ""),
}
_GREY = "#5F5F5F"
_LEAST_NAMED_SHARE = 0.045
_STYLE: dict[str, Any] = {
    "font.size": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 11,
    "hatch.linewidth": 0.6,
    "svg.hashsalt": "vitgraph",
}


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
    from matplotlib import rc_context

    targets = [folder / f"{PROFILE_PLOT}.{ending}" for ending in ("png", "svg")]
    for path in () if overwrite else targets:
        refuse_to_replace(path)
    with rc_context(cast(Any, _STYLE)):
        figure = draw_profile(record)
        for path in targets:
            content = io.BytesIO()
            # Without a date in it, the same profile gives the same file.
            metadata = {"Date": None} if path.suffix == ".svg" else {}
            figure.savefig(content, format=path.suffix[1:], dpi=PNG_DPI, metadata=metadata)
            try:
                folder.mkdir(parents=True, exist_ok=True)
                write_atomically(path, content.getvalue())
            except OSError as error:
                raise RecordFileError(f"cannot write {path}: {os_reason(error)}") from error
    return targets


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
        bars["limit"] = known or {"product": limit["total_ms"]}
    return bars


def draw_profile(record: Mapping[str, Any]) -> Figure:
    """The stacked bars of a profile."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    bars = profile_bars(record)
    figure = Figure(figsize=(10.5, 1.9 + 0.85 * len(bars)), layout="constrained")
    FigureCanvasAgg(figure)
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
                axes.text(start + value / 2, place, _short(value), ha="center", va="center", fontsize=10, bbox=box)
            start += value
        axes.text(start + 0.008 * longest, place, f"{_short(start)} ms", va="center", fontsize=11)
    model = record["settings"]["model"]["model"].rsplit("/", 1)[-1]
    figure.suptitle("Where the time of a call goes", x=0.01, ha="left", fontsize=14, fontweight="bold")
    call = f"{describe_items(record['call']['items'])}, {record['traced']}"
    axes.set_title(
        f"{model} · {record['environment']['device']} · {call}", loc="left", fontsize=10.5, color=_GREY, pad=10
    )
    axes.set_yticks(range(len(bars)), list(bars))
    axes.invert_yaxis()
    noun = "kernel" if record["traced"] == "GPU kernels" else "operator"
    axes.set(xlabel=f"ms from the first {noun} to the last", xlim=(0.0, 1.1 * longest))
    axes.tick_params(axis="y", length=0)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0)
    return figure


def _short(value: float) -> str:
    return f"{value:.1f}" if value >= 100 else f"{value:.2f}"
