"""Folders of saved runs for tests: the stored example, changed as a test needs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from record_dicts import old_form
from records_of_dicts import record_of

from vitgraph.records.sample_table import Samples, SampleWriter, read_samples
from vitgraph.records.store import SAMPLES_FILE, ResultFolder, read_record

EXAMPLE = Path(__file__).parent / "data" / "bench-run"


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
    record = old_form(read_record(EXAMPLE))
    change(record)
    samples = read_samples(EXAMPLE / SAMPLES_FILE)
    frame = samples.frame if requests is None else samples.frame[samples.frame["call"] < requests]
    if wall_ms is not None:
        rows = [
            {"mode": row["series"], "request": str(row["call"]), "round": str(row["round"]), "wall_ms": row["wall_ms"]}
            for row in frame.to_dict("records")
        ]
        frame = frame.assign(wall_ms=[wall_ms(row) for row in rows])
    with ResultFolder(folder) as results:
        with SampleWriter(results) as writer:
            writer.write_table(Samples(frame))
        results.save(record_of(record))
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
