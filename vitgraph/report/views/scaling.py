"""How latency scales with the ranks that share a call: saved runs on 1, 2, 4, … GPUs side by side, a table a scenario.

Efficiency is the latency on the fewest GPUs over N times the latency on N times as many; 1 is perfect. A published
result of the same scenario stands beside it as it was published.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vitgraph.records.record import BenchRecord
from vitgraph.records.saved_runs import SavedRun
from vitgraph.report.columns import Column, Row, Table, TableSpec, ms_text, number_text
from vitgraph.report.document import Section, section
from vitgraph.report.views.bench import is_cpu_replay
from vitgraph.report.views.conditions import (
    backend_of,
    compiled_of,
    measured_of,
    model_of,
    per_call_of,
    weights_of,
    workload_of,
)


def _pair_text(values: Sequence[float | None], decimals: int | None = None) -> str | None:
    if any(value is None for value in values):
        return None
    return "→".join(ms_text(value) if decimals is None else number_text(value, decimals) for value in values)


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
        Column("gather_ms", "number", "ms", "gather of a graph call once the last rank is there; empty on one GPU"),
        Column("time_imbalance", "number", "ratio", "slowest rank over the ranks' mean in graph mode"),
    ),
    "requests",
)
_SHOWN = TableSpec(
    "scaling",
    "",
    "a backend and number of ranks",
    (
        *(column for column in SCALING.columns if column.header),
        Column("mean", "text", "ms", "mean, eager→graph", "Mean ms"),
        Column("mean_improvement_pct", "number", "%", "improvement of the mean", "Mean gain"),
        Column("p99", "text", "ms", "P99, eager→graph", "P99 ms"),
        Column("p99_improvement_pct", "number", "%", "improvement of the P99", "P99 gain"),
        Column("efficiency", "text", "ratio", "scaling efficiency, eager→graph", "Efficiency"),
        Column("gather_ms", "number", "ms", "gather of a graph call", "Gather ms"),
        Column(
            "time_imbalance", "number", "ratio", "slowest rank over the mean", "Imbalance", lambda v: number_text(v, 2)
        ),
    ),
    "requests",
)
_NOTE = (
    "Efficiency, eager→graph = mean latency on the fewest GPUs over N times that on N times as many; 1 is perfect. "
    "Times are eager→graph, and a positive gain = graph faster."
)

PUBLISHED_SOURCE = "vLLM's page, 4 GB200"
_PUBLISHED_RANKS = 4
_PUBLISHED: Mapping[str, tuple[float, float, float, float, float, float]] = {
    "FLASH_ATTN": (28.39, 23.16, 18.4, 238.78, 205.28, 14.0),
    "FLASHINFER": (23.24, 12.91, 44.4, 172.41, 26.05, 84.9),
}
"""By backend: mean eager and graph, improvement, P99 eager and graph, improvement, as published for Qwen3-VL-32B and
random-mm, 20 images of 336x336 a request, 1000 requests."""
_PUBLISHED_NAMES = (
    *("eager_mean_ms", "graph_mean_ms", "mean_improvement_pct"),
    *("eager_p99_ms", "graph_p99_ms", "p99_improvement_pct"),
)


def scaling_table(runs: Sequence[SavedRun]) -> Table:
    """One row a backend and number of ranks, of every scenario that was measured on different numbers of GPUs."""
    return SCALING.table(row for _, rows in _scenarios(runs) for row in rows)


def scaling_sections(runs: Sequence[SavedRun]) -> Iterable[Section]:
    """A table a scenario; none where nothing scales."""
    for title, rows in _scenarios(runs):
        shown = (
            row
            | {
                "mean": _pair_text((row["eager_mean_ms"], row["graph_mean_ms"])),
                "p99": _pair_text((row["eager_p99_ms"], row["graph_p99_ms"])),
                "efficiency": _pair_text((row["eager_efficiency"], row["graph_efficiency"]), 2),
            }
            for row in rows
        )
        yield section(f"Scaling: {title}", Table(_SHOWN, tuple(shown), notes=(_NOTE,)))


def _scenarios(runs: Sequence[SavedRun]) -> Iterable[tuple[str, list[dict[str, Any]]]]:
    found: dict[tuple[str, ...], dict[str, list[SavedRun]]] = {}
    for run in runs:
        if run.record.result.comparison.requests and run.record.resolved is not None:
            found.setdefault(_scenario(run.record), {}).setdefault(_series(run.record), []).append(run)
    for (device, model, *details), series in found.items():
        rows: list[dict[str, Any]] = []
        published: dict[str, dict[str, Any]] = {}
        for name, members in series.items():
            if len({_ranks(run.record) for run in members}) > 1:
                rows += _series_rows(name, members)
                published |= _published_rows(members[0].record)
        if rows:
            title = ", ".join((f"{model} on {device}", *(part for part in details[:-2] if part)))
            yield title, [*rows, *published.values()]


def _scenario(record: BenchRecord) -> tuple[str, ...]:
    """What runs that are set against each other have in common; the last two only tell them apart."""
    resolved, device = record.resolved, record.environment.device if record.environment else ""
    assert resolved is not None
    shared = (weights_of(record), compiled_of(record), measured_of(record), per_call_of(resolved))
    fingerprint = record.workload.fingerprint if record.workload else workload_of(record)
    return (device, model_of(record), *shared, fingerprint, str(resolved.token_budgets))


def _ranks(record: BenchRecord) -> int:
    return record.resolved.ranks if record.resolved else 1


def _series(record: BenchRecord) -> str:
    """What the runs of a series of their own have in common: the backend, and how calls are packed."""
    packing = record.resolved.packing if record.resolved else None
    backend = backend_of(record)
    return backend if packing in (None, "greedy") else f"{backend}, packing {packing}"


def _series_rows(name: str, runs: Sequence[SavedRun]) -> list[dict[str, Any]]:
    ordered = sorted(runs, key=lambda run: _ranks(run.record))
    first = ordered[0].record
    rows: list[dict[str, Any]] = []
    for run in ordered:
        record = run.record
        latency, pair = record.result.latency, record.result.comparison.pair("eager", "graph")
        growth = _ranks(record) / _ranks(first)
        row: dict[str, Any] = {"backend": name, "ranks": _ranks(record), "run": run.name, "source": "measured"}
        for metric in ("mean", "p99"):
            is_known = metric == "mean" or latency["eager"].p99_supported
            for mode in ("eager", "graph"):
                row[f"{mode}_{metric}_ms"] = getattr(latency[mode], f"{metric}_ms") if is_known else None
            # Replay on a CPU saves no launches, so no gain is claimed there.
            found = getattr(pair, metric) if pair and is_known and not is_cpu_replay(record) else None
            row[f"{metric}_improvement_pct"] = found.improvement_pct if found else None
        for mode in ("eager", "graph"):
            before, after = (one.result.latency[mode].mean_ms for one in (first, record))
            row[f"{mode}_efficiency"] = before / (growth * after) if before and after else None
        sharing = latency["graph"].sharing
        row |= {name: getattr(sharing, name, None) for name in ("gather_ms", "time_imbalance")}
        rows.append(row)
    return rows


def _published_rows(record: BenchRecord) -> dict[str, dict[str, Any]]:
    """What vLLM published of the scenario of a run, by backend; empty where it is another one."""
    settings: Row = record.settings
    # Settings are the options of the command, by group or flat.
    workload: Any = settings.get("workload") if isinstance(settings.get("workload"), Mapping) else settings
    is_scenario = (
        "Qwen3-VL-32B" in model_of(record)
        and workload.get("dataset_name") == "random-mm"
        and workload.get("random_mm_base_items_per_request") == 20
    )
    encoder = record.environment.encoder if record.environment else None
    backend = (encoder.attn_backend if encoder else None) or ""
    if not is_scenario or backend not in _PUBLISHED:
        return {}
    row: dict[str, Any] = dict.fromkeys(column.name for column in SCALING.columns)
    named = {"backend": backend, "ranks": _PUBLISHED_RANKS, "source": PUBLISHED_SOURCE}
    return {backend: {**row, **named, **dict(zip(_PUBLISHED_NAMES, _PUBLISHED[backend], strict=True))}}
