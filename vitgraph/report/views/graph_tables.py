"""Tables and facts of graphs: use, measured, expected or predicted, memory, paths, and one graph of all paths."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from vitgraph.records.record import BenchRecord
from vitgraph.records.sections import DroppedGraph, GraphKey
from vitgraph.records.series import (
    CapturedGraph,
    Counters,
    GraphFacts,
    GraphUse,
    Improvement,
    Latency,
    PartUse,
    PathUse,
)
from vitgraph.report import say
from vitgraph.report.columns import Cell, Table, column, fields, table_of, texts
from vitgraph.report.document import NO_VERDICT, Chart, Section, section
from vitgraph.report.draw import draw_budgets
from vitgraph.report.views.claims import METRICS, TAIL_OF_FEW, Claim, claims_of, improvement_columns

MONOLITHIC = "monolithic"

GRAPH_KEY = (
    *fields(GraphKey, "key", path="Path", token_budget="Budget", segment_slots="Slots"),
    column(
        "axis_key",
        "key on the model's further capture axes, as `28x36`; empty without any",
        "Axis",
        text=lambda key: str(key).replace("x", "×"),
        of=lambda row: "x".join(map(str, row["key"].axis_key)),
    ),
)
PER_BUDGET = table_of(
    "per_budget",
    *GRAPH_KEY,
    *fields(GraphUse, "key", replays="Replays", items="Items", tokens=""),
    column("fill", "rows that were used", "Fill", of=lambda row: _used(row["key"])),
    *fields(GraphUse, "key", waste="Waste", replay_ms="Replay ms", gpu_busy_ms="", launch_gap="Launch gap"),
    *fields(CapturedGraph, "graph", "capture_ms", "pool_bytes", "buffer_bytes"),
    title="Replays by token budget",
    one_row="a graph that was captured or replayed; monolithic ones have the path `monolithic`",
)
CAPTURED = table_of(
    "captured",
    *GRAPH_KEY,
    *fields(CapturedGraph, "graph", pool_bytes="Pool added", buffer_bytes="Buffers used"),
    *fields(CapturedGraph, "graph", capture_ms=("Capture ms", 1)),
    *fields(GraphUse, "key", replays="Replays"),
    title="Memory of each graph",
    one_row="a captured graph",
)
PER_PATH = table_of(
    "per_path",
    column("series", "`graph`, or `monolithic`, whose graphs hold every path"),
    column("path", "encoder path; `all` for the sum", "Path"),
    *fields(PathUse, "part", items="Items", hits="Hits"),
    column("runs", "executions of the path, replayed or eager", "Runs"),
    *fields(PathUse, "part", replays="Replays"),
    column("tokens", "real output rows of the replays", "Rows used", of="part.tokens_replayed", unit="rows"),
    column("budget_tokens", "rows computed", "Computed", of="part.budget_tokens_replayed", unit="rows"),
    *fields(PathUse, "part", waste="Waste"),
    column("replay_ms", "time of a mean request in replays of the path", "Replay ms"),
    title="Encoder paths",
    one_row="a series of graphs and encoder path, with one of path `all`",
)
_PATHS_NOTE = "Hits: items whose rows on the path were replayed. Replay ms: in replays of the path, a mean request."
MISSES = table_of(
    "misses",
    column("reason", "why items ran eagerly", "Reason", say.words),
    column("items", "items missed for it; all reasons add up to the misses", "Items"),
    title="Misses by reason",
    one_row="a reason",
)
DROPPED = table_of(
    "dropped",
    *GRAPH_KEY,
    *fields(DroppedGraph, "key", reason="Why"),
    title="Graphs that could not be captured",
    one_row="a graph that could not be captured",
)


def _used(use: GraphUse) -> float | None:
    return None if use.waste is None else 1 - use.waste


def by_key(name: str, graph: Counters, monolithic: Counters | None) -> dict[tuple[Any, ...], Any]:
    """The graphs of one list by what tells them apart; monolithic graphs are of a path of that name."""
    found = list(getattr(graph, name, ()))
    found += [one.model_copy(update={"path": MONOLITHIC}) for one in getattr(monolithic, name, ())]
    return {tuple(getattr(one, field) for field in GraphKey.model_fields): one for one in found}


def graph_rows(graph: Counters, monolithic: Counters | None) -> dict[tuple[Any, ...], dict[str, Any]]:
    """By graph: its use, also where there was none, and its capture; those that were captured come first."""
    captured, used = (by_key(name, graph, monolithic) for name in ("captured", "per_budget"))
    unused: dict[str, Any] = {"replays": 0, "items": 0, "tokens": 0, "segments": 0, "waste": None}
    return {
        key: {
            "key": used.get(key) or GraphUse(**dict(zip(GraphKey.model_fields, key, strict=True)), **unused),
            "graph": captured.get(key),
        }
        for key in captured | used
    }


def per_budget_table(graph: Counters, monolithic: Counters | None = None) -> Table:
    """One row a graph that was captured or replayed."""
    rows = graph_rows(graph, monolithic)
    return PER_BUDGET.of(rows[key] for key in sorted(rows))


def replayed_table(graph: Counters, monolithic: Counters | None = None) -> Table:
    """The graphs that were replayed, without the columns that say nothing of them."""
    rows = (row for row in per_budget_table(graph, monolithic).rows if row["replays"])
    return compact(PER_BUDGET.filled(rows)).without_empty("replay_ms", "launch_gap")


def compact(table: Table) -> Table:
    """A table of graphs without path and axis key where none has any."""
    is_plain = all(row["path"] == "default" for row in table.rows)
    return table.without_empty("axis_key").without("path" if is_plain else "")


def per_path_table(graph: Counters, monolithic: Counters | None = None) -> Table:
    """One row a series of graphs and path, and one of all paths."""
    series: list[tuple[str, Counters, Sequence[PathUse | PartUse]]] = [("graph", graph, graph.per_path)]
    series += [(MONOLITHIC, monolithic, monolithic.parts)] if monolithic is not None else []
    rows: list[dict[str, Any]] = []
    for name, whole, parts in series:
        for part in parts:
            figures = {figure: getattr(part, figure, None) for figure in ("runs", "replay_ms")}
            rows.append({"series": name, "path": part.path, "part": part, **figures})
        if parts:
            rows.append({"series": name, "path": "all", "part": whole, "runs": whole.path_runs})
    return PER_PATH.of(rows)


def shown_paths(graph: Counters) -> Table | None:
    """What was done on each encoder path; None for a model with one."""
    if all(path.path == "default" for path in graph.per_path):
        return None
    rows = [row for row in per_path_table(graph).rows if row["path"] != "all"]
    timed = any(row["replay_ms"] is not None for row in rows)
    # Of some paths only, a path whose graphs were not all timed says so.
    rows = [{**row, "replay_ms": Cell(say.NOT_MEASURED)} if timed and row["replay_ms"] is None else row for row in rows]
    return PER_PATH.filled(rows, notes=(_PATHS_NOTE,)).without_empty("replay_ms")


def budgets_chart(
    name: str, alt: str, title: str, subtitle: str, counted: str, graph: Counters, monolithic: Counters | None = None
) -> Chart:
    """What each token budget replays and wastes, its slots and axis keys together, beneath hits and misses if known."""
    import pandas as pd

    summed = ["replays", "items", "tokens"]
    used = [use for use in by_key("per_budget", graph, monolithic).values() if use.replays]
    names = ["path", "token_budget", *summed]
    frame = pd.DataFrame([[getattr(use, field) for field in names] for use in used], columns=names)
    uses = frame.groupby(["path", "token_budget"], as_index=False)[summed].sum()
    has_paths = any(use.path != "default" for use in used)
    uses["name"] = (uses["path"] + " " if has_paths else "") + uses["token_budget"].astype(str)
    uses["waste_pct"] = 100 * (1 - uses["tokens"] / (uses["replays"] * uses["token_budget"]))
    outcomes = [("hit", graph.hits, False)] if graph.items else []
    outcomes += [(f"miss: {reason}", count, True) for reason, count in _reasons(graph)]
    count = "replays" if counted == "Replays" else "items"
    return Chart(
        name, alt, partial(draw_budgets, title, subtitle, counted, uses.rename(columns={count: "count"}), outcomes)
    )


def _reasons(graph: Counters) -> Iterable[tuple[str, int]]:
    """Reasons of misses in words with their items, the most frequent first."""
    found = sorted(graph.misses_by_reason.items(), key=lambda pair: (-pair[1], pair[0]))
    return ((say.words(reason), count) for reason, count in found if count)


def memory_text(graph: GraphFacts) -> str:
    """What the graphs hold."""
    sizes = (("graph pool", graph.pool_bytes), ("buffers", graph.buffer_bytes))
    return ", ".join(f"{name} {say.NOT_MEASURED if size is None else say.size(size)}" for name, size in sizes)


def capture_text(graph: GraphFacts) -> str:
    """How many graphs were captured, in what time, and how many could not be."""
    seconds = f" in {say.number(graph.capture_s, 2)} s" if graph.capture_s is not None else ""
    failed = f", {len(graph.dropped)} not captured" if graph.dropped else ""
    return f"{say.count(graph.graphs, 'graph')}{seconds}{failed}"


def counter_facts(graph: Counters, policy: str) -> Sequence[tuple[str, str]]:
    """Hits, misses and replays in words."""
    rate = f" ({say.share(graph.hit_rate)})" if graph.hit_rate is not None else ""
    partly = f", {graph.partial_hits} of them with some path replayed" if graph.partial_hits else ""
    used, rows = graph.tokens_replayed, graph.budget_tokens_replayed
    waste = f", waste {say.share(graph.waste)} ({used:,} of {rows:,} rows used)" if graph.replays else ""
    misses = say.count(graph.misses, "miss", "misses")
    return (
        ("Items", f"{graph.items:,}: {say.count(graph.hits, 'hit')}{rate}, {misses}{partly}"),
        ("Misses by reason", ", ".join(f"{count:,} {reason}" for reason, count in _reasons(graph))),
        ("Replays", f"{graph.replays:,} ({policy} packing){waste}"),
    )


# -- two paths beside one graph of both --------------------------------------------------------------------------------

_SERIES = ("eager", "graph", "monolithic")
MONOLITHIC_SPEC = table_of(
    "monolithic",
    column("metric", "`mean`, `p50` or `p99`"),
    *fields(Latency, "graph", "requests"),
    column("two_paths_ms", "the metric with a graph for each path, a request"),
    column("monolithic_ms", "the metric with one graph of both paths, a request"),
    *improvement_columns("found", " of two paths over monolithic graphs"),
    *fields(Improvement, "found", "noise_floor_pct"),
    one_row="a metric of two paths against monolithic graphs",
    counts="requests",
    is_optional=True,
)
TWO_PATHS = table_of(
    "two_paths",
    *texts(figure=" ", eager="Eager", graph="Two paths", monolithic="Monolithic"),
    title="Two paths against one monolithic graph",
)
FIGURES: Mapping[str, Callable[[Any], str]] = {
    "Hits": lambda graph: f"{graph.hits:,} of {graph.items:,}",
    "Replays": lambda graph: f"{graph.replays:,}",
    "Rows used": lambda graph: f"{graph.tokens_replayed:,}",
    "Rows computed": lambda graph: f"{graph.budget_tokens_replayed:,}",
    "Waste": lambda graph: say.share(graph.waste),
}
_CAPTURE: Mapping[str, Callable[[Any], str]] = {
    "Graphs": lambda graph: str(graph.graphs),
    "Graph pool": lambda graph: say.size(graph.pool_bytes),
    "Buffers": lambda graph: say.size(graph.buffer_bytes),
    "Capture, s": lambda graph: say.number(graph.capture_s, 2),
}


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
    rows = (*_latency_rows(record), *_figure_rows(record.result.graph, record.result.monolithic))
    table = TWO_PATHS.filled(dict(zip(("figure", *_SERIES), row, strict=True)) for row in rows)
    return section("", table, *_sentences(record, claims))


def _latency_rows(record: BenchRecord) -> Iterable[tuple[str, ...]]:
    entries = [record.result.latency[series] for series in _SERIES]
    tail = ("p99_ms", "P99") if entries[0].p99_supported else ("max_ms", f"M{TAIL_OF_FEW[1:]}")
    for name, label in (("mean_ms", "Mean"), ("p50_ms", "P50"), tail):
        yield (f"{label}, ms a request", *(say.ms(getattr(entry, name)) for entry in entries))
    sides = (claims_of(record, "eager", series).values() for series in _SERIES[1:])
    for both in zip(*sides, strict=True):
        words = (one.verdict if one.verdict != NO_VERDICT and not one.is_tail_of_few else "" for one in both)
        gains = (say.joined(say.pct(one.improvement_pct), word) for one, word in zip(both, words, strict=True))
        yield f"{both[0].name} improvement", say.NO_VALUE, *gains


def _figure_rows(two_paths: GraphFacts, monolithic: GraphFacts) -> Iterable[tuple[str, ...]]:
    shares = [{part.path: say.share(part.waste) for part in parts} for parts in (two_paths.per_path, monolithic.parts)]
    for label, text in FIGURES.items():
        yield label, say.NO_VALUE, text(two_paths), text(monolithic)
    for path in shares[0] | shares[1]:
        yield f"Waste, {path}", say.NO_VALUE, *(share.get(path, say.NO_VALUE) for share in shares)
    for label, text in _CAPTURE.items():
        yield label, say.NO_VALUE, text(two_paths), text(monolithic)


def _sentences(record: BenchRecord, claims: Sequence[Claim]) -> Iterable[str]:
    """What the monolithic graph is, and what two paths are worth against it."""
    plan = record.resolved.monolithic if record.resolved else None
    if plan is not None:
        yield (
            f"The monolithic graph computes a global view and {say.count(plan.max_crops, 'crop')} of every image, "
            f"{plan.item_tokens:,} rows; rows that the image does not have are waste."
        )
    intervals = (f" ({say.ci95(claim.ci95)})" if claim.ci95 else "" for claim in claims)
    parts = (f"{one.label} {say.pct(one.improvement_pct)}{ends}" for one, ends in zip(claims, intervals, strict=True))
    yield f"Two paths against the monolithic graph: {', '.join(parts)}: {claims[0].word}."
    found = record.result.correctness
    if found is not None and found.monolithic_max_rel_l2 is not None:
        error = say.error(found.monolithic_max_rel_l2)
        yield f"Monolithic outputs against eager: largest relative L2 difference {error}."
