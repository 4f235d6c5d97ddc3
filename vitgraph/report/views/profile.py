"""The document of a profile: where the time of one call goes, by kind of work and mode, beside the arithmetic limit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from vitgraph.records.kinds.profile import ModeTrace, ProfiledCall, ProfileResult
from vitgraph.records.record import ProfileRecord
from vitgraph.report.charts_of_bars import draw_parts
from vitgraph.report.columns import WITHIN_NOISE, Cell, Column, Row, Table, TableSpec, count_text, number_text
from vitgraph.report.document import Chart, Document, section, sections
from vitgraph.report.views.conditions import (
    backend_of,
    compiled_of,
    device_of,
    environment_facts,
    items_text,
    model_of,
    packing_of,
    subtitle_of,
    warning_of,
    weights_of,
)

KIND_LABELS = {
    "attention": "attention",
    "product": "matrix products",
    "norm": "norms",
    "element-wise": "element-wise",
    "copy": "copies and gathers",
    "other": "other",
}
GAPS, UNDIVIDED = "gaps", "arithmetic"
"""What no kernel covers; and the limit of records in which it is not divided into attention and products."""
_PARTS = (*KIND_LABELS.values(), UNDIVIDED, GAPS)
_LISTED = 8

KINDS = TableSpec(
    "kinds",
    "",
    "a mode and kind of work",
    (
        Column("mode", "text", "", "`eager` or `graph`"),
        Column("kind", "text", "", "kind of kernel, or `gaps`"),
        Column("ms", "number", "ms", "its time in the call"),
        Column("share", "number", "share", "of the time from the first kernel to the last"),
        Column("kernels", "number", "kernels", "kernels of it, a mean over the traces"),
        Column("limit_ms", "number", "ms", "the arithmetic of the unpadded call"),
    ),
    "calls",
)
_TOP = TableSpec(
    "kernels",
    "",
    "a kernel",
    (
        Column("ms", "number", "ms", "its time in the call", "ms"),
        Column("kernels", "number", "kernels", "how often it ran", "Times", lambda n: number_text(n, 0)),
        Column("kind", "text", "", "its kind", "Kind"),
        Column("name", "text", "", "its name", "Name"),
    ),
    "calls",
)


def profile_document(record: ProfileRecord) -> Document:
    """The report of one profile."""
    result = record.result
    title = f"{model_of(record)} on {device_of(record)}"
    found = [backend_of(record), compiled_of(record), packing_of(record), weights_of(record)]
    if result is None:
        return Document("vitgraph profile", title, tuple(filter(None, found)), warning=warning_of(record))
    call = result.call
    what = (device_of(record), *filter(None, found), f"one call: {items_text(call.items)}", _replays_text(call))
    return Document(
        name="vitgraph profile",
        title=title,
        what=what,
        warning=warning_of(record),
        sections=sections(
            section("Where the time of a call goes", _kind_table(result), _chart(record, result)),
            *(section(f"{mode.capitalize()}: what takes longest", _top_table(of)) for mode, of in result.modes.items()),
            section("Environment", environment_facts(record), is_detail=True),
        ),
        tables=(KINDS.table(_kind_rows(result)),),
        command=record.command,
    )


def _replays_text(call: ProfiledCall) -> str:
    budgets = ", ".join(
        ("" if replay.path == "default" else f"{replay.path} ") + str(replay.token_budget) for replay in call.replays
    )
    eager = f", {count_text(call.eager_items, 'item')} eager" if call.eager_items else ""
    tokens = count_text(call.tokens, "token")
    return f"{tokens}; {count_text(len(call.replays), 'replay')} (token budget {budgets}){eager}"


def _kind_table(result: ProfileResult) -> Table:
    """A row a kind of work, three columns a mode."""
    counted = "Kernels" if result.traced == "GPU kernels" else "Operators"
    columns = [Column("what", "text", "", "kind of work", "ms a call")]
    for mode in result.modes:
        columns.append(Column(f"{mode}_ms", "number", "ms", "its time", mode.capitalize()))
        columns.append(Column(f"{mode}_share", "number", "share", "its share", "Share"))
        columns.append(Column(f"{mode}_n", "number", "", "how many", counted, lambda n: number_text(n, 0)))
    columns.append(Column("limit", "number", "ms", "its arithmetic", "Limit"))
    spec = TableSpec("profile", "", "a kind of work", tuple(columns))
    return Table(spec, tuple(_shown_rows(result)), notes=tuple(_notes(result))).without_empty("limit")


def _shown_rows(result: ProfileResult) -> Iterable[Row]:
    modes, limit = result.modes, result.speed_of_light
    limits = {"attention": limit.attention_ms, "product": limit.product_ms} if limit else {}
    for kind, label in KIND_LABELS.items():
        found = {mode: of.kinds.get(kind) for mode, of in modes.items()}
        if any(one and one.kernels for one in found.values()):
            cells: dict[str, Any] = {"what": label, "limit": limits.get(kind)}
            for mode, one in found.items():
                cells |= _cells(mode, modes[mode], one.ms if one else 0.0, one.kernels if one else 0.0)
            yield cells
    yield {"what": GAPS} | {name: v for mode, of in modes.items() for name, v in _gap_cells(mode, of).items()}
    spans = {name: v for m, of in modes.items() for name, v in ((f"{m}_ms", of.span_ms), (f"{m}_n", of.kernels))}
    yield {"what": "first to last", **spans, "limit": limit.total_ms if limit else None}
    yield {"what": "whole call", **{f"{mode}_ms": of.wall_ms for mode, of in modes.items()}}
    if limit and limit.total_ms:
        times = {f"{mode}_ms": Cell(f"{number_text(of.wall_ms / limit.total_ms, 2)}×") for mode, of in modes.items()}
        yield {"what": "over the limit", **times}


def _cells(mode: str, trace: ModeTrace, ms: float, kernels: float) -> dict[str, Any]:
    return {f"{mode}_ms": ms, f"{mode}_share": ms / trace.span_ms if trace.span_ms else None, f"{mode}_n": kernels}


def _gap_cells(mode: str, trace: ModeTrace) -> dict[str, Any]:
    if trace.gap_ms < 0:
        return {f"{mode}_ms": Cell(WITHIN_NOISE)}
    return {f"{mode}_ms": trace.gap_ms, f"{mode}_share": trace.gap_ms / trace.span_ms if trace.span_ms else None}


def _kind_rows(result: ProfileResult) -> Iterable[Row]:
    limit = result.speed_of_light
    limits = {"attention": limit.attention_ms, "product": limit.product_ms} if limit else {}
    for mode, of in result.modes.items():
        for kind, one in of.kinds.items():
            share = one.ms / of.span_ms if of.span_ms else None
            row = {"mode": mode, "kind": kind, "ms": one.ms, "share": share, "kernels": one.kernels}
            yield row | {"limit_ms": limits.get(kind)}
        yield {"mode": mode, "kind": GAPS, "ms": of.gap_ms, "share": of.gap_ms / of.span_ms if of.span_ms else None}


def _notes(result: ProfileResult) -> Iterable[str]:
    if result.traced == "GPU kernels":
        yield "Times of GPU kernels, a mean over traces; gaps: what no kernel covers; whole call: wall clock."
    else:
        yield (
            "Times of CPU operators, a mean over traces, not of GPU kernels: they show what the call is made of and "
            "say nothing of a GPU. A replay on a CPU is the forward again; gaps are Python and the profiler's own work."
        )
    limit = result.speed_of_light
    if limit:
        rate = f"{limit.matrix_rate_tflops:.0f} TFLOP/s of a large matrix product, measured in this run"
        yield f"The limit is the arithmetic of the unpadded call at the {rate}."
    if result.trace_files:
        yield f"Traces for chrome://tracing or Perfetto: {', '.join(result.trace_files)}"


def _top_table(trace: ModeTrace) -> Table:
    return _TOP.table(
        {"ms": one.ms, "kernels": one.kernels, "kind": KIND_LABELS.get(one.kind, one.kind), "name": one.name}
        for one in trace.top[:_LISTED]
    )


def profile_bars(result: ProfileResult) -> Mapping[str, Mapping[str, float]]:
    """Milliseconds of each kind and of the gaps by bar; the limit's bar is there where it was measured.

    Where kernels overlap, the kinds of a mode are scaled to the time in which anything ran, so that a bar is as long as
    the call.
    """
    bars: dict[str, dict[str, float]] = {}
    for mode, of in result.modes.items():
        total = sum(one.ms for one in of.kinds.values())
        scale = min(1.0, of.busy_ms / total) if total else 1.0
        bars[mode] = {KIND_LABELS.get(kind, kind): one.ms * scale for kind, one in of.kinds.items() if one.ms}
        bars[mode][GAPS] = max(0.0, of.gap_ms)
    limit = result.speed_of_light
    if limit:
        known = {"attention": limit.attention_ms, "product": limit.product_ms}
        divided = {KIND_LABELS[kind]: ms for kind, ms in known.items() if ms is not None}
        bars["limit"] = divided or {UNDIVIDED: limit.total_ms}
    return bars


def _chart(record: ProfileRecord, result: ProfileResult) -> Chart:
    noun = "kernel" if result.traced == "GPU kernels" else "operator"
    subtitle = subtitle_of(record, f"{items_text(result.call.items)}, {result.traced}")
    title = "Where the time of a call goes"
    xlabel = f"ms from the first {noun} to the last"
    draw = partial(draw_parts, title, subtitle, xlabel, _PARTS, profile_bars(result))
    return Chart("profile", "Time of a call by kind of work, eager and graph", draw)
