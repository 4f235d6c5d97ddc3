"""The samples of every kind of record: one row a timed call, written while measuring and read as one table.

A sample is a call. It names the requests in it by their places in the workload, and its times are of the whole call.
Figures "a request" weigh a call by its number of requests: each of them has an equal share of the call's time.
"""

from __future__ import annotations

import errno
import gzip
import io
import os
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import numpy.typing as npt

from vitgraph.errors import UsageError
from vitgraph.records.series import RankPart, Sharing
from vitgraph.records.store import SAMPLES_FILE, RecordFileError, ResultFolder, os_reason, read_bytes

if TYPE_CHECKING:
    import pandas as pd

EAGER, GRAPH, HF, MONOLITHIC, ITEMWISE = "eager", "graph", "hf", "monolithic", "itemwise"
REPEAT_SUFFIX = "_repeat"
"""Behind the name of a series that is measured against itself, to know the noise."""
FIRST, SECOND = "first", "second"

Clock = Literal["wall_ms", "gpu_ms"]
FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


def _column(meaning: str, **more: Any) -> Any:
    return field(metadata={"meaning": meaning}, **more)


@dataclass(frozen=True, slots=True)
class Sample:
    """One timed call, or one rank's part of it."""

    call: int = _column("Index of the call among the workload's calls.")
    requests: tuple[int, ...] = _column("Places of the call's requests in the workload, with blanks between.")
    series: str = _column("What was measured, for example `eager`, `graph`, `eager_repeat` or `FLASH_ATTN/graph`.")
    round: int = _column("Round of the run, from 0.")
    position: int = _column("Place in the interleaving of the series, from 0.")
    wall_ms: float = _column("Wall time of the whole call between two device synchronisations, in ms.")
    items: int = _column("Items of the call.")
    tokens: int = _column("Their output tokens.")
    input_rows: int | None = _column("Their rows of the pixel tensors; empty where not known.")
    hits: int = _column("Items that replayed on every path; 0 in series without graphs.", default=0)
    misses: int = _column("Items with an eager path; 0 in series without graphs.", default=0)
    replays: int = _column("Graph replays of the call.", default=0)
    gpu_ms: float | None = _column("Time between device events, in ms; empty where not measured.", default=None)
    rank: int | None = _column("The rank whose part of the call this is; empty for the call.", default=None)
    encode_ms: float | None = _column("A rank's encoding of its share, in ms; empty for the call.", default=None)
    gather_ms: float | None = _column(
        "From there to the end of the gather in ms, the wait for slower ranks included; empty for the call.",
        default=None,
    )


COLUMNS = tuple(column.name for column in fields(Sample))
MEANINGS = {column.name: str(column.metadata["meaning"]) for column in fields(Sample)}
_FORMS = {
    "int": r"\d{1,15}",
    "float": r"\d{1,15}(\.\d{1,15})?",
    "int | None": r"(\d{1,15})?",
    "float | None": r"(\d{1,15}(\.\d{1,15})?)?",
    "str": ".+",
    "tuple[int, ...]": r"\d{1,15}( \d{1,15})*",
}
"""How a file writes a field of each type."""
_DTYPES = {"int": "int64", "float": "float64", "int | None": "float64", "float | None": "float64"}
_NUMBERS = {column.name: _DTYPES[str(column.type)] for column in fields(Sample) if column.type in _DTYPES}


def csv_of(samples: Iterable[Sample]) -> str:
    """A whole file of samples."""
    return "".join(f"{row}\n" for row in (",".join(COLUMNS), *map(_row, samples)))


def _row(sample: Sample) -> str:
    """The line of a file; times have six decimals, which is a nanosecond."""
    return ",".join(_cell(getattr(sample, column)) for column in COLUMNS)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return f"{value:.6f}" if isinstance(value, float) else str(value)


class SampleWriter:
    """Appends samples to a folder's samples file while measuring; each row is handed to the system at once."""

    def __init__(self, folder: ResultFolder) -> None:
        """Opens the file and writes its header; an older record of the folder goes."""
        self._folder = folder
        self.path = folder.begin(SAMPLES_FILE)
        self.rows = 0
        try:
            # Without a buffer, a row that failed is not written again when the file is closed.
            self._file: io.FileIO | None = io.FileIO(self.path, "w")
            self._append(",".join(COLUMNS))
        except OSError as error:
            raise RecordFileError(
                f"cannot start {self.path}: {os_reason(error)}; nothing has been measured yet"
            ) from error

    def write(self, sample: Sample) -> None:
        """Appends one sample."""
        self._write(_row(sample), f"call {sample.call} of round {sample.round} ({sample.series})")

    def _write(self, row: str, name: str) -> None:
        try:
            self._append(row)
        except OSError as error:
            saved = f"the first {self.rows} samples" if self.rows and self.path.exists() else "nothing"
            raise RecordFileError(
                f"cannot write {self.path}: {os_reason(error)}. Saved: {saved}. Not saved: {name} and all after it"
            ) from error
        self.rows += 1
        self._folder.samples_saved = self.rows

    def write_table(self, samples: Samples) -> None:
        """Appends the rows of a table."""
        whole = {column.name: "Int64" for column in fields(Sample) if column.type == "int | None"}
        text = samples.frame[list(COLUMNS)].astype(whole).to_csv(header=False, index=False, float_format="%.6f")
        for line in text.splitlines():
            self._write(line, f"a sample of another process ({line.split(',')[2]})")

    def close(self) -> None:
        """Closes the file; may be called twice."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _append(self, row: str) -> None:
        if self._file is None:
            raise ValueError(f"{self.path} is closed")
        if not os.fstat(self._file.fileno()).st_nlink:
            # The system goes on taking what is written to a file that was removed, and drops it all at the end.
            raise FileNotFoundError(errno.ENOENT, "the file was removed meanwhile")
        left = memoryview(f"{row}\n".encode())
        while left:
            left = left[self._file.write(left) or 0 :]


@dataclass(frozen=True, slots=True)
class PairedTimes:
    """Times of the calls that were measured in all of some series.

    Attributes:
        calls: Their indexes, ascending; `[n]`.
        requests: Requests of each call, which its times weigh; `[n]`.
        rounds: Distinct rounds in which all the series were measured.
        times: By series, each call's mean over these rounds in milliseconds a request; `[n]` each.
        unpaired: Samples of these series left out because another one is missing in that round.
    """

    calls: IntArray
    requests: IntArray
    rounds: int
    times: dict[str, FloatArray]
    unpaired: int

    @property
    def request_count(self) -> int:
        """Requests of the calls."""
        return int(self.requests.sum())


class Samples:
    """The samples of a run as one table.

    Attributes:
        frame: One row a sample, with the columns of `COLUMNS`.
        warning: What had to be left out of a file, in words.
    """

    def __init__(self, frame: pd.DataFrame, warning: str | None = None) -> None:
        self.frame = frame
        self.warning = warning

    @classmethod
    def of(cls, samples: Iterable[Sample]) -> Samples:
        """A table of samples in memory."""
        import pandas as pd

        rows = [[getattr(sample, column) for column in COLUMNS] for sample in samples]
        frame = pd.DataFrame(rows, columns=list(COLUMNS))
        frame["requests"] = [_cell(requests) for requests in frame["requests"]]
        return cls(frame.astype(_NUMBERS))

    @classmethod
    def joined(cls, tables: Sequence[Samples]) -> Samples:
        """The rows of several tables in one."""
        import pandas as pd

        return cls(pd.concat([table.frame for table in tables], ignore_index=True)) if tables else cls.of([])

    def __len__(self) -> int:
        return len(self.frame)

    @cached_property
    def calls(self) -> pd.DataFrame:
        """The rows of whole calls."""
        return self.frame[self.frame["rank"].isna()]

    @property
    def series(self) -> list[str]:
        """Names of the series, in the order in which they were first measured."""
        return [str(name) for name in self.calls["series"].unique()]

    def paired(self, series: Sequence[str], clock: Clock = "wall_ms") -> PairedTimes:
        """Averages each call over its rounds, from the rounds in which every one of the series has it.

        An interrupted run ends in the middle of a round; a call counts only where it can be compared.

        Args:
            clock: Which time; rows without it are left out.
        """
        rows = self.calls[self.calls["series"].isin(list(series))]
        return _pair(rows.assign(column=rows["series"]), list(series), clock)

    def repeated(self, series: Sequence[str]) -> PairedTimes:
        """Times of the calls that were measured twice in one of the series: `first` and `second`."""
        wanted = [*series, *(name + REPEAT_SUFFIX for name in series)]
        rows = self.calls[self.calls["series"].isin(wanted)]
        again = rows["series"].str.endswith(REPEAT_SUFFIX)
        names = rows["series"].str.removesuffix(REPEAT_SUFFIX)
        rows = rows.assign(of=names, column=again.map({False: FIRST, True: SECOND}))
        twice = rows.groupby(["of", "call", "round"])["column"].transform("nunique") == 2
        return _pair(rows[twice], [FIRST, SECOND], "wall_ms")

    def sharing(self, series: str, ranks: int) -> Sharing | None:
        """How a series' calls were shared among the ranks; None where not every rank has a part of some call."""
        parts = self.frame[self.frame["rank"].notna() & (self.frame["series"] == series)]
        keys = ["round", "call", "position"]
        complete = parts[parts.groupby(keys)["rank"].transform("nunique") == ranks]
        if complete.empty:
            return None
        calls = complete.groupby(keys)
        # The rank that comes last waits for nobody, so what it sees is the gather itself.
        gathers = calls["gather_ms"].min()
        requests = calls["requests"].first().map(_count)
        complete = complete.assign(wait_ms=complete["gather_ms"] - calls["gather_ms"].transform("min"))
        total = float(requests.sum())
        return Sharing(
            gather_ms=float(gathers.sum()) / total,
            time_imbalance=_imbalance(calls["encode_ms"]),
            input_imbalance=_imbalance(calls["input_rows"]),
            ranks=tuple(_rank_part(rank, complete[complete["rank"] == rank], total) for rank in range(ranks)),
        )


def _pair(rows: pd.DataFrame, columns: list[str], clock: Clock) -> PairedTimes:
    import pandas as pd

    rows = rows[rows[clock].notna()]
    # Counted in arrays: a pivot table of a few thousand rows takes ten times as long.
    moments, place = np.unique(rows[["call", "round"]].to_numpy(np.int64), axis=0, return_inverse=True)
    cell = place.reshape(-1) * len(columns) + rows["column"].map(columns.index).to_numpy(np.int64)
    counts, sums = (
        np.bincount(cell, weights, len(moments) * len(columns)).reshape(len(moments), len(columns))
        for weights in (None, rows[clock])
    )
    complete = counts.all(axis=1)
    times = pd.DataFrame(sums[complete] / counts[complete], columns=columns)
    means = times.groupby(moments[complete, 0]).mean()
    request_counts = rows.drop_duplicates("call").set_index("call")["requests"].map(_count)
    requests = request_counts.reindex(means.index).to_numpy(dtype=np.int64)
    return PairedTimes(
        calls=means.index.to_numpy(dtype=np.int64),
        requests=requests,
        rounds=len(np.unique(moments[complete, 1])),
        times={name: means[name].to_numpy(dtype=np.float64) / requests for name in columns},
        unpaired=len(rows) - int(counts[complete].sum()),
    )


def _count(requests: str) -> int:
    return len(requests.split())


def _imbalance(parts: Any) -> float:
    """Mean over the calls of the largest part over the parts' mean; 1 where all is even, or nothing is there."""
    means = parts.mean()
    return float((parts.max() / means.where(means > 0)).fillna(1.0).mean())


def _rank_part(rank: int, rows: pd.DataFrame, requests: float) -> RankPart:
    once = rows[rows["round"] == rows["round"].min()]
    counted = ("items", "tokens", "hits", "misses", "replays")
    times = {name: float(rows[name].sum()) / requests for name in ("encode_ms", "wait_ms", "wall_ms")}
    counts = {name: int(once[name].sum()) for name in counted} | {"idle_calls": int((once["items"] == 0).sum())}
    return RankPart.model_validate({"rank": rank, **times, **counts})


# -- reading -----------------------------------------------------------------------------------------------------------


def read_samples(path: Path) -> Samples:
    """Reads a samples file, packed with gzip or not; a last line that a crash cut off is left out and reported.

    Raises:
        UsageError: The file is missing, has other columns, or a line before the last is damaged.
    """
    complete, rest = _text(path)
    frame = _parse(complete, path)
    for column in fields(Sample):
        cells = frame[column.name]
        for wrong in np.flatnonzero(~cells.str.fullmatch(_FORMS[str(column.type)])):
            # The first line is the header.
            where = f"{path}, line {wrong + 2}: {column.name} is {str(cells.iloc[wrong])[:40]!r}"
            raise UsageError(f"{where}; delete the line to read the others")
    frame = frame.replace("", np.nan).astype(_NUMBERS)
    if not rest:
        return Samples(frame)
    # A row without its line end may have lost digits, so it is not trusted even where it parses.
    return Samples(frame, f"{path}: the last line was cut off and is left out; {len(frame)} are complete")


def _text(path: Path) -> tuple[str, str]:
    content = read_bytes(path)
    try:
        text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is no samples file ({error}); give the folder of a saved run") from None
    complete, end, rest = text.rpartition("\n")
    return complete + end, rest


def _parse(text: str, path: Path) -> pd.DataFrame:
    import pandas as pd

    lines = text.splitlines()
    if not lines or lines[0] != ",".join(COLUMNS):
        raise UsageError(f"{path} does not start with the header {','.join(COLUMNS)}; it is no samples file")
    for number, line in enumerate(lines, start=1):
        if line.count(",") != len(COLUMNS) - 1:
            cells = line.count(",") + 1
            raise UsageError(
                f"{path}, line {number}: {cells} cells instead of {len(COLUMNS)}; delete the line to read the others"
            )
    try:
        return pd.read_csv(io.StringIO(text), dtype=object, keep_default_na=False, na_filter=False, quoting=3)
    except (ValueError, pd.errors.ParserError) as error:
        raise UsageError(f"{path}: {str(error).strip()}; delete the line to read the others") from None
