"""Writes the CSV tables that are derived from a run record: its latency summary and its graphs.

All are tidy: one header row, fixed columns, one fact a row. A cell is empty where nothing was measured.

`summary.csv`, one row a mode and metric:
    mode                     `eager`, `graph`, `monolithic` or `hf`
    metric                   `mean`, `p50`, `p90`, `p99`, `max`, `std`, `gpu_mean` or `outliers`
    value, unit              the figure, in `ms` a request or in `requests`
    n                        requests that it describes
    delta_pct                mode minus eager in percent of eager, negative = faster; graph and monolithic rows only
    ci95_low_pct, ci95_high_pct  ends of the 95 % interval of `delta_pct`
    noise_floor_pct          what eager differs from itself in the metric
    verdict                  `faster`, `slower`, `same`, `undecided` or `invalid`

`per_budget.csv`, one row a captured or replayed graph:
    path, token_budget, segment_slots, axis_key   the graph; axis keys as `28x36`; path `monolithic` holds both paths
    replays, items, tokens   what was replayed with it
    fill, waste              share of its rows that were used, and the rest
    replay_ms, gpu_busy_ms   median wall time of a replay, and its GPU-busy time
    launch_gap               wall time of a replay over its GPU-busy time
    capture_ms, pool_bytes, buffer_bytes   what the graph cost to capture and to hold

`per_path.csv`, one row a graph mode and encoder path, and one of path `all`:
    mode, path               `graph`, or `monolithic`, whose graphs hold every path
    items, hits, runs, replays   items with rows on the path, those replayed, executions of the path, replays of it
    tokens, budget_tokens    rows used and rows computed by the replays
    waste                    share of the computed rows that was padding
    replay_ms                time of a mean request in replays of the path

`monolithic.csv`, one row a metric of two paths against monolithic graphs; only where those were measured:
    metric, n                `mean`, `p50` or `p99`, and the requests
    two_paths_ms, monolithic_ms   the metric of either, in ms a request
    delta_pct and what follows it   two paths minus monolithic in percent of monolithic, negative = two paths faster
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from vitgraph.records.bench_record import RunRecord
from vitgraph.records.samples import GRAPH, MONOLITHIC
from vitgraph.records.stats import METRICS
from vitgraph.report.files import csv_bytes, write_files
from vitgraph.report.paths_view import all_graphs

SUMMARY_COLUMNS = (
    "mode",
    "metric",
    "value",
    "unit",
    "n",
    "delta_pct",
    "ci95_low_pct",
    "ci95_high_pct",
    "noise_floor_pct",
    "verdict",
)
PER_BUDGET_COLUMNS = (
    "path",
    "token_budget",
    "segment_slots",
    "axis_key",
    "replays",
    "items",
    "tokens",
    "fill",
    "waste",
    "replay_ms",
    "gpu_busy_ms",
    "launch_gap",
    "capture_ms",
    "pool_bytes",
    "buffer_bytes",
)
PER_PATH_COLUMNS = (
    "mode",
    "path",
    "items",
    "hits",
    "runs",
    "replays",
    "tokens",
    "budget_tokens",
    "waste",
    "replay_ms",
)
MONOLITHIC_COLUMNS = (
    "metric",
    "n",
    "two_paths_ms",
    "monolithic_ms",
    "delta_pct",
    "ci95_low_pct",
    "ci95_high_pct",
    "noise_floor_pct",
    "verdict",
)
_SUMMARY_METRICS = ("mean", "p50", "p90", "p99", "max", "std", "gpu_mean")
_COPIED_REPLAY = ("replay_ms", "gpu_busy_ms", "launch_gap")
_COPIED_CAPTURE = ("capture_ms", "pool_bytes", "buffer_bytes")


def write_summary_csv(record: RunRecord, path: Path | str, overwrite: bool = False) -> Path:
    """Writes one row a mode and metric.

    Raises:
        UsageError: The file exists and `overwrite` is off.
        RecordFileError: The file could not be written.
    """
    (written,) = write_files({Path(path): csv_bytes(SUMMARY_COLUMNS, summary_rows(record))}, overwrite)
    return written


def write_per_budget_csv(record: RunRecord, path: Path | str, overwrite: bool = False) -> Path:
    """Writes one row a graph that was captured or replayed; only the header where there was none.

    Raises:
        UsageError: The file exists and `overwrite` is off.
        RecordFileError: The file could not be written.
    """
    rows = per_budget_rows(record["graph"] or {})
    (written,) = write_files({Path(path): csv_bytes(PER_BUDGET_COLUMNS, rows)}, overwrite)
    return written


def write_per_path_csv(record: RunRecord, path: Path | str, overwrite: bool = False) -> Path:
    """Writes one row a graph mode and encoder path.

    Raises:
        UsageError: The file exists and `overwrite` is off.
        RecordFileError: The file could not be written.
    """
    rows = per_path_rows(record["graph"] or {})
    (written,) = write_files({Path(path): csv_bytes(PER_PATH_COLUMNS, rows)}, overwrite)
    return written


def write_monolithic_csv(record: RunRecord, path: Path | str, overwrite: bool = False) -> Path:
    """Writes one row a metric of two paths against monolithic graphs; only the header where they were not measured.

    Raises:
        UsageError: The file exists and `overwrite` is off.
        RecordFileError: The file could not be written.
    """
    (written,) = write_files({Path(path): csv_bytes(MONOLITHIC_COLUMNS, monolithic_rows(record))}, overwrite)
    return written


def summary_rows(record: RunRecord) -> Iterable[dict[str, Any]]:
    """The rows of `summary.csv`; None where nothing was measured, keys left out where a column does not apply."""
    comparison = record["comparison"] or {}
    against_eager = {GRAPH: comparison, MONOLITHIC: comparison.get("monolithic_against_eager")}
    for mode, entry in record["summary"].items():
        differences = against_eager.get(mode)
        for metric in _SUMMARY_METRICS:
            row = {"mode": mode, "metric": metric, "value": entry[f"{metric}_ms"], "unit": "ms", "n": entry["n"]}
            if differences and metric in METRICS:
                row |= _difference_cells(differences[metric])
            yield row
        outliers = entry["outliers"]
        yield {"mode": mode, "metric": "outliers", "value": outliers, "unit": "requests", "n": entry["n"]}


def _difference_cells(difference: Mapping[str, Any]) -> dict[str, Any]:
    low, high = difference["ci95"] or (None, None)
    copied = {name: difference[name] for name in ("delta_pct", "noise_floor_pct", "verdict")}
    return copied | {"ci95_low_pct": low, "ci95_high_pct": high}


def monolithic_rows(record: RunRecord) -> Iterable[dict[str, Any]]:
    """The rows of `monolithic.csv`; none where no monolithic graph was measured."""
    differences = (record["comparison"] or {}).get("two_paths_against_monolithic", {})
    for metric, difference in differences.items():
        two_paths, monolithic = (record["summary"][mode] for mode in (GRAPH, MONOLITHIC))
        yield {
            "metric": metric,
            "n": two_paths["n"],
            "two_paths_ms": two_paths[f"{metric}_ms"],
            "monolithic_ms": monolithic[f"{metric}_ms"],
            **_difference_cells(difference),
        }


def per_path_rows(graph: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    """The rows of `per_path.csv`, from the `graph` section of a record; none where it counted no paths."""
    sides = {GRAPH: (graph, graph.get("per_path", []))}
    if "monolithic" in graph:
        sides[MONOLITHIC] = (graph["monolithic"], graph["monolithic"]["parts"])
    for mode, (section, paths) in sides.items():
        if not paths:
            continue
        whole = {**section, "path": "all", "runs": section["path_runs"]}
        for row in (*paths, whole):
            yield {
                "mode": mode,
                **{name: row.get(name) for name in ("path", "items", "hits", "runs", "replays", "waste", "replay_ms")},
                "tokens": row["tokens_replayed"],
                "budget_tokens": row["budget_tokens_replayed"],
            }


def per_budget_rows(graph: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    """The rows of `per_budget.csv`, from the `graph` section of a record."""
    captured = {graph_key(entry): entry for entry in all_graphs(graph, "captured")}
    replayed = {graph_key(entry): entry for entry in all_graphs(graph, "per_budget")}
    for key in sorted(captured.keys() | replayed.keys()):
        path, token_budget, segment_slots, axis_key = key
        replay = replayed.get(key, {})
        waste = replay.get("waste")
        yield {
            "path": path,
            "token_budget": token_budget,
            "segment_slots": segment_slots,
            "axis_key": "x".join(map(str, axis_key)),
            **{name: replay.get(name, 0) for name in ("replays", "items", "tokens")},
            "fill": None if waste is None else 1 - waste,
            "waste": waste,
            **{name: replay.get(name) for name in _COPIED_REPLAY},
            **{name: captured.get(key, {}).get(name) for name in _COPIED_CAPTURE},
        }


def graph_key(entry: Mapping[str, Any]) -> tuple[str, int, int, tuple[int, ...]]:
    """What tells a graph of a record from its others."""
    return entry["path"], entry["token_budget"], entry["segment_slots"], tuple(entry["axis_key"])
