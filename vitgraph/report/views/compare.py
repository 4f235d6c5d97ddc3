"""The document of a backend comparison: one table of backends, the advice, and the reasons of what is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from vitgraph.records.attention_choices import choices_text
from vitgraph.records.graph_facts import GraphFacts
from vitgraph.records.kinds.compare import Candidate, CandidateMode, Reference
from vitgraph.records.latency import Latency
from vitgraph.records.record import CompareRecord
from vitgraph.report import say
from vitgraph.report.charts import CPU_NOTE
from vitgraph.report.charts_of_bars import Series, draw_backends
from vitgraph.report.columns import Cell, Column, Row, Table, TableSpec, fields
from vitgraph.report.document import NO_VERDICT, Chart, Document, Facts, Text, Verdict, section
from vitgraph.report.views.claims import (
    NOT_A_GPU,
    TAIL_OF_FEW,
    claim_of,
    floor_text,
    improvement_columns,
    measured_text,
    moved_by_one,
)
from vitgraph.report.views.conditions import Ran, dropped_lines, skipped_text
from vitgraph.report.views.ranks import MODES, ranks_table

_NOTE = "Positive = graph faster than the same backend's eager; milliseconds a request, eager→graph."
_BEST_NOTE = "Against the best: negative = slower than the fastest backend and mode."

CANDIDATES = TableSpec(
    "candidates",
    columns=(
        Column("name", "text", "", "attention backend", "Backend"),
        Column("mean", "text", "", "improvement of the mean over its own eager", "Mean latency improvement"),
        Column("p99", "text", "", "improvement of the P99, or of the maximum", "P99 latency improvement"),
        Column("best", "text", "", "its faster mode against the fastest of all", "Against the best"),
        *fields(GraphFacts, "graphs", gpu_busy_ms="GPU-busy ms", launch_gap="Launch gap"),
        Column("memory", "integer", "bytes", "pool and buffers of its graphs", "Graph memory", say.size),
        Column("error", "number", "ratio", "largest relative L2 distance from float32", "Error", say.error),
    ),
    counts="requests",
)
BACKENDS = TableSpec(
    "backends",
    "",
    "a backend and mode",
    (
        Column("backend", "text", "", "attention backend, or `plain` and `compiled`", of="candidate.name"),
        Column("mode", "text", "", "`eager` or `graph`"),
        *fields(CandidateMode, "state", "status", "reason"),
        *fields(Candidate, "candidate", "implementation"),
        *fields(Latency, "state.latency", "requests", "mean_ms", "p50_ms", "p90_ms", "p99_ms", "max_ms"),
        *fields(Latency, "state.latency", "gpu_mean_ms"),
        *improvement_columns("gain.mean", " of the mean over the same backend's eager; graph rows only", "_mean"),
        *improvement_columns("gain.p99", " of the P99", "_p99"),
        *improvement_columns("best", " of the mean over the fastest of all, negative = slower", "_best"),
        Column("call_busy_ms", "number", "ms", "GPU-busy time of some whole calls", of="state.busy.gpu_busy_ms"),
        Column("call_busy_share", "number", "share", "its share of their latency", of="state.busy.share"),
        *fields(GraphFacts, "graphs", "replay_ms"),
        Column("replay_busy_ms", "number", "ms", "GPU-busy time of a replay", of="graphs.gpu_busy_ms"),
        *fields(GraphFacts, "graphs", "launch_gap"),
        *fields(CandidateMode, "state", "error_vs_float32"),
        *fields(GraphFacts, "graphs", "hits", "misses", "replays", "waste"),
        *fields(GraphFacts, "graphs", "pool_bytes", "buffer_bytes", "capture_s"),
    ),
    "requests",
)


def compare_document(record: CompareRecord) -> Document:
    """The report of one comparison; an incomplete one shows what it has and why it ended."""
    candidates, advice, ran = record.result.candidates, record.result.recommendation, Ran(record)
    word = NO_VERDICT if advice.name is None else "best" if advice.sure == "clear" else "undecided"
    ranks = [table for one in candidates if (table := ranks_table(_latencies(one), f"{one.name}, ")).rows]
    moved = (
        Text(f"{name} {mode}: {text}, which alone moves its mean and its maximum.", "warning")
        for (name, mode), text in moved_by_one(_all_latencies(record)).items()
    )
    dropped = (
        Text(f"{one.name}: {line}", "warning")
        for one in candidates
        for line in dropped_lines((one.graphs and one.graphs.dropped) or one.dropped)
    )
    return ran.document(
        "vitgraph compare-backends",
        section("Backends", _candidate_table(record), *moved),
        section("", Facts.of([*reasons_of(candidates), *_facts(record)])),
        section("", *dropped),
        section("Charts", _chart(record) if any(map(_latencies, candidates)) else None),
        section("Ranks", *ranks),
        what=ran.conditions("backend"),
        verdict=Verdict(word, advice.text),
        tables=(backends_table(record), *ranks),
    )


# -- the table ---------------------------------------------------------------------------------------------------------


def _candidate_table(record: CompareRecord) -> Table:
    notes = [_NOTE, _BEST_NOTE]
    if not _has_p99(record):
        notes.append(f"P99 latency improvement: of the {TAIL_OF_FEW}, of which nothing is claimed.")
    return CANDIDATES.of((_candidate_row(record, one) for one in record.result.candidates), notes=tuple(notes))


def _has_p99(record: CompareRecord) -> bool:
    return any(latency.p99_supported for latency in _all_latencies(record).values())


def _latencies(candidate: Candidate) -> dict[str, Latency]:
    """Latency by mode; empty where nothing was measured."""
    modes = {"eager": candidate.eager.latency, "graph": candidate.graph.latency}
    return {mode: latency for mode, latency in modes.items() if latency is not None}


def _all_latencies(record: CompareRecord) -> dict[tuple[str, str], Latency]:
    return {(one.name, mode): of for one in record.result.candidates for mode, of in _latencies(one).items()}


def _candidate_row(record: CompareRecord, one: Candidate) -> Row:
    if not _latencies(one):
        return {"name": one.name, "mean": Cell(status_text(one.eager), tone="warning")}
    graphs = one.graphs
    sizes = [graphs.pool_bytes, graphs.buffer_bytes] if graphs else [None]
    known = [size for size in sizes if size is not None]
    errors = [mode.error_vs_float32 for mode in (one.eager, one.graph) if mode.error_vs_float32 is not None]
    return {
        "name": one.name,
        **{metric: _gain_cell(record, one, metric) for metric in ("mean", "p99")},
        "best": _standing_cell(record, one),
        "graphs": graphs,
        "memory": sum(known) if len(known) == len(sizes) else None,
        "error": max(errors, default=None),
    }


def status_text(mode: CandidateMode) -> str:
    """The status of a mode without figures, in words."""
    return say.NOT_MEASURED if mode.status == "ok" else mode.status.replace("_", " ")


def _gain_cell(record: CompareRecord, one: Candidate, metric: str) -> Cell:
    """Improvement and both latencies, and beneath them what may be claimed."""
    latencies = _latencies(one)
    if len(latencies) < len(MODES):
        ((mode, latency),) = latencies.items()
        missing = "graph" if mode == "eager" else "eager"
        value = latency.mean_ms if metric == "mean" else latency.p99_ms if latency.p99_supported else latency.max_ms
        status = status_text(getattr(one, missing))
        return Cell(f"{mode} {say.ms(value)} ms", f"{missing} {status}" if metric == "mean" else "", "warning")
    if one.gain is None:
        return Cell(say.NO_VALUE)
    claim = claim_of(one.gain, metric, latencies["eager"], latencies["graph"], is_cpu=Ran(record).is_cpu)
    return Cell(claim.headline) if claim.is_tail_of_few else claim.cell


def _standing_cell(record: CompareRecord, one: Candidate) -> Cell:
    """The backend's faster mode against the fastest of all."""
    if Ran(record).is_cpu:
        return Cell(NOT_A_GPU)
    own = next((standing for standing in record.result.comparison.standings if standing.name == one.name), None)
    if own is None:
        return Cell(say.NO_VALUE)
    against = own.against_best
    if against is None:
        return Cell(f"best, {own.mode}", tone="best")
    interval = say.interval(against.ci95) if against.verdict != "invalid" else ""
    note = f"{against.verdict}{f', 95% CI {interval}' if interval else ''}"
    return Cell(f"{own.mode} {say.pct(against.improvement_pct)}", note, against.verdict)


def reasons_of(candidates: Sequence[Candidate]) -> Iterable[tuple[str, str]]:
    """Why modes have no figures, once where both lack for the same reason."""
    for one in candidates:
        eager, graph = ((mode.status, mode.reason) for mode in (one.eager, one.graph))
        if eager == graph and one.eager.status != "ok":
            yield one.name, f"{status_text(one.eager)}: {one.eager.reason}"
            continue
        for name, mode in (("eager", one.eager), ("graph", one.graph)):
            if mode.status != "ok":
                yield f"{one.name} {name}", f"{status_text(mode)}: {mode.reason}"


# -- what is beneath it ------------------------------------------------------------------------------------------------


def _facts(record: CompareRecord) -> Iterable[tuple[str, str | None]]:
    comparison = record.result.comparison
    measured = [one for one in record.result.candidates if _latencies(one)]
    if comparison.requests:
        how = _processes(comparison.isolated, Ran(record).ranks)
        yield "Measured", measured_text(comparison, f"{say.count(len(measured), 'backend')}, {how}")
        found = {mode: comparison.noise_floor.get(mode) for mode in MODES}
        floors = ", ".join(f"{mode} {floor_text(floor.mean if floor else None)}" for mode, floor in found.items())
        yield "Noise floor", f"mean {floors} (calls measured twice by the same backend in the same mode)"
    yield "Checked", reference_text(comparison.reference)
    yield "Hits", _per_backend(measured, _use_text)
    busy = _per_backend(measured, _busy_text)
    yield "GPU-busy share", f"{busy} of the latency of whole calls" if busy else None
    slower = _per_backend(measured, _slower_text)
    yield "Slower requests", f"{slower} slower than the backend's own eager by more than 2%" if slower else None
    yield "Capture", _per_backend(measured, _capture_text)
    yield "Ran", "; ".join(f"{one.name}: {one.implementation}" for one in measured if one.implementation)
    yield "Chosen", "; ".join(choices_text(one.choices) for one in measured if one.choices)
    yield "Skipped inputs", skipped_text(record.workload)


def _processes(is_isolated: bool, ranks: int) -> str:
    """Which processes measured the backends."""
    if is_isolated:
        return "each backend in a process of its own" if ranks == 1 else f"each backend on {ranks} ranks of its own"
    return "interleaved in one process" if ranks == 1 else f"interleaved on {ranks} ranks"


def _per_backend(candidates: Sequence[Candidate], fact: Callable[[Candidate], str | None]) -> str:
    """One fact a backend; backends that share it are named together, and not at all where it is everyone's."""
    names: dict[str, list[str]] = {}
    for one in candidates:
        if (text := fact(one)) is not None:
            names.setdefault(text, []).append(one.name)
    if len(names) == 1 and len(next(iter(names.values()))) == len(candidates):
        return next(iter(names))
    return "; ".join(f"{', '.join(sharing)} {text}" for text, sharing in names.items())


def reference_text(reference: Reference | None) -> str:
    """What outputs were checked against."""
    if reference is None:
        return ""
    return (
        f"{say.count(reference.calls, 'call')} with every series against the same tower in {reference.dtype}; "
        f"relative L2 up to {say.error(reference.limit)} passes ({reference.backend} in this dtype: "
        f"{say.error(reference.own_error)})"
    )


def _use_text(one: Candidate) -> str | None:
    graphs = one.graphs
    if graphs is None or not graphs.items:
        return None
    waste = f", waste {say.share(graphs.waste)}" if graphs.waste is not None else ""
    return f"{graphs.hits:,} of {say.count(graphs.items, 'item')}, {say.count(graphs.replays, 'replay')}{waste}"


def _busy_text(one: Candidate) -> str | None:
    shares = [mode.busy.share if mode.busy else None for mode in (one.eager, one.graph)]
    return None if all(share is None for share in shares) else "→".join(map(say.share, shares))


def _slower_text(one: Candidate) -> str | None:
    slower = one.gain.slower if one.gain else None
    return None if slower is None else f"{slower.over_2pct_count:,} of {slower.requests:,} requests"


def _capture_text(one: Candidate) -> str | None:
    graphs = one.graphs
    if graphs is None or graphs.capture_s is None:
        return None
    dropped = f" (-{len(graphs.dropped)})" if graphs.dropped else ""
    return f"{say.count(graphs.graphs, 'graph')}{dropped} in {say.number(graphs.capture_s, 2)} s"


# -- chart and file ----------------------------------------------------------------------------------------------------


def _chart(record: CompareRecord) -> Chart:
    has_p99, ran = _has_p99(record), Ran(record)
    latencies, marks = _all_latencies(record), moved_by_one(_all_latencies(record))
    series = {
        key: Series(of.mean_ms or 0.0, (of.p99_ms if has_p99 else of.max_ms) or 0.0, marks.get(key, ""))
        for key, of in latencies.items()
    }
    names = [one.name for one in record.result.candidates]
    missing = {
        (one.name, mode): f"{mode}: {status_text(getattr(one, mode))}"
        for one in record.result.candidates
        for mode in MODES
        if (one.name, mode) not in series
    }
    subtitle = ran.subtitle(CPU_NOTE if ran.is_cpu else "", without="backend")
    tail = "P99" if has_p99 else f"M{TAIL_OF_FEW[1:]}"
    draw = partial(draw_backends, "Attention backends, eager and graph", subtitle, names, series, missing, tail)
    return Chart("backends", "Mean and tail latency of every backend, eager and graph", draw)


def backends_table(record: CompareRecord) -> Table:
    """One row a backend and mode."""
    standings = {(entry.name, str(entry.mode)): entry for entry in record.result.comparison.standings}
    rows = []
    for one in record.result.candidates:
        for mode, state in (("eager", one.eager), ("graph", one.graph)):
            standing = standings.get((one.name, mode))
            best = standing and (standing.against_best or {"verdict": "best", "improvement_pct": 0.0})
            row = {"candidate": one, "mode": mode, "state": state, "best": best}
            rows.append(row | ({"gain": one.gain, "graphs": one.graphs} if mode == "graph" else {}))
    return BACKENDS.of(rows)


def availability_facts(backends: Sequence[Mapping[str, Any]]) -> Facts:
    """Which backends could run on this device, for a dry run; rows as `describe_backends` gives them."""
    found = [(str(row["name"]), row["unavailable_reason"]) for row in backends]
    # Those that can run come first.
    found.sort(key=lambda pair: bool(pair[1]))
    return Facts.of((name, f"unavailable: {reason}" if reason else "available") for name, reason in found)
