"""What each rank of a data-parallel run measured: `samples-ranks.csv`, and the per-rank facts of the summary."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from vitgraph.errors import UsageError
from vitgraph.predict.assignment import imbalance_of
from vitgraph.records.files import read_text
from vitgraph.records.samples import MODES, RowWriter

RANK_SAMPLES_FILE = "samples-ranks.csv"


@dataclass(frozen=True, slots=True)
class RankSample:
    """One rank's part of one timed call; times are milliseconds a request, as in `samples.csv`.

    Attributes:
        round: Round of the run, from 0.
        request: Index of the request in the workload.
        mode: `eager`, `graph`, `eager_repeat` or `hf`.
        position: Place in the interleaving of the modes, from 0.
        rank: The rank.
        wall_ms: From the common start to the end of the gather on this rank; the longest is the call's.
        encode_ms: Encoding of its share: on a GPU between events on its stream, on a CPU wall clock.
        gather_ms: From the end of that to the end of the gather, the wait for slower ranks included.
        items: Items of its share.
        tokens: Their output tokens.
        input_rows: Their rows of the pixel tensors.
        hits: Its items that replayed on every path; 0 outside graph mode.
        misses: Its items with an eager path; 0 outside graph mode.
        replays: Graph replays on this rank; 0 outside graph mode.
    """

    round: int
    request: int
    mode: str
    position: int
    rank: int
    wall_ms: float
    encode_ms: float
    gather_ms: float
    items: int
    tokens: int
    input_rows: int
    hits: int
    misses: int
    replays: int

    def to_row(self) -> list[str]:
        """Cells in the order of `RANK_SAMPLE_COLUMNS`; times with six decimals, which is a nanosecond."""
        cells = [getattr(self, column) for column in RANK_SAMPLE_COLUMNS]
        return [f"{cell:.6f}" if isinstance(cell, float) else str(cell) for cell in cells]

    @classmethod
    def from_row(cls, row: Sequence[str]) -> Self:
        """The reverse of `to_row`.

        Raises:
            ValueError: A cell is missing, is not a number, or names an unknown mode.
        """
        if len(row) != len(RANK_SAMPLE_COLUMNS):
            raise ValueError(f"{len(row)} cells instead of {len(RANK_SAMPLE_COLUMNS)}")
        cells = dict(zip(RANK_SAMPLE_COLUMNS, row, strict=True))
        mode = cells.pop("mode")
        if mode not in MODES:
            raise ValueError(f"mode {mode!r} is none of {', '.join(MODES)}")
        wall_ms, encode_ms, gather_ms = (float(cells.pop(name)) for name in ("wall_ms", "encode_ms", "gather_ms"))
        numbers = {name: int(cell) for name, cell in cells.items()}
        return cls(mode=mode, wall_ms=wall_ms, encode_ms=encode_ms, gather_ms=gather_ms, **numbers)


RANK_SAMPLE_COLUMNS = tuple(RankSample.__dataclass_fields__)


class RankSampleWriter(RowWriter):
    """Appends the ranks' samples while measuring."""

    def __init__(
        self, folder: Path, overwrite: bool = False, name: str = RANK_SAMPLES_FILE, leading: Sequence[str] = ()
    ) -> None:
        """Opens the file of a folder; raises as `RowWriter` does.

        Args:
            folder: Folder of the record.
            overwrite: Replace an existing file.
            name: Name of the file.
            leading: Columns before those of a sample.
        """
        super().__init__(folder / name, (*leading, *RANK_SAMPLE_COLUMNS), overwrite)

    def write(self, sample: RankSample, leading: Sequence[str] = ()) -> None:
        """Appends one sample, after the cells of the leading columns; raises as `append` does."""
        name = f"rank {sample.rank} in request {sample.request} of round {sample.round} ({sample.mode})"
        self.append([*leading, *sample.to_row()], name)


def load_rank_samples(folder: Path) -> list[RankSample]:
    """Reads the ranks' samples of a run; a last line that was cut off is left out.

    Raises:
        UsageError: The file is missing, has other columns, or a complete line is damaged.
    """
    path = folder / RANK_SAMPLES_FILE
    lines = list(csv.reader(read_text(path).rpartition("\n")[0].splitlines()))
    if not lines or tuple(lines[0]) != RANK_SAMPLE_COLUMNS:
        raise UsageError(f"{path} does not start with the header {','.join(RANK_SAMPLE_COLUMNS)}")
    try:
        return [RankSample.from_row(line) for line in lines[1:]]
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from error


def summarize_ranks(samples: Iterable[RankSample], mode: str, ranks: int) -> dict[str, Any] | None:
    """How a mode's calls were shared among the ranks, in the shape of run.json; None where it was not measured.

    Args:
        samples: Samples of all ranks, in any order.
        mode: The mode.
        ranks: Ranks of the run.
    """
    calls: dict[tuple[int, int, int], dict[int, RankSample]] = defaultdict(dict)
    for sample in samples:
        if sample.mode == mode:
            calls[sample.round, sample.request, sample.position][sample.rank] = sample
    complete = [of_rank for of_rank in calls.values() if len(of_rank) == ranks]
    if not complete:
        return None
    # The rank that comes last waits for nobody, so what it sees is the gather itself.
    gathers = [min(sample.gather_ms for sample in of_rank.values()) for of_rank in complete]
    return {
        "gather_ms": float(np.mean(gathers)),
        "time_imbalance": _mean_imbalance(complete, "encode_ms"),
        "input_imbalance": _mean_imbalance(complete, "input_rows"),
        "ranks": [_summarize_rank(rank, [of_rank[rank] for of_rank in complete], gathers) for rank in range(ranks)],
    }


def _mean_imbalance(calls: Sequence[dict[int, RankSample]], name: str) -> float:
    return float(np.mean([imbalance_of([getattr(sample, name) for sample in call.values()]) for call in calls]))


def _summarize_rank(rank: int, samples: Sequence[RankSample], gathers: Sequence[float]) -> dict[str, Any]:
    first_round = min(sample.round for sample in samples)
    once = [sample for sample in samples if sample.round == first_round]
    waits = [max(0.0, sample.gather_ms - gather) for sample, gather in zip(samples, gathers, strict=True)]
    return {
        "rank": rank,
        "encode_ms": float(np.mean([sample.encode_ms for sample in samples])),
        "wait_ms": float(np.mean(waits)),
        "wall_ms": float(np.mean([sample.wall_ms for sample in samples])),
        "idle_calls": sum(sample.items == 0 for sample in once),
        **{
            name: sum(getattr(sample, name) for sample in once)
            for name in ("items", "tokens", "hits", "misses", "replays")
        },
    }
