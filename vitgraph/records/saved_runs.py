"""Opens saved runs to report or compare: only those of `bench`, each with a name of its own and its samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vitgraph.errors import UsageError
from vitgraph.records.record import BenchRecord
from vitgraph.records.sample_table import Samples, read_samples
from vitgraph.records.store import SAMPLES_FILE, beside, read_record, record_file

BENCH_KIND = "bench"


@dataclass(frozen=True, slots=True)
class SavedRun:
    """A run with its samples.

    Attributes:
        name: Shortest end of its path that no other of the opened runs has.
        samples: Its samples; None where the file is missing.
        notes: What had to be left out, in words.
    """

    name: str
    record: BenchRecord
    samples: Samples | None
    notes: tuple[str, ...] = ()


def open_runs(paths: Sequence[Path]) -> list[SavedRun]:
    """Opens runs by their folders or their `run.json` files.

    Raises:
        UsageError: A path is no record, is one of another command or of a newer version, or is given twice.
    """
    files = [record_file(path) for path in paths]
    folders = [file.parent for file in files]
    for folder in folders:
        if folders.count(folder) > 1:
            raise UsageError(f"{folder} is given {folders.count(folder)} times; give each run once")
    names = _names(folders)
    return [_open(name, file) for name, file in zip(names, files, strict=True)]


def _open(name: str, file: Path) -> SavedRun:
    record = read_record(file, BENCH_KIND)
    assert isinstance(record, BenchRecord)
    if record.samples_file is None or not beside(file, record.samples_file).exists():
        note = (
            f"{name}: {record.samples_file or SAMPLES_FILE} is missing, so there are no samples and no plots of latency"
        )
        return SavedRun(name, record, None, (note,))
    samples = read_samples(beside(file, record.samples_file))
    return SavedRun(name, record, samples, (f"{name}: {samples.warning}",) if samples.warning else ())


def _names(folders: Sequence[Path]) -> list[str]:
    """The last part of each path, with as many parents before it as tell it from the others."""
    depth = 1
    while True:
        names = ["/".join(folder.parts[-depth:]) for folder in folders]
        if len(set(names)) == len(names) or depth >= max(len(folder.parts) for folder in folders):
            return names
        depth += 1
