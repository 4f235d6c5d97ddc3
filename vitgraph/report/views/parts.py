"""The documents of what is measured of parts: attention alone, the kernels of a call, and replays for a calibration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from vitgraph.records.record import MicroRecord, ProfileRecord
from vitgraph.records.results import (
    Crossing,
    KernelTime,
    MicroResult,
    MicroRow,
    ModeTrace,
    NamedKernel,
    ProfiledCall,
    ProfileResult,
)
from vitgraph.report import say
from vitgraph.report.columns import Cell, Row, Table, column, fields, table_of
from vitgraph.report.document import Chart, Document, Facts, Text, document, section
from vitgraph.report.draw import draw_attention, draw_parts
from vitgraph.report.views.conditions import Ran, items_text

# -- attention alone: `compare-backends --micro` -----------------------------------------------------------------------

_SWEEPS = {
    "length": ("Segments of equal length", {"segments": "Segments", "segment_length": "Rows each"}),
    "slots": ("One segment, the other slots empty", {"segment_length": "Rows each", "slots": "Slots"}),
}
"""By sweep: its title, and the fields of its cases."""
MICRO = table_of(
    "micro",
    *fields(MicroRow, "", "backend", "implementation", "status", "reason", "sweep", "segment_length", "segments"),
    *fields(MicroRow, "", "slots", "rows", "timed_as", "milliseconds", "first_call_ms", "relative_error"),
    *fields(MicroRow, "", "limit_ms", "limit_share"),
    one_row="a backend and case of attention alone",
    counts="calls",
)
CROSSINGS = table_of(
    "crossings",
    *fields(
        Crossing,
        sweep="Varied",
        segments="Segments",
        segment_length="Rows each",
        below="Fastest below",
        equal_at=("Equal at", "{:,.0f}".format),
        above="Fastest above",
        low="Measured at",
        high="and at",
    ),
    title="Where one overtakes another",
    one_row="a size at which the fastest backend changes",
)


def micro_document(record: MicroRecord) -> Document:
    """The report of one record."""
    result, ran = record.result, Ran(record)
    timed = [row for row in result.rows if row.sweep]
    sweeps = dict.fromkeys(row.sweep for row in timed if row.sweep)
    crossings = CROSSINGS.of(result.crossings)
    is_constant = not crossings.rows and len({row.backend for row in result.rows if row.milliseconds}) > 1
    none = "No backend overtakes another: the fastest at the smallest size stays so."
    failures = dict.fromkeys((row.backend, row.status, row.reason) for row in result.rows if row.status != "ok")
    return ran.document(
        "vitgraph compare-backends --micro",
        *(section("", _sweep_table(sweep, [row for row in timed if row.sweep == sweep])) for sweep in sweeps),
        section("", crossings.without_empty("segments", "segment_length"), none if is_constant else None),
        section("", *_micro_charts(ran.model, result)),
        section(
            "",
            *_micro_notes(ran, timed),
            *(Text(f"{name} {say.words(status)}: {reason}", "warning") for name, status, reason in failures),
        ),
        title=f"{ran.model} on {ran.device}",
        what=(ran.device, "attention alone", f"{result.heads} heads of {result.head_width}", result.dtype),
        tables=(MICRO.of(result.rows), crossings),
    )


def _micro_charts(model: str, result: MicroResult) -> Iterable[Chart]:
    lines: dict[str, dict[str, list[tuple[int, float]]]] = {}
    marks: dict[str, list[float]] = {}
    for row in result.rows:
        if row.sweep == "length" and row.milliseconds and row.segment_length:
            panel = lines.setdefault(say.count(row.segments or 1, "segment"), {})
            panel.setdefault(row.backend, []).append((row.segment_length, row.milliseconds))
    for one in result.crossings:
        if one.sweep == "length":
            marks.setdefault(say.count(one.segments or 1, "segment"), []).append(float(one.equal_at))
    if lines:
        draw = partial(draw_attention, f"{model}, {result.heads} heads of {result.head_width}", lines, marks)
        yield Chart("micro", "Time of attention over the rows of a segment, by backend", draw)


def _sweep_table(sweep: str, rows: Sequence[MicroRow]) -> Table:
    title, names = _SWEEPS[sweep]
    cases, backends = fields(MicroRow, **names), dict.fromkeys(row.backend for row in rows)
    columns = (
        *cases,
        *(column(f"of {name}", "time of a call", name, str, unit="ms") for name in backends),
        column("limit_ms", "the limit", "Limit", 4),
    )
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        case = {column.name: column.value(row) for column in cases}
        share = f" ({100 * row.limit_share:.0f}%)" if row.limit_share is not None else ""
        text = f"{say.number(row.milliseconds, 4)}{share}" if row.status == "ok" else say.words(row.status)
        found.setdefault(tuple(case.values()), case).update({f"of {row.backend}": text, "limit_ms": row.limit_ms})
    return table_of(sweep, *columns, title=title, one_row="a case").filled(found.values()).without_empty("limit_ms")


def _micro_notes(ran: Ran, timed: Sequence[MicroRow]) -> Iterable[Text | str]:
    rate = ran.at("environment.matrix_rate_tflops")
    reached = "in brackets the share that is reached."
    limit = "" if rate is None else f" The limit is its arithmetic at the measured {rate:.0f} TFLOP/s; {reached}"
    yield Text(f"Milliseconds of one call.{limit}", "dim")
    modes = {row.backend: row.timed_as for row in timed if row.status == "ok"}
    for mode in dict.fromkeys(modes.values()):
        names = ", ".join(name for name, timed_as in modes.items() if timed_as == mode)
        yield f"Timed as {'one graph of many calls' if mode == 'graph' else 'eager calls'}: {names or say.NO_VALUE}"


# -- the kernels of one call: `profile` --------------------------------------------------------------------------------

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
_LISTED = 8

KINDS = table_of(
    "kinds",
    column("mode", "`eager` or `graph`"),
    column("kind", "kind of kernel, or `gaps`"),
    column("ms", "its time in the call", of="of.ms"),
    column("share", "of the time from the first kernel to the last"),
    *fields(KernelTime, "of", "kernels"),
    column("limit_ms", "the arithmetic of the unpadded call"),
    one_row="a mode and kind of work",
    counts="calls",
)
_TOP = table_of(
    "kernels",
    *fields(NamedKernel, ms="ms", kernels=("Times", 0)),
    column("kind", "its kind", "Kind", of=lambda one: KIND_LABELS.get(one.kind, one.kind)),
    *fields(NamedKernel, name="Name"),
    counts="calls",
)


def profile_document(record: ProfileRecord) -> Document:
    """The report of one profile."""
    result, ran = record.result, Ran(record)
    title = f"{ran.model} on {ran.device}"
    found = tuple(filter(None, (ran.backend, ran.compiled, ran.packing, ran.weights)))
    if result is None:
        return document("vitgraph profile", title, what=found, warning=ran.warning)
    tops = ((mode, _TOP.of(of.top[:_LISTED])) for mode, of in result.modes.items())
    subtitle = ran.subtitle(items_text(result.call.items), result.traced)
    xlabel = f"ms from the first {'kernel' if result.traced == 'GPU kernels' else 'operator'} to the last"
    parts, heading = (*KIND_LABELS.values(), UNDIVIDED, GAPS), "Where the time of a call goes"
    draw = partial(draw_parts, heading, subtitle, xlabel, parts, profile_bars(result))
    chart = Chart("profile", "Time of a call by kind of work, eager and graph", draw)
    return ran.document(
        "vitgraph profile",
        section(heading, _kind_table(result), chart),
        *(section(f"{mode.capitalize()}: what takes longest", top) for mode, top in tops),
        section("", Facts.of((("Attention", ran.chosen),))),
        title=title,
        what=(ran.device, *found, f"one call: {items_text(result.call.items)}", _replays_text(result.call)),
        tables=(KINDS.of(_kind_rows(result)),),
    )


def _replays_text(call: ProfiledCall) -> str:
    budgets = ", ".join(f"{say.path(replay.path)}{replay.token_budget}" for replay in call.replays)
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
    columns = [column("what", "kind of work", "ms a call")]
    for mode in result.modes:
        columns.append(column(f"{mode}_ms", "its time", mode.capitalize()))
        columns.append(column(f"{mode}_share", "its share", "Share"))
        columns.append(column(f"{mode}_n", "how many", counted, 0, kind="number"))
    columns.append(column("limit", "its arithmetic", "Limit", unit="ms"))
    spec = table_of("profile", *tuple(columns))
    return spec.filled(_shown_rows(result), notes=tuple(_profile_notes(result))).without_empty("limit")


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
        times = {f"{mode}_ms": Cell(say.ratio(of.wall_ms / limit.total_ms)) for mode, of in modes.items()}
        yield {"what": "over the limit", **times}


def _share(of: ModeTrace, ms: float) -> float | None:
    return ms / of.span_ms if of.span_ms else None


def _kind_rows(result: ProfileResult) -> Iterable[Row]:
    for mode, of in result.modes.items():
        for kind, one in of.kinds.items():
            limit = _limits(result).get(kind)
            yield {"mode": mode, "kind": kind, "of": one, "share": _share(of, one.ms), "limit_ms": limit}
        yield {"mode": mode, "kind": GAPS, "of": {"ms": of.gap_ms}, "share": _share(of, of.gap_ms)}


def _profile_notes(result: ProfileResult) -> Iterable[str]:
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


# -- replays for a calibration: `calibrate` ----------------------------------------------------------------------------

CURVE = table_of(
    "curve",
    column("token_budget", "the budget", "Budget", str),
    column("segment_slots", "its segment slots", "Slots"),
    column("tokens", "output tokens of the batch in it", "Tokens"),
    column("replay_ms", "wall time of a replay", "Replay ms"),
    column("eager_ms", "the same batch run eagerly", "Eager ms"),
    column("eager_low_ms", "its 10th percentile", "Eager P10"),
    column("eager_high_ms", "its 90th percentile", "Eager P90"),
    one_row="a token budget",
    counts="calls",
)


def calibrate_document(summary: Mapping[str, Any]) -> Document:
    """The report of a calibration: the replay curve, empty slots, overheads, memory, and the cost model's error.

    Args:
        summary: `vitgraph.predict.doubt.describe_profile`.
    """
    curve = CURVE.filled(summary["curve"])
    doubts = (f"measure it first: {doubt}" for doubt in summary["doubts"])
    return document(
        "vitgraph calibrate",
        str(summary["label"]),
        section("Replay and eager by budget", curve),
        section("What a call costs beside it", Facts.of(_calibration_facts(summary))),
        section("", summary["error_text"], *doubts, *(f"note: {note}" for note in summary["notes"])),
        what=(f"measured {summary['created_at']} in {say.number(summary['elapsed_s'], 0)} s",),
        tables=(curve,),
    )


def _calibration_facts(summary: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    small, large = summary["empty_slots_budgets"]
    levels = [
        f"{row['slots']:g}: +{say.ms(row['at_small_budget_ms'])} ms at {small:g} tokens"
        + (f", +{say.ms(row['at_large_budget_ms'])} ms at {large:g}" if large != small else "")
        for row in summary["empty_slots"]
        if row["slots"]
    ]
    yield "Empty slots", "; ".join(levels) or say.NOT_MEASURED
    cost = summary["overheads"]
    yield (
        "Manager",
        f"{say.ms(cost['call_ms'])} ms a call, {say.ms(cost['replay_ms'])} a replay, "
        f"{say.ms(cost['item_ms'])} an item, {say.ms(1e3 * cost['token_ms'])} a thousand tokens, "
        f"{say.ms(cost['miss_ms'])} an eager call",
    )
    for row in summary["memory"]:
        sizes = f"pool {say.size(row['pool_bytes'])}, buffers {say.size(row['buffer_bytes'])}"
        yield f"Budgets up to {row['max_budget']}", f"{sizes}, {say.count(row['graphs'], 'graph')}"
    yield "Attention", summary["attention"]
    host = summary["host"] or {}
    if host.get("launch_us") is not None:
        usual = f"usual hosts: {host['reference_launch_us']:.0f}"
        yield "Host", f"{host['launch_us']:.0f} µs a kernel of short eager calls ({usual})"
    yield "Capture", f"{say.number(summary['capture_ms'], 0)} ms a graph"
