"""Two paths beside one graph of both: their table, their section and their sentences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vitgraph.records.latency import Improvement, Latency
from vitgraph.records.record import BenchRecord
from vitgraph.report import say
from vitgraph.report.columns import Column, Table, TableSpec, fields, texts
from vitgraph.report.document import NO_VERDICT, Section, Text, section
from vitgraph.report.views.claims import METRICS, NOT_A_GPU, TAIL_OF_FEW, Claim, claims_of, improvement_columns

SIDES = ("eager", "graph", "monolithic")
MONOLITHIC_SPEC = TableSpec(
    "monolithic",
    "",
    "a metric of two paths against monolithic graphs",
    (
        Column("metric", "text", "", "`mean`, `p50` or `p99`"),
        *fields(Latency, "graph", "requests"),
        Column("two_paths_ms", "number", "ms", "the metric with a graph for each path, a request"),
        Column("monolithic_ms", "number", "ms", "the metric with one graph of both paths, a request"),
        *improvement_columns("found", " of two paths over monolithic graphs"),
        *fields(Improvement, "found", "noise_floor_pct"),
    ),
    "requests",
    is_optional=True,
)
_SIDE_BY_SIDE = TableSpec(
    "two_paths",
    "Two paths against one monolithic graph",
    columns=texts(figure=" ", eager="Eager", graph="Two paths", monolithic="Monolithic"),
)


def monolithic_table(record: BenchRecord) -> Table:
    """A row a metric of two paths against monolithic graphs; none where those were not measured."""
    latency, comparison = record.result.latency, record.result.comparison
    pair = comparison.pair("monolithic", "graph") if comparison.requests else None
    return MONOLITHIC_SPEC.of(
        {
            "metric": metric,
            "graph": latency["graph"],
            "two_paths_ms": getattr(latency["graph"], f"{metric}_ms"),
            "monolithic_ms": getattr(latency["monolithic"], f"{metric}_ms"),
            "found": found,
        }
        for metric in METRICS
        if pair is not None and (found := getattr(pair, metric)) is not None
    )


def monolithic_section(record: BenchRecord) -> Section | None:
    """Eager, two paths and the monolithic graph side by side; None where that was not measured."""
    claims = list(claims_of(record, "monolithic", "graph").values())
    if record.result.monolithic is None or not claims:
        return None
    rows = (*_latency_rows(record), *_graph_rows(record))
    table = _SIDE_BY_SIDE.table(dict(zip(("figure", *SIDES), row, strict=True)) for row in rows)
    return section("", table, *map(Text, _sentences(record, claims)))


def _latency_rows(record: BenchRecord) -> Iterable[tuple[str, ...]]:
    entries = [record.result.latency[series] for series in SIDES]
    tail = ("p99_ms", "P99") if entries[0].p99_supported else ("max_ms", f"M{TAIL_OF_FEW[1:]}")
    for name, label in (("mean_ms", "Mean"), ("p50_ms", "P50"), tail):
        yield (f"{label}, ms a request", *(say.ms(getattr(entry, name)) for entry in entries))
    sides = (claims_of(record, "eager", series).values() for series in SIDES[1:])
    for graph, monolithic in zip(*sides, strict=True):
        label = graph.label[:1].upper() + graph.label[1:]
        yield f"{label} improvement", say.NO_VALUE, *map(_improvement, (graph, monolithic))


def _improvement(claim: Claim) -> str:
    is_judged = claim.verdict != NO_VERDICT and not claim.is_tail_of_few
    return f"{claim.headline.partition(' ')[0]}{f', {claim.verdict}' if is_judged else ''}"


def _graph_rows(record: BenchRecord) -> Iterable[tuple[str, ...]]:
    two_paths, monolithic = record.result.graph, record.result.monolithic
    assert monolithic is not None
    sides = (two_paths, monolithic)
    shares = [{part.path: say.share(part.waste) for part in parts} for parts in (two_paths.per_path, monolithic.parts)]
    paths = dict.fromkeys(path for share in shares for path in share)
    named: list[tuple[str, Sequence[str]]] = [
        ("Hits", [f"{graph.hits:,} of {graph.items:,}" for graph in sides]),
        ("Replays", [f"{graph.replays:,}" for graph in sides]),
        ("Rows used", [f"{graph.tokens_replayed:,}" for graph in sides]),
        ("Rows computed", [f"{graph.budget_tokens_replayed:,}" for graph in sides]),
        ("Waste", [say.share(graph.waste) for graph in sides]),
        *((f"Waste, {path}", [share.get(path, say.NO_VALUE) for share in shares]) for path in paths),
        ("Graphs", [str(graph.graphs) for graph in sides]),
        ("Graph pool", [say.size(graph.pool_bytes) for graph in sides]),
        ("Buffers", [say.size(graph.buffer_bytes) for graph in sides]),
        ("Capture, s", [say.number(graph.capture_s, 2) for graph in sides]),
    ]
    return ((label, say.NO_VALUE, *cells) for label, cells in named)


def _sentences(record: BenchRecord, claims: Sequence[Claim]) -> Iterable[str]:
    """What the monolithic graph is, and what two paths are worth against it."""
    plan = record.resolved.monolithic if record.resolved else None
    if plan is not None:
        yield (
            f"The monolithic graph computes a global view and {say.count(plan.max_crops, 'crop')} of every image, "
            f"{plan.item_tokens:,} rows; rows that the image does not have are waste."
        )
    parts = [
        f"{claim.label} {claim.headline.partition(' ')[0]}{f' ({claim.interval})' if claim.interval else ''}"
        for claim in claims
    ]
    word = NOT_A_GPU if claims[0].verdict == NO_VERDICT else claims[0].verdict
    yield f"Two paths against the monolithic graph: {', '.join(parts)}: {word}."
    found = record.result.correctness
    if found is not None and found.monolithic_max_rel_l2 is not None:
        error = say.error(found.monolithic_max_rel_l2)
        yield f"Monolithic outputs against eager: largest relative L2 difference {error}."
