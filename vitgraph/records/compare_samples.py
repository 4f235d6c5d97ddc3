"""The timed samples of a backend comparison: `backend_samples.csv`, written while measuring, and series of its rows."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Self

from vitgraph.errors import UsageError
from vitgraph.records.files import read_text
from vitgraph.records.samples import SAMPLE_COLUMNS, RequestTimes, RowWriter, Sample, request_times

BACKEND_SAMPLES_FILE = "backend_samples.csv"
BACKEND_SAMPLE_COLUMNS = ("backend", "repeat", *SAMPLE_COLUMNS)

Series = tuple[str, str]
"""A backend and one of its modes."""


@dataclass(frozen=True, slots=True)
class BackendSample:
    """One timed call of one backend.

    Attributes:
        backend: Registry name.
        is_repeat: The call was measured a second time in the same mode, to know the noise; the first time counts.
        sample: The call; its `position` is the place among all backends and modes.
    """

    backend: str
    is_repeat: bool
    sample: Sample

    @property
    def series(self) -> Series:
        return self.backend, self.sample.mode

    def to_row(self) -> list[str]:
        """Cells in the order of `BACKEND_SAMPLE_COLUMNS`."""
        return [self.backend, str(int(self.is_repeat)), *self.sample.to_row()]

    @classmethod
    def from_row(cls, row: Sequence[str]) -> Self:
        """The reverse of `to_row`.

        Raises:
            ValueError: A cell is missing or is not what the column holds.
        """
        if len(row) != len(BACKEND_SAMPLE_COLUMNS):
            raise ValueError(f"{len(row)} cells instead of {len(BACKEND_SAMPLE_COLUMNS)}")
        backend, repeat, *cells = row
        if repeat not in ("0", "1"):
            raise ValueError(f"repeat is {repeat!r}; it is 0 or 1")
        return cls(backend, repeat == "1", Sample.from_row(cells))


class BackendSampleWriter(RowWriter):
    """Appends samples to `backend_samples.csv` while measuring."""

    def __init__(self, folder: Path, overwrite: bool = False) -> None:
        """Opens the file of a folder; raises as `RowWriter` does."""
        super().__init__(folder / BACKEND_SAMPLES_FILE, BACKEND_SAMPLE_COLUMNS, overwrite)

    def write(self, sample: BackendSample) -> None:
        """Appends one sample; raises as `append` does."""
        call = sample.sample
        name = f"request {call.request} of round {call.round} ({sample.backend}, {call.mode})"
        self.append(sample.to_row(), name)


def load_backend_samples(path: Path) -> list[BackendSample]:
    """Reads a `backend_samples.csv`; a last line that a crash cut off is left out.

    Args:
        path: The file, or the folder of the run.

    Raises:
        UsageError: The file is missing, has other columns, or a line before the last is damaged.
    """
    if path.is_dir():
        path = path / BACKEND_SAMPLES_FILE
    # A row without its line end may have lost digits, so it is not trusted even where it parses.
    complete, _, _ = read_text(path).rpartition("\n")
    lines = list(csv.reader(complete.splitlines()))
    if not lines or tuple(lines[0]) != BACKEND_SAMPLE_COLUMNS:
        raise UsageError(f"{path} does not start with the header {','.join(BACKEND_SAMPLE_COLUMNS)}")
    samples = []
    for number, line in enumerate(lines[1:], start=2):
        try:
            samples.append(BackendSample.from_row(line))
        except ValueError as error:
            raise UsageError(f"{path}, line {number}: {error}; delete the line to read the others") from error
    return samples


def series_name(series: Series) -> str:
    """A series as `RequestTimes.times` and messages name it."""
    return f"{series[0]}/{series[1]}"


def series_times(
    samples: Iterable[BackendSample], series: Sequence[Series], clock: Literal["wall_ms", "gpu_ms"] = "wall_ms"
) -> RequestTimes:
    """Times of the requests that were measured in all of `series`, by `series_name`; repeats take no part."""
    named = [replace(row.sample, mode=series_name(row.series)) for row in samples if not row.is_repeat]
    return request_times(named, [series_name(one) for one in series], clock)


FIRST, SECOND = "first", "second"


def repeat_times(samples: Sequence[BackendSample], mode: str) -> RequestTimes:
    """Times of calls that were measured twice in `mode`, by whichever backend: `first` and `second`."""
    repeated = {
        (row.backend, row.sample.round, row.sample.request): row.sample
        for row in samples
        if row.is_repeat and row.sample.mode == mode
    }
    pairs: list[Sample] = []
    for row in samples:
        again = repeated.get((row.backend, row.sample.round, row.sample.request))
        if again is not None and not row.is_repeat and row.sample.mode == mode:
            pairs += replace(row.sample, mode=FIRST), replace(again, mode=SECOND)
    return request_times(pairs, (FIRST, SECOND))
