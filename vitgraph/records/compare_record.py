"""The saved record of a backend comparison: `run.json` of kind `compare-backends`, its rows and its rules.

Format history (`SCHEMA_VERSION`):
    1: first version.

As in every record, not measured is null and never 0, and a number that is not finite is a string.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vitgraph.errors import BackendError, IncorrectOutputError, NothingReplayedError, UsageError, VitgraphError
from vitgraph.measure.compare_results import COMPARED_MODES, OK
from vitgraph.records.bench_record import check_frame, decode, encode
from vitgraph.records.compare_samples import BACKEND_SAMPLES_FILE, BackendSample, load_backend_samples
from vitgraph.records.files import RecordFileError, os_reason, read_text, refuse_to_replace, write_atomically
from vitgraph.records.samples import EAGER, GRAPH, RUN_FILE

KIND, COMPILE_KIND = "compare-backends", "compile-rows"
"""Both have the same record: rows of two modes, each checked against float32."""

SCHEMA_VERSION = 1
UNAVAILABLE, UNSUPPORTED, CAPTURE_FAILED = "unavailable", "unsupported", "capture_failed"
INCORRECT, OUT_OF_MEMORY, ERROR = "incorrect", "out_of_memory", "error"
ROW_STATUSES = (OK, UNAVAILABLE, UNSUPPORTED, CAPTURE_FAILED, INCORRECT, OUT_OF_MEMORY, ERROR)
CUDA, CPU_REPLAY = "cuda", "cpu-replay"

TOP_LEVEL_FIELDS = (
    "schema_version",
    "kind",
    "status",
    "status_reason",
    "vitgraph_version",
    "created_at",
    "command",
    "settings",
    "environment",
    "workload",
    "backends",
    "comparison",
    "recommendation",
    "samples_file",
)

Json = dict[str, Any]


@dataclass(slots=True)
class CompareRecord:
    """A comparison as saved in `run.json`, kept as the dictionary that the file holds.

    What the measured sections hold; times are in milliseconds a request, shares between 0 and 1:
        backends: One entry a backend: `requested`, `used`, `implementation`; `status` and `reason` (the first mode
            that is not `ok`), and those of each mode under `modes`; `eager` and `graph`, latencies as in a bench
            record, null unless `ok`; `improvement` by metric (graph against its own eager); `slower_than_eager`;
            `error_vs_float32` by mode; `use` (hits, misses by reason, replays and waste); `captured`, `dropped`,
            `pool_bytes`, `buffer_bytes`, `capture_s`, `plan_build_ms`; `replay_ms`, `gpu_busy_ms` and `launch_gap` of
            a replay alone, averaged over the most used graphs by use; `busy` by mode: GPU-busy time of some whole
            calls and its share of their latency; `verdict_vs_best`: the faster mode against the best of all.
        comparison: `mode` (`cuda` or `cpu-replay`), `isolated`, `reference` (what outputs were checked against, and
            how far they may be), `invalid_reasons`, `requests`, `rounds`, `unpaired_samples`, `noise_floor_pct` by
            mode and metric, and `standings`, every measured backend and mode with the fastest first.
        recommendation: `backend`, `mode`, `sure` (`clear` or `undecided`), `fastest_in_share`, `text`.

    Attributes:
        data: The fields of `TOP_LEVEL_FIELDS`.
        folder: Where the record was loaded from or saved to; None while it is only in memory.
    """

    data: Json
    folder: Path | None = field(default=None, compare=False)

    def __getitem__(self, name: str) -> Any:
        return self.data[name]

    @property
    def rows(self) -> list[Json]:
        return self.data["backends"]

    @property
    def is_cpu_replay(self) -> bool:
        """True when graph mode ran its replays on a CPU, where there are no launches to save."""
        return self.data["comparison"].get("mode") == CPU_REPLAY

    @property
    def model_name(self) -> str:
        return str(self.data["settings"]["model"]["model"])

    @property
    def device_name(self) -> str | None:
        """Device that was measured; None where the run ended before it was known."""
        return self.data["environment"].get("device")

    def failure(self) -> VitgraphError | None:
        """What a finished comparison must not exit with 0 for: nothing measured, or no graph replayed."""
        measured = {mode for row in self.rows for mode in COMPARED_MODES if row["modes"][mode]["status"] == OK}
        if GRAPH in measured:
            return None
        reasons = "; ".join(f"{row['requested']}: {row['reason']}" for row in self.rows)
        if EAGER in measured:
            return NothingReplayedError(f"no backend could be replayed as graphs, only eager was measured ({reasons})")
        if any(row["status"] == INCORRECT for row in self.rows):
            return IncorrectOutputError(f"no backend's outputs are right, so nothing was timed ({reasons})")
        return BackendError(f"no backend could be measured ({reasons})")

    def validate(self) -> None:
        """Checks the rules of the format.

        Raises:
            UsageError: A field is missing or breaks a rule; the message names the field and its values.
        """
        _check(self.data)

    def save(self, folder: Path, overwrite: bool = False) -> Path:
        """Writes `run.json` into `folder`: whole or not at all.

        Raises:
            UsageError: The record breaks a rule, or the file exists and `overwrite` is off.
            RecordFileError: The file could not be written.
        """
        self.validate()
        text = json.dumps(encode({name: self.data[name] for name in TOP_LEVEL_FIELDS}), indent=2, ensure_ascii=False)
        path = folder / RUN_FILE
        if not overwrite:
            refuse_to_replace(path)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(path, f"{text}\n".encode())
        except OSError as error:
            raise RecordFileError(
                f"cannot write {path}: {os_reason(error)}. Saved: the samples in {folder / BACKEND_SAMPLES_FILE}. "
                "Not saved: settings and results"
            ) from error
        self.folder = folder
        return path

    @classmethod
    def load(cls, path: Path, kind: str = KIND) -> CompareRecord:
        """Reads the record of a folder, or of its `run.json`.

        Args:
            path: One of them.
            kind: `KIND` or `COMPILE_KIND`.

        Raises:
            UsageError: The file is missing, is not such a record, breaks a rule, or is of a newer version.
        """
        path = path / RUN_FILE if path.is_dir() else path
        try:
            data = json.loads(read_text(path))
        except json.JSONDecodeError as error:
            raise UsageError(f"{path} is not valid JSON ({error}); give the folder of a saved run") from error
        if not isinstance(data, dict) or data.get("kind") != kind:
            raise UsageError(f"{path} is no record of kind {kind!r}; give the folder of one")
        for name in ("backends", "comparison", "recommendation"):
            if name in data:
                data[name] = decode(data[name])
        record = cls(data, path.parent)
        record.validate()
        return record

    def load_samples(self) -> list[BackendSample]:
        """Reads the samples that belong to this record.

        Raises:
            UsageError: The record is not on disk, or its samples cannot be read.
        """
        if self.folder is None:
            raise UsageError("this record has not been saved, so it has no samples file; save it first")
        return load_backend_samples(self.folder / self.data["samples_file"])


def empty_row(backend: str) -> Json:
    """The row of a backend that nothing is known of yet; both modes are `error` until they are measured."""
    return {
        "requested": backend,
        "used": None,
        "implementation": None,
        "status": ERROR,
        "reason": "the run ended before its turn",
        "modes": {mode: {"status": ERROR, "reason": "the run ended before its turn"} for mode in COMPARED_MODES},
        "eager": None,
        "graph": None,
        "improvement": None,
        "slower_than_eager": None,
        "error_vs_float32": dict.fromkeys(COMPARED_MODES),
        "use": None,
        "captured": None,
        "dropped": [],
        "pool_bytes": None,
        "buffer_bytes": None,
        "capture_s": None,
        "plan_build_ms": None,
        "replay_ms": None,
        "gpu_busy_ms": None,
        "launch_gap": None,
        "busy": dict.fromkeys(COMPARED_MODES),
        "verdict_vs_best": None,
    }


def set_status(row: Json, modes: Json) -> None:
    """Puts the statuses of both modes into a row, and the first one that is not `ok` over them."""
    row["modes"] = modes
    failed = [(mode, modes[mode]) for mode in COMPARED_MODES if modes[mode]["status"] != OK]
    if not failed:
        row["status"], row["reason"] = OK, None
        return
    mode, state = failed[0]
    is_shared = len({(other["status"], other["reason"]) for other in modes.values()}) == 1
    row["status"] = state["status"]
    row["reason"] = state["reason"] if is_shared else f"{mode}: {state['reason']}"


def _check(data: Json) -> None:
    check_frame(data, TOP_LEVEL_FIELDS, SCHEMA_VERSION)
    if data["schema_version"] != SCHEMA_VERSION:
        raise UsageError(
            f"the record has schema_version {data['schema_version']!r}; this vitgraph reads {SCHEMA_VERSION}. "
            "Update vitgraph to open a newer one"
        )
    for row in data["backends"]:
        _check_row(row)


def _check_row(row: Json) -> None:
    name = row["requested"]
    for where, state in ((name, row), *((f"{name}, {mode}", row["modes"][mode]) for mode in COMPARED_MODES)):
        if state["status"] not in ROW_STATUSES:
            raise UsageError(f"{where}: status is {state['status']!r}; it must be one of {', '.join(ROW_STATUSES)}")
        if (state["status"] == OK) == bool(state["reason"]):
            raise UsageError(f"{where}: status {state['status']!r} with reason {state['reason']!r}; ok alone has none")
    for mode in COMPARED_MODES:
        if row[mode] is not None and row["modes"][mode]["status"] != OK:
            raise UsageError(f"{name}, {mode}: a latency with status {row['modes'][mode]['status']!r}; only ok has one")
