"""Timed calls as records keep them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from vitgraph.measure.calls import EncoderCall
from vitgraph.measure.experiment import TimedCall
from vitgraph.measure.on_ranks import RankTime
from vitgraph.planning.packing import PackedBatch
from vitgraph.records.sample_table import REPEAT_SUFFIX, Sample, Samples, SampleWriter


def samples_of(timed: TimedCall) -> Iterator[Sample]:
    """The sample of a timed call, and those of the ranks that shared it."""
    yield Sample(
        **_place(timed),
        wall_ms=timed.time.wall_ms,
        gpu_ms=timed.time.gpu_ms,
        **_counts(timed, timed.call, timed.batches),
    )
    for rank, part in enumerate(timed.parts):
        assert isinstance(part.time, RankTime)
        yield Sample(
            **_place(timed),
            rank=rank,
            wall_ms=part.time.wall_ms,
            encode_ms=part.time.encode_ms,
            gather_ms=part.time.gather_ms,
            **_counts(timed, part.call, part.batches),
        )


class SampleKeeper:
    """Takes timed calls: keeps their samples, and writes them at once.

    Args:
        writer: Writes them; None where this process has none to save.

    Attributes:
        samples: All samples so far.
    """

    def __init__(self, writer: SampleWriter | None) -> None:
        self.samples: list[Sample] = []
        self._writer = writer

    def __call__(self, timed: TimedCall) -> None:
        for sample in samples_of(timed):
            self.samples.append(sample)
            if self._writer is not None:
                self._writer.write(sample)

    def table(self) -> Samples:
        """The samples as one table."""
        return Samples.of(self.samples)


def _place(timed: TimedCall) -> dict[str, Any]:
    return {
        "call": timed.call.index,
        "requests": tuple(timed.call.requests),
        "series": timed.series.name + (REPEAT_SUFFIX if timed.is_repeat else ""),
        "round": timed.round,
        "position": timed.position,
    }


def _counts(timed: TimedCall, call: EncoderCall, batches: Sequence[PackedBatch]) -> dict[str, Any]:
    """Items and rows of a call, or of a rank's part of it; hits, misses and replays are 0 in series without graphs."""
    hits = sum(batch.miss_reason_of(item) is None for batch in batches for item in batch.items)
    return {
        "items": len(call.items),
        "tokens": call.tokens,
        "input_rows": call.input_rows,
        "hits": hits,
        "misses": len(call.items) - hits if timed.series.manager is not None else 0,
        "replays": sum(run.key is not None for batch in batches for run in batch.runs.values()),
    }
