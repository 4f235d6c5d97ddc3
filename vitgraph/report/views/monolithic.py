"""Two paths beside one graph of both: their table, their section and their sentences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vitgraph.records.record import BenchRecord
from vitgraph.records.sections import GraphFacts, Latency, Pair, PartUse, PathUse
from vitgraph.report.columns import (
    NO_VALUE,
    Column,
    Table,
    TableSpec,
    bytes_text,
    count_text,
    error_text,
    ms_text,
    number_text,
    share_text,
)
from vitgraph.report.document import NO_VERDICT, Section, Text, section
from vitgraph.report.views.claims import (
    METRICS,
    NOT_A_GPU,
    TAIL_OF_FEW,
    Claim,
    claim_of,
    improvement_cells,
    improvement_columns,
)

MONOLITHIC_SPEC = TableSpec(
    "monolithic",
    "",
    "a metric of two paths against monolithic graphs",
    (
        Column("metric", "text", "", "`mean`, `p50` or `p99`"),
        Column("requests", "integer", "requests", "requests that it describes; a P99 of fewer than 300 is a maximum"),
        Column("two_paths_ms", "number", "ms", "the metric with a graph for each path, a request"),
        Column("monolithic_ms", "number", "ms", "the metric with one graph of both paths, a request"),
        *improvement_columns(" of two paths over monolithic graphs", verdict_of="two paths"),
        Column("noise_floor_pct", "number", "%", "what eager differs from itself in the metric"),
    ),
    "requests",
    is_optional=True,
)
_SIDE_BY_SIDE = TableSpec(
    "two_paths",
    "Two paths against one monolithic graph",
    "a figure",
    (
        Column("figure", "text", "", "what is compared", " "),
        Column("eager", "text", "", "eager", "Eager"),
        Column("graph", "text", "", "a graph for each path", "Two paths"),
        Column("monolithic", "text", "", "one graph of both paths", "Monolithic"),
    ),
)
_TRIO = ("eager", "graph", "monolithic")


def _pair(record: BenchRecord, base: str, series: str) -> Pair | None:
    return record.result.comparison.pair(base, series) if record.result.comparison.requests else None


def monolithic_table(record: BenchRecord) -> Table:
    """A row a metric of two paths against monolithic graphs; none where those were not measured."""
    pair, latency = _pair(record, "monolithic", "graph"), record.result.latency
    if pair is None:
        return MONOLITHIC_SPEC.table(())
    found = ((metric, getattr(pair, metric)) for metric in METRICS)
    return MONOLITHIC_SPEC.table(
        {
            "metric": metric,
            "requests": latency["graph"].requests,
            "two_paths_ms": getattr(latency["graph"], f"{metric}_ms"),
            "monolithic_ms": getattr(latency["monolithic"], f"{metric}_ms"),
            **improvement_cells(improvement),
            "noise_floor_pct": improvement.noise_floor_pct,
        }
        for metric, improvement in found
        if improvement is not None
    )


def monolithic_section(record: BenchRecord) -> Section | None:
    """Eager, two paths and the monolithic graph side by side; None where that was not measured."""
    monolithic = record.result.monolithic
    if monolithic is None or _pair(record, "monolithic", "graph") is None:
        return None
    rows = [*_latency_rows(record), *_graph_rows(record.result.graph, monolithic)]
    table = _SIDE_BY_SIDE.table(dict(zip(("figure", *_TRIO), row, strict=True)) for row in rows)
    return section("", table, *map(Text, _sentences(record)))


def _claims(record: BenchRecord, base: str, series: str) -> list[Claim]:
    pair, latency = _pair(record, base, series), record.result.latency
    if pair is None:
        return []
    both = latency[base], latency[series]
    is_cpu = record.result.graph.mode == "cpu-replay"
    return [claim_of(pair, metric, *both, is_cpu=is_cpu) for metric in METRICS]


def _latency_rows(record: BenchRecord) -> Iterable[tuple[str, ...]]:
    entries: Sequence[Latency] = [record.result.latency[series] for series in _TRIO]
    has_p99 = entries[0].p99_supported
    tail = ("p99_ms", "P99") if has_p99 else ("max_ms", f"M{TAIL_OF_FEW[1:]}")
    for name, label in (("mean_ms", "Mean"), ("p50_ms", "P50"), tail):
        yield (f"{label}, ms a request", *(ms_text(getattr(entry, name)) for entry in entries))
    sides = [_claims(record, "eager", series) for series in ("graph", "monolithic")]
    for graph, monolithic in zip(*sides, strict=True):
        label = graph.label[:1].upper() + graph.label[1:]
        yield f"{label} improvement", NO_VALUE, *map(_improvement, (graph, monolithic))


def _improvement(claim: Claim) -> str:
    is_judged = claim.verdict != NO_VERDICT and not claim.is_tail_of_few
    return f"{claim.headline.partition(' ')[0]}{f', {claim.verdict}' if is_judged else ''}"


def _graph_rows(two_paths: GraphFacts, monolithic: GraphFacts) -> Iterable[tuple[str, ...]]:
    sides = (two_paths, monolithic)
    waste: dict[str, list[str]] = {}
    parts: Sequence[tuple[int, PathUse | PartUse]] = [
        *((0, part) for part in two_paths.per_path),
        *((1, part) for part in monolithic.parts),
    ]
    for place, part in parts:
        waste.setdefault(part.path, [NO_VALUE, NO_VALUE])[place] = share_text(part.waste)
    named: list[tuple[str, Sequence[str]]] = [
        ("Hits", [f"{graph.hits:,} of {graph.items:,}" for graph in sides]),
        ("Replays", [f"{graph.replays:,}" for graph in sides]),
        ("Rows used", [f"{graph.tokens_replayed:,}" for graph in sides]),
        ("Rows computed", [f"{graph.budget_tokens_replayed:,}" for graph in sides]),
        ("Waste", [share_text(graph.waste) for graph in sides]),
        *((f"Waste, {path}", cells) for path, cells in waste.items()),
        ("Graphs", [str(graph.graphs) for graph in sides]),
        ("Graph pool", [bytes_text(graph.pool_bytes) for graph in sides]),
        ("Buffers", [bytes_text(graph.buffer_bytes) for graph in sides]),
        ("Capture, s", [number_text(graph.capture_s, 2) for graph in sides]),
    ]
    return [(label, NO_VALUE, *cells) for label, cells in named]


def _sentences(record: BenchRecord) -> list[str]:
    """What the monolithic graph is, and what two paths are worth against it."""
    plan = record.resolved.monolithic if record.resolved else None
    lines = []
    if plan is not None:
        lines.append(
            f"The monolithic graph computes a global view and {count_text(plan.max_crops, 'crop')} of every image, "
            f"{plan.item_tokens:,} rows; rows that the image does not have are waste."
        )
    claims = _claims(record, "monolithic", "graph")
    parts = [
        f"{claim.label} {claim.headline.partition(' ')[0]}{f' ({claim.interval})' if claim.interval else ''}"
        for claim in claims
    ]
    word = NOT_A_GPU if claims[0].verdict == NO_VERDICT else claims[0].verdict
    lines.append(f"Two paths against the monolithic graph: {', '.join(parts)}: {word}.")
    found: Any = record.result.correctness
    if found is not None and found.monolithic_max_rel_l2 is not None:
        error = error_text(found.monolithic_max_rel_l2)
        lines.append(f"Monolithic outputs against eager: largest relative L2 difference {error}.")
    return lines
