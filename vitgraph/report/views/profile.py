"""The document of a profile: where the time of one call goes, by kind of work and mode, beside the arithmetic limit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from vitgraph.records.kinds.profile import KernelTime, ModeTrace, NamedKernel, ProfiledCall, ProfileResult
from vitgraph.records.record import ProfileRecord
from vitgraph.report import say
from vitgraph.report.charts_of_bars import draw_parts
from vitgraph.report.columns import Cell, Column, Row, Table, TableSpec, fields
from vitgraph.report.document import Chart, Document, Facts, section
from vitgraph.report.views.conditions import Ran, chosen_text, items_text

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
        Column("ms", "number", "ms", "its time in the call", of="of.ms"),
        Column("share", "number", "share", "of the time from the first kernel to the last"),
        *fields(KernelTime, "of", "kernels"),
        Column("limit_ms", "number", "ms", "the arithmetic of the unpadded call"),
    ),
    "calls",
)
_TOP = TableSpec(
    "kernels",
    columns=(
        *fields(NamedKernel, ms="ms", kernels=("Times", lambda n: say.number(n, 0))),
        Column("kind", "text", "", "its kind", "Kind", of=lambda one: KIND_LABELS.get(one.kind, one.kind)),
        *fields(NamedKernel, name="Name"),
    ),
    counts="calls",
)


def profile_document(record: ProfileRecord) -> Document:
    """The report of one profile."""
    result, ran = record.result, Ran(record)
    title = f"{ran.model} on {ran.device}"
    found = tuple(filter(None, (ran.backend, ran.compiled, ran.packing, ran.weights)))
    if result is None:
        return Document("vitgraph profile", title, found, warning=ran.warning)
    tops = ((mode, _TOP.of(of.top[:_LISTED])) for mode, of in result.modes.items())
    return ran.document(
        "vitgraph profile",
        section("Where the time of a call goes", _kind_table(result), _chart(ran, result)),
        *(section(f"{mode.capitalize()}: what takes longest", top) for mode, top in tops),
        section("", Facts.of((("Attention", chosen_text(record)),))),
        title=title,
        what=(ran.device, *found, f"one call: {items_text(result.call.items)}", _replays_text(result.call)),
        tables=(KINDS.of(_kind_rows(result)),),
    )


def _replays_text(call: ProfiledCall) -> str:
    budgets = ", ".join(
        ("" if replay.path == "default" else f"{replay.path} ") + str(replay.token_budget) for replay in call.replays
    )
    eager = f", {say.count(call.eager_items, 'item')} eager" if call.eager_items else ""
    tokens = say.count(call.tokens, "token")
    return f"{tokens}; {say.count(len(call.replays), 'replay')} (token budget {budgets}){eager}"


def _limits(result: ProfileResult) -> dict[str, float | None]:
    """The arithmetic of the kinds of work that have any, in ms."""
    limit = result.speed_of_light
    return {"attention": limit.attention_ms, "product": limit.product_ms} if limit else {}


def _kind_table(result: ProfileResult) -> Table:
    """A row a kind of work, three columns a mode."""
    counted = "Kernels" if result.traced == "GPU kernels" else "Operators"
    columns = [Column("what", "text", "", "kind of work", "ms a call")]
    for mode in result.modes:
        columns.append(Column(f"{mode}_ms", "number", "ms", "its time", mode.capitalize()))
        columns.append(Column(f"{mode}_share", "number", "share", "its share", "Share"))
        columns.append(Column(f"{mode}_n", "number", "", "how many", counted, lambda n: say.number(n, 0)))
    columns.append(Column("limit", "number", "ms", "its arithmetic", "Limit"))
    spec = TableSpec("profile", columns=tuple(columns))
    return spec.table(_shown_rows(result), notes=tuple(_notes(result))).without_empty("limit")


def _shown_rows(result: ProfileResult) -> Iterable[Row]:
    modes, limit, limits = result.modes, result.speed_of_light, _limits(result)
    for kind, label in KIND_LABELS.items():
        found = {mode: of.kinds.get(kind) or KernelTime(ms=0.0, kernels=0.0) for mode, of in modes.items()}
        if any(one.kernels for one in found.values()):
            cells: dict[str, Any] = {"what": label, "limit": limits.get(kind)}
            for mode, one in found.items():
                cells |= {f"{mode}_ms": one.ms, f"{mode}_share": _share(modes[mode], one.ms), f"{mode}_n": one.kernels}
            yield cells
    gaps: dict[str, Any] = {"what": GAPS}
    for mode, of in modes.items():
        gaps[f"{mode}_ms"] = Cell(say.WITHIN_NOISE) if of.gap_ms < 0 else of.gap_ms
        gaps[f"{mode}_share"] = None if of.gap_ms < 0 else _share(of, of.gap_ms)
    yield gaps
    spans = {name: v for m, of in modes.items() for name, v in ((f"{m}_ms", of.span_ms), (f"{m}_n", of.kernels))}
    yield {"what": "first to last", **spans, "limit": limit.total_ms if limit else None}
    yield {"what": "whole call", **{f"{mode}_ms": of.wall_ms for mode, of in modes.items()}}
    if limit and limit.total_ms:
        times = {f"{mode}_ms": Cell(f"{say.number(of.wall_ms / limit.total_ms, 2)}×") for mode, of in modes.items()}
        yield {"what": "over the limit", **times}


def _share(of: ModeTrace, ms: float) -> float | None:
    return ms / of.span_ms if of.span_ms else None


def _kind_rows(result: ProfileResult) -> Iterable[Row]:
    for mode, of in result.modes.items():
        for kind, one in of.kinds.items():
            limit = _limits(result).get(kind)
            yield {"mode": mode, "kind": kind, "of": one, "share": _share(of, one.ms), "limit_ms": limit}
        yield {"mode": mode, "kind": GAPS, "of": {"ms": of.gap_ms}, "share": _share(of, of.gap_ms)}


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
    if result.speed_of_light:
        divided = {KIND_LABELS[kind]: ms for kind, ms in _limits(result).items() if ms is not None}
        bars["limit"] = divided or {UNDIVIDED: result.speed_of_light.total_ms}
    return bars


def _chart(ran: Ran, result: ProfileResult) -> Chart:
    subtitle = ran.subtitle(items_text(result.call.items), result.traced)
    xlabel = f"ms from the first {'kernel' if result.traced == 'GPU kernels' else 'operator'} to the last"
    draw = partial(draw_parts, "Where the time of a call goes", subtitle, xlabel, _PARTS, profile_bars(result))
    return Chart("profile", "Time of a call by kind of work, eager and graph", draw)
