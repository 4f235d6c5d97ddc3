"""Folders of saved runs for tests: the stored example, changed as a test needs."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).parent / "data" / "run-v1"


def write_run(
    folder: Path,
    change: Callable[[dict[str, Any]], None] = lambda record: None,
    wall_ms: Callable[[dict[str, str]], float] | None = None,
    requests: int | None = None,
) -> Path:
    """Writes a copy of the example run.

    Args:
        folder: Where it goes.
        change: Changes its record in place.
        wall_ms: New wall time of a sample, from its row; None keeps all.
        requests: Keep only the samples of so many requests.
    """
    folder.mkdir(parents=True)
    record = json.loads((EXAMPLE / "run.json").read_text(encoding="utf-8"))
    change(record)
    (folder / "run.json").write_text(json.dumps(record), encoding="utf-8")
    with (EXAMPLE / "samples.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if requests is None or int(row["request"]) < requests]
    with (folder / "samples.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            time_ms = float(row["wall_ms"]) if wall_ms is None else wall_ms(row)
            writer.writerow(row | {"wall_ms": f"{time_ms:.6f}"})
    return folder


def scale(**factors: float) -> Callable[[dict[str, str]], float]:
    """Wall times multiplied by mode; `eager_repeat` goes with `eager`."""

    def wall_ms(row: dict[str, str]) -> float:
        mode = "eager" if row["mode"] == "eager_repeat" else row["mode"]
        return float(row["wall_ms"]) * factors.get(mode, 1.0)

    return wall_ms


def set_field(*path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """A change of one field of a record."""

    def change(record: dict[str, Any]) -> None:
        for name in path[:-1]:
            record = record[name]
        record[path[-1]] = value

    return change


def on_a_cpu(record: dict[str, Any]) -> None:
    """The run replayed on a CPU."""
    record["graph"]["mode"] = "cpu-replay"
    record["environment"] |= {"device": "CPU", "device_type": "cpu", "attn_backend": "TORCH_SDPA"}
    reason = "replay on a CPU saves no launches; no speed-up is claimed here"
    record["comparison"] |= {"verdict": "invalid", "verdict_reason": reason}
    for metric in ("mean", "p50", "p99"):
        record["comparison"][metric]["verdict"] = "invalid"


def nothing_measured(record: dict[str, Any]) -> None:
    """The run ended before it measured anything."""
    record |= {"status": "error", "status_reason": "out of memory: 80 GiB needed", "summary": {}, "comparison": {}}
    record |= {"environment": {}, "correctness": None}
    counters = ("items", "hits", "misses", "replays", "path_runs", "partial_hits", "tokens_replayed")
    record["graph"] |= dict.fromkeys(counters, 0) | {"hit_rate": None, "waste": None, "mode": None, "dropped": []}
    record["graph"] |= {"per_budget": [], "captured": [], "misses_by_reason": {}, "pool_bytes": None, "capture_s": None}
