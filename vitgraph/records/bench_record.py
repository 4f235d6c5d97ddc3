"""The saved record of a run: `run.json` and `samples.csv`, their rules, and what is derived from the samples.

Format history (`SCHEMA_VERSION`):
    1: first version.

In files, not measured is null and never 0, and a number that is not finite is the string "nan", "inf" or "-inf".
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vitgraph.errors import UsageError
from vitgraph.records.files import RecordFileError, os_reason, read_text, refuse_to_replace, write_atomically
from vitgraph.records.samples import (
    MODES,
    RUN_FILE,
    SAMPLE_COLUMNS,
    SAMPLES_FILE,
    LoadedSamples,
    Sample,
    SampleWriter,
    load_samples,
)

__all__ = [
    "CPU_REPLAY_REASON",
    "MODES",
    "SAMPLE_COLUMNS",
    "SCHEMA_VERSION",
    "LoadedSamples",
    "RecordFileError",
    "RunRecord",
    "Sample",
    "SampleWriter",
    "load_samples",
    "ranks_of",
]

SCHEMA_VERSION = 1
STATUSES = ("complete", "interrupted", "error")
CPU_REPLAY_REASON = "replay on a CPU saves no launches; no speed-up is claimed here"
"""Goes into `build_comparison(invalid_reasons=...)` when the replays ran on a CPU."""
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
    "summary",
    "comparison",
    "graph",
    "correctness",
    "samples_file",
)

Json = dict[str, Any]
Migration = Callable[[Json], Json]
MIGRATIONS: dict[int, Migration] = {}
"""Turns a record of the version it is keyed by into one of the next version; empty while there is only version 1."""

_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_MEASURED_SECTIONS = ("summary", "comparison", "graph", "correctness")


@dataclass(slots=True)
class RunRecord:
    """A run as saved in `run.json`, kept as the dictionary that the file holds.

    What the measured sections hold; times are in milliseconds, shares between 0 and 1:
        summary: From `build_summary`.
        comparison: From `build_comparison`, or null.
        graph: `mode` (`cuda` or `cpu-replay`), `policy`; counters `items`, `hits`, `misses`, `hit_rate`,
            `misses_by_reason`, `partial_hits` (misses with some path replayed), `replays`, `path_runs`; rows
            `tokens_replayed`, `budget_tokens_replayed`, `waste`; `per_path`, one entry an encoder path; `per_budget`,
            `captured` and `dropped`, one entry a graph (`path`, `token_budget`, `segment_slots`, `axis_key`, then its
            figures or its `reason`); `pool_bytes`, `buffer_bytes`, `capture_s`, `launch_gap` (wall time of a
            replay over its GPU-busy time), `host_steps_ms`, `call_overheads`. `monolithic` holds
            the same of the monolithic graphs, with the rows of either path in them as `parts`. What a run did not
            reach is absent or null.
        correctness: `checked` calls, `max_rel_l2`, `tolerance`, `status`; null where nothing was checked.

    Attributes:
        data: The fields of `TOP_LEVEL_FIELDS`.
        folder: Where the record was loaded from or saved to; None while it is only in memory.
    """

    data: Json
    folder: Path | None = field(default=None, compare=False)

    def __getitem__(self, name: str) -> Any:
        return self.data[name]

    @property
    def is_cpu_replay(self) -> bool:
        """True when graph mode ran its replays on a CPU, where there are no launches to save."""
        return bool(self.data["graph"]) and self.data["graph"].get("mode") == "cpu-replay"

    @property
    def model_name(self) -> str:
        """Model as given (`settings.model.model`)."""
        return str(self.data["settings"]["model"]["model"])

    @property
    def backend_requested(self) -> str | None:
        """Attention backend asked for (`settings.model.attn_backend`); None where the choice was left open."""
        requested = self.data["settings"]["model"].get("attn_backend")
        return None if requested == "auto" else requested

    @property
    def backend_used(self) -> str | None:
        """Attention backend that ran (`environment.attn_backend`); None where the run ended before it was chosen."""
        return self.data["environment"].get("attn_backend")

    @property
    def device_name(self) -> str | None:
        """Device that was measured (`environment.device`); None where it is not known."""
        return self.data["environment"].get("device")

    @property
    def ranks(self) -> int:
        """Processes that shared every call (`settings.parallel.ranks`)."""
        return ranks_of(self.data["settings"])

    def validate(self) -> None:
        """Checks the rules of the format.

        Raises:
            UsageError: A field is missing or breaks a rule; the message names the field and its values.
        """
        _check_record(self.data)

    def save(self, folder: Path | str, overwrite: bool = False) -> Path:
        """Writes `run.json` into `folder`: whole or not at all.

        Returns:
            The file.

        Raises:
            UsageError: The record breaks a rule, or the file exists and `overwrite` is off.
            RecordFileError: The file could not be written; the message says whether the samples are saved.
        """
        self.validate()
        folder = Path(folder)
        ordered = {name: self.data[name] for name in TOP_LEVEL_FIELDS}
        text = json.dumps(encode(ordered), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        path = folder / RUN_FILE
        if not overwrite:
            refuse_to_replace(path)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(path, text.encode("utf-8"))
        except OSError as error:
            samples = folder / SAMPLES_FILE
            kept = f"the samples in {samples}" if samples.exists() else "nothing"
            raise RecordFileError(
                f"cannot write {path}: {os_reason(error)}. Saved: {kept}. Not saved: settings, summary and counters"
            ) from error
        self.folder = folder
        return path

    @classmethod
    def load(cls, path: Path | str) -> RunRecord:
        """Reads a record of this or an older version.

        Args:
            path: The folder of the run, or its `run.json`.

        Raises:
            UsageError: The file is missing, is not a record, breaks a rule, or is of a newer version.
        """
        path = Path(path)
        if path.is_dir():
            path = path / RUN_FILE
        if not path.exists() and (path.parent / SAMPLES_FILE).exists():
            raise UsageError(
                f"{path} does not exist, but {SAMPLES_FILE} beside it does: the run ended before its record was saved. "
                "The samples are complete up to there; settings and counters are not known"
            )
        try:
            data = json.loads(read_text(path))
        except json.JSONDecodeError as error:
            raise UsageError(f"{path} is not valid JSON ({error}); give the folder of a saved run") from error
        record = cls(_migrate(data, path), path.parent)
        for name in _MEASURED_SECTIONS:
            if name in record.data:
                record.data[name] = decode(record.data[name])
        record.validate()
        return record

    def load_samples(self) -> LoadedSamples:
        """Reads the samples that belong to this record.

        Raises:
            UsageError: The record is not on disk, or its samples cannot be read.
        """
        if self.folder is None:
            raise UsageError("this record has not been saved, so it has no samples file; save it first")
        return load_samples(self.folder / self.data["samples_file"])


def ranks_of(settings: Mapping[str, Any]) -> int:
    """Processes that shared every call, from a record's settings; 1 in records that are older than ranks."""
    return int(settings.get("parallel", {}).get("ranks", 1))


def encode(value: Any, where: str = "record") -> Any:
    """Turns a value into what strict JSON can hold; numbers that are not finite become strings.

    Raises:
        TypeError: A value has no place in a record; the message names the field.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping):
        return {str(name): encode(entry, f"{where}.{name}") for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [encode(entry, f"{where}[{index}]") for index, entry in enumerate(value)]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        return encode(value.item(), where)
    raise TypeError(f"{where} is a {type(value).__name__}, which a record cannot hold; convert it before saving")


def decode(value: Any) -> Any:
    """Turns the strings that stand for numbers that are not finite back into them, at any depth."""
    if isinstance(value, dict):
        return {name: decode(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [decode(entry) for entry in value]
    return _NOT_FINITE.get(value, value) if isinstance(value, str) else value


def _migrate(data: Any, path: Path) -> Json:
    version = data.get("schema_version") if isinstance(data, dict) else None
    if not isinstance(version, int) or isinstance(version, bool):
        raise UsageError(f"{path} has no whole number schema_version, so it is no vitgraph record")
    if version > SCHEMA_VERSION:
        raise UsageError(
            f"{path} has schema_version {version}; this vitgraph reads up to {SCHEMA_VERSION}. "
            "Update vitgraph to open it"
        )
    while version < SCHEMA_VERSION:
        if version not in MIGRATIONS:
            raise UsageError(f"{path} has schema_version {version}; the oldest that can be read is 1")
        data = MIGRATIONS[version](data)
        version += 1
    return data


def check_frame(data: Json, fields: Sequence[str], schema_version: int) -> None:
    """Checks what records of all kinds have alike: their fields, their status, and a reason where they are incomplete.

    Raises:
        UsageError: A field is missing or unknown, or the status breaks a rule.
    """
    missing = [name for name in fields if name not in data]
    unknown = [name for name in data if name not in fields]
    if missing or unknown:
        raise UsageError(
            f"the record lacks {', '.join(missing) or 'nothing'} and has unknown {', '.join(unknown) or 'nothing'}; "
            f"version {schema_version} has exactly {', '.join(fields)}"
        )
    status = data["status"]
    if status not in STATUSES:
        raise UsageError(f"status is {status!r}; it must be one of {', '.join(STATUSES)}")
    if (status == "complete") == bool(data["status_reason"]):
        raise UsageError(
            f"status {status!r} with reason {data['status_reason']!r}; exactly the incomplete have a reason"
        )


def _check_record(data: Json) -> None:
    check_frame(data, TOP_LEVEL_FIELDS, SCHEMA_VERSION)
    if data["schema_version"] != SCHEMA_VERSION or data["kind"] != "bench":
        raise UsageError(
            f"the record is schema_version {data['schema_version']!r}, kind {data['kind']!r}; "
            f"this one must be {SCHEMA_VERSION} and 'bench'"
        )
    if data["status"] == "complete" and not (data["summary"] and data["graph"]):
        raise UsageError("a complete record needs its summary and graph sections; use status 'interrupted' or 'error'")
    if data["graph"]:
        _check_counters(data["graph"])
        if "monolithic" in data["graph"]:
            _check_counters(data["graph"]["monolithic"])


def _check_counters(graph: Json) -> None:
    items, hits, misses = graph["items"], graph["hits"], graph["misses"]
    if hits + misses != items:
        raise UsageError(f"graph counters contradict: {hits} hits + {misses} misses are not {items} items")
    by_reason = sum(graph["misses_by_reason"].values())
    if by_reason != misses:
        raise UsageError(f"graph counters contradict: misses by reason add up to {by_reason}, misses are {misses}")
    expected = hits / items if items else None
    rate = graph["hit_rate"]
    if (rate is None) != (expected is None) or (rate is not None and abs(rate - expected) > 1e-6):
        raise UsageError(f"graph hit_rate is {rate}; {hits} of {items} items make it {expected}")
