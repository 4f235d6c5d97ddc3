"""The document of `bench --compile-rows`: eager and graph, plain and compiled, and what each step gains."""

from __future__ import annotations

from collections.abc import Sequence

from vitgraph.records.graph_facts import GraphFacts
from vitgraph.records.latency import Improvement, Pair
from vitgraph.records.record import CompareRecord, Record
from vitgraph.records.results import CandidateMode
from vitgraph.records.sections import Compiled, value_at
from vitgraph.report import say
from vitgraph.report.columns import Cell, Row, Table, column, fields, table_of, texts
from vitgraph.report.document import NO_VERDICT, Document, Facts, Text, Verdict, document, section
from vitgraph.report.views.claims import GAP_MEANING, TAIL_OF_FEW, headline_of, latency_columns
from vitgraph.report.views.compare import backends_table, reasons_of, reference_text, status_text
from vitgraph.report.views.conditions import Ran

COMPILE_ROWS = "compile-rows"
"""The kind of these records."""
_SERIES = (
    ("eager", "plain", "eager"),
    ("eager+compile", "compiled", "eager"),
    ("graph", "plain", "graph"),
    ("graph+compile", "compiled", "graph"),
)
_LABELS = {f"{name}/{mode}": label for label, name, mode in _SERIES}
"""By the name that a series has in a record."""
_GAINS = ("eager → graph+compile", "eager+compile → graph+compile")
_GAIN_NOTE = "Positive = the second is faster; 95% interval in brackets."

ROWS = table_of(
    "rows",
    *texts(series="Row"),
    *latency_columns(mean_ms="Mean", p50_ms="P50", p99_ms="P99", max_ms="Max", gpu_mean_ms="GPU mean"),
    *fields(GraphFacts, "graphs", launch_gap="Launch gap"),
    column("limit", "mean over the arithmetic of a mean request", "Over the limit", unit="ratio"),
    *fields(CandidateMode, "state", error_vs_float32=("Error", say.error)),
    title="Milliseconds a request",
    counts="requests",
)
GAINS = table_of("gains", *texts(pair="Improvement", mean="Mean", p99="P99"), counts="requests")
MANY = table_of(
    "compile_rows",
    column("row", "row of the table of supported models", "Row"),
    column("model", "model as given", "Model"),
    column("workload", "name and requests of the workload", "Workload"),
    *(column(label, f"mean of {label}", label, kind="number", unit="ms") for label, *_ in _SERIES),
    *(column(of, "what {2} gains over {0}".format(*of.split()), of, kind="text", unit="%") for of in _GAINS),
    column("gap", "launch gap, plain→compiled", "Launch gap, plain→compiled", kind="text"),
    column("error", "distance from float32, plain→compiled", "Error, plain→compiled", kind="text"),
    column("seconds", "time of torch's compiler", "Compiling, s", 1),
    one_row="a record",
    counts="requests",
)


def compile_rows_document(record: CompareRecord) -> Document:
    """The report of one record; an incomplete one shows what it has and why it ended."""
    ran, comparison = Ran(record), record.result.comparison
    gains, claimed = _gains(record), not ran.is_cpu
    rows = ({"pair": name, "mean": _gain_cell(of.mean), "p99": _gain_cell(of.p99)} for name, of in gains.items())
    nothing = Text("Replay on a CPU is the forward again: no speed-up is claimed.", "warning")
    facts = (
        ("Compilation", _compilation_text(record)),
        ("Checked", reference_text(record)),
        *reasons_of(record.result.candidates),
        ("No verdict", "; ".join(comparison.invalid_reasons) if claimed else ""),
    )
    verdict = None
    # The question that the rows answer is on everything together against plain eager.
    if (pair := gains.get(_GAINS[0])) is not None:
        word, reason = pair.mean.verdict, "; ".join(comparison.invalid_reasons)
        headline = headline_of(word, "Compiled graphs are", "Compiled graphs and plain eager")
        verdict = Verdict(word, headline, reason, f"mean latency {_gain_cell(pair.mean).text}")
        verdict = verdict if claimed else Verdict(NO_VERDICT, "No verdict: replayed on a CPU")
    return ran.document(
        "vitgraph bench --compile-rows",
        section("Rows", _row_table(record)),
        section("Gains", GAINS.filled(rows, notes=(_GAIN_NOTE,)) if claimed else nothing),
        section("", Facts.of(facts)),
        what=ran.conditions("compiled"),
        verdict=verdict,
        tables=(backends_table(record),),
    )


def compile_rows_table(records: Sequence[Record]) -> Document:
    """One table of several records, a model a row."""
    note = f"Mean milliseconds a request. {_GAIN_NOTE} Launch gap: {GAP_MEANING}. Error: relative L2 from float32."
    table = MANY.filled((_many_row(one) for one in records if isinstance(one, CompareRecord)), notes=(note,))
    ran = [Ran(record).conditions("compiled") for record in records]
    plain = ({name: getattr(value, "text", value) for name, value in row.items()} for row in table.rows)
    return document(
        "vitgraph bench --compile-rows",
        say.count(len(records), "record"),
        section("", table),
        what=tuple(phrase for phrase in ran[0] if all(phrase in one for one in ran)),
        tables=(MANY.filled(plain),),
    )


def _series(record: CompareRecord) -> dict[str, tuple[CandidateMode | None, GraphFacts | None]]:
    """What became of each series, and the graphs of those that have any, by its label."""
    found = {one.name: one for one in record.result.candidates}
    states = {label: value_at(found.get(name), mode) for label, name, mode in _SERIES}
    graphs = {label: value_at(found.get(name), "graphs") for label, name, mode in _SERIES if mode == "graph"}
    return {label: (state, graphs.get(label)) for label, state in states.items()}


def _gains(record: CompareRecord) -> dict[str, Pair]:
    """What the second of two series gains, by the labels of both."""
    pairs = record.result.comparison.contrasts
    return {" → ".join(_LABELS.get(name, name) for name in (pair.base, pair.series)): pair for pair in pairs}


def _row_table(record: CompareRecord) -> Table:
    limit = record.result.comparison.speed_of_light_ms
    rows: list[Row] = []
    for label, (state, graphs) in _series(record).items():
        if state is None or state.latency is None:
            rows.append({"series": Cell(label, status_text(state), "warning")})
            continue
        mean = state.latency.mean_ms
        over = mean / limit if limit and mean is not None else None
        rows.append({"series": label, "of": state.latency, "state": state, "graphs": graphs, "limit": over})
    table = ROWS.of(rows)
    few = f"A P99 takes more requests than were measured; Max: {TAIL_OF_FEW}."
    table = ROWS.filled(table.rows, notes=(few,) if all(row["p99_ms"] is None for row in table.rows) else ())
    return table.without_empty("p99_ms", "gpu_mean_ms", "launch_gap", "limit", "error_vs_float32")


def _gain_cell(found: Improvement | None) -> Cell:
    """An improvement with its interval and verdict."""
    if found is None or found.ci95 is None:
        return Cell(say.NO_VALUE)
    interval = f" ({say.interval(found.ci95)})" if found.verdict != "invalid" else ""
    return Cell(f"{say.pct(found.improvement_pct)}{interval} {found.verdict}", tone=found.verdict)


def _compilation_text(record: CompareRecord) -> str:
    did = _compiled(record)
    if did is None or did.seconds is None:
        return say.NOT_MEASURED
    cached = (
        f", {did.cache.hits} of them from the cache in {did.cache_dir or 'a temporary folder'}" if did.cache else ""
    )
    return f"{say.number(did.seconds, 1)} s in {say.count(did.compilations or 0, 'compilation')}{cached}"


def _compiled(record: CompareRecord) -> Compiled | None:
    return next((one.compiled for one in record.result.candidates if one.name == "compiled"), None)


def _many_row(record: CompareRecord) -> Row:
    ran, gains, series = Ran(record), _gains(record), _series(record)
    requests = say.count(record.workload.requests, "request") if record.workload else ""
    both = [series[label] for label in ("graph", "graph+compile")]
    return {
        "row": ran.at("resolved.row"),
        "model": ran.model,
        "workload": f"{ran.workload}, {requests}",
        **{label: value_at(state, "latency.mean_ms") for label, (state, _) in series.items()},
        **{name: _gain_cell(gains[name].mean if name in gains else None) for name in _GAINS},
        "gap": say.change(*(value_at(graphs, "launch_gap") for _, graphs in both), text=say.gap),
        "error": say.change(*(value_at(state, "error_vs_float32") for state, _ in both), text=say.error),
        "seconds": value_at(_compiled(record), "seconds"),
    }
