"""The documents of a comparison: of backends, and of `bench --compile-rows`, eager and graph, plain and compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from vitgraph.records.record import CompareRecord, Record
from vitgraph.records.results import COMPARED_MODES, Candidate, CandidateMode
from vitgraph.records.sections import Compiled, choices_text, value_at
from vitgraph.records.series import GraphFacts, Improvement, Latency, Pair
from vitgraph.records.stats import P99_MIN_SAMPLES
from vitgraph.report import say
from vitgraph.report.columns import Cell, Row, Table, column, fields, table_of, texts
from vitgraph.report.document import NO_VERDICT, Chart, Document, Facts, Text, Verdict, document, section
from vitgraph.report.draw import draw_backends
from vitgraph.report.views import claims
from vitgraph.report.views.conditions import Ran, dropped_lines, reference_text
from vitgraph.report.views.graph_tables import capture_text
from vitgraph.report.views.ranks import ranks_table

_NOTE = "Positive = graph faster than the same backend's eager; milliseconds a request, eager→graph."
_BEST_NOTE = "Against the best: negative = slower than the fastest backend and mode."
_P99_NOTE = f"P99 latency improvement: of the {claims.TAIL_OF_FEW}, of which nothing is claimed."

CANDIDATES = table_of(
    "candidates",
    *texts(name="Backend", mean="Mean latency improvement", p99="P99 latency improvement", best="Against the best"),
    *fields(GraphFacts, "graphs", gpu_busy_ms="GPU-busy ms", launch_gap="Launch gap"),
    column("memory", "pool and buffers of its graphs", "Graph memory", say.size, unit="bytes"),
    column("error", "largest relative L2 distance from float32", "Error", say.error),
    counts="requests",
)
BACKENDS = table_of(
    "backends",
    column("backend", "attention backend, or `plain` and `compiled`", of="candidate.name"),
    column("mode", "`eager` or `graph`"),
    *fields(CandidateMode, "state", "status", "reason"),
    *fields(Candidate, "candidate", "implementation"),
    *fields(Latency, "state.latency", "requests", "mean_ms", "p50_ms", "p90_ms", "p99_ms", "max_ms"),
    *fields(Latency, "state.latency", "gpu_mean_ms"),
    *claims.improvement_columns("gain.mean", " of the mean over the same backend's eager; graph rows only", "_mean"),
    *claims.improvement_columns("gain.p99", " of the P99", "_p99"),
    *claims.improvement_columns("best", " of the mean over the fastest of all, negative = slower", "_best"),
    column("call_busy_ms", "GPU-busy time of some whole calls", of="state.busy.gpu_busy_ms"),
    column("call_busy_share", "its share of their latency", of="state.busy.share"),
    *fields(GraphFacts, "graphs", "replay_ms"),
    column("replay_busy_ms", "GPU-busy time of a replay", of="graphs.gpu_busy_ms"),
    *fields(GraphFacts, "graphs", "launch_gap"),
    *fields(CandidateMode, "state", "error_vs_float32"),
    *fields(GraphFacts, "graphs", "hits", "misses", "replays", "waste"),
    *fields(GraphFacts, "graphs", "pool_bytes", "buffer_bytes", "capture_s"),
    one_row="a backend and mode",
    counts="requests",
)


def compare_document(record: CompareRecord) -> Document:
    """The report of one comparison; an incomplete one shows what it has and why it ended."""
    candidates, advice, ran = record.result.candidates, record.result.recommendation, Ran(record)
    latencies = {(one.name, mode): of for one in candidates for mode, of in _latencies(one).items()}
    has_p99 = any(latency.p99_supported for latency in latencies.values())
    moved = claims.moved_by_one(latencies)
    word = NO_VERDICT if advice.name is None else "best" if advice.sure == "clear" else "undecided"
    ranks = [table for one in candidates if (table := ranks_table(_latencies(one), f"{one.name}, ")).rows]
    rows = (_candidate_row(record, one) for one in candidates)
    table = CANDIDATES.of(rows, notes=(_NOTE, _BEST_NOTE, *(() if has_p99 else (_P99_NOTE,))))
    alone = "which alone moves its mean and its maximum."
    warnings = (f"{name} {mode}: {text}, {alone}" for (name, mode), text in moved.items())
    dropped = (
        f"{one.name}: {line}"
        for one in candidates
        for line in dropped_lines((one.graphs and one.graphs.dropped) or one.dropped)
    )
    words = {
        (one.name, mode): moved.get((one.name, mode), f"{mode}: {status_text(one.mode(mode))}")
        for one in candidates
        for mode in COMPARED_MODES
        if (one.name, mode) in moved or (one.name, mode) not in latencies
    }
    subtitle, names = ran.subtitle(without="backend"), [one.name for one in candidates]
    draw = partial(draw_backends, subtitle, names, latencies, words, "p99_ms" if has_p99 else "max_ms")
    chart = Chart("backends", "Mean and tail latency of every backend, eager and graph", draw)
    return ran.document(
        "vitgraph compare-backends",
        section("Backends", table, *(Text(line, "warning") for line in warnings)),
        section("", Facts.of([*reasons_of(candidates), *_facts(record)])),
        section("", *(Text(line, "warning") for line in dropped)),
        section("Charts", chart if latencies else None),
        section("Ranks", *ranks),
        what=ran.conditions("backend"),
        verdict=Verdict(word, advice.text),
        tables=(backends_table(record), *ranks),
    )


# -- the table ---------------------------------------------------------------------------------------------------------


def _latencies(candidate: Candidate) -> dict[str, Latency]:
    """Latency by mode; empty where nothing was measured."""
    return {mode: of for mode in COMPARED_MODES if (of := candidate.mode(mode).latency) is not None}


def _candidate_row(record: CompareRecord, one: Candidate) -> Row:
    if not _latencies(one):
        return {"name": one.name, "mean": Cell(status_text(one.eager), tone="warning")}
    sizes = [one.graphs.pool_bytes, one.graphs.buffer_bytes] if one.graphs else [None]
    known = [size for size in sizes if size is not None]
    errors = [error for mode in COMPARED_MODES if (error := one.mode(mode).error_vs_float32) is not None]
    return {
        "name": one.name,
        **{metric: _gain_cell(record, one, metric) for metric in ("mean", "p99")},
        "best": _standing_cell(record, one),
        "graphs": one.graphs,
        "memory": sum(known) if len(known) == len(sizes) else None,
        "error": max(errors, default=None),
    }


def status_text(mode: CandidateMode | None) -> str:
    """The status of a mode without figures, in words."""
    return say.NOT_MEASURED if mode is None or mode.status == "ok" else say.words(mode.status)


def _gain_cell(record: CompareRecord, one: Candidate, metric: str) -> Cell:
    """Improvement and both latencies, and beneath them what may be claimed."""
    latencies = _latencies(one)
    if len(latencies) < len(COMPARED_MODES):
        ((mode, latency),) = latencies.items()
        missing = "graph" if mode == "eager" else "eager"
        value = latency.mean_ms if metric == "mean" else latency.p99_ms if latency.p99_supported else latency.max_ms
        note = f"{missing} {status_text(one.mode(missing))}" if metric == "mean" else ""
        return Cell(f"{mode} {say.ms(value)} ms", note, "warning")
    if one.gain is None:
        return Cell(say.NO_VALUE)
    claim = claims.claim_of(one.gain, metric, latencies["eager"], latencies["graph"], is_cpu=Ran(record).is_cpu)
    return Cell(claim.headline) if claim.is_tail_of_few else claim.cell


def _standing_cell(record: CompareRecord, one: Candidate) -> Cell:
    """The backend's faster mode against the fastest of all."""
    if Ran(record).is_cpu:
        return Cell(claims.NOT_A_GPU)
    own = next((standing for standing in record.result.comparison.standings if standing.name == one.name), None)
    if own is None:
        return Cell(say.NO_VALUE)
    against = own.against_best
    if against is None:
        return Cell(f"best, {own.mode}", tone="best")
    note = against.verdict + (say.ci95(against.ci95, ", ") if against.verdict != "invalid" else "")
    return Cell(f"{own.mode} {say.pct(against.improvement_pct)}", note, against.verdict)


def backends_table(record: CompareRecord) -> Table:
    """One row a backend and mode."""
    standings = {(entry.name, str(entry.mode)): entry for entry in record.result.comparison.standings}
    rows = []
    for one in record.result.candidates:
        for mode in COMPARED_MODES:
            standing = standings.get((one.name, mode))
            best = standing and (standing.against_best or {"verdict": "best", "improvement_pct": 0.0})
            row = {"candidate": one, "mode": mode, "state": one.mode(mode), "best": best}
            rows.append(row | ({"gain": one.gain, "graphs": one.graphs} if mode == "graph" else {}))
    return BACKENDS.of(rows)


# -- what is beneath it ------------------------------------------------------------------------------------------------


def reasons_of(candidates: Sequence[Candidate]) -> Iterable[tuple[str, str]]:
    """Why modes have no figures, once where both lack for the same reason."""
    for one in candidates:
        failed = {mode: state for mode in COMPARED_MODES if (state := one.mode(mode)).status != "ok"}
        is_shared = len(failed) == len(COMPARED_MODES) and len({(of.status, of.reason) for of in failed.values()}) == 1
        for mode, state in list(failed.items())[: 1 if is_shared else None]:
            yield one.name if is_shared else f"{one.name} {mode}", f"{status_text(state)}: {state.reason}"


def _facts(record: CompareRecord) -> Iterable[tuple[str, str | None]]:
    comparison = record.result.comparison
    measured = [one for one in record.result.candidates if _latencies(one)]
    if comparison.requests:
        ranks = f" on {Ran(record).ranks} ranks" if Ran(record).ranks > 1 else ""
        alone = f"each backend{ranks} of its own" if ranks else "each backend in a process of its own"
        how = alone if comparison.isolated else f"interleaved{ranks or ' in one process'}"
        yield "Measured", claims.measured_text(comparison, f"{say.count(len(measured), 'backend')}, {how}")
        found = {mode: comparison.noise_floor.get(mode) for mode in COMPARED_MODES}
        floors = ", ".join(
            f"{mode} {claims.floor_text(floor.mean if floor else None)}" for mode, floor in found.items()
        )
        yield "Noise floor", f"mean {floors} (calls measured twice by the same backend in the same mode)"
    yield "Checked", reference_text(record)
    yield "Hits", _per_backend(measured, _use_text)
    busy = _per_backend(measured, _busy_text)
    yield "GPU-busy share", f"{busy} of the latency of whole calls" if busy else None
    slower = _per_backend(measured, _slower_text)
    yield "Slower requests", f"{slower} slower than the backend's own eager by more than 2%" if slower else None
    yield (
        "Capture",
        _per_backend(
            measured, lambda one: capture_text(one.graphs) if one.graphs and one.graphs.capture_s is not None else None
        ),
    )
    yield "Ran", "; ".join(f"{one.name}: {one.implementation}" for one in measured if one.implementation)
    yield "Chosen", "; ".join(choices_text(one.choices) for one in measured if one.choices)
    yield "Skipped inputs", Ran(record).skipped


def _per_backend(candidates: Sequence[Candidate], fact: Callable[[Candidate], str | None]) -> str:
    """One fact a backend; backends that share it are named together, and not at all where it is everyone's."""
    names: dict[str, list[str]] = {}
    for one in candidates:
        if (text := fact(one)) is not None:
            names.setdefault(text, []).append(one.name)
    if len(names) == 1 and len(next(iter(names.values()))) == len(candidates):
        return next(iter(names))
    return "; ".join(f"{', '.join(sharing)} {text}" for text, sharing in names.items())


def _use_text(one: Candidate) -> str | None:
    graphs = one.graphs
    if graphs is None or not graphs.items:
        return None
    waste = f", waste {say.share(graphs.waste)}" if graphs.waste is not None else ""
    return f"{graphs.hits:,} of {say.count(graphs.items, 'item')}, {say.count(graphs.replays, 'replay')}{waste}"


def _busy_text(one: Candidate) -> str | None:
    shares = [mode.busy.share if mode.busy else None for mode in map(one.mode, COMPARED_MODES)]
    return None if all(share is None for share in shares) else say.change(*shares, text=say.share)


def _slower_text(one: Candidate) -> str | None:
    slower = one.gain.slower if one.gain else None
    return None if slower is None else f"{slower.over_2pct_count:,} of {slower.requests:,} requests"


_SERIES = (
    ("eager", "plain", "eager"),
    ("eager+compile", "compiled", "eager"),
    ("graph", "plain", "graph"),
    ("graph+compile", "compiled", "graph"),
)
_LABELS = {f"{name}/{mode}": label for label, name, mode in _SERIES}
"""By the name that a series has in a record."""
_GAINS = ("eager → graph+compile", "eager+compile → graph+compile")
_STEP_NOTE = "Positive = the second is faster; 95% interval in brackets."

COMPILE_TABLE = table_of(
    "rows",
    *texts(series="Row"),
    *claims.latency_columns(mean_ms="Mean", p50_ms="P50", p99_ms="P99", max_ms="Max", gpu_mean_ms="GPU mean"),
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
    ran, invalid = Ran(record), "; ".join(record.result.comparison.invalid_reasons)
    gains, claimed = _gains(record), not ran.is_cpu
    rows = ({"pair": name, "mean": _step_cell(of.mean), "p99": _step_cell(of.p99)} for name, of in gains.items())
    nothing = Text("Replay on a CPU is the forward again: no speed-up is claimed.", "warning")
    facts = (
        ("Compilation", _compilation_text(record)),
        ("Checked", reference_text(record)),
        *reasons_of(record.result.candidates),
        ("No verdict", invalid if claimed else ""),
    )
    verdict = None
    # The question that the rows answer is on everything together against plain eager.
    if (pair := gains.get(_GAINS[0])) is not None:
        headline = claims.headline_of(pair.mean.verdict, "Compiled graphs are", "Compiled graphs and plain eager")
        figure = f"mean latency {_step_cell(pair.mean).text.removesuffix(f' {pair.mean.verdict}')}"
        verdict = Verdict(pair.mean.verdict, headline, invalid, figure)
        verdict = verdict if claimed else Verdict(NO_VERDICT, "No verdict: replayed on a CPU")
    return ran.document(
        "vitgraph bench --compile-rows",
        section("Rows", _row_table(record)),
        section("Gains", GAINS.filled(rows, notes=(_STEP_NOTE,)) if claimed else nothing),
        section("", Facts.of(facts)),
        what=ran.conditions("compiled"),
        verdict=verdict,
        tables=(backends_table(record),),
    )


def compile_rows_table(records: Sequence[Record]) -> Document:
    """One table of several records, a model a row."""
    note = (
        f"Mean milliseconds a request. {_STEP_NOTE} Launch gap: {claims.GAP_MEANING}. Error: relative L2 from float32."
    )
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
    every = [(label, found.get(name), mode) for label, name, mode in _SERIES]
    return {label: (value_at(one, mode), one.graphs if one and mode == "graph" else None) for label, one, mode in every}


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
    few = f"A P99 takes {P99_MIN_SAMPLES} requests, and fewer were measured."
    has_p99 = any(value_at(row.get("of"), "p99_supported") for row in rows)
    table = COMPILE_TABLE.of(rows, notes=() if has_p99 else (few,))
    return table.without_empty("p99_ms", "gpu_mean_ms", "launch_gap", "limit", "error_vs_float32")


def _step_cell(found: Improvement | None) -> Cell:
    """An improvement with its interval and verdict."""
    if found is None or found.ci95 is None:
        return Cell(say.NO_VALUE)
    interval = f" ({say.interval(found.ci95)})" if found.verdict != "invalid" else ""
    return Cell(f"{say.pct(found.improvement_pct)}{interval} {found.verdict}", tone=found.verdict)


def _compilation_text(record: CompareRecord) -> str:
    did = _compiled(record)
    if did is None or did.seconds is None:
        return say.NOT_MEASURED
    place = did.cache_dir or "a temporary folder"
    cached = f", {did.cache.hits} of them from the cache in {place}" if did.cache else ""
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
        **{name: _step_cell(gains[name].mean if name in gains else None) for name in _GAINS},
        "gap": say.change(*(value_at(graphs, "launch_gap") for _, graphs in both), text=say.gap),
        "error": say.change(*(value_at(state, "error_vs_float32") for state, _ in both), text=say.error),
        "seconds": value_at(_compiled(record), "seconds"),
    }
