"""The timed samples of a run: `samples.csv`, written while measuring, and what is grouped from its rows."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import numpy as np

from vitgraph.records.files import RecordFileError, os_reason, refuse_to_replace
from vitgraph.records.stats import FloatArray

RUN_FILE = "run.json"
SAMPLES_FILE = "samples.csv"
EAGER, GRAPH, EAGER_REPEAT, HF, MONOLITHIC = MODES = ("eager", "graph", "eager_repeat", "hf", "monolithic")
GRAPH_MODES = (GRAPH, MONOLITHIC)
"""Modes that replay: a model's graphs, and one graph that holds both of its paths."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One timed call: a request in one mode in one round.

    Attributes:
        round: Round of the run, from 0.
        request: Index of the request in the workload.
        mode: `eager`, `graph`, `eager_repeat` (the eager-against-eager control), `hf` or `monolithic`.
        position: Place in the interleaving of the modes, from 0.
        wall_ms: Wall time between two device synchronisations, milliseconds a request.
        gpu_ms: Time between device events, milliseconds a request; None where it was not measured.
        items: Items of the request.
        tokens: Output tokens of the request.
        input_rows: Rows of the pixel tensors of the request.
        hits: Items that replayed on every path; 0 in modes without graphs.
        misses: Items with an eager path; 0 in modes without graphs.
        replays: Graph replays of the call.
    """

    round: int
    request: int
    mode: str
    position: int
    wall_ms: float
    gpu_ms: float | None
    items: int
    tokens: int
    input_rows: int
    hits: int
    misses: int
    replays: int

    def to_row(self) -> list[str]:
        """Cells in the order of `SAMPLE_COLUMNS`; times with six decimals, which is a nanosecond."""
        cells = [getattr(self, column) for column in SAMPLE_COLUMNS]
        return ["" if c is None else f"{c:.6f}" if isinstance(c, float) else str(c) for c in cells]

    @classmethod
    def from_row(cls, row: Sequence[str]) -> Self:
        """The reverse of `to_row`.

        Raises:
            ValueError: A cell is missing, is not a number, or names an unknown mode.
        """
        if len(row) != len(SAMPLE_COLUMNS):
            raise ValueError(f"{len(row)} cells instead of {len(SAMPLE_COLUMNS)}")
        cells = dict(zip(SAMPLE_COLUMNS, row, strict=True))
        mode, wall_ms, gpu_ms = (cells.pop(column) for column in ("mode", "wall_ms", "gpu_ms"))
        if mode not in MODES:
            raise ValueError(f"mode {mode!r} is none of {', '.join(MODES)}")
        numbers = {column: int(cell) for column, cell in cells.items()}
        return cls(mode=mode, wall_ms=float(wall_ms), gpu_ms=float(gpu_ms) if gpu_ms else None, **numbers)


SAMPLE_COLUMNS = tuple(Sample.__dataclass_fields__)


class RowWriter:
    """Appends rows to a CSV file while measuring; each row is handed to the operating system at once.

    Attributes:
        path: The file.
        rows: Rows that are in the file, without its header.
    """

    def __init__(self, path: Path, columns: Sequence[str], overwrite: bool = False) -> None:
        """Opens the file and writes its header.

        With `overwrite`, an older `run.json` of the folder is removed, so that it cannot be taken for the record
        of the new rows.

        Raises:
            UsageError: The folder holds a result already and `overwrite` is off.
            RecordFileError: The folder or the file cannot be written.
        """
        self.path = path
        self.rows = 0
        run_file = path.parent / RUN_FILE
        if not overwrite:
            for file in (run_file, path):
                refuse_to_replace(file)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            run_file.unlink(missing_ok=True)
            # Without a buffer, a row that failed is not written again when the file is closed.
            self._file: io.FileIO | None = io.FileIO(path, "w")
            self._append(columns)
        except OSError as error:
            raise RecordFileError(f"cannot start {path}: {os_reason(error)}; nothing has been measured yet") from error

    def append(self, cells: Sequence[str], name: str) -> None:
        """Appends one row.

        Args:
            cells: Its cells, which hold no comma.
            name: What the row is of, for the message.

        Raises:
            RecordFileError: The row could not be written; the message gives the number of rows that were.
        """
        try:
            self._append(cells)
        except OSError as error:
            raise RecordFileError(
                f"cannot write {self.path}: {os_reason(error)}. Saved: the first {self.rows} samples. Not saved: "
                f"{name} and all after it"
            ) from error
        self.rows += 1

    def close(self) -> None:
        """Closes the file; may be called twice."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _append(self, cells: Sequence[str]) -> None:
        if self._file is None:
            raise ValueError(f"{self.path} is closed")
        left = memoryview((",".join(cells) + "\n").encode("ascii"))
        while left:
            left = left[self._file.write(left) or 0 :]


class SampleWriter(RowWriter):
    """Appends samples to `samples.csv` while measuring."""

    def __init__(self, folder: Path | str, overwrite: bool = False) -> None:
        """Opens the file of a folder; raises as `RowWriter` does."""
        super().__init__(Path(folder) / SAMPLES_FILE, SAMPLE_COLUMNS, overwrite)

    def write(self, sample: Sample) -> None:
        """Appends one sample; raises as `append` does."""
        self.append(sample.to_row(), f"request {sample.request} of round {sample.round} ({sample.mode})")


@dataclass(frozen=True, slots=True)
class LoadedSamples:
    """What a `samples.csv` holds.

    Attributes:
        samples: The complete rows, in file order.
        warning: What had to be left out, in words, or None.
    """

    samples: list[Sample]
    warning: str | None = None


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Times of the requests that were measured in all of some modes.

    Attributes:
        requests: Their indexes, ascending; shape `[n]`.
        rounds: Distinct rounds in which all the modes were measured.
        times: By mode, each request's mean over these rounds, milliseconds; shape `[n]` each.
        unpaired: Samples of these modes left out because another mode is missing in that round.
    """

    requests: tuple[int, ...]
    rounds: int
    times: dict[str, FloatArray]
    unpaired: int


def compared_modes(samples: Iterable[Sample]) -> tuple[str, ...]:
    """Modes that a run sets against one another request by request: monolithic where it was measured."""
    has_monolithic = any(sample.mode == MONOLITHIC for sample in samples)
    return (EAGER, GRAPH, MONOLITHIC) if has_monolithic else (EAGER, GRAPH)


def request_times(
    samples: Iterable[Sample], modes: Sequence[str], clock: Literal["wall_ms", "gpu_ms"] = "wall_ms"
) -> RequestTimes:
    """Averages each request over its rounds, from the rounds in which every mode has the request.

    An interrupted run ends in the middle of a round; a request counts only where it can be compared.

    Args:
        samples: Rows of a run, in any order, of any modes.
        modes: The modes to be compared with one another.
        clock: Which time to average; rows without it are left out.
    """
    cells: dict[tuple[int, int], dict[str, list[float]]] = {}
    for sample in samples:
        time_ms = sample.wall_ms if clock == "wall_ms" else sample.gpu_ms
        if sample.mode in modes and time_ms is not None:
            cells.setdefault((sample.request, sample.round), {}).setdefault(sample.mode, []).append(time_ms)
    by_request: dict[int, dict[str, list[float]]] = {}
    rounds: set[int] = set()
    unpaired = 0
    for (request, round_index), cell in sorted(cells.items()):
        if len(cell) < len(modes):
            unpaired += sum(map(len, cell.values()))
            continue
        rounds.add(round_index)
        series = by_request.setdefault(request, {mode: [] for mode in modes})
        for mode, times in cell.items():
            series[mode].extend(times)
    means = {mode: np.array([float(np.mean(series[mode])) for series in by_request.values()]) for mode in modes}
    return RequestTimes(tuple(by_request), len(rounds), means, unpaired)
