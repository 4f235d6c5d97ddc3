"""Series that several ranks encode together, and what the measuring loop needs to know of the other ranks."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from pydantic import TypeAdapter
from pydantic_core import to_jsonable_python

from vitgraph.measure.calls import EncoderCall, part_of
from vitgraph.measure.environment import validity_problems
from vitgraph.measure.experiment import Experiment, TimedCall
from vitgraph.measure.series import CallTime, CallTimer, Encode, Series
from vitgraph.measure.setup import load
from vitgraph.models.base import EncoderInputs
from vitgraph.models.encoder import VisionEncoder
from vitgraph.planning.packing import PackedBatch
from vitgraph.predict.assignment import Assigner
from vitgraph.ranks.group import ParallelGroup
from vitgraph.ranks.sharing import CallSharing
from vitgraph.records.sections import Encoder

if TYPE_CHECKING:
    from vitgraph.models.registry import ModelSource
    from vitgraph.specs.parts import ModelSpec


class RankTimer(CallTimer):
    """Times calls that all ranks of a group make together."""

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
            call()
            ended = time.perf_counter()
            encode_ms, gather_ms = (self._encoded_at - started) * 1e3, (ended - self._encoded_at) * 1e3
            return CallTime((ended - started) * 1e3, None, encode_ms, gather_ms)
        start, encoded, end = self._marks
        start.record()
        result = call()
        end.record()
        self._group.wait_event(end, own=encoded)
        wall_ms = (time.perf_counter() - started) * 1e3
        del result
        return CallTime(wall_ms, start.elapsed_time(end), start.elapsed_time(encoded), encoded.elapsed_time(end))


class SharedSeries(Series):
    """A series that all ranks encode together, each its share of the items."""

    def __init__(self, alone: Series, ranks: RanksOfRun, sharing: CallSharing) -> None:
        encode = partial(sharing.encode, alone.encode, on_encoded=ranks.timer.mark_encoded)
        super().__init__(alone.name, encode, alone.manager)
        self.alone = alone
        self._ranks = ranks

    @property
    def is_live(self) -> bool:
        return self.alone.is_live

    def batches(self, call: EncoderCall) -> Sequence[PackedBatch]:
        """What this rank packs together of its share."""
        own = self._ranks.own_part(call)
        return self.alone.batches(own) if own.items else []


class RanksOfRun:
    """The ranks of a run; all of them do the same, and rank 0 records.

    Args:
        assign: Who encodes what.

    Attributes:
        timer: Times calls that they make together.
        facts: Of each rank, once they met: where it runs, what it holds, and why its times are invalid.
    """

    def __init__(self, group: ParallelGroup, assign: Assigner) -> None:
        self.group = group
        self.assign = assign
        self.timer = RankTimer(group)
        self.facts: list[dict[str, Any]] = []
        self._known: tuple[EncoderCall, list[EncoderCall]] | None = None

    def load(
        self, source: ModelSource, spec: ModelSpec, *, device: torch.device, dtype: torch.dtype
    ) -> tuple[VisionEncoder, Encoder]:
        """Builds this rank's encoder; where `auto` chooses the attention backend, rank 0 chooses for all."""
        from vitgraph.attention.registry import AUTO

        if spec.attn_backend != AUTO:
            return load(source, spec, device=device, dtype=dtype)
        loaded = load(source, spec, device=device, dtype=dtype) if self.group.is_leader else None
        chosen = self.group.exchange(loaded[1].attn_backend if loaded else "", "its attention", slow=True)[0]
        return loaded or load(source, replace(spec, attn_backend=chosen), device=device, dtype=dtype)

    def share(self, series: Sequence[Series], encoder: VisionEncoder) -> list[Series]:
        """The series of an encoder, each encoded by all ranks together."""
        sharing = CallSharing(self.group, encoder, self.assign)
        return [SharedSeries(alone, self, sharing) for alone in series]

    def waiting(self, series: Series) -> Encode:
        """Encodes a call on all ranks, and returns once its rows are there."""

        def encode(inputs: EncoderInputs) -> list[torch.Tensor]:
            outputs = series.encode(inputs)
            self.group.wait_device()
            return outputs

        return encode

    def parts(self, call: EncoderCall) -> list[EncoderCall]:
        """Each rank's items of a call."""
        if self._known is None or self._known[0] is not call:
            shares = self.assign(call.specs, self.group.size)
            self._known = call, [part_of(call, share) for share in shares]
        return self._known[1]

    def own_part(self, call: EncoderCall) -> EncoderCall:
        """This rank's items of a call."""
        return self.parts(call)[self.group.rank]

    def own_calls(self, calls: Sequence[EncoderCall]) -> list[EncoderCall]:
        """This rank's part of each call; without those in which it has none."""
        return [own for call in calls if (own := self.own_part(call)).items]

    def meet(self, **own: Any) -> list[dict[str, Any]]:
        """After every rank has loaded and captured: tells the others of this one, and returns what all told."""
        place = {"rank": self.group.rank, "host": socket.gethostname(), "device": str(self.group.device)}
        self.facts = self.group.exchange({**place, **own, "problems": []}, "its captured graphs", slow=True)
        return self.facts

    def gather(self, timed: Iterator[TimedCall]) -> Iterator[TimedCall]:
        """Times this rank's part of a call in every series, and gives what all ranks measured, on rank 0 alone."""
        own = list(timed)
        told = to_jsonable_python([(one.time, one.batches) for one in own], fallback=lambda number: number.item())
        what = f"call {own[0].call.index} of round {own[0].round}" if own else "a call"
        everyone = self.group.exchange(told, what)
        if not self.group.is_leader:
            return
        told_by_rank = [_TOLD.validate_python(found) for found in everyone]
        for place, one in enumerate(own):
            parts = [
                replace(one, call=share, time=told[place][0], batches=told[place][1], rank=rank)
                for rank, (share, told) in enumerate(zip(self.parts(one.call), told_by_rank, strict=True))
            ]
            batches = [batch for part in parts for batch in part.batches]
            yield replace(one, time=slowest([part.time for part in parts]), batches=batches, parts=tuple(parts))

    def after(self, experiment: Experiment) -> list[str]:
        """Ends the measuring on all ranks; returns why the times of ranks other than 0 are invalid.

        Raises:
            RankFailedError: The measuring was stopped because another rank failed.
        """
        if experiment.is_interrupted:
            failure = self.group.failure_behind_stop()
            if failure is not None:
                raise failure
            return []
        everyone = self.group.exchange(validity_problems(experiment.gpu_states), "the end of the measuring")
        for facts, problems in zip(self.facts, everyone, strict=True):
            facts["problems"] = problems
        return [f"rank {rank}: {problem}" for rank, found in enumerate(everyone) for problem in found if rank]


def slowest(times: Sequence[CallTime]) -> CallTime:
    """The time of a call: the longest of its ranks."""
    gpu = [time.gpu_ms for time in times if time.gpu_ms is not None]
    return CallTime(max(time.wall_ms for time in times), max(gpu, default=None))


_TOLD = TypeAdapter(list[tuple[CallTime, list[PackedBatch]]])
"""What a rank tells the others of a call: by series, its time and what it packed together."""
