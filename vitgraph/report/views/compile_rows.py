"""The document of `bench --compile-rows`: eager and graph, plain and compiled, and what each step gains."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vitgraph.records.kinds.compare import Candidate, CandidateMode
from vitgraph.records.latency import Improvement, Latency, Pair
from vitgraph.records.record import CompareRecord, Record
from vitgraph.report import say
from vitgraph.report.columns import Cell, Column, Row, Table, TableSpec, fields, texts
from vitgraph.report.document import NO_VERDICT, Document, Facts, Text, Verdict, section, sections
from vitgraph.report.views.claims import GAP_MEANING, TAIL_OF_FEW, headline_of
from vitgraph.report.views.compare import backends_table, reasons_of, reference_text, status_text
from vitgraph.report.views.conditions import Ran

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
    columns=(
        Column("series", "text", "", "mode, and whether blocks are compiled", "Row"),
        *fields(Latency, "of", mean_ms="Mean", p50_ms="P50"),
        Column("p99_ms", "number", "ms", "99th percentile; of too few requests left out", "P99"),
        *fields(Latency, "of", max_ms="Max", gpu_mean_ms="GPU mean"),
        Column("launch_gap", "number", "ratio", GAP_MEANING, "Launch gap", say.gap),
        Column("limit", "number", "ratio", "mean over the arithmetic of a mean request", "Over the limit"),
        *fields(CandidateMode, "state", error_vs_float32=("Error", say.error)),
    ),
    counts="requests",
)
GAINS = TableSpec("gains", columns=texts(pair="Improvement", mean="Mean", p99="P99"), counts="requests")
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
        Column("seconds", "number", "s", "time of torch's compiler", "Compiling, s", lambda s: say.number(s, 1)),
    ),
    "requests",
)


def compile_rows_document(record: CompareRecord) -> Document:
    """The report of one record; an incomplete one shows what it has and why it ended."""
    ran = Ran(record)
    gains: Table | Text = GAINS.table(_gain_rows(record), notes=(_GAIN_NOTE,))
    if ran.is_cpu:
        gains = Text("Replay on a CPU is the forward again: no speed-up is claimed.", "warning")
    return ran.document(
        "vitgraph bench --compile-rows",
        section("Rows", _row_table(record)),
        section("Gains", gains),
        section("", Facts.of(_facts(record))),
        what=ran.conditions("compiled"),
        verdict=_verdict(record),
        tables=(backends_table(record),),
    )


def compile_rows_table(records: Sequence[Record]) -> Document:
    """One table of several records, a model a row."""
    note = f"Mean milliseconds a request. {_GAIN_NOTE} Launch gap: {GAP_MEANING}. Error: relative L2 from float32."
    table = MANY.table((_many_row(one) for one in records if isinstance(one, CompareRecord)), notes=(note,))
    ran = [Ran(record).conditions("compiled") for record in records]
    plain = ({name: getattr(value, "text", value) for name, value in row.items()} for row in table.rows)
    return Document(
        name="vitgraph bench --compile-rows",
        title=say.count(len(records), "record"),
        what=tuple(phrase for phrase in ran[0] if all(phrase in one for one in ran)),
        sections=sections(section("", table)),
        tables=(MANY.table(plain),),
    )


def _candidates(record: CompareRecord) -> dict[str, Candidate]:
    return {one.name: one for one in record.result.candidates}


def _modes(record: CompareRecord) -> dict[str, CandidateMode | None]:
    """What became of each series, by its label."""
    found = _candidates(record)
    return {label: getattr(found.get(name), mode, None) for label, name, mode in _SERIES}


def _names(pair: Pair) -> tuple[str, str]:
    return _LABELS.get(pair.base, pair.base), _LABELS.get(pair.series, pair.series)


def _gain(record: CompareRecord, names: tuple[str, str]) -> Improvement | None:
    """What the second of two series gains in the mean."""
    return next((pair.mean for pair in record.result.comparison.contrasts if _names(pair) == names), None)


def _verdict(record: CompareRecord) -> Verdict | None:
    """On everything together against plain eager, the question that the rows answer."""
    found = _gain(record, _GAINS[0])
    if found is None:
        return None
    if Ran(record).is_cpu:
        return Verdict(NO_VERDICT, "No verdict: replayed on a CPU")
    reason = "; ".join(record.result.comparison.invalid_reasons)
    headline = headline_of(found.verdict, "Compiled graphs are", "Compiled graphs and plain eager")
    return Verdict(found.verdict, headline, reason, f"mean latency {gain_cell(found).text}")


def _row_table(record: CompareRecord) -> Table:
    limit, candidates = record.result.comparison.speed_of_light_ms, _candidates(record)
    rows: list[Row] = []
    for (label, name, mode), state in zip(_SERIES, _modes(record).values(), strict=True):
        of = state.latency if state else None
        if state is None or of is None:
            rows.append({"series": Cell(label, status_text(state) if state else say.NOT_MEASURED, "warning")})
            continue
        graphs = candidates[name].graphs if mode == "graph" else None
        rows.append(
            {
                "series": label,
                "of": of,
                "state": state,
                "p99_ms": of.p99_ms if of.p99_supported else None,
                "launch_gap": graphs.launch_gap if graphs else None,
                "limit": of.mean_ms / limit if limit and of.mean_ms is not None else None,
            }
        )
    few = f"A P99 takes more requests than were measured; Max: {TAIL_OF_FEW}."
    notes = (few,) if all(row.get("p99_ms") is None for row in rows) else ()
    table = ROWS.of(rows, notes=notes)
    return table.without_empty("p99_ms", "gpu_mean_ms", "launch_gap", "limit", "error_vs_float32")


def _gain_rows(record: CompareRecord) -> Iterable[Row]:
    for pair in record.result.comparison.contrasts:
        yield {"pair": " → ".join(_names(pair)), "mean": gain_cell(pair.mean), "p99": gain_cell(pair.p99)}


def gain_cell(found: Improvement | None) -> Cell:
    """An improvement with its interval and verdict."""
    if found is None or found.ci95 is None:
        return Cell(say.NO_VALUE)
    interval = f" ({say.interval(found.ci95)})" if found.verdict != "invalid" else ""
    return Cell(f"{say.pct(found.improvement_pct)}{interval} {found.verdict}", tone=found.verdict)


def _facts(record: CompareRecord) -> Iterable[tuple[str, str | None]]:
    compiled, comparison = _candidates(record).get("compiled"), record.result.comparison
    did = compiled.compiled if compiled else None
    if did is None or did.seconds is None:
        yield "Compilation", say.NOT_MEASURED
    else:
        cached = (
            f", {did.cache.hits if did.cache else 0} of them from the cache in {did.cache_dir or 'a temporary folder'}"
        )
        count = say.count(did.compilations or 0, "compilation")
        yield "Compilation", f"{say.number(did.seconds, 1)} s in {count}{cached if did.cache else ''}"
    yield "Checked", reference_text(comparison.reference)
    yield from reasons_of(record.result.candidates)
    yield "No verdict", "" if Ran(record).is_cpu else "; ".join(comparison.invalid_reasons)


def _many_row(record: CompareRecord) -> dict[str, Any]:
    sides = [_candidates(record).get(name) for name in ("plain", "compiled")]
    compiled = sides[1].compiled if sides[1] else None
    requests = say.count(record.workload.requests, "request") if record.workload else ""
    return {
        "row": record.resolved.row if record.resolved else None,
        "model": Ran(record).model,
        "workload": f"{Ran(record).workload}, {requests}",
        **{label: of.latency.mean_ms if of and of.latency else None for label, of in _modes(record).items()},
        **{f"{base} → {series}": gain_cell(_gain(record, (base, series))) for base, series in _GAINS},
        "gap": "→".join(say.gap(one.graphs.launch_gap if one and one.graphs else None) for one in sides),
        "error": "→".join(say.error(one.graph.error_vs_float32 if one else None) for one in sides),
        "seconds": compiled.seconds if compiled else None,
    }
