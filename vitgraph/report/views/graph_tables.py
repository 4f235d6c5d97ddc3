"""Tables and facts of graphs: their use, measured, expected or predicted, their memory and their paths."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

from vitgraph.records.sections import Counters, GraphFacts, GraphUse
from vitgraph.report.columns import (
    NOT_MEASURED,
    Cell,
    Column,
    Table,
    TableSpec,
    bytes_text,
    count_text,
    gap_text,
    misses_text,
    number_text,
    share_text,
)
from vitgraph.report.document import Chart
from vitgraph.report.views.claims import GAP_MEANING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MONOLITHIC = "monolithic"

GRAPH_KEY = (
    Column(
        "path", "text", "", "encoder path; `default` where a model has one, `monolithic` for a graph of both", "Path"
    ),
    Column("token_budget", "integer", "tokens", "output tokens that the graph can hold", "Budget", str),
    Column("segment_slots", "integer", "segments", "attention segments that the graph can hold", "Slots"),
    Column(
        "axis_key",
        "text",
        "",
        "key on the model's further capture axes, as `28x36`; empty without any",
        "Axis",
        lambda key: str(key).replace("x", "×"),
    ),
)

PER_BUDGET = TableSpec(
    "per_budget",
    "Replays by token budget",
    "a graph that was captured or replayed",
    (
        *GRAPH_KEY,
        Column("replays", "integer", "replays", "replays of one round", "Replays"),
        Column("items", "integer", "items", "items in those replays", "Items"),
        Column("tokens", "integer", "tokens", "output tokens of those items"),
        Column("fill", "number", "share", "rows of the replays that were used", "Fill"),
        Column("waste", "number", "share", "rows of the replays that were padding", "Waste"),
        Column("replay_ms", "number", "ms", "wall time of one replay alone, median", "Replay ms"),
        Column("gpu_busy_ms", "number", "ms", "time in which the GPU worked during a replay"),
        Column("launch_gap", "number", "ratio", GAP_MEANING, "Launch gap", gap_text),
        Column("capture_ms", "number", "ms", "time of warm-up and capture"),
        Column("pool_bytes", "integer", "bytes", "what the graph added to the shared pool"),
        Column("buffer_bytes", "integer", "bytes", "static buffers that the graph uses, shared with the others"),
    ),
)
CAPTURED = TableSpec(
    "captured",
    "Memory of each graph",
    "a captured graph",
    (
        *GRAPH_KEY,
        Column("pool_bytes", "integer", "bytes", "what the graph added to the shared pool", "Pool added", bytes_text),
        Column("buffer_bytes", "integer", "bytes", "static buffers that the graph uses", "Buffers used", bytes_text),
        Column(
            "capture_ms", "number", "ms", "time of warm-up and capture", "Capture ms", lambda ms: number_text(ms, 1)
        ),
        Column("replays", "integer", "replays", "replays of one round", "Replays"),
    ),
)
PER_PATH = TableSpec(
    "per_path",
    "Encoder paths",
    "a series of graphs and encoder path, with one of path `all`",
    (
        Column("series", "text", "", "`graph`, or `monolithic`, whose graphs hold every path"),
        Column("path", "text", "", "encoder path; `all` for the sum", "Path"),
        Column("items", "integer", "items", "items that have rows on the path", "Items"),
        Column("hits", "integer", "items", "items whose rows on the path were replayed", "Hits"),
        Column("runs", "integer", "runs", "executions of the path, replayed or eager", "Runs"),
        Column("replays", "integer", "replays", "replays of one round", "Replays"),
        Column("tokens", "integer", "rows", "real output rows of the replays", "Rows used"),
        Column("budget_tokens", "integer", "rows", "rows that the replays computed", "Computed"),
        Column("waste", "number", "share", "rows of the replays that were padding", "Waste"),
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
    (*GRAPH_KEY, Column("reason", "text", "", "why it could not be captured", "Why")),
)

Sides = Mapping[str, GraphFacts | Counters]
Key = tuple[str, int, int, tuple[int, ...]]


def sides_of(graph: GraphFacts | Counters, monolithic: GraphFacts | Counters | None) -> Sides:
    """The graphs of each path, and beside them the monolithic ones where there are any."""
    return {"": graph} | ({MONOLITHIC: monolithic} if monolithic is not None else {})


def key_of(side: str, graph: Any) -> Key:
    """What tells a graph from the others of a record; monolithic graphs are of a path of that name."""
    return (side or graph.path, graph.token_budget, graph.segment_slots, tuple(graph.axis_key))


def _key_cells(key: Key) -> dict[str, Any]:
    path, budget, slots, axis = key
    return {"path": path, "token_budget": budget, "segment_slots": slots, "axis_key": "x".join(map(str, axis))}


def _by_key(sides: Sides, name: str) -> dict[Key, Any]:
    return {key_of(side, graph): graph for side, facts in sides.items() for graph in getattr(facts, name, ())}


def per_budget_table(sides: Sides) -> Table:
    """One row a graph that was captured or replayed."""
    captured, replayed = _by_key(sides, "captured"), _by_key(sides, "per_budget")
    rows = []
    for key in sorted(captured.keys() | replayed.keys()):
        use, graph = replayed.get(key), captured.get(key)
        row = _key_cells(key) | {name: getattr(use, name, 0) for name in ("replays", "items", "tokens")}
        row |= {name: getattr(use, name, None) for name in ("waste", "replay_ms", "gpu_busy_ms", "launch_gap")}
        row["fill"] = None if row["waste"] is None else 1 - row["waste"]
        row |= {name: getattr(graph, name, None) for name in ("capture_ms", "pool_bytes", "buffer_bytes")}
        rows.append(row)
    return PER_BUDGET.table(rows)


def replayed_table(sides: Sides) -> Table:
    """The graphs that were replayed, without the columns that say nothing of them."""
    table = per_budget_table(sides).of_rows(lambda row: bool(row["replays"]))
    return compact(table).without_empty("replay_ms", "launch_gap")


def compact(table: Table) -> Table:
    """A table of graphs without path and axis key where none has any."""
    names = {name for name, none in (("path", "default"), ("axis_key", "")) if _all_are(table, name, none)}
    return Table(table.spec, table.rows, table.title, table.hidden | names, table.notes)


def _all_are(table: Table, name: str, value: str) -> bool:
    return all(row.get(name) in (value, "", None) for row in table.rows)


def idle_text(sides: Sides) -> str:
    """The captured graphs that nothing replayed, on one line."""
    from vitgraph.report.views.conditions import list_graphs

    replayed = {key for key, use in _by_key(sides, "per_budget").items() if use.replays}
    idle = [graph for key, graph in _by_key(sides, "captured").items() if key not in replayed]
    return f"Captured and never replayed: {list_graphs(idle)}" if idle else ""


def captured_table(sides: Sides) -> Table:
    """Memory and capture time of each graph."""
    replayed = _by_key(sides, "per_budget")
    rows = [
        _key_cells(key)
        | {name: getattr(graph, name) for name in ("pool_bytes", "buffer_bytes", "capture_ms")}
        | {"replays": replayed[key].replays if key in replayed else 0}
        for key, graph in _by_key(sides, "captured").items()
    ]
    return compact(CAPTURED.table(rows))


def dropped_table(sides: Sides) -> Table:
    """The graphs that could not be captured."""
    return DROPPED.table(_key_cells(key) | {"reason": graph.reason} for key, graph in _by_key(sides, "dropped").items())


def misses_table(graph: Counters) -> Table:
    """Missed items by reason."""
    return MISSES.table({"reason": reason, "items": items} for reason, items in graph.misses_by_reason.items())


def per_path_table(graph: Counters, monolithic: Counters | None = None) -> Table:
    """One row a series of graphs and path, and one of all paths."""
    return PER_PATH.table(_path_rows(graph, monolithic))


def _path_rows(graph: Counters, monolithic: Counters | None) -> Iterable[dict[str, Any]]:
    for series, section, paths in (
        ("graph", graph, graph.per_path),
        (MONOLITHIC, monolithic, monolithic.parts if monolithic else ()),
    ):
        if section is None or not paths:
            continue
        for path in (*paths, section):
            yield {
                "series": series,
                "path": getattr(path, "path", "all"),
                "runs": getattr(path, "runs", section.path_runs if path is section else None),
                **{name: getattr(path, name, None) for name in ("items", "hits", "replays", "waste", "replay_ms")},
                "tokens": path.tokens_replayed,
                "budget_tokens": path.budget_tokens_replayed,
                **({"replay_ms": None} if path is section else {}),
            }


def shown_paths(graph: Counters) -> Table | None:
    """What was done on each encoder path; None for a model with one."""
    if all(path.path == "default" for path in graph.per_path):
        return None
    rows = [row for row in _path_rows(graph, None) if row["path"] != "all"]
    timed = any(row["replay_ms"] is not None for row in rows)
    # Of some paths only, a path whose graphs were not all timed says so.
    rows = [row | ({"replay_ms": Cell(NOT_MEASURED)} if timed and row["replay_ms"] is None else {}) for row in rows]
    return Table(PER_PATH, tuple(rows), notes=(_PATHS_NOTE,)).without_empty("replay_ms")


def budgets_chart(name: str, title: str, subtitle: str, counted: str, graph: Any, sides: Sides) -> Chart:
    """Hits and misses, and what each token budget replays and wastes, its slots and axis keys together."""
    from vitgraph.report.charts_of_bars import draw_budgets

    uses = budget_uses(sides, counted)
    outcomes = [("hit", graph.hits, False)]
    reasons = sorted(graph.misses_by_reason.items(), key=lambda pair: (-pair[1], pair[0]))
    outcomes += [(f"miss: {reason.replace('_', ' ')}", count, True) for reason, count in reasons if count]
    draw: Callable[[], Figure] = partial(draw_budgets, title, subtitle, counted, uses, outcomes)
    return Chart(name, "Items that hit and that missed, and what each token budget replays and wastes", draw)


def budget_uses(sides: Sides, counted: str) -> list[Any]:
    """The use of each path and budget, ascending; `counted` is `Items replayed` or `Replays`."""
    from vitgraph.report.charts_of_bars import BudgetUse

    def place(entry: tuple[Key, GraphUse]) -> tuple[str, int]:
        return entry[0][0], entry[0][1]

    used = sorted(((key, use) for key, use in _by_key(sides, "per_budget").items() if use.replays), key=place)
    has_paths = any(key[0] != "default" for key, _ in used)
    found = []
    for (path, budget), group in groupby(used, key=place):
        uses = [use for _, use in group]
        replays, tokens = sum(use.replays for use in uses), sum(use.tokens for use in uses)
        count = replays if counted == "Replays" else sum(use.items for use in uses)
        name = f"{path} {budget}" if has_paths else str(budget)
        found.append(BudgetUse(name, count, 100 * (1 - tokens / (replays * budget))))
    return found


def memory_text(graph: GraphFacts) -> str:
    """What the graphs hold."""
    sizes = (("graph pool", graph.pool_bytes), ("buffers", graph.buffer_bytes))
    return ", ".join(f"{name} {NOT_MEASURED if size is None else bytes_text(size)}" for name, size in sizes)


def capture_text(graph: GraphFacts) -> str:
    """How many graphs were captured, in what time, and how many could not be."""
    seconds = f" in {number_text(graph.capture_s, 2)} s" if graph.capture_s is not None else ""
    failed = f", {len(graph.dropped)} not captured" if graph.dropped else ""
    return f"{count_text(graph.graphs, 'graph')}{seconds}{failed}"


def counter_facts(graph: Counters, policy: str) -> Sequence[tuple[str, str]]:
    """Hits, misses and replays in words."""
    rate = f" ({share_text(graph.hit_rate)})" if graph.hit_rate is not None else ""
    partial_hits = f", {graph.partial_hits} of them with some path replayed" if graph.partial_hits else ""
    reasons = sorted(graph.misses_by_reason.items(), key=lambda pair: (-pair[1], pair[0]))
    named = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in reasons if count)
    used, rows = graph.tokens_replayed, graph.budget_tokens_replayed
    waste = f", waste {share_text(graph.waste)} ({used:,} of {rows:,} rows used)" if graph.replays else ""
    return (
        ("Items", f"{graph.items:,}: {count_text(graph.hits, 'hit')}{rate}, {misses_text(graph.misses)}{partial_hits}"),
        ("Misses by reason", named),
        ("Replays", f"{graph.replays:,} ({policy} packing){waste}"),
    )
