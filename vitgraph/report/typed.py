"""The border between what is still read and written as dictionaries and the types that reports take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from vitgraph.records.bench_record import RunRecord
from vitgraph.records.drafts import record_of
from vitgraph.records.record import BenchRecord, Record
from vitgraph.records.sample_table import Sample, Samples
from vitgraph.records.samples import Sample as OldSample
from vitgraph.records.saved_runs import SavedRun as OldRun


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
    """The record of a draft; a typed one as it is."""
    if isinstance(record, Record):
        return record
    return record_of(record if isinstance(record, Mapping) else record.data)


def typed_samples(samples: Iterable[OldSample], requests_per_call: int) -> Samples | None:
    """The samples of a run in the one table of all kinds; None without any."""
    found = [
        Sample(
            call=old.request,
            requests=tuple(range(old.request * requests_per_call, (old.request + 1) * requests_per_call)),
            series=old.mode,
            round=old.round,
            position=old.position,
            wall_ms=old.wall_ms * requests_per_call,
            items=old.items,
            tokens=old.tokens,
            input_rows=old.input_rows,
            hits=old.hits,
            misses=old.misses,
            replays=old.replays,
            gpu_ms=None if old.gpu_ms is None else old.gpu_ms * requests_per_call,
        )
        for old in samples
    ]
    return Samples.of(found) if found else None


def typed_run(run: OldRun) -> SavedRun:
    """A saved run with its types."""
    record: RunRecord = run.record
    typed = typed_record(record)
    assert isinstance(typed, BenchRecord)
    per_call = typed.resolved.requests_per_call if typed.resolved else 1
    return SavedRun(run.name, typed, typed_samples(run.samples, per_call), run.notes)
