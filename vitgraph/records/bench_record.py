"""A run of bench as reports took it before they took types; goes when the last of those reports does."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vitgraph.errors import UsageError
from vitgraph.records.old_forms import old_form
from vitgraph.records.record import BenchRecord
from vitgraph.records.sample_table import Samples, read_samples
from vitgraph.records.samples import LoadedSamples, Sample
from vitgraph.records.store import beside, read_record, record_file
from vitgraph.records.summary import CPU_REPLAY_REASON

__all__ = ["CPU_REPLAY_REASON", "RunRecord", "Sample", "decode", "encode", "ranks_of"]

Json = dict[str, Any]
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@dataclass(slots=True)
class RunRecord:
    """A run as dictionaries, with its types in `typed`."""

    data: Json
    folder: Path | None = field(default=None, compare=False)
    typed: BenchRecord | None = field(default=None, compare=False)

    def __getitem__(self, name: str) -> Any:
        return self.data[name]

    @classmethod
    def of(cls, record: BenchRecord, folder: Path | None = None) -> RunRecord:
        """The dictionaries of a record."""
        return cls(old_form(record), folder, record)

    @classmethod
    def load(cls, path: Path) -> RunRecord:
        """Reads a record; raises as `read_record` does."""
        record = read_record(path, "bench")
        assert isinstance(record, BenchRecord)
        return cls.of(record, record_file(path).parent)

    def as_json(self) -> Json:
        """The record as its file has it."""
        assert self.typed is not None
        return self.typed.model_dump(mode="json")

    @property
    def is_cpu_replay(self) -> bool:
        return bool(self.data["graph"]) and self.data["graph"].get("mode") == "cpu-replay"

    @property
    def model_name(self) -> str:
        return str(self.data["settings"]["model"]["model"])

    @property
    def backend_requested(self) -> str | None:
        requested = self.data["settings"]["model"].get("attn_backend")
        return None if requested == "auto" else requested

    @property
    def backend_used(self) -> str | None:
        return self.data["environment"].get("attn_backend")

    @property
    def device_name(self) -> str | None:
        return self.data["environment"].get("device")

    @property
    def ranks(self) -> int:
        return ranks_of(self.data["settings"])

    def load_samples(self) -> LoadedSamples:
        """Reads the samples that belong to this record.

        Raises:
            UsageError: The record is not on disk, or its samples cannot be read.
        """
        if self.folder is None or self.data.get("samples_file") is None:
            raise UsageError("this record has no samples file; give the folder of a run that measured")
        table = read_samples(beside(self.folder / "run.json", self.data["samples_file"]))
        return LoadedSamples(old_samples(table), table.warning)


def old_samples(table: Samples) -> list[Sample]:
    """The calls of a table, times in milliseconds a request."""
    found = []
    for row in table.calls.to_dict("records"):
        requests = len(str(row["requests"]).split())
        gpu_ms = None if math.isnan(row["gpu_ms"]) else row["gpu_ms"] / requests
        counts = ("position", "items", "tokens", "hits", "misses", "replays", "round")
        found.append(
            Sample(
                request=int(row["call"]),
                mode=str(row["series"]),
                wall_ms=row["wall_ms"] / requests,
                gpu_ms=gpu_ms,
                input_rows=0 if math.isnan(row["input_rows"]) else int(row["input_rows"]),
                **{name: int(row[name]) for name in counts},
            )
        )
    return found


def ranks_of(settings: Mapping[str, Any]) -> int:
    """Processes that shared every call, from a record's settings."""
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
