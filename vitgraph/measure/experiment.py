"""The one measuring loop: every series on every call, interleaved, each timed call handed out as it is measured."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from vitgraph.measure.calls import EncoderCall
from vitgraph.measure.environment import read_gpu_state
from vitgraph.measure.series import CallTime, CallTimer, Series
from vitgraph.models.base import EncoderInputs
from vitgraph.planning.accounting import GraphCounters
from vitgraph.planning.packing import PackedBatch
from vitgraph.records.sample_table import REPEAT_SUFFIX, Sample
from vitgraph.records.sections import GpuState

STATE_READS = 8
"""Times that clocks and throttling are read during a run."""

CONTROL_SHARE = 0.1
MIN_CONTROL_CALLS = 40
P99_CONTROL_CALLS = 300
"""A series is measured against itself on a share of the calls, and on at least so many; where there are enough calls to
speak of a P99, on enough to know its noise."""


@dataclass(frozen=True, slots=True)
class TimedCall:
    """One call, timed in one series, or one rank's part of it.

    Attributes:
        call: The call; of a part, the rank's share of the items.
        round: Round of the run, from 0.
        series: How it was encoded.
        is_repeat: It is the control: the second time in the same series and round.
        position: Place among the series of this call and round, from 0.
        time: Of the whole call; with several ranks, of the slowest.
        batches: What was packed together; none where nothing is replayed.
        rank: The rank whose part it is; None of a whole call.
        parts: Every rank's part, by rank; none in one process.
    """

    call: EncoderCall
    round: int
    series: Series
    is_repeat: bool
    position: int
    time: CallTime
    batches: Sequence[PackedBatch]
    rank: int | None = None
    parts: tuple[TimedCall, ...] = ()

    def samples(self) -> Iterator[Sample]:
        """As records keep it, and the ranks' parts; hits, misses and replays are 0 in series without graphs."""
        hits = sum(batch.miss_reason_of(item) is None for batch in self.batches for item in batch.items)
        yield Sample(
            call=self.call.index,
            requests=tuple(self.call.requests),
            series=self.series.name + (REPEAT_SUFFIX if self.is_repeat else ""),
            round=self.round,
            position=self.position,
            rank=self.rank,
            wall_ms=self.time.wall_ms,
            gpu_ms=self.time.gpu_ms if self.rank is None else None,
            encode_ms=self.time.encode_ms,
            gather_ms=self.time.gather_ms,
            items=len(self.call.items),
            tokens=self.call.tokens,
            input_rows=self.call.input_rows,
            hits=hits,
            misses=len(self.call.items) - hits if self.series.manager is not None else 0,
            replays=sum(run.key is not None for batch in self.batches for run in batch.runs.values()),
        )
        for part in self.parts:
            yield from part.samples()


@dataclass(frozen=True, slots=True)
class Control:
    """Which series are measured a second time in a call, to know the noise, and how often.

    Attributes:
        series: Names of those that take turns.
        every: Every so many-th call has a control.
    """

    series: Sequence[str]
    every: int

    @classmethod
    def of(cls, series: Sequence[str], calls: int, rounds: int, kinds: int = 1) -> Control:
        """A control on the usual share of the calls.

        Args:
            kinds: Kinds of series, each with a noise of its own.
        """
        least = P99_CONTROL_CALLS if calls >= P99_CONTROL_CALLS else MIN_CONTROL_CALLS
        wanted = max(kinds * least, int(calls * rounds * CONTROL_SHARE))
        return cls(series, max(1, calls * rounds // wanted))

    def series_at(self, step: int, live: Sequence[Series]) -> Series | None:
        """The series that is repeated at a step; None where none is."""
        candidates = [series for series in live if series.name in self.series]
        if step % self.every or not candidates:
            return None
        return candidates[step // self.every % len(candidates)]


def turn_order(step: int, series: Sequence[Series], control: Control | None = None) -> list[tuple[Series, bool]]:
    """The order in which a call meets the series, and which of them is the control.

    Who comes first rotates, and the direction alternates. The control runs at the end that is farther from the first
    time of the same series, so that drift within the call shows in it as in the others, and in either direction.

    Args:
        step: Number of the call, plus that of the round.
    """
    first = step // 2 % len(series)
    order = [*series[first:], *series[:first]]
    if step % 2:
        order.reverse()
    turns = [(one, False) for one in order]
    again = control.series_at(step, series) if control is not None else None
    if again is not None:
        before = order.index(again)
        turns.insert(0 if before > len(order) - 1 - before else len(order), (again, True))
    return turns


def rounds_over(calls: Sequence[EncoderCall], rounds: int) -> Iterator[tuple[EncoderCall, int]]:
    """Every call once, then every call again, and so on."""
    return ((call, number) for number in range(rounds) for call in calls)


class Experiment:
    """Series on calls.

    Args:
        make: Makes the device inputs of a call, outside the timing.
        gather: With several ranks, times this one's part of a call in every series, and gives what all measured, on
            rank 0 alone; None in one process.

    Attributes:
        counters: By series, hits, misses and use of its graphs over the first round.
        gpu_states: Readings of the GPU during the run.
        is_interrupted: The user stopped the measuring; what was handed out until then is valid.
    """

    def __init__(
        self,
        series: Sequence[Series],
        make: Callable[[EncoderCall], EncoderInputs],
        timer: CallTimer,
        device: torch.device,
        gather: Callable[[Iterator[TimedCall]], Iterator[TimedCall]] | None = None,
    ) -> None:
        self.series = series
        self.counters = {one.name: GraphCounters() for one in series}
        self.gpu_states: list[GpuState] = []
        self.is_interrupted = False
        self._make, self._timer, self._device, self._gather = make, timer, device, gather

    @property
    def live(self) -> list[Series]:
        """The series that can still be measured."""
        return [series for series in self.series if series.is_live]

    @torch.inference_mode()
    def warm_up(self, calls: Iterable[EncoderCall], tick: Callable[[], None] = lambda: None) -> None:
        """Runs calls in every series without handing anything out."""
        for call in calls:
            inputs = self._make(call)
            for series in self.live:
                series.time(self._timer, inputs)
            tick()

    @torch.inference_mode()
    def measure(
        self,
        schedule: Iterable[tuple[EncoderCall, int]],
        steps: int,
        keep: Callable[[TimedCall], None],
        *,
        control: Control | None = None,
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        """Measures calls in every series that is live, in an order that changes from step to step.

        A stop by the user ends the measuring and is noted; nothing that was handed out is lost.

        Args:
            schedule: Calls with the number of their round, one step each.
            steps: How many there are, or would be without a time limit.
            keep: Takes each timed call as it is measured.
            tick: Called after each step.
        """
        read_every = max(1, steps // STATE_READS)
        with without_collection():
            try:
                for done, (call, round_index) in enumerate(schedule):
                    if not self.live:
                        break
                    if done % read_every == 0:
                        self._read_state()
                    timed = self._time_call(call, round_index, control)
                    for one in timed if self._gather is None else self._gather(timed):
                        keep(one)
                        if round_index == 0 and not one.is_repeat:
                            self.counters[one.series.name].add(one.batches, one.series.real_rows(call))
                    tick()
            except KeyboardInterrupt:
                self.is_interrupted = True
            finally:
                self._read_state()

    def _read_state(self) -> None:
        state = read_gpu_state(self._device)
        if state is not None:
            self.gpu_states.append(state)

    def _time_call(self, call: EncoderCall, round_index: int, control: Control | None) -> Iterator[TimedCall]:
        inputs = self._make(call)
        turns = turn_order(call.index + round_index, self.live, control)
        for position, (series, is_repeat) in enumerate(turns):
            time = series.time(self._timer, inputs) if series.is_live else None
            if time is not None:
                # Looked up after the timed run, which has to pack the call itself.
                batches = series.batches(call)
                yield TimedCall(call, round_index, series, is_repeat, position, time, batches)


@contextmanager
def without_collection() -> Iterator[None]:
    """A garbage collection in the middle of a call would be charged to it."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
