"""Calls that ranks share: how they were shared, what that costs, and how latency scales with the ranks.

Efficiency is the latency on the fewest GPUs over N times the latency on N times as many; 1 is perfect. A published
result of the same scenario stands beside it as it was published.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from vitgraph.records.record import Record
from vitgraph.records.results import COMPARED_MODES as MODES
from vitgraph.records.series import Latency, RankPart, Sharing
from vitgraph.records.two_runs import SavedRun
from vitgraph.report import say
from vitgraph.report.columns import Row, Table, column, fields, table_of
from vitgraph.report.document import Section, section
from vitgraph.report.views.conditions import Ran

RANKS = table_of(
    "ranks",
    column("series", "the series; of several backends, with the backend before it", "Series"),
    *fields(RankPart, "part", rank="Rank", encode_ms="Encode", wait_ms="Wait", wall_ms="Whole", items="Items"),
    *fields(RankPart, "part", hits="Hits", misses="Misses", replays="Replays", idle_calls="Calls without items"),
    title="By rank, milliseconds a request",
    one_row="a series and rank",
    counts="requests",
    is_optional=True,
)
_PREDICTED = table_of(
    "sharing",
    column("assignment", "who encodes what", "Assignment"),
    column("slowest_ms", "predicted time of the slowest rank", "Slowest rank ms"),
    column("imbalance", "that over their mean", "over the mean", 3),
    column("rows", "pixel rows of the fullest rank over the mean", "Pixel rows over the mean", unit="ratio"),
    one_row="an assignment",
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
    return section("Ranks", table, *lines) if table.rows else None


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
    table = _PREDICTED.filled(
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
    return section(title, table, text)


# -- scaling -----------------------------------------------------------------------------------------------------------


def _both(name: str, text: Callable[[Any], str] = say.ms) -> Callable[[Row], str | None]:
    """Reads a figure of both modes from a row; None where one is missing."""

    def read(row: Row) -> str | None:
        values = [row[f"{mode}_{name}"] for mode in MODES]
        return None if None in values else say.change(*values, text=text)

    return read


SCALING = table_of(
    "scaling",
    column("backend", "attention backend that ran, and packing where not greedy", "Backend"),
    column("ranks", "processes that shared each call, each on a GPU of its own", "GPUs"),
    column("run", "name of the run; empty for a published result"),
    column("source", "`measured`, or where the figures were published", "Source"),
    *(column(f"{mode}_mean_ms", f"mean latency of a request in {mode} mode") for mode in MODES),
    column("mean_improvement_pct", "(eager - graph) / eager of the means, positive = graph faster"),
    *(column(f"{mode}_p99_ms", f"P99 in {mode} mode; empty below 300 requests") for mode in MODES),
    column("p99_improvement_pct", "the same of the P99"),
    *(column(f"{mode}_efficiency", f"scaling efficiency of the mean in {mode} mode", unit="ratio") for mode in MODES),
    *fields(Sharing, "sharing", "gather_ms", "time_imbalance"),
    one_row="a backend and number of ranks",
    counts="requests",
)
_SHOWN = replace(
    SCALING,
    columns=(
        *(column for column in SCALING.columns if column.header),
        column("mean", "mean, eager→graph", "Mean ms", of=_both("mean_ms")),
        column("mean_improvement_pct", "improvement of the mean", "Mean gain"),
        column("p99", "P99, eager→graph", "P99 ms", of=_both("p99_ms")),
        column("p99_improvement_pct", "improvement of the P99", "P99 gain"),
        column("efficiency", "eager→graph", "Efficiency", of=_both("efficiency", "{:.2f}".format)),
        column("gather_ms", "gather of a graph call", "Gather ms"),
        column("time_imbalance", "slowest rank over the mean", "Imbalance", kind="number", unit=""),
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


def scaling(runs: Sequence[SavedRun]) -> tuple[Table, list[Section]]:
    """A row a backend and number of ranks, of every scenario that was measured on different numbers of GPUs.

    Returns:
        The rows of all scenarios, and a section of each.
    """
    found: dict[tuple[str, ...], dict[str, list[SavedRun]]] = {}
    for run in runs:
        ran, resolved = Ran(run.record), run.record.resolved
        if run.record.result.comparison.requests and resolved is not None:
            shared = (ran.model, ran.weights, ran.compiled, ran.measured, ran.per_call)
            # The last two only tell scenarios apart.
            scenario = (ran.at("environment.device") or "", *shared, ran.at("workload.fingerprint") or "")
            name = ran.backend + ("" if resolved.packing in (None, "greedy") else f", packing {resolved.packing}")
            found.setdefault((*scenario, str(resolved.token_budgets)), {}).setdefault(name, []).append(run)
    every: list[Row] = []
    sections = []
    for (device, model, *details), series in found.items():
        rows: list[dict[str, Any]] = []
        published: dict[str, dict[str, Any]] = {}
        for name, members in series.items():
            if len({Ran(run.record).ranks for run in members}) > 1:
                rows += _series_rows(name, sorted(members, key=lambda run: Ran(run.record).ranks))
                published |= _published_rows(members[0])
        if rows:
            table = SCALING.of([*rows, *published.values()])
            every += table.rows
            title = ", ".join((f"{model} on {device}", *(part for part in details[:-2] if part)))
            sections.append(section(f"Scaling: {title}", _SHOWN.of(table.rows, notes=(_NOTE,))))
    return SCALING.filled(every), sections


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
    ran, found = Ran(run.record), dict(run.record.settings)
    # Settings are the options of the command, by group or flat.
    workload: Any = found["workload"] if isinstance(found.get("workload"), Mapping) else found
    is_random = (workload.get("dataset_name"), workload.get("random_mm_base_items_per_request")) == ("random-mm", 20)
    backend = ran.backend_used or ""
    if not is_random or "Qwen3-VL-32B" not in ran.model or backend not in _PUBLISHED:
        return {}
    figures = dict(zip(_PUBLISHED_NAMES, _PUBLISHED[backend], strict=True))
    return {backend: {"backend": backend, "ranks": _PUBLISHED_RANKS, "source": PUBLISHED_SOURCE, **figures}}
