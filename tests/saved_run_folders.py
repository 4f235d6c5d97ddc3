"""Folders of saved runs for tests: what a command left, and the stored example, changed as a test needs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from vitgraph.records.record import BenchRecord, CompareRecord
from vitgraph.records.sample_table import Samples, SampleWriter, read_samples
from vitgraph.records.store import SAMPLES_FILE, ResultFolder, read_record

EXAMPLE = Path(__file__).parent / "data" / "bench-run"


def read_bench(folder: Path) -> BenchRecord:
    """The record of a bench."""
    record = read_record(folder, "bench")
    assert isinstance(record, BenchRecord)
    return record


def read_compare(folder: Path) -> CompareRecord:
    """The record of a backend comparison."""
    record = read_record(folder, "compare-backends")
    assert isinstance(record, CompareRecord)
    return record


@cache
def example_samples() -> Samples:
    """The samples of the stored example, which nobody changes."""
    return read_samples(EXAMPLE / SAMPLES_FILE)


def write_run(
    folder: Path,
    change: Callable[[dict[str, Any]], None] = lambda record: None,
    wall_ms: Callable[[dict[str, str]], float] | None = None,
    requests: int | None = None,
) -> Path:
    """Writes a copy of the example run.

    Args:
        folder: Where it goes.
        change: Changes its record, in the form of its file, in place.
        wall_ms: New wall time of a sample, from its row; None keeps all.
        requests: Keep only the samples of so many requests.
    """
    record = read_record(EXAMPLE).model_dump(mode="json")
    change(record)
    samples = example_samples()
    frame = samples.frame if requests is None else samples.frame[samples.frame["call"] < requests]
    if wall_ms is not None:
        frame = frame.assign(wall_ms=[wall_ms(row) for row in frame.to_dict("records")])
    with ResultFolder(folder) as results:
        with SampleWriter(results) as writer:
            writer.write_table(Samples(frame))
        results.save(BenchRecord.model_validate(record))
    return folder


def scale(**factors: float) -> Callable[[dict[str, str]], float]:
    """Wall times multiplied by series; `eager_repeat` goes with `eager`."""

    def wall_ms(row: dict[str, str]) -> float:
        return float(row["wall_ms"]) * factors.get(row["series"].removesuffix("_repeat"), 1.0)

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
    record["environment"] |= {"device": "CPU", "device_type": "cpu"}
    record["environment"]["encoder"]["attn_backend"] = "TORCH_SDPA"
    record["result"]["graph"]["mode"] = "cpu-replay"
    comparison = record["result"]["comparison"]
    reason = "replay on a CPU saves no launches; no speed-up is claimed here"
    comparison |= {"verdict": "invalid", "verdict_reason": reason, "invalid_reasons": [reason]}
    for metric in ("mean", "p50", "p99"):
        comparison["pairs"][0][metric]["verdict"] = "invalid"
