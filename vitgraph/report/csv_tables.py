"""Writes the CSV tables that are derived from a run record: its latency summary and its graphs.

Both are tidy: one header row, fixed columns, one fact a row. A cell is empty where nothing was measured.

`summary.csv`, one row a mode and metric:
    mode                     `eager`, `graph` or `hf`
    metric                   `mean`, `p50`, `p90`, `p99`, `max`, `std`, `gpu_mean` or `outliers`
    value, unit              the figure, in `ms` a request or in `requests`
    n                        requests that it describes
    delta_pct                graph minus eager in percent of eager, negative = graph faster; graph rows only
    ci95_low_pct, ci95_high_pct  ends of the 95 % interval of `delta_pct`
    noise_floor_pct          what eager differs from itself in the metric
    verdict                  `faster`, `slower`, `same`, `undecided` or `invalid`

`per_budget.csv`, one row a captured or replayed graph:
    path, token_budget, segment_slots, axis_key   the graph; axis keys as `28x36`
    replays, items, tokens   what was replayed with it
    fill, waste              share of its rows that were used, and the rest
    replay_ms, gpu_busy_ms, launch_gap   mean wall time of a replay, its GPU time, and their ratio
    capture_ms, pool_bytes, buffer_bytes   what the graph cost to capture and to hold
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from vitgraph.records import RunRecord
from vitgraph.report.files import csv_bytes, write_files
from vitgraph.stats import METRICS

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


def summary_rows(record: RunRecord) -> Iterable[dict[str, Any]]:
    """The rows of `summary.csv`; None where nothing was measured, keys left out where a column does not apply."""
    comparison = record["comparison"] or {}
    for mode, entry in record["summary"].items():
        for metric in _SUMMARY_METRICS:
            row = {"mode": mode, "metric": metric, "value": entry[f"{metric}_ms"], "unit": "ms", "n": entry["n"]}
            if mode == "graph" and metric in METRICS and comparison:
                compared = comparison[metric]
                low, high = compared["ci95"] or (None, None)
                row |= {"delta_pct": compared["delta_pct"], "ci95_low_pct": low, "ci95_high_pct": high}
                row |= {"noise_floor_pct": compared["noise_floor_pct"], "verdict": compared["verdict"]}
            yield row
        outliers = entry["outliers"]
        yield {"mode": mode, "metric": "outliers", "value": outliers, "unit": "requests", "n": entry["n"]}


def per_budget_rows(graph: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    """The rows of `per_budget.csv`, from the `graph` section of a record."""
    captured = {graph_key(entry): entry for entry in graph.get("captured", [])}
    replayed = {graph_key(entry): entry for entry in graph.get("per_budget", [])}
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
