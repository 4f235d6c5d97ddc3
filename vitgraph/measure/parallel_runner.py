"""Measures calls on all ranks of a group at once: every rank runs this with the same calls, rank 0 records."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from vitgraph.graphs.manager import EncoderCudaGraphManager
from vitgraph.measure.calls import CallInputs, EncoderCall
from vitgraph.measure.runner import BenchOutcome, BenchRunner, make_sample
from vitgraph.measure.timing import CallTime, CallTimer
from vitgraph.models.base import EncoderInputs
from vitgraph.models.encoder import VisionEncoder
from vitgraph.planning.packing import PackedBatch
from vitgraph.predict.assignment import Assigner, Shares
from vitgraph.ranks.gather import RowGather
from vitgraph.ranks.group import ParallelGroup
from vitgraph.ranks.manager import CallSharing, DataParallelEncoder
from vitgraph.records.rank_samples import RankSample
from vitgraph.records.samples import EAGER, GRAPH, HF, Sample


@dataclass(frozen=True, slots=True)
class RankTime:
    """One rank's times of one call.

    Attributes:
        wall_ms: From the common start to the end of the gather here.
        gpu_ms: The same between device events; None on a CPU.
        encode_ms: Encoding of this rank's share.
        gather_ms: From the end of that to the end of the gather.
    """

    wall_ms: float
    gpu_ms: float | None
    encode_ms: float
    gather_ms: float


class RankTimer(CallTimer):
    """Times calls that all ranks of a group make together.

    Args:
        group: The ranks.

    Attributes:
        last: Times of the last call, its parts included.
    """

    last: RankTime

    def __init__(self, group: ParallelGroup) -> None:
        super().__init__(group.device)
        self._group = group
        self._is_cuda = group.device.type == "cuda"
        self._marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)] if self._is_cuda else []
        self._encoded_at = 0.0

    def mark_encoded(self) -> None:
        """This rank's share is encoded, or on a GPU launched; the gather comes next."""
        if self._is_cuda:
            self._marks[1].record()
        else:
            self._encoded_at = time.perf_counter()

    def time(self, call: Callable[[], object]) -> CallTime:
        """Runs `call` once on all ranks, begun together, and times this one's; its result is dropped."""
        self._group.align()
        started = self._encoded_at = time.perf_counter()
        if not self._is_cuda:
            result = call()
            ended = time.perf_counter()
            encode_ms, gather_ms = (self._encoded_at - started) * 1e3, (ended - self._encoded_at) * 1e3
            self.last = RankTime((ended - started) * 1e3, None, encode_ms, gather_ms)
        else:
            start, encoded, end = self._marks
            start.record()
            result = call()
            end.record()
            self._group.wait_event(end, own=encoded)
            wall_ms = (time.perf_counter() - started) * 1e3
            self.last = RankTime(
                wall_ms, start.elapsed_time(end), start.elapsed_time(encoded), encoded.elapsed_time(end)
            )
        del result
        return CallTime(self.last.wall_ms, self.last.gpu_ms)


class ParallelBenchRunner(BenchRunner):
    """Measures one encoder on all ranks; each rank has its own, with its own graphs.

    Args:
        encoder: This rank's encoder.
        manager: This rank's captured graphs.
        inputs: Makes the calls' pixels, the same on every rank.
        group: The ranks.
        assign: Who encodes what.
        baseline: `eager`, or `hf` to measure transformers' stock forward too.
        on_rank_sample: Takes every rank's sample, on rank 0.
    """

    def __init__(
        self,
        encoder: VisionEncoder,
        manager: EncoderCudaGraphManager,
        inputs: CallInputs,
        group: ParallelGroup,
        assign: Assigner,
        *,
        baseline: str = "eager",
        on_rank_sample: Callable[[RankSample], None] = lambda sample: None,
    ) -> None:
        super().__init__(encoder, manager, inputs, baseline=baseline)
        self.group = group
        self.sharing = CallSharing(encoder, group.rank, group.size, assign)
        self._on_rank_sample = on_rank_sample
        self._timer = self._rank_timer = RankTimer(group)
        gather = RowGather(group, encoder.rule.output_width, encoder.dtype)
        ways = {GRAPH: manager.execute, EAGER: self.run_eager, HF: self._run_stock}
        self._parallel = {
            mode: DataParallelEncoder(encode, self.sharing, gather, self._rank_timer.mark_encoded)
            for mode, encode in ways.items()
        }

    def _run(self, mode: str, mm_kwargs: EncoderInputs) -> list[torch.Tensor]:
        return self._parallel[mode if mode in self._parallel else EAGER].execute(mm_kwargs)

    def _run_stock(self, mm_kwargs: EncoderInputs) -> list[torch.Tensor]:
        rows = [self.encoder.rule.final_tokens(item) for item in mm_kwargs.chosen]
        return list(self.encoder.stock_forward(mm_kwargs).split(rows))

    def _checked_outputs(self, mm_kwargs: EncoderInputs) -> list[torch.Tensor]:
        """What graph mode gives over all ranks; this rank then compares it with its own eager run of the whole call."""
        outputs = self._run(GRAPH, mm_kwargs)
        self.group.wait_device()
        return outputs

    def check_outputs(self, calls: Sequence[EncoderCall], outcome: BenchOutcome) -> None:
        """As for one process, on every rank; the distance is the largest of all ranks."""
        super().check_outputs(calls, outcome)
        for distance in self.group.exchange(outcome.max_rel_l2, "checked outputs", slow=True):
            if distance is not None and distance > (outcome.max_rel_l2 or 0.0):
                outcome.max_rel_l2 = distance

    def prepare_attention(self, calls: Sequence[EncoderCall]) -> None:
        super().prepare_attention(self.own_calls(calls))
        # A rank may take long to compile or tune; the others must not give up on it in a timed call.
        self.group.exchange(None, "prepared attention", slow=True)

    def own_calls(self, calls: Sequence[EncoderCall]) -> list[EncoderCall]:
        """This rank's part of each call, as a call of its own; without those in which it has none."""
        return [share for call in calls if (share := self.share_of(call)) is not None]

    def share_of(self, call: EncoderCall) -> EncoderCall | None:
        """This rank's part of a call; None where it has none."""
        return part_of(call, self.sharing.divide(call.items).shares[self.group.rank])

    def _measure_call(
        self, call: EncoderCall, round_index: int, is_control: bool, record: Callable[[Sample], None]
    ) -> dict[str, list[PackedBatch]]:
        mm_kwargs = self.inputs.make(call)
        modes = self._order_modes(call, round_index, is_control)
        times = []
        for mode in modes:
            self._timer.time(partial(self._run, mode, mm_kwargs))
            times.append(self._rank_timer.last)
        selected = self.sharing.select(mm_kwargs)
        own = [] if selected is None else self.manager.plan_call(selected).batches
        everyone = self.group.exchange((times, own), f"request {call.index} of round {round_index}")
        if not self.group.is_leader:
            return {GRAPH: own}
        shares = self.sharing.divide(call.items).shares
        batches = [batch for _, of_rank in everyone for batch in of_rank]
        for position, mode in enumerate(modes):
            of_ranks = [RankPart(found[position], rank_batches) for found, rank_batches in everyone]
            for sample in rank_samples(call, round_index, mode, position, shares, of_ranks):
                self._on_rank_sample(sample)
            record(make_sample(call, round_index, mode, position, slowest(of_ranks), batches))
        return {GRAPH: batches}


def part_of(call: EncoderCall, share: Sequence[int]) -> EncoderCall | None:
    """Some items of a call as a call of its own; None without any."""
    if not share:
        return None
    return replace(
        call,
        media=tuple(call.media[index] for index in share),
        items=tuple(call.items[index] for index in share),
        specs=tuple(call.specs[index] for index in share),
    )


@dataclass(frozen=True, slots=True)
class RankPart:
    """One rank's part of a timed call: its times, and the batches that it packed its items into."""

    time: RankTime
    batches: Sequence[PackedBatch]


def slowest(parts: Sequence[RankPart]) -> CallTime:
    """The time of a call: the longest of its ranks."""
    gpu = [part.time.gpu_ms for part in parts if part.time.gpu_ms is not None]
    return CallTime(max(part.time.wall_ms for part in parts), max(gpu, default=None))


def rank_samples(
    call: EncoderCall, round_index: int, mode: str, position: int, shares: Shares, parts: Sequence[RankPart]
) -> list[RankSample]:
    """Every rank's sample of a timed call."""
    samples = []
    for rank, (share, part) in enumerate(zip(shares, parts, strict=True)):
        own = part_of(call, share) or replace(call, media=(), items=(), specs=())
        time = CallTime(part.time.wall_ms, None)
        sample = make_sample(own, round_index, mode, position, time, part.batches)
        samples.append(_rank_sample(sample, rank, part.time, call.requests))
    return samples


def _rank_sample(sample: Sample, rank: int, rank_time: RankTime, requests: int) -> RankSample:
    return RankSample(
        round=sample.round,
        request=sample.request,
        mode=sample.mode,
        position=sample.position,
        rank=rank,
        wall_ms=sample.wall_ms,
        encode_ms=rank_time.encode_ms / requests,
        gather_ms=rank_time.gather_ms / requests,
        items=sample.items,
        tokens=sample.tokens,
        input_rows=sample.input_rows,
        hits=sample.hits,
        misses=sample.misses,
        replays=sample.replays,
    )
