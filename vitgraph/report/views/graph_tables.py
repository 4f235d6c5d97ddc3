"""Tables and facts of graphs: use, measured, expected or predicted, memory, paths, and one graph of all paths."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

from vitgraph.records.graph_facts import CapturedGraph, Counters, GraphFacts, GraphUse, PartUse, PathUse
from vitgraph.records.latency import Improvement, Latency
from vitgraph.records.record import BenchRecord
from vitgraph.records.sections import DroppedGraph, GraphKey
from vitgraph.report import say
from vitgraph.report.columns import Cell, Column, Table, TableSpec, fields, texts
from vitgraph.report.document import NO_VERDICT, Chart, Section, Text, section
from vitgraph.report.views.claims import METRICS, NOT_A_GPU, TAIL_OF_FEW, Claim, claims_of, improvement_columns
from vitgraph.report.views.conditions import list_graphs

MONOLITHIC = "monolithic"

GRAPH_KEY = (
    *fields(GraphKey, "key", path="Path", token_budget="Budget", segment_slots="Slots"),
    Column(
        "axis_key",
        "text",
        "",
        "key on the model's further capture axes, as `28x36`; empty without any",
        "Axis",
        lambda key: str(key).replace("x", "×"),
        lambda row: "x".join(map(str, row["key"].axis_key)),
    ),
)
PER_BUDGET = TableSpec(
    "per_budget",
    "Replays by token budget",
    "a graph that was captured or replayed; monolithic ones have the path `monolithic`",
    (
        *GRAPH_KEY,
        *fields(GraphUse, "use", replays="Replays", items="Items", tokens=""),
        Column("fill", "number", "share", "rows that were used", "Fill", of=lambda row: _fill(row["use"])),
        *fields(GraphUse, "use", waste="Waste", replay_ms="Replay ms", gpu_busy_ms="", launch_gap="Launch gap"),
        *fields(CapturedGraph, "graph", "capture_ms", "pool_bytes", "buffer_bytes"),
    ),
)
CAPTURED = TableSpec(
    "captured",
    "Memory of each graph",
    "a captured graph",
    (
        *GRAPH_KEY,
        *fields(CapturedGraph, "graph", pool_bytes="Pool added", buffer_bytes="Buffers used"),
        *fields(CapturedGraph, "graph", capture_ms=("Capture ms", lambda ms: say.number(ms, 1))),
        *fields(GraphUse, "use", replays="Replays"),
    ),
)
PER_PATH = TableSpec(
    "per_path",
    "Encoder paths",
    "a series of graphs and encoder path, with one of path `all`",
    (
        Column("series", "text", "", "`graph`, or `monolithic`, whose graphs hold every path"),
        Column("path", "text", "", "encoder path; `all` for the sum", "Path"),
        *fields(PathUse, "part", items="Items", hits="Hits"),
        Column("runs", "integer", "runs", "executions of the path, replayed or eager", "Runs"),
        *fields(PathUse, "part", replays="Replays"),
        Column("tokens", "integer", "rows", "real output rows of the replays", "Rows used", of="part.tokens_replayed"),
        Column("budget_tokens", "integer", "rows", "rows computed", "Computed", of="part.budget_tokens_replayed"),
        *fields(PathUse, "part", waste="Waste"),
        Column("replay_ms", "number", "ms", "time of a mean request in replays of the path", "Replay ms"),
    ),
)
_PATHS_NOTE = "Hits: items whose rows on the path were replayed. Replay ms: in replays of the path, a mean request."
MISSES = TableSpec(
    "misses",
    "Misses by reason",
    "a reason",
    (
        Column("reason", "text", "", "why items ran eagerly", "Reason", lambda reason: str(reason).replace("_", " ")),
        Column("items", "integer", "items", "items missed for it; all reasons add up to the misses", "Items"),
    ),
)
DROPPED = TableSpec(
    "dropped",
    "Graphs that could not be captured",
    "a graph that could not be captured",
    (*GRAPH_KEY, *fields(DroppedGraph, "key", reason="Why")),
)

Sides = Mapping[str, GraphFacts | Counters]


def sides_of(graph: GraphFacts | Counters, monolithic: GraphFacts | Counters | None = None) -> Sides:
    """The graphs of each path, and beside them the monolithic ones where there are any."""
    return {"": graph} | ({MONOLITHIC: monolithic} if monolithic is not None else {})


def _fill(use: GraphUse) -> float | None:
    return None if use.waste is None else 1 - use.waste


def _by_key(sides: Sides, name: str) -> dict[tuple[Any, ...], Any]:
    """The graphs of one list by what tells them apart; monolithic graphs are of a path of that name."""
    found = {}
    for side, facts in sides.items():
        for graph in getattr(facts, name, ()):
            own = graph.model_copy(update={"path": side}) if side else graph
            found[own.path, own.token_budget, own.segment_slots, own.axis_key] = own
    return found


def _graph_rows(sides: Sides) -> dict[tuple[Any, ...], dict[str, Any]]:
    """By graph: its key, its use and its capture, for the columns of tables; those that were captured come first."""
    captured, used = _by_key(sides, "captured"), _by_key(sides, "per_budget")
    unused: dict[str, Any] = {"replays": 0, "items": 0, "tokens": 0, "segments": 0, "waste": None}
    rows = {}
    for key in (*captured, *(key for key in used if key not in captured)):
        named = dict(zip(GraphKey.model_fields, key, strict=True))
        use = used.get(key) or GraphUse(**named, **unused)
        rows[key] = {"key": use, "use": use, "graph": captured.get(key)}
    return rows


def per_budget_table(sides: Sides) -> Table:
    """One row a graph that was captured or replayed."""
    rows = _graph_rows(sides)
    return PER_BUDGET.of(rows[key] for key in sorted(rows))


def replayed_table(sides: Sides) -> Table:
    """The graphs that were replayed, without the columns that say nothing of them."""
    rows = (row for row in per_budget_table(sides).rows if row["replays"])
    return compact(PER_BUDGET.table(rows)).without_empty("replay_ms", "launch_gap")


def compact(table: Table) -> Table:
    """A table of graphs without path and axis key where none has any."""
    is_plain = all(row["path"] == "default" for row in table.rows)
    return table.without_empty("axis_key").without("path" if is_plain else "")


def idle_text(sides: Sides) -> str:
    """The captured graphs that nothing replayed, on one line."""
    idle = [row["key"] for row in _graph_rows(sides).values() if row["graph"] and not row["use"].replays]
    return f"Captured and never replayed: {list_graphs(idle)}" if idle else ""


def captured_table(sides: Sides) -> Table:
    """Memory and capture time of each graph."""
    return compact(CAPTURED.of(row for row in _graph_rows(sides).values() if row["graph"]))


def dropped_table(sides: Sides) -> Table:
    """The graphs that could not be captured."""
    return DROPPED.of({"key": graph} for graph in _by_key(sides, "dropped").values())


def misses_table(graph: Counters) -> Table:
    """Missed items by reason."""
    return MISSES.table({"reason": reason, "items": items} for reason, items in graph.misses_by_reason.items())


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
    return PER_PATH.table(rows, notes=(_PATHS_NOTE,)).without_empty("replay_ms")


def budgets_chart(name: str, title: str, subtitle: str, counted: str, graph: Any, sides: Sides) -> Chart:
    """Hits and misses, and what each token budget replays and wastes, its slots and axis keys together."""
    from vitgraph.report.charts_of_bars import draw_budgets

    outcomes = [("hit", graph.hits, False)]
    outcomes += [(f"miss: {reason}", count, True) for reason, count in _reasons(graph)]
    draw = partial(draw_budgets, title, subtitle, counted, budget_uses(sides, counted), outcomes)
    return Chart(name, "Items that hit and that missed, and what each token budget replays and wastes", draw)


def budget_uses(sides: Sides, counted: str) -> list[Any]:
    """The use of each path and budget, ascending; `counted` is `Items replayed` or `Replays`."""
    from vitgraph.report.charts_of_bars import BudgetUse

    used = sorted(
        (use for use in _by_key(sides, "per_budget").values() if use.replays),
        key=lambda use: (use.path, use.token_budget),
    )
    has_paths = any(use.path != "default" for use in used)
    found = []
    for (path, budget), group in groupby(used, key=lambda use: (use.path, use.token_budget)):
        uses = list(group)
        replays, items, tokens = (sum(getattr(use, name) for use in uses) for name in ("replays", "items", "tokens"))
        name = f"{path} {budget}" if has_paths else str(budget)
        count = replays if counted == "Replays" else items
        found.append(BudgetUse(name, count, 100 * (1 - tokens / (replays * budget))))
    return found


def _reasons(graph: Counters) -> Iterable[tuple[str, int]]:
    """Reasons of misses in words with their items, the most frequent first."""
    found = sorted(graph.misses_by_reason.items(), key=lambda pair: (-pair[1], pair[0]))
    return ((reason.replace("_", " "), count) for reason, count in found if count)


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
    rows = (*_latency_rows(record), *_figure_rows(record))
    table = _SIDE_BY_SIDE.table(dict(zip(("figure", *_SERIES), row, strict=True)) for row in rows)
    return section("", table, *map(Text, _sentences(record, claims)))


def _latency_rows(record: BenchRecord) -> Iterable[tuple[str, ...]]:
    entries = [record.result.latency[series] for series in _SERIES]
    tail = ("p99_ms", "P99") if entries[0].p99_supported else ("max_ms", f"M{TAIL_OF_FEW[1:]}")
    for name, label in (("mean_ms", "Mean"), ("p50_ms", "P50"), tail):
        yield (f"{label}, ms a request", *(say.ms(getattr(entry, name)) for entry in entries))
    sides = (claims_of(record, "eager", series).values() for series in _SERIES[1:])
    for graph, monolithic in zip(*sides, strict=True):
        label = graph.label[:1].upper() + graph.label[1:]
        yield f"{label} improvement", say.NO_VALUE, *map(_improvement, (graph, monolithic))


def _improvement(claim: Claim) -> str:
    is_judged = claim.verdict != NO_VERDICT and not claim.is_tail_of_few
    return f"{claim.headline.partition(' ')[0]}{f', {claim.verdict}' if is_judged else ''}"


def _figure_rows(record: BenchRecord) -> Iterable[tuple[str, ...]]:
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
