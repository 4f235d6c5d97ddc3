"""What every measuring command does with its series: warms up, measures, records what is known, and frees the graphs.

A command says which series there are, what follows from their samples, and what is looked at once they are measured.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic

import torch

from vitgraph.graphs.manager import EncoderCudaGraphManager
from vitgraph.measure.calls import CallInputs, EncoderCall
from vitgraph.measure.environment import validity_problems
from vitgraph.measure.experiment import Control, Experiment, TimedCall, rounds_over
from vitgraph.measure.on_ranks import RanksOfRun
from vitgraph.measure.preparation import PreparedBench, shared_facts
from vitgraph.measure.progress import Progress
from vitgraph.measure.series import CallTimer, Series, matrix_rate_flops
from vitgraph.measure.setup import resolve_device, resolve_dtype
from vitgraph.planning.accounting import GraphCounters
from vitgraph.ranks.group import ParallelGroup
from vitgraph.records.sample_table import Sample, Samples, SampleWriter
from vitgraph.records.stats import CPU_REPLAY_REASON
from vitgraph.records.store import SAMPLES_FILE, Draft, Kind, ResultFolder

STOPPED = "stopped by the user while measuring"
STOPPED_BEFORE = "stopped by the user before the measuring began"
STOPPED_AFTER = "stopped by the user after the measuring, while graphs were timed alone"


class MeasuredRun(ABC, Generic[Kind]):
    """One run in progress, or one rank's part of it; fills `draft` as facts become known.

    Args:
        draft: The record before anything is measured.
        group: The ranks that share the calls; rank 0 records, and the others do the same work.

    Attributes:
        device: Where it runs, once it is executed.
        dtype: Dtype of the encoder.
        ranks: The ranks that share the calls; None in one process.
    """

    device: torch.device
    dtype: torch.dtype

    def __init__(
        self, prepared: PreparedBench, draft: Draft[Kind], progress: Progress, group: ParallelGroup | None = None
    ) -> None:
        self.prepared = prepared
        self.calls = prepared.calls
        self.draft = draft
        self.progress = progress
        self.group = group
        self.ranks: RanksOfRun | None = None

    def record(self, folder: Path) -> Kind | None:
        """Runs it all and saves the record in `folder`, whatever ends it; a rank other than 0 has none.

        Raises:
            UsageError: Results cannot be saved in `folder`; nothing was loaded yet.
            VitgraphError: Why nothing could be measured, or another rank failed; the record says so.
        """
        if self.group is not None and not self.group.is_leader:
            self._execute(None)
            return None
        overwrite = self.prepared.spec.run.overwrite
        with self.draft.saved_in(folder, overwrite, lambda: STOPPED_BEFORE) as results:
            self._execute(results)
        return self.draft.record

    def _execute(self, results: ResultFolder | None) -> None:
        model = self.prepared.spec.model
        self.device = resolve_device(model.device) if self.group is None else self.group.device
        self.dtype = resolve_dtype(model.dtype, self.device)
        try:
            if results is None:
                self._measure(None, None)
            else:
                with SampleWriter(results) as writer:
                    self._measure(results, writer)
        except KeyboardInterrupt as stop:
            self._raise_failure_behind(stop)
            raise
        finally:
            # A rank's process ends with its run, and where another rank failed, its device may wait for ever.
            if self.group is None:
                self.release()

    def _raise_failure_behind(self, stop: KeyboardInterrupt) -> None:
        """Raises the failure of another rank, where that is what stopped this one."""
        failure = self.group.failure_behind_stop() if self.group is not None else None
        if failure is not None:
            raise failure from stop

    def _measure(self, results: ResultFolder | None, writer: SampleWriter | None) -> None:
        # Weights are made outside inference mode, as for a user, whose eager calls they must cost as much as.
        inputs = self.open()
        own_calls = self.calls if self.ranks is None else self.ranks.own_calls(self.calls)
        self.prepare(own_calls, inputs)
        timer, gather = (CallTimer(self.device), None) if self.ranks is None else (self.ranks.timer, self.ranks.gather)
        experiment = Experiment(self.series(), inputs.make, timer, self.device, gather)
        self.progress.phase("warming up", len(self.prepared.warmups))
        experiment.warm_up(self.prepared.warmups, self.progress.step)
        self._save_before_measuring(results)
        rounds = self.prepared.spec.run.rounds
        steps = len(self.calls) * rounds
        self.progress.phase("measuring", steps)
        problems: list[str] = []
        samples: list[Sample] = []

        def keep(timed: TimedCall) -> None:
            for sample in timed.samples():
                samples.append(sample)
                if writer is not None:
                    writer.write(sample)

        try:
            experiment.measure(
                rounds_over(self.calls, rounds), steps, keep, control=self.control(), tick=self.progress.step
            )
            if self.ranks is not None:
                problems = self.ranks.after(experiment)
        finally:
            if writer is not None:
                self._summarize(experiment, Samples.of(samples), problems)
        if writer is None:
            return
        if experiment.is_interrupted:
            self.draft.end("interrupted", STOPPED)
            return
        try:
            # Replays alone are rank 0's on its own share, and the others wait for it at the end of the run.
            self.diagnose(inputs, own_calls, samples)
        except KeyboardInterrupt as stop:
            self._raise_failure_behind(stop)
            self.draft.end("interrupted", STOPPED_AFTER)
        else:
            self.draft.end("complete")

    def _save_before_measuring(self, results: ResultFolder | None) -> None:
        """Rank 0 may be killed for another's sake; its samples then have a record that says what they are."""
        if results is not None and self.ranks is not None:
            self.draft.end("error", f"the run ended while it was measuring; {SAMPLES_FILE} holds what it has")
            results.save(self.draft.record)

    def _summarize(self, experiment: Experiment, samples: Samples, problems: Sequence[str]) -> None:
        environment = self.draft.record.environment
        assert environment is not None
        self.draft.note_environment(
            gpu_states=(*environment.gpu_states, *experiment.gpu_states),
            ranks=() if self.ranks is None else self.ranks.facts,
        )
        on_cpu = [] if self.device.type == "cuda" else [CPU_REPLAY_REASON]
        reasons = (*on_cpu, *validity_problems(experiment.gpu_states), *problems)
        self.summarize(samples, experiment.counters, reasons)

    def join_ranks(self, **facts: Any) -> None:
        """Meets the other ranks, where there are some, and makes sure that they are about to do the same.

        Args:
            facts: What must be equal on all of them, beside model, workload and graphs.
        """
        if self.group is not None:
            assert self.prepared.assign is not None
            self.group.agree(shared_facts(self.prepared) | facts)
            self.ranks = RanksOfRun(self.group, self.prepared.assign)

    def speed_of_light_ms(self) -> float | None:
        """The arithmetic of a mean request, without padding, at the rate of a large matrix product; None on a CPU."""
        rate = matrix_rate_flops(self.device, self.dtype)
        if not rate:
            return None
        self.draft.note_environment(matrix_rate_tflops=rate / 1e12)
        rule = self.prepared.source.rule()
        flops = sum(rule.flops(item) for call in self.calls for item in call.items)
        requests = sum(len(call.requests) for call in self.calls)
        return flops / requests / (rate * self.prepared.spec.parallel.ranks) * 1e3

    # -- what a command does of its own ------------------------------------------------------------------------------

    @abstractmethod
    def open(self) -> CallInputs:
        """Loads, captures and checks what is measured; returns what makes the calls' pixels.

        Raises:
            VitgraphError: Nothing can be measured.
        """

    @abstractmethod
    def prepare(self, calls: Sequence[EncoderCall], inputs: CallInputs) -> None:
        """Lets the attention backends build what they need for this rank's calls, so that no timed call does."""

    @abstractmethod
    def series(self) -> list[Series]:
        """What is measured."""

    @abstractmethod
    def control(self) -> Control:
        """Which series are measured a second time, to know the noise."""

    @abstractmethod
    def summarize(
        self, samples: Samples, counters: Mapping[str, GraphCounters], invalid_reasons: Sequence[str]
    ) -> None:
        """Puts into the record what the samples and counters tell.

        Args:
            counters: By series, hits, misses and use of its graphs.
        """

    @abstractmethod
    def diagnose(self, inputs: CallInputs, calls: Sequence[EncoderCall], samples: Sequence[Sample]) -> None:
        """Puts into the record where the time of this rank's calls goes; on a GPU only."""

    @abstractmethod
    def release(self) -> None:
        """Frees the graphs, once the device has done what a stop or a failure left under way."""


def clear_graphs(managers: Iterable[EncoderCudaGraphManager]) -> None:
    """Frees the graphs of some managers; after a device error even that fails, and the error is on its way already."""
    for manager in managers:
        with suppress(RuntimeError):
            manager.clear()


def captured_facts(manager: EncoderCudaGraphManager) -> dict[str, Any]:
    """What `GraphFacts` says of a manager's captures."""
    graphs = manager.graphs.values()
    sizes = ("capture_ms", "pool_bytes", "buffer_bytes")
    return {
        "mode": "cuda" if manager.is_cuda else "cpu-replay",
        "policy": manager.policy,
        "graphs": len(graphs),
        "captured": [graph.key.as_dict() | {name: getattr(graph, name) for name in sizes} for graph in graphs],
        "dropped": [dropped.key.as_dict() | {"reason": dropped.reason} for dropped in manager.dropped],
        "pool_bytes": manager.pool_bytes,
        "buffer_bytes": manager.buffer_bytes,
        "capture_s": sum(graph.capture_ms for graph in graphs) / 1e3,
    }
