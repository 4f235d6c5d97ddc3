"""Writes the CSV tables of a backend comparison: one row a backend and mode, or a case of attention alone.

Both are tidy: one header row, fixed columns, one observation a row. A cell is empty where nothing was measured.

`backends.csv`, one row a backend and mode:
    backend, mode            registry name; `eager` or `graph`
    status, reason           `ok`, or why there are no figures
    implementation           what ran behind the name
    requests                 requests that the times describe
    mean_ms, p50_ms, p90_ms, p99_ms, max_ms   latency of a request, wall clock
    gpu_mean_ms              mean time between device events around the call
    delta_mean_pct, delta_mean_low_pct, delta_mean_high_pct, verdict_mean   graph minus the same backend's eager in
                             percent, negative = graph faster, with its 95 % interval and verdict; graph rows only
    delta_p99_pct, delta_p99_low_pct, delta_p99_high_pct, verdict_p99       the same of the 99th percentile
    delta_best_pct, delta_best_low_pct, delta_best_high_pct, verdict_best   mean minus that of the fastest of all
    call_busy_ms, call_busy_share   GPU-busy time of some whole calls, and its share of their latency
    replay_ms, replay_busy_ms   a replay alone: wall clock and GPU-busy time; graph rows only
    launch_gap               wall time of a replay over its GPU-busy time; graph rows only
    error_vs_float32         largest relative L2 distance of an item from the float32 reference
    hits, misses, replays, waste   what the graphs did with the workload; graph rows only
    pool_bytes, buffer_bytes, capture_s   what the graphs cost; graph rows only

`micro.csv`, one row a backend and case: the columns of `vitgraph.measure.micro.run_micro`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vitgraph.records.compare_record import CompareRecord
from vitgraph.report.files import csv_bytes, write_files

BACKENDS_FILE, MICRO_FILE = "backends.csv", "micro.csv"
_TIMES = ("mean_ms", "p50_ms", "p90_ms", "p99_ms", "max_ms", "gpu_mean_ms")
_GRAPH_ONLY = ("pool_bytes", "buffer_bytes", "capture_s")
_USE = ("hits", "misses", "replays", "waste")


def _delta_columns(name: str) -> tuple[str, ...]:
    return f"delta_{name}_pct", f"delta_{name}_low_pct", f"delta_{name}_high_pct", f"verdict_{name}"


BACKEND_COLUMNS = (
    *("backend", "mode", "status", "reason", "implementation", "requests"),
    *_TIMES,
    *_delta_columns("mean"),
    *_delta_columns("p99"),
    *_delta_columns("best"),
    *("call_busy_ms", "call_busy_share", "replay_ms", "replay_busy_ms", "launch_gap", "error_vs_float32"),
    *_USE,
    *_GRAPH_ONLY,
)
MICRO_COLUMNS = (
    *("backend", "implementation", "status", "reason", "sweep", "segment_length", "segments", "slots", "rows"),
    *("timed_as", "milliseconds", "first_call_ms", "relative_error", "limit_ms", "limit_share"),
)


def write_backends_csv(record: CompareRecord, path: Path, overwrite: bool = False) -> Path:
    """Writes one row a backend and mode.

    Raises:
        UsageError: The file exists and `overwrite` is off.
        RecordFileError: The file could not be written.
    """
    (written,) = write_files({path: backends_csv(record)}, overwrite)
    return written


def backends_csv(record: CompareRecord) -> bytes:
    """The content of `backends.csv`."""
    return csv_bytes(BACKEND_COLUMNS, _backend_rows(record))


def write_micro_csv(rows: Sequence[Mapping[str, Any]], path: Path, overwrite: bool = False) -> Path:
    """Writes one row a backend and case of attention alone.

    Raises:
        UsageError: The file exists and `overwrite` is off.
        RecordFileError: The file could not be written.
    """
    (written,) = write_files({path: micro_csv(rows)}, overwrite)
    return written


def micro_csv(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """The content of `micro.csv`."""
    return csv_bytes(MICRO_COLUMNS, rows)


def _backend_rows(record: CompareRecord) -> Iterable[Mapping[str, Any]]:
    standings = {(entry["backend"], entry["mode"]): entry for entry in record["comparison"].get("standings", [])}
    for row in record.rows:
        for mode, state in row["modes"].items():
            latency, busy = row[mode] or {}, row["busy"][mode] or {}
            cells = {
                "backend": row["requested"],
                "mode": mode,
                "status": state["status"],
                "reason": state["reason"],
                "implementation": row["implementation"],
                "requests": latency.get("n"),
                **{name: latency.get(name) for name in _TIMES},
                **_delta_cells("best", standings.get((row["requested"], mode))),
                "call_busy_ms": busy.get("gpu_busy_ms"),
                "call_busy_share": busy.get("share"),
                "error_vs_float32": row["error_vs_float32"][mode],
            }
            if mode == "graph":
                gains = row["improvement"] or {}
                cells |= {**_delta_cells("mean", gains.get("mean")), **_delta_cells("p99", gains.get("p99"))}
                cells |= {"replay_ms": row["replay_ms"], "replay_busy_ms": row["gpu_busy_ms"]}
                cells |= {"launch_gap": row["launch_gap"], **{name: row[name] for name in _GRAPH_ONLY}}
                cells |= {name: (row["use"] or {}).get(name) for name in _USE}
            yield cells


def _delta_cells(name: str, entry: Mapping[str, Any] | None) -> dict[str, Any]:
    if entry is None:
        return {}
    low, high = entry["ci95"] or (None, None)
    return dict(zip(_delta_columns(name), (entry["delta_pct"], low, high, entry["verdict"]), strict=True))
