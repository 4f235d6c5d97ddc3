"""How latency scales with the ranks that share a call: saved runs on 1, 2, 4, … GPUs side by side, a table a backend.

Efficiency is the latency on the fewest GPUs over N times the latency on N times as many; 1 is perfect. A published
result of the same scenario stands beside it as it was published.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from vitgraph.records.samples import EAGER, GRAPH
from vitgraph.records.saved_runs import SavedRun
from vitgraph.report.claims import backend_text, scenario_of
from vitgraph.report.terminal import line, new_table
from vitgraph.report.text_tables import markdown_row, markdown_text
from vitgraph.report.tidy_tables import Column
from vitgraph.report.units import NO_VALUE, is_number, ms_text, number_text

SCALING_COLUMNS = (
    Column("backend", "text", "", "attention backend that ran, and how calls were packed where not greedily"),
    Column("ranks", "integer", "ranks", "processes that shared each call, each on a GPU of its own"),
    Column("run", "text", "", "name of the run; empty for a published result"),
    Column("source", "text", "", "`measured`, or where the figures were published"),
    Column("eager_mean_ms", "number", "ms", "mean latency of a request in eager mode"),
    Column("graph_mean_ms", "number", "ms", "mean latency of a request in graph mode"),
    Column("mean_improvement_pct", "number", "%", "(eager - graph) / eager of the means, positive = graph faster"),
    Column("eager_p99_ms", "number", "ms", "P99 in eager mode; empty below 300 requests"),
    Column("graph_p99_ms", "number", "ms", "P99 in graph mode; empty below 300 requests"),
    Column("p99_improvement_pct", "number", "%", "the same of the P99"),
    Column("eager_efficiency", "number", "ratio", "scaling efficiency of the mean in eager mode"),
    Column("graph_efficiency", "number", "ratio", "scaling efficiency of the mean in graph mode"),
    Column("gather_ms", "number", "ms", "gather of a graph call once the last rank is there; empty on one GPU"),
    Column("time_imbalance", "number", "ratio", "slowest rank over the ranks' mean in graph mode; empty on one GPU"),
)
"""Columns of `scaling.csv` and `scaling.parquet`, one row a backend and number of ranks."""

DEFAULT_PACKING = "greedy"

SCALING_NOTE = (
    "Efficiency, eager→graph = mean latency on the fewest GPUs over N times that on N times as many; 1 is perfect. "
    "Times are eager→graph, and a positive gain = graph faster."
)
_HEADERS = ("Backend", "GPUs", "Mean ms", "Mean gain", "P99 ms", "P99 gain", "Efficiency", "Gather ms", "Imbalance")

WIDE_CONSOLE = 120
_NARROW_HEADERS = {"Efficiency": "Effi-\nciency", "Imbalance": "Imba-\nlance"}

PUBLISHED_SOURCE = "vLLM's page, 4 GB200"
_PUBLISHED_RANKS = 4
_PUBLISHED: Mapping[str, tuple[float, float, float, float, float, float]] = {
    "FLASH_ATTN": (28.39, 23.16, 18.4, 238.78, 205.28, 14.0),
    "FLASHINFER": (23.24, 12.91, 44.4, 172.41, 26.05, 84.9),
}
"""By backend: mean eager and graph, improvement, P99 eager and graph, improvement, as published for Qwen3-VL-32B and
random-mm, 20 images of 336x336 a request, 1000 requests."""


@dataclass(frozen=True, slots=True)
class ScalingTable:
    """Runs of one scenario on different numbers of GPUs.

    Attributes:
        title: Model, device and workload, short enough for a line of a narrow terminal.
        details: What else all rows have in common: the model in full, its weights, how much was measured.
        rows: Tidy rows, by `SCALING_COLUMNS`.
    """

    title: str
    details: str
    rows: tuple[Mapping[str, Any], ...]


def scaling_tables(runs: Sequence[SavedRun]) -> list[ScalingTable]:
    """A table a scenario that some backend was measured in on different numbers of GPUs; none where there is none."""
    scenarios: dict[tuple[str, ...], dict[str, list[SavedRun]]] = {}
    for run in runs:
        if not (run.record["comparison"] or {}).get("requests"):
            continue
        budgets = run.record["settings"].get("resolved", {}).get("token_budgets")
        key = (*scenario_of(run.record), str(budgets))
        scenarios.setdefault(key, {}).setdefault(_series_of(run), []).append(run)
    tables = []
    for (device, model, weights, workload, size, *_), series in scenarios.items():
        rows: list[Mapping[str, Any]] = []
        published: dict[str, Mapping[str, Any]] = {}
        for name, members in series.items():
            if len({run.record.ranks for run in members}) > 1:
                rows += _series_rows(name, members)
                published |= _published_rows(members[0])
        rows += published.values()
        if rows:
            title = f"{model.rsplit('/', 1)[-1]} on {device}, {workload}"
            details = "; ".join(part for part in (model, weights, size) if part)
            tables.append(ScalingTable(title, details, tuple(rows)))
    return tables


def _series_of(run: SavedRun) -> str:
    """What runs whose latencies are set against each other have in common: the backend, and how calls are packed."""
    packing = run.record["settings"]["graph"].get("packing", DEFAULT_PACKING)
    backend = backend_text(run.record)
    return backend if packing == DEFAULT_PACKING else f"{backend}, packing {packing}"


def _series_rows(name: str, runs: Sequence[SavedRun]) -> list[Mapping[str, Any]]:
    ordered = sorted(runs, key=lambda run: run.record.ranks)
    first = ordered[0]
    rows: list[Mapping[str, Any]] = []
    for run in ordered:
        summary, comparison = run.record["summary"], run.record["comparison"]
        has_p99 = summary[EAGER]["p99_supported"]
        growth = run.record.ranks / first.record.ranks
        shared = summary[GRAPH].get("parallel", {})
        row: dict[str, Any] = {"backend": name, "ranks": run.record.ranks, "run": run.name, "source": "measured"}
        for metric in ("mean", "p99"):
            is_known = metric == "mean" or has_p99
            for mode in (EAGER, GRAPH):
                row[f"{mode}_{metric}_ms"] = summary[mode][f"{metric}_ms"] if is_known else None
            # Replay on a CPU saves no launches, so no gain is claimed there.
            is_claimed = is_known and not run.record.is_cpu_replay
            row[f"{metric}_improvement_pct"] = comparison[metric]["improvement_pct"] if is_claimed else None
        for mode in (EAGER, GRAPH):
            before, after = (one.record["summary"][mode]["mean_ms"] for one in (first, run))
            row[f"{mode}_efficiency"] = before / (growth * after)
        row |= {"gather_ms": shared.get("gather_ms"), "time_imbalance": shared.get("time_imbalance")}
        rows.append(row)
    return rows


def _published_rows(run: SavedRun) -> Mapping[str, Mapping[str, Any]]:
    """What vLLM published of the scenario of a run, by backend; empty where it is another one."""
    settings = run.record["settings"]
    workload = settings["workload"]
    is_scenario = (
        "Qwen3-VL-32B" in run.record.model_name
        and workload.get("dataset_name") == "random-mm"
        and workload.get("random_mm_base_items_per_request") == 20
    )
    backend = run.record.backend_used or ""
    figures = _PUBLISHED.get(backend)
    if not is_scenario or figures is None:
        return {}
    names = (
        *("eager_mean_ms", "graph_mean_ms", "mean_improvement_pct"),
        *("eager_p99_ms", "graph_p99_ms", "p99_improvement_pct"),
    )
    row: dict[str, Any] = dict.fromkeys(column.name for column in SCALING_COLUMNS)
    named = {"backend": backend, "ranks": _PUBLISHED_RANKS, "source": PUBLISHED_SOURCE}
    return {backend: {**row, **named, **dict(zip(names, figures, strict=True))}}


def render_scaling(tables: Sequence[ScalingTable], console: Console) -> None:
    """Prints the tables; nothing where there are none."""
    for found in tables:
        grid = new_table(found.title, collapse_padding=True)
        is_narrow = console.width < WIDE_CONSOLE
        for index, header in enumerate(_HEADERS):
            narrow = _NARROW_HEADERS.get(header, header.replace(" ", "\n"))
            grid.add_column(narrow if is_narrow else header, justify="right" if index > 1 else "left")
        for row in found.rows:
            cells = [cell.replace("→", "→\n").replace("_", "_\n") if is_narrow else cell for cell in _cells(row)]
            grid.add_row(*cells, style="" if row["run"] else "dim")
        console.print(grid)
        console.print(line(f"{found.details}.", "dim"))
        console.print(line(SCALING_NOTE, "dim"))
        console.print()


def scaling_markdown(tables: Sequence[ScalingTable]) -> str:
    """The tables as Markdown."""
    lines = []
    for found in tables:
        lines += [
            f"### {markdown_text(found.title)}",
            "",
            f"{markdown_text(found.details)}.",
            "",
            markdown_row(_HEADERS),
        ]
        lines.append(markdown_row([":--", ":--", *["--:"] * (len(_HEADERS) - 2)]))
        lines += [markdown_row([markdown_text(cell) for cell in _cells(row)]) for row in found.rows]
        lines += ["", SCALING_NOTE, ""]
    return "\n".join(lines)


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    def gain(metric: str) -> str:
        value = row[f"{metric}_improvement_pct"]
        return f"{value:+.1f}%" if is_number(value) else NO_VALUE

    def times(metric: str) -> str:
        pair = row[f"eager_{metric}_ms"], row[f"graph_{metric}_ms"]
        return "→".join(map(ms_text, pair)) if all(map(is_number, pair)) else NO_VALUE

    efficiency = row["eager_efficiency"], row["graph_efficiency"]
    return (
        row["backend"],
        str(row["ranks"]) if row["run"] else f"{row['ranks']} ({row['source']})",
        times("mean"),
        gain("mean"),
        times("p99"),
        gain("p99"),
        "→".join(number_text(one, 2) for one in efficiency) if all(map(is_number, efficiency)) else NO_VALUE,
        ms_text(row["gather_ms"]) if is_number(row["gather_ms"]) else NO_VALUE,
        number_text(row["time_imbalance"], 2) if is_number(row["time_imbalance"]) else NO_VALUE,
    )
