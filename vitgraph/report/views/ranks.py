"""How the calls of a run were shared among its ranks: a table, and sentences on what the sharing costs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from vitgraph.records.record import Record
from vitgraph.records.sections import Latency, Sharing
from vitgraph.report.columns import Column, Table, TableSpec, count_text, ms_text, number_text
from vitgraph.report.document import Section, Text, section

RANKS = TableSpec(
    "ranks",
    "By rank, milliseconds a request",
    "a series and rank",
    (
        Column("series", "text", "", "the series; of several backends, with the backend before it", "Series"),
        Column("rank", "integer", "", "number of the rank", "Rank"),
        Column("encode_ms", "number", "ms", "encoding of its share", "Encode"),
        Column("wait_ms", "number", "ms", "from there until the last rank came to the gather", "Wait"),
        Column("wall_ms", "number", "ms", "from the common start to the end of the gather", "Whole"),
        Column("items", "integer", "items", "items of its shares", "Items"),
        Column("hits", "integer", "items", "its items that were replayed on every path", "Hits"),
        Column("misses", "integer", "items", "its items with an eager path", "Misses"),
        Column("replays", "integer", "replays", "its graph replays", "Replays"),
        Column("idle_calls", "integer", "calls", "calls in which it had no items", "Calls without items"),
    ),
    "requests",
    is_optional=True,
)
_PREDICTED = TableSpec(
    "sharing",
    "",
    "an assignment",
    (
        Column("assignment", "text", "", "who encodes what", "Assignment"),
        Column("slowest_ms", "number", "ms", "predicted time of the slowest rank", "Slowest rank ms"),
        Column(
            "imbalance", "number", "ratio", "that over the ranks' mean", "over the mean", lambda v: number_text(v, 3)
        ),
        Column("rows", "number", "ratio", "pixel rows of the fullest rank over the mean", "Pixel rows over the mean"),
    ),
)


def ranks_table(latency: Mapping[str, Latency], prefix: str = "") -> Table:
    """A row a series and rank; none for a run of one process."""
    return RANKS.table(
        {"series": f"{prefix}{series}", **{name: getattr(part, name) for name in _PART_FIELDS}}
        for series, entry in latency.items()
        if entry.sharing is not None
        for part in entry.sharing.ranks
    )


_PART_FIELDS = tuple(column.name for column in RANKS.columns[1:])


def rank_section(latency: Mapping[str, Latency], record: Record) -> Section | None:
    """The ranks' part of a run; None for a run of one process."""
    table = ranks_table(latency)
    if not table.rows:
        return None
    assignment = record.resolved.assignment if record.resolved else None
    lines = [
        _sharing_text(series, entry.sharing, assignment)
        for series, entry in latency.items()
        if entry.sharing is not None
    ]
    return section("Ranks", table, *map(Text, [*lines, *_dropped(record)]))


def _sharing_text(series: str, sharing: Sharing, assignment: str | None) -> str:
    return (
        f"{series}: gather {ms_text(sharing.gather_ms)} ms once the last rank is there; the slowest rank encodes "
        f"{number_text(sharing.time_imbalance, 2)} times the mean of the ranks (pixel rows "
        f"{number_text(sharing.input_imbalance, 2)}, shared by {assignment or 'size'})"
    )


def _dropped(record: Record) -> Iterable[str]:
    for rank in record.environment.ranks if record.environment else ():
        for graph in rank.dropped:
            yield f"Rank {rank.rank} could not capture budget {graph.token_budget}: {graph.reason}"


def sharing_section(sharing: Mapping[str, Any] | None) -> Section | None:
    """What assigning by cost changes against vLLM's load balance by size, as predicted; None without a cost.

    Args:
        sharing: `PreparedBench.sharing`.
    """
    by_cost = (sharing or {}).get("by_cost")
    if sharing is None or by_cost is None:
        return None
    slowest, imbalance, rows = (by_cost[name] for name in _SHARING_FIELDS)
    labels = (("size", "size, as vLLM"), ("cost", "cost"))
    table = _PREDICTED.table(
        {"assignment": label, "slowest_ms": slowest[name], "imbalance": imbalance[name], "rows": rows[name]}
        for name, label in labels
    )
    gain = f"{100 * (1 - slowest['cost'] / slowest['size']):+.1f}%" if slowest["size"] else "nothing"
    text = (
        f"Sharing by cost gives some rank other items in {by_cost['changed_calls']} of {by_cost['calls']} calls; "
        f"the slowest rank gains {gain} (positive = faster)"
    )
    calls = count_text(by_cost["calls"], "call")
    title = f"Predicted for {calls} on {sharing['ranks']} ranks, in graphs of exactly their size"
    return section(title, table, Text(text))


_SHARING_FIELDS = ("predicted_slowest_ms", "predicted_imbalance", "input_imbalance")
