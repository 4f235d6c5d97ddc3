"""A comparison as reports took it before they took types; goes when the last of those reports does."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vitgraph.errors import UsageError, VitgraphError
from vitgraph.records import record as records
from vitgraph.records.bench_record import old_samples
from vitgraph.records.candidates import COMPARE_KIND as KIND
from vitgraph.records.candidates import COMPILE_KIND, failure
from vitgraph.records.compare_samples import BackendSample
from vitgraph.records.old_forms import old_form
from vitgraph.records.sample_table import REPEAT_SUFFIX, read_samples
from vitgraph.records.samples import Sample
from vitgraph.records.store import beside, read_record, record_file

__all__ = ["COMPILE_KIND", "CPU_REPLAY", "CUDA", "KIND", "CompareRecord"]

CUDA, CPU_REPLAY = "cuda", "cpu-replay"

Json = dict[str, Any]


@dataclass(slots=True)
class CompareRecord:
    """A comparison as dictionaries, with its types in `typed`."""

    data: Json
    folder: Path | None = field(default=None, compare=False)
    typed: records.CompareRecord | None = field(default=None, compare=False)

    def __getitem__(self, name: str) -> Any:
        return self.data[name]

    @classmethod
    def of(cls, record: records.CompareRecord, folder: Path | None = None) -> CompareRecord:
        """The dictionaries of a record."""
        return cls(old_form(record), folder, record)

    @classmethod
    def load(cls, path: Path, kind: str = KIND) -> CompareRecord:
        """Reads a record; raises as `read_record` does."""
        record = read_record(path, kind)
        assert isinstance(record, records.CompareRecord)
        return cls.of(record, record_file(path).parent)

    @property
    def rows(self) -> list[Json]:
        rows: list[Json] = self.data["backends"]
        return rows

    def as_json(self) -> Json:
        """The record as its file has it."""
        assert self.typed is not None
        return self.typed.model_dump(mode="json")

    @property
    def is_cpu_replay(self) -> bool:
        return self.data["comparison"].get("mode") == CPU_REPLAY

    @property
    def model_name(self) -> str:
        return str(self.data["settings"]["model"]["model"])

    @property
    def device_name(self) -> str | None:
        return self.data["environment"].get("device")

    def failure(self) -> VitgraphError | None:
        """What a finished comparison must not exit with 0 for."""
        assert self.typed is not None
        return failure(self.typed.result)

    def load_samples(self) -> list[BackendSample]:
        """Reads the samples that belong to this record.

        Raises:
            UsageError: The record is not on disk, or its samples cannot be read.
        """
        if self.folder is None or self.data.get("samples_file") is None:
            raise UsageError("this record has no samples file; give the folder of a run that measured")
        table = read_samples(beside(self.folder / "run.json", self.data["samples_file"]))
        return [_backend_sample(sample) for sample in old_samples(table)]


def _backend_sample(sample: Sample) -> BackendSample:
    name, _, mode = sample.mode.removesuffix(REPEAT_SUFFIX).rpartition("/")
    again = sample.mode.endswith(REPEAT_SUFFIX)
    changed = {column: getattr(sample, column) for column in Sample.__dataclass_fields__} | {"mode": mode}
    return BackendSample(name, again, Sample(**changed))
