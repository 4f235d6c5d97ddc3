"""The document of `bench --compile-rows`: eager and graph, plain and compiled, and what each step gains."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vitgraph.records.kinds.compare import Candidate, CandidateMode
from vitgraph.records.record import CompareRecord, Record
from vitgraph.records.sections import Improvement, Pair
from vitgraph.report.columns import (
    NO_VALUE,
    NOT_MEASURED,
    Cell,
    Column,
    Row,
    Table,
    TableSpec,
    count_text,
    error_text,
    gap_text,
    interval_text,
    number_text,
    pct_text,
)
from vitgraph.report.document import NO_VERDICT, Document, Facts, Text, Verdict, section, sections
from vitgraph.report.views.claims import GAP_MEANING, TAIL_OF_FEW, headline_of
from vitgraph.report.views.compare import backends_table, is_cpu, reasons_of, reference_text, status_text
from vitgraph.report.views.conditions import conditions, device_of, environment_facts, model_of, warning_of, workload_of

_SERIES = (
    ("eager", "plain", "eager"),
    ("eager+compile", "compiled", "eager"),
    ("graph", "plain", "graph"),
    ("graph+compile", "compiled", "graph"),
)
_LABELS = {f"{name}/{mode}": label for label, name, mode in _SERIES}
"""By the name that a series has in a record."""
_GAINS = (("eager", "graph+compile"), ("eager+compile", "graph+compile"))
COMPILE_ROWS = "compile-rows"
"""The kind of these records."""
_GAIN_NOTE = "Positive = the second is faster; 95% interval in brackets."

ROWS = TableSpec(
    "rows",
    "Milliseconds a request",
    "a series",
    (
        Column("series", "text", "", "mode, and whether blocks are compiled", "Row"),
        Column("mean", "number", "ms", "mean", "Mean"),
        Column("p50", "number", "ms", "median", "P50"),
        Column("p99", "number", "ms", "99th percentile", "P99"),
        Column("max", "number", "ms", "largest", "Max"),
        Column("gpu_mean", "number", "ms", "mean time between device events", "GPU mean"),
        Column("launch_gap", "number", "ratio", GAP_MEANING, "Launch gap", gap_text),
        Column("limit", "number", "ratio", "mean over the arithmetic of a mean request", "Over the limit"),
        Column("error", "number", "ratio", "relative L2 distance from float32", "Error", error_text),
    ),
    "requests",
)
GAINS = TableSpec(
    "gains",
    "",
    "two series",
    (
        Column("pair", "text", "", "the two", "Improvement"),
        Column("mean", "text", "%", "of the mean", "Mean"),
        Column("p99", "text", "%", "of the P99", "P99"),
    ),
    "requests",
)
MANY = TableSpec(
    "compile_rows",
    "",
    "a record",
    (
        Column("row", "text", "", "row of the table of supported models", "Row"),
        Column("model", "text", "", "model as given", "Model"),
        Column("workload", "text", "", "name and requests of the workload", "Workload"),
        *(Column(label, "number", "ms", f"mean of {label}", label) for label, *_ in _SERIES),
        *(Column(f"{a} → {b}", "text", "%", f"what {b} gains over {a}", f"{a} → {b}") for a, b in _GAINS),
        Column("gap", "text", "ratio", "launch gap, plain→compiled", "Launch gap, plain→compiled"),
        Column("error", "text", "ratio", "distance from float32, plain→compiled", "Error, plain→compiled"),
        Column("seconds", "number", "s", "time of torch's compiler", "Compiling, s", lambda s: number_text(s, 1)),
    ),
    "requests",
)


def compile_rows_document(record: CompareRecord) -> Document:
    """The report of one record; an incomplete one shows what it has and why it ended."""
    gains = GAINS.table(_gain_rows(record))
    cpu = Text("Replay on a CPU is the forward again: no speed-up is claimed.", "warning") if is_cpu(record) else None
    return Document(
        name="vitgraph bench --compile-rows",
        title=f"{model_of(record)} on {device_of(record)}, workload {workload_of(record)}",
        what=conditions(record, with_compiled=False),
        verdict=_verdict(record),
        warning=warning_of(record),
        sections=sections(
            section("Rows", _row_table(record)),
            section("Gains", cpu or Table(GAINS, gains.rows, notes=(_GAIN_NOTE,))),
            section("", Facts.of(_facts(record))),
            section("Environment", environment_facts(record), is_detail=True),
        ),
        tables=(backends_table(record),),
        command=record.command,
    )


def compile_rows_table(records: Sequence[Record]) -> Document:
    """One table of several records, a model a row."""
    found = [record for record in records if isinstance(record, CompareRecord)]
    note = f"Mean milliseconds a request. {_GAIN_NOTE} Launch gap: {GAP_MEANING}. Error: relative L2 from float32."
    table = Table(MANY, tuple(map(_many_row, found)), notes=(note,))
    shared = [set(conditions(record, with_compiled=False)) for record in records]
    common = [phrase for phrase in conditions(records[0], with_compiled=False) if all(phrase in one for one in shared)]
    return Document(
        name="vitgraph bench --compile-rows",
        title=count_text(len(records), "record"),
        what=tuple(common),
        sections=sections(section("", table)),
        tables=(MANY.table({**row, **_plain(row)} for row in table.rows),),
    )


def _plain(row: Any) -> dict[str, Any]:
    return {name: value.text for name, value in row.items() if isinstance(value, Cell)}


def _candidates(record: CompareRecord) -> dict[str, Candidate]:
    return {one.name: one for one in record.result.candidates}


def _mode(record: CompareRecord, name: str, mode: str) -> CandidateMode | None:
    candidate = _candidates(record).get(name)
    return None if candidate is None else candidate.eager if mode == "eager" else candidate.graph


def _found(record: CompareRecord, base: str, series: str, metric: str) -> Improvement | None:
    pairs = record.result.comparison.contrasts
    return next((getattr(pair, metric) for pair in pairs if _names(pair) == (base, series)), None)


def _names(pair: Pair) -> tuple[str, str]:
    return _LABELS.get(pair.base, pair.base), _LABELS.get(pair.series, pair.series)


def _verdict(record: CompareRecord) -> Verdict | None:
    """On everything together against plain eager, the question that the rows answer."""
    found = _found(record, *_GAINS[0], "mean")
    if found is None:
        return None
    if is_cpu(record):
        return Verdict(NO_VERDICT, "No verdict: replayed on a CPU")
    reason = "; ".join(record.result.comparison.invalid_reasons)
    headline = headline_of(found.verdict, "Compiled graphs are", "Compiled graphs and plain eager")
    return Verdict(found.verdict, headline, reason, f"mean latency {gain_cell(found).text}")


def _row_table(record: CompareRecord) -> Table:
    limit = record.result.comparison.speed_of_light_ms
    rows: list[Row] = []
    for label, name, mode in _SERIES:
        state, candidate = _mode(record, name, mode), _candidates(record).get(name)
        latency = state.latency if state else None
        if state is None or latency is None:
            rows.append({"series": Cell(label, status_text(state) if state else NOT_MEASURED, "warning")})
            continue
        graphs = candidate.graphs if candidate and mode == "graph" else None
        rows.append(
            {
                "series": label,
                **{field: getattr(latency, f"{field}_ms") for field in ("mean", "p50", "max", "gpu_mean")},
                "p99": latency.p99_ms if latency.p99_supported else None,
                "launch_gap": graphs.launch_gap if graphs else None,
                "limit": latency.mean_ms / limit if limit and latency.mean_ms is not None else None,
                "error": state.error_vs_float32,
            }
        )
    few = f"A P99 takes more requests than were measured; Max: {TAIL_OF_FEW}."
    notes = (few,) if all(row.get("p99") is None for row in rows) else ()
    return Table(ROWS, tuple(rows), notes=notes).without_empty("p99", "gpu_mean", "launch_gap", "limit", "error")


def _gain_rows(record: CompareRecord) -> Iterable[dict[str, Any]]:
    for pair in record.result.comparison.contrasts:
        label = " → ".join(_names(pair))
        yield {"pair": label, "mean": gain_cell(pair.mean), "p99": gain_cell(pair.p99)}


def gain_cell(found: Improvement | None) -> Cell:
    """An improvement with its interval and verdict."""
    if found is None or found.ci95 is None:
        return Cell(NO_VALUE)
    interval = f" ({interval_text(found.ci95)})" if found.verdict != "invalid" else ""
    return Cell(f"{pct_text(found.improvement_pct)}{interval} {found.verdict}", tone=found.verdict)


def _facts(record: CompareRecord) -> Iterable[tuple[str, str | None]]:
    compiled = _candidates(record).get("compiled")
    did = compiled.compiled if compiled else None
    if did is None or did.seconds is None:
        yield "Compilation", NOT_MEASURED
    else:
        cached = (
            f", {did.cache.hits} of them from the cache in {did.cache_dir or 'a temporary folder'}" if did.cache else ""
        )
        count = count_text(did.compilations or 0, "compilation")
        yield "Compilation", f"{number_text(did.seconds, 1)} s in {count}{cached}"
    comparison = record.result.comparison
    yield "Checked", reference_text(comparison.reference)
    yield from reasons_of(record.result.candidates)
    yield "No verdict", "" if is_cpu(record) else "; ".join(comparison.invalid_reasons)


def _many_row(record: CompareRecord) -> dict[str, Any]:
    found = _candidates(record)
    plain, compiled = found.get("plain"), found.get("compiled")
    states = {label: _mode(record, name, mode) for label, name, mode in _SERIES}
    means = {label: state.latency.mean_ms if state and state.latency else None for label, state in states.items()}
    gaps = [one.graphs.launch_gap if one and one.graphs else None for one in (plain, compiled)]
    errors = [one.graph.error_vs_float32 if one else None for one in (plain, compiled)]
    requests = count_text(record.workload.requests, "request") if record.workload else ""
    return {
        "row": record.resolved.row if record.resolved else None,
        "model": model_of(record),
        "workload": f"{workload_of(record)}, {requests}",
        **means,
        **{f"{base} → {series}": gain_cell(_found(record, base, series, "mean")) for base, series in _GAINS},
        "gap": "→".join(map(gap_text, gaps)),
        "error": "→".join(map(error_text, errors)),
        "seconds": compiled.compiled.seconds if compiled and compiled.compiled else None,
    }
