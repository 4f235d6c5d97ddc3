"""The timed samples of a backend comparison: `backend_samples.csv`, written while measuring, and series of its rows."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from vitgraph.errors import UsageError
from vitgraph.result_files import RecordFileError, os_reason, read_text, refuse_to_replace
from vitgraph.samples import RUN_FILE, SAMPLE_COLUMNS, RequestTimes, Sample, request_times

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


class BackendSampleWriter:
    """Appends samples while measuring; each row is handed to the operating system at once.

    Attributes:
        path: The file.
        rows: Samples that are in the file.
    """

    def __init__(self, folder: Path, overwrite: bool = False) -> None:
        """Opens the file and writes its header; with `overwrite`, an older record of the folder is removed.

        Raises:
            UsageError: The folder holds a result already and `overwrite` is off.
            RecordFileError: The folder or the file cannot be written.
        """
        self.path = folder / BACKEND_SAMPLES_FILE
        self.rows = 0
        run_file = folder / RUN_FILE
        if not overwrite:
            for path in (run_file, self.path):
                refuse_to_replace(path)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            run_file.unlink(missing_ok=True)
            # Without a buffer, a row that failed is not written again when the file is closed.
            self._file = self.path.open("wb", buffering=0)
            self._append(BACKEND_SAMPLE_COLUMNS)
        except OSError as error:
            raise RecordFileError(
                f"cannot start {self.path}: {os_reason(error)}; nothing has been measured yet"
            ) from error

    def write(self, sample: BackendSample) -> None:
        """Appends one sample.

        Raises:
            RecordFileError: The row could not be written; the message gives the number of rows that were.
        """
        try:
            self._append(sample.to_row())
        except OSError as error:
            raise RecordFileError(
                f"cannot write {self.path}: {os_reason(error)}. Saved: the first {self.rows} samples. Not saved: "
                f"request {sample.sample.request} of round {sample.sample.round} ({sample.backend}, "
                f"{sample.sample.mode}) and all after it"
            ) from error
        self.rows += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def _append(self, cells: Sequence[str]) -> None:
        left = memoryview((",".join(cells) + "\n").encode("ascii"))
        while left:
            left = left[self._file.write(left) or 0 :]


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
