"""The border to records that are still handed on as dictionaries beside their types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vitgraph.records.record import BenchRecord, Record
from vitgraph.records.sample_table import Samples, read_samples
from vitgraph.records.saved_runs import SavedRun as OldRun
from vitgraph.records.store import RUN_FILE, beside


@dataclass(frozen=True, slots=True)
class SavedRun:
    """A run with its samples.

    Attributes:
        name: Shortest end of its path that no other of the opened runs has.
        record: The record.
        samples: Its samples; None where the file is missing.
        notes: What had to be left out, in words.
    """

    name: str
    record: BenchRecord
    samples: Samples | None
    notes: tuple[str, ...] = ()


def typed_record(record: Any) -> Record:
    """The types of a record."""
    found: Record = record if isinstance(record, Record) else record.typed
    return found


def typed_run(run: OldRun) -> SavedRun:
    """A saved run with its types."""
    record = run.record.typed
    assert record is not None and run.record.folder is not None
    samples = None
    if run.samples and record.samples_file is not None:
        samples = read_samples(beside(run.record.folder / RUN_FILE, record.samples_file))
    return SavedRun(run.name, record, samples, run.notes)
