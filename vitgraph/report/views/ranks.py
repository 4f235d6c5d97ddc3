"""Calls that ranks share: how they were shared, what that costs, and how latency scales with the ranks.

Efficiency is the latency on the fewest GPUs over N times the latency on N times as many; 1 is perfect. A published
result of the same scenario stands beside it as it was published.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from vitgraph.records.latency import Latency, RankPart, Sharing
from vitgraph.records.record import Record
from vitgraph.records.saved_runs import SavedRun
from vitgraph.report import say
from vitgraph.report.columns import Column, Row, Table, TableSpec, fields
from vitgraph.report.document import Section, Text, section
from vitgraph.report.views.conditions import Ran

MODES = ("eager", "graph")

RANKS = TableSpec(
    "ranks",
    "By rank, milliseconds a request",
    "a series and rank",
    (
        Column("series", "text", "", "the series; of several backends, with the backend before it", "Series"),
        *fields(RankPart, "part", rank="Rank", encode_ms="Encode", wait_ms="Wait", wall_ms="Whole", items="Items"),
        *fields(RankPart, "part", hits="Hits", misses="Misses", replays="Replays", idle_calls="Calls without items"),
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
        Column("imbalance", "number", "ratio", "that over their mean", "over the mean", lambda v: say.number(v, 3)),
        Column("rows", "number", "ratio", "pixel rows of the fullest rank over the mean", "Pixel rows over the mean"),
    ),
)


def ranks_table(latency: Mapping[str, Latency], prefix: str = "") -> Table:
    """A row a series and rank; none for a run of one process."""
    return RANKS.of(
        {"series": f"{prefix}{series}", "part": part}
        for series, entry in latency.items()
        for part in (entry.sharing.ranks if entry.sharing else ())
    )


def rank_section(latency: Mapping[str, Latency], record: Record) -> Section | None:
    """The ranks' part of a run; None for a run of one process."""
    assignment = record.resolved.assignment if record.resolved else None
    lines = [
        f"{series}: gather {say.ms(sharing.gather_ms)} ms once the last rank is there; the slowest rank encodes "
        f"{say.number(sharing.time_imbalance, 2)} times the mean of the ranks (pixel rows "
        f"{say.number(sharing.input_imbalance, 2)}, shared by {assignment or 'size'})"
        for series, entry in latency.items()
        if (sharing := entry.sharing) is not None
    ]
    lines += [
        f"Rank {rank.rank} could not capture budget {graph.token_budget}: {graph.reason}"
        for rank in (record.environment.ranks if record.environment else ())
        for graph in rank.dropped
    ]
    table = ranks_table(latency)
    return section("Ranks", table, *map(Text, lines)) if table.rows else None


def sharing_section(sharing: Mapping[str, Any] | None) -> Section | None:
    """What assigning by cost changes against vLLM's load balance by size, as predicted; None without a cost.

    Args:
        sharing: `PreparedBench.sharing`.
    """
    by_cost = (sharing or {}).get("by_cost")
    if sharing is None or by_cost is None:
        return None
    names = ("predicted_slowest_ms", "predicted_imbalance", "input_imbalance")
    slowest, imbalance, rows = (by_cost[name] for name in names)
    table = _PREDICTED.table(
        {"assignment": label, "slowest_ms": slowest[name], "imbalance": imbalance[name], "rows": rows[name]}
        for name, label in (("size", "size, as vLLM"), ("cost", "cost"))
    )
    gain = f"{100 * (1 - slowest['cost'] / slowest['size']):+.1f}%" if slowest["size"] else "nothing"
    text = (
        f"Sharing by cost gives some rank other items in {by_cost['changed_calls']} of {by_cost['calls']} calls; "
        f"the slowest rank gains {gain} (positive = faster)"
    )
    calls = say.count(by_cost["calls"], "call")
    title = f"Predicted for {calls} on {sharing['ranks']} ranks, in graphs of exactly their size"
    return section(title, table, Text(text))


# -- scaling -----------------------------------------------------------------------------------------------------------


def _both(name: str, decimals: int | None = None) -> Any:
    """Reads a figure of both modes from a row; None where one is missing."""

    def text(row: Row) -> str | None:
        values = [row[f"{mode}_{name}"] for mode in MODES]
        if None in values:
            return None
        return "→".join(say.ms(value) if decimals is None else say.number(value, decimals) for value in values)

    return text


SCALING = TableSpec(
    "scaling",
    "",
    "a backend and number of ranks",
    (
        Column("backend", "text", "", "attention backend that ran, and packing where not greedy", "Backend"),
        Column("ranks", "integer", "ranks", "processes that shared each call, each on a GPU of its own", "GPUs"),
        Column("run", "text", "", "name of the run; empty for a published result"),
        Column("source", "text", "", "`measured`, or where the figures were published", "Source"),
        Column("eager_mean_ms", "number", "ms", "mean latency of a request in eager mode"),
        Column("graph_mean_ms", "number", "ms", "mean latency of a request in graph mode"),
        Column("mean_improvement_pct", "number", "%", "(eager - graph) / eager of the means, positive = graph faster"),
        Column("eager_p99_ms", "number", "ms", "P99 in eager mode; empty below 300 requests"),
        Column("graph_p99_ms", "number", "ms", "P99 in graph mode; empty below 300 requests"),
        Column("p99_improvement_pct", "number", "%", "the same of the P99"),
        Column("eager_efficiency", "number", "ratio", "scaling efficiency of the mean in eager mode"),
        Column("graph_efficiency", "number", "ratio", "scaling efficiency of the mean in graph mode"),
        *fields(Sharing, "sharing", "gather_ms", "time_imbalance"),
    ),
    "requests",
)
_SHOWN = replace(
    SCALING,
    columns=(
        *(column for column in SCALING.columns if column.header),
        Column("mean", "text", "ms", "mean, eager→graph", "Mean ms", of=_both("mean_ms")),
        Column("mean_improvement_pct", "number", "%", "improvement of the mean", "Mean gain"),
        Column("p99", "text", "ms", "P99, eager→graph", "P99 ms", of=_both("p99_ms")),
        Column("p99_improvement_pct", "number", "%", "improvement of the P99", "P99 gain"),
        Column("efficiency", "text", "ratio", "eager→graph", "Efficiency", of=_both("efficiency", 2)),
        Column("gather_ms", "number", "ms", "gather of a graph call", "Gather ms"),
        Column("time_imbalance", "number", "", "slowest rank over the mean", "Imbalance"),
    ),
)
_NOTE = (
    "Efficiency, eager→graph = mean latency on the fewest GPUs over N times that on N times as many; 1 is perfect. "
    "Times are eager→graph, and a positive gain = graph faster."
)
PUBLISHED_SOURCE = "vLLM's page, 4 GB200"
_PUBLISHED_RANKS = 4
_PUBLISHED = {
    "FLASH_ATTN": (28.39, 23.16, 18.4, 238.78, 205.28, 14.0),
    "FLASHINFER": (23.24, 12.91, 44.4, 172.41, 26.05, 84.9),
}
"""By backend: mean eager and graph, improvement, P99 eager and graph, improvement, as published for Qwen3-VL-32B and
random-mm, 20 images of 336x336 a request, 1000 requests."""
_PUBLISHED_NAMES = tuple(column.name for column in SCALING.columns[4:10])


def scaling_table(runs: Sequence[SavedRun]) -> Table:
    """One row a backend and number of ranks, of every scenario that was measured on different numbers of GPUs."""
    return SCALING.table(row for _, rows in _scenarios(runs) for row in rows)


def scaling_sections(runs: Sequence[SavedRun]) -> Iterable[Section]:
    """A table a scenario; none where nothing scales."""
    for title, rows in _scenarios(runs):
        yield section(f"Scaling: {title}", _SHOWN.of(rows, notes=(_NOTE,)))


def _scenarios(runs: Sequence[SavedRun]) -> Iterable[tuple[str, tuple[Row, ...]]]:
    found: dict[tuple[str, ...], dict[str, list[SavedRun]]] = {}
    for run in runs:
        if run.record.result.comparison.requests and run.record.resolved is not None:
            found.setdefault(_scenario(run), {}).setdefault(_series(run), []).append(run)
    for (device, model, *details), series in found.items():
        rows: list[dict[str, Any]] = []
        published: dict[str, dict[str, Any]] = {}
        for name, members in series.items():
            if len({Ran(run.record).ranks for run in members}) > 1:
                rows += _series_rows(name, sorted(members, key=lambda run: Ran(run.record).ranks))
                published |= _published_rows(members[0])
        if rows:
            title = ", ".join((f"{model} on {device}", *(part for part in details[:-2] if part)))
            yield title, SCALING.of([*rows, *published.values()]).rows


def _scenario(run: SavedRun) -> tuple[str, ...]:
    """What runs that are set against each other have in common; the last two only tell them apart."""
    ran, record = Ran(run.record), run.record
    device = record.environment.device if record.environment else ""
    fingerprint = record.workload.fingerprint if record.workload else ran.workload
    shared = (ran.weights, ran.compiled, ran.measured, ran.per_call, fingerprint)
    return (device, ran.model, *shared, str(record.resolved and record.resolved.token_budgets))


def _series(run: SavedRun) -> str:
    """What the runs of a series of their own have in common: the backend, and how calls are packed."""
    packing = run.record.resolved.packing if run.record.resolved else None
    return Ran(run.record).backend + ("" if packing in (None, "greedy") else f", packing {packing}")


def _series_rows(name: str, runs: Sequence[SavedRun]) -> list[dict[str, Any]]:
    """A row a run, ascending by ranks."""
    first = runs[0].record
    rows = []
    for run in runs:
        record, ran = run.record, Ran(run.record)
        latency, pair = record.result.latency, record.result.comparison.pair("eager", "graph")
        growth = ran.ranks / Ran(first).ranks
        row: dict[str, Any] = {"backend": name, "ranks": ran.ranks, "run": run.name, "source": "measured"}
        for metric in ("mean", "p99"):
            is_known = metric == "mean" or latency["eager"].p99_supported
            for mode in MODES:
                row[f"{mode}_{metric}_ms"] = getattr(latency[mode], f"{metric}_ms") if is_known else None
            # Replay on a CPU saves no launches, so no gain is claimed there.
            found = getattr(pair, metric) if pair and is_known and not ran.is_cpu else None
            row[f"{metric}_improvement_pct"] = found.improvement_pct if found else None
        for mode in MODES:
            before, after = (one.result.latency[mode].mean_ms for one in (first, record))
            row[f"{mode}_efficiency"] = before / (growth * after) if before and after else None
        rows.append(row | {"sharing": latency["graph"].sharing})
    return rows


def _published_rows(run: SavedRun) -> dict[str, dict[str, Any]]:
    """What vLLM published of the scenario of a run, by backend; empty where it is another one."""
    settings, ran = run.record.settings, Ran(run.record)
    # Settings are the options of the command, by group or flat.
    workload: Any = settings.get("workload") if isinstance(settings.get("workload"), Mapping) else settings
    is_scenario = (
        "Qwen3-VL-32B" in ran.model
        and workload.get("dataset_name") == "random-mm"
        and workload.get("random_mm_base_items_per_request") == 20
    )
    backend = ran.backend_used or ""
    if not is_scenario or backend not in _PUBLISHED:
        return {}
    figures = dict(zip(_PUBLISHED_NAMES, _PUBLISHED[backend], strict=True))
    return {backend: {"backend": backend, "ranks": _PUBLISHED_RANKS, "source": PUBLISHED_SOURCE, **figures}}
