"""Timed calls as records keep them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from vitgraph.measure.calls import EncoderCall
from vitgraph.measure.experiment import TimedCall
from vitgraph.measure.on_ranks import RankTime
from vitgraph.planning.packing import PackedBatch
from vitgraph.records.rank_samples import RankSample
from vitgraph.records.sample_table import REPEAT_SUFFIX, Sample
from vitgraph.records.samples import Sample as OldSample


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


def sample_of(timed: TimedCall, mode: str) -> OldSample:
    """The sample of a timed call."""
    requests, gpu_ms = len(timed.call.requests), timed.time.gpu_ms
    return OldSample(
        round=timed.round,
        request=timed.call.index,
        mode=mode,
        position=timed.position,
        wall_ms=timed.time.wall_ms / requests,
        gpu_ms=None if gpu_ms is None else gpu_ms / requests,
        **_counts(timed, timed.call, timed.batches),
    )


def rank_samples_of(timed: TimedCall, mode: str) -> list[RankSample]:
    """Every rank's sample of a timed call; none in one process."""
    requests, samples = len(timed.call.requests), []
    for rank, part in enumerate(timed.parts):
        assert isinstance(part.time, RankTime)
        samples.append(
            RankSample(
                round=timed.round,
                request=timed.call.index,
                mode=mode,
                position=timed.position,
                rank=rank,
                wall_ms=part.time.wall_ms / requests,
                encode_ms=part.time.encode_ms / requests,
                gather_ms=part.time.gather_ms / requests,
                **_counts(timed, part.call, part.batches),
            )
        )
    return samples


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
