"""The `bench` command's work: plan, load, capture, check, measure, record. Prints nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from vitgraph.errors import NothingReplayedError, VitgraphError
from vitgraph.measure.calls import EncoderCall
from vitgraph.measure.parallel_bench import RanksOfRun
from vitgraph.measure.preparation import PreparedBench, prepare_bench, shared_facts
from vitgraph.measure.record_facts import correctness_facts, empty_record, replay_ms_of_path
from vitgraph.measure.setup import load, resolve_device, resolve_dtype
from vitgraph.planning.packing import EAGER_IS_FASTER
from vitgraph.records.bench_record import CPU_REPLAY_REASON, RunRecord
from vitgraph.records.files import refuse_to_replace
from vitgraph.records.rank_samples import RankSampleWriter
from vitgraph.records.samples import RUN_FILE, SAMPLES_FILE, Sample, SampleWriter
from vitgraph.records.summary import build_comparison, build_summary

if TYPE_CHECKING:
    import torch

    from vitgraph.graphs.manager import EncoderCudaGraphManager
    from vitgraph.measure.calls import CallInputs
    from vitgraph.measure.runner import BenchOutcome, BenchRunner
    from vitgraph.models.encoder import VisionEncoder
    from vitgraph.ranks.group import ParallelGroup

__all__ = ["PreparedBench", "Progress", "follow_bench", "prepare_bench", "run_bench"]

CUDA, CPU_REPLAY = "cuda", "cpu-replay"


class Progress(Protocol):
    """What the engine tells about its work; the command line shows it, tests collect it."""

    def phase(self, name: str, total: int | None = None) -> None:
        """A new phase with `total` steps begins."""

    def step(self) -> None:
        """One step of the phase is done."""

    def note(self, text: str) -> None:
        """Something that the user should know."""


def run_bench(
    prepared: PreparedBench,
    folder: Path,
    command: Sequence[str],
    progress: Progress,
    group: ParallelGroup | None = None,
) -> RunRecord:
    """Runs a prepared bench and saves its record in `folder`, whatever ends it.

    Args:
        prepared: What to run.
        folder: Where the record goes.
        command: The command as it was given.
        progress: Told about the work.
        group: The ranks that share the calls; this one is rank 0, and the others run `follow_bench`.

    Raises:
        NothingReplayedError: No graph was captured, or none was replayed; the record is saved all the same.
        IncorrectOutputError: Replay and eager disagree; the record says so and holds no latency.
        VitgraphError: Any other reason why nothing could be measured.
    """
    if not prepared.spec.run.overwrite:
        refuse_to_replace(folder / RUN_FILE)
    overwrite = prepared.spec.run.overwrite
    record = empty_record(prepared, command)
    with ExitStack() as stack:
        writer = stack.enter_context(SampleWriter(folder, overwrite=overwrite))
        ranks = None
        if group is not None and prepared.assign is not None:
            ranks = RanksOfRun(group, prepared.assign, stack.enter_context(RankSampleWriter(folder, overwrite)))
        run = _Run(prepared, record, progress, ranks, folder)
        try:
            run.execute(writer)
        except VitgraphError as error:
            record["status"], record["status_reason"] = "error", str(error)
            raise
        except KeyboardInterrupt as stop:
            failure = group.failure_behind_stop() if group is not None else None
            if failure is not None:
                record["status"], record["status_reason"] = "error", str(failure)
                raise failure from stop
            when = (
                "after the measuring, while graphs were timed alone"
                if run.is_measured
                else "before the measuring began"
            )
            record["status"], record["status_reason"] = "interrupted", f"stopped by the user {when}"
            raise
        except Exception as error:
            record["status"], record["status_reason"] = "error", f"{type(error).__name__}: {error}"
            raise
        finally:
            saved = RunRecord(record)
            saved.save(folder, overwrite=overwrite or ranks is not None)
    if record["status"] == "complete" and not record["graph"]["replays"]:
        items, misses = record["graph"]["items"], record["graph"]["misses_by_reason"]
        if set(misses) != {EAGER_IS_FASTER}:
            raise NothingReplayedError(
                f"graph mode replayed nothing: all {items} items went eager ({misses}); the record is in {folder}"
            )
        # An answer, not a failure: what was asked for is the faster of the two.
        progress.note(
            f"no graph was replayed: the calibration predicts eager to be faster for all {items} items, so both modes "
            "are eager here"
        )
    return saved


def follow_bench(prepared: PreparedBench, group: ParallelGroup, progress: Progress) -> None:
    """A rank's part of `run_bench` where it is not rank 0: the same work, and no record.

    Raises:
        VitgraphError: This rank, or another one, failed.
    """
    assert prepared.assign is not None
    ranks = RanksOfRun(group, prepared.assign, None)
    _Run(prepared, empty_record(prepared, []), progress, ranks, None).execute(None)


class _Run:
    """One run in progress, or one rank's part of it; fills `record` as facts become known."""

    def __init__(
        self,
        prepared: PreparedBench,
        record: dict[str, Any],
        progress: Progress,
        ranks: RanksOfRun | None,
        folder: Path | None,
    ) -> None:
        self.prepared = prepared
        self.record = record
        self.progress = progress
        self.ranks = ranks
        self.folder = folder
        self.samples: list[Sample] = []
        self.is_measured = False
        self._managers: list[EncoderCudaGraphManager] = []

    def execute(self, writer: SampleWriter | None) -> None:
        try:
            self._execute(writer)
        finally:
            self._release()

    def _release(self) -> None:
        """Frees the graphs, once the device has done what a stop or a failure left under way.

        A rank's process ends with its run, and where another rank failed, its device may wait in a gather for ever.
        """
        if self.ranks is not None:
            return
        for manager in self._managers:
            # After a device error even releasing fails, and that error is on its way already.
            with suppress(RuntimeError):
                manager.clear()

    def _execute(self, writer: SampleWriter | None) -> None:
        from vitgraph.graphs.captured import reserve_together
        from vitgraph.graphs.manager import EncoderCudaGraphManager
        from vitgraph.measure.calls import CallInputs
        from vitgraph.measure.environment import snapshot
        from vitgraph.measure.runner import TOLERANCE, BenchOutcome

        prepared, record, spec = self.prepared, self.record, self.prepared.spec
        device = resolve_device(spec.model.device) if self.ranks is None else self.ranks.group.device
        dtype = resolve_dtype(spec.model.dtype, device)
        self.progress.phase("loading the encoder")
        encoder, facts = self._load(device, dtype)
        record["environment"] = {**snapshot(device), **facts}
        if prepared.cost is not None:
            differences = prepared.cost.model.profile.differences(record["environment"])
            record["environment"]["calibration_differences"] = differences
            for difference in differences:
                self.progress.note(difference)
        manager = EncoderCudaGraphManager(encoder, prepared.plan, policy=spec.graph.packing, cost=prepared.cost)
        self._managers.append(manager)
        monolithic = self._monolithic_manager(encoder)
        if monolithic is not None:
            self._managers.append(monolithic)
            reserve_together([manager, monolithic])
        self._capture(manager, record["graph"], "capturing graphs")
        if self.ranks is not None:
            self.ranks.meet(record)
        if monolithic is not None:
            self._capture(monolithic, record["graph"]["monolithic"], "capturing monolithic graphs")
        inputs = CallInputs(encoder, [*prepared.calls, *prepared.warmups], spec.model.seed)
        runner = self._runner(encoder, manager, inputs, monolithic)
        outcome = BenchOutcome()
        self.progress.phase("comparing replay with eager")
        try:
            runner.check_outputs(prepared.warmups or prepared.calls, outcome)
        finally:
            record["correctness"] = correctness_facts(outcome, TOLERANCE[dtype])
        runner.prepare_attention(prepared.calls)
        record["environment"]["attn_plan_build_ms"] = encoder.attention.plan_build_ms
        self.progress.phase("warming up", len(prepared.warmups))
        runner.warm_up(prepared.warmups, self.progress.step)

        def keep(sample: Sample) -> None:
            self.samples.append(sample)
            if writer is not None:
                writer.write(sample)

        self._save_before_measuring()
        self.progress.phase("measuring", len(prepared.calls) * spec.run.rounds)
        try:
            runner.measure(prepared.calls, spec.run.rounds, keep, outcome, self.progress.step)
            if self.ranks is not None:
                self.ranks.after_measuring(record, outcome)
        finally:
            if writer is not None:
                self._summarize(manager.is_cuda, outcome)
        if outcome.is_interrupted:
            record["status"], record["status_reason"] = "interrupted", "stopped by the user while measuring"
            return
        self.is_measured = True
        if writer is not None and manager.is_cuda:
            # First what is done at once: a stop while replays are timed, which takes much longer, leaves it.
            self._speed_of_light(device, dtype)
            calls = runner.own_calls(prepared.calls)
            self._diagnose(manager, inputs, calls, record["graph"])
            if monolithic is not None:
                self._diagnose(monolithic, inputs, calls, record["graph"]["monolithic"])
        record["status"], record["status_reason"] = "complete", None

    def _monolithic_manager(self, encoder: VisionEncoder) -> EncoderCudaGraphManager | None:
        from vitgraph.graphs.manager import EncoderCudaGraphManager
        from vitgraph.models.monolithic import MonolithicEncoder

        planned = self.prepared.monolithic
        if planned is None:
            return None
        whole = MonolithicEncoder(encoder, planned.rule.max_crops)
        return EncoderCudaGraphManager(whole, planned.plan, policy=self.prepared.spec.graph.packing)

    def _capture(self, manager: EncoderCudaGraphManager, section: dict[str, Any], phase: str) -> None:
        """Captures a manager's graphs, and tells of them in a section of the record."""
        self.progress.phase(phase, len(manager.plan.graph_keys()))
        try:
            manager.capture(lambda done, of, key: self.progress.step())
        finally:
            captured = [graph.as_dict() for graph in manager.graphs.values()]
            section |= {
                "mode": CUDA if manager.is_cuda else CPU_REPLAY,
                "captured": captured,
                "dropped": [dropped.as_dict() for dropped in manager.dropped],
                "pool_bytes": manager.pool_bytes,
                "buffer_bytes": manager.buffer_bytes,
                "capture_s": sum(graph["capture_ms"] for graph in captured) / 1e3,
            }
        for dropped in manager.dropped:
            self.progress.note(f"{phase}: budget {dropped.key.token_budget} was dropped: {dropped.reason}")

    def _load(self, device: Any, dtype: Any) -> tuple[Any, Mapping[str, Any]]:
        prepared, spec = self.prepared, self.prepared.spec.model
        if self.ranks is None:
            return load(prepared.source, spec, device=device, dtype=dtype)
        self.ranks.agree(shared_facts(prepared))
        return self.ranks.load(prepared.source, spec, device=device, dtype=dtype)

    def _save_before_measuring(self) -> None:
        """Rank 0 may be killed for another's sake; its samples then have a record that says what they are."""
        if self.folder is not None and self.ranks is not None:
            self.record["status_reason"] = f"the run ended while it was measuring; {SAMPLES_FILE} holds what it has"
            # The samples were begun, so that the folder is this run's.
            RunRecord(self.record).save(self.folder, overwrite=True)

    def _runner(
        self,
        encoder: VisionEncoder,
        manager: EncoderCudaGraphManager,
        inputs: CallInputs,
        monolithic: EncoderCudaGraphManager | None,
    ) -> BenchRunner:
        from vitgraph.measure.runner import BenchRunner

        baseline = self.prepared.spec.run.baseline
        if self.ranks is None:
            return BenchRunner(encoder, manager, inputs, baseline=baseline, monolithic=monolithic)
        return self.ranks.runner(encoder, manager, inputs, baseline=baseline)

    def _summarize(self, is_cuda: bool, outcome: BenchOutcome) -> None:
        from vitgraph.measure.environment import validity_problems
        from vitgraph.models.compile.compilation import compile_facts

        record = self.record
        reasons = validity_problems(outcome.gpu_states)
        if not is_cuda:
            reasons.insert(0, CPU_REPLAY_REASON)
        record["summary"] = build_summary(self.samples)
        if self.ranks is not None:
            reasons += self.ranks.problems(record)
            self.ranks.summarize(record["summary"])
        record["comparison"] = build_comparison(self.samples, self.prepared.spec.model.seed, reasons)
        record["graph"] |= outcome.counters.as_dict()
        if self.prepared.monolithic is not None and outcome.monolithic is not None:
            record["graph"]["monolithic"] |= self.prepared.monolithic.describe_counters(outcome.monolithic)
        record["environment"]["gpu_states"] = [
            None if state is None else {**state.values, "other_processes": state.other_processes}
            for state in outcome.gpu_states
        ]
        if self.prepared.spec.model.compile:
            record["environment"] |= compile_facts()

    def _diagnose(
        self,
        manager: EncoderCudaGraphManager,
        inputs: CallInputs,
        calls: Sequence[EncoderCall],
        graph: dict[str, Any],
    ) -> None:
        """Times a manager's replays alone and its steps on the host, into its section of the record.

        Each figure goes there as soon as it is known, so that whatever ends this leaves those before it.
        """
        from vitgraph.measure.diagnose import (
            measure_call_overheads,
            measure_host_steps,
            measure_replays,
            most_used_graphs,
        )

        self.progress.phase("timing replays alone")
        rows = {
            (row["path"], row["token_budget"], row["segment_slots"], tuple(row["axis_key"])): row
            for row in graph["per_budget"]
        }
        try:
            for key, times in measure_replays(manager, inputs, most_used_graphs(manager, inputs, calls)):
                row = rows.get((key.path, key.token_budget, key.segment_slots, key.axis_key))
                if row is not None:
                    row.update(times)
        finally:
            self._derive_replay_times(graph)
        graph["call_overheads"] = []
        for overhead in measure_call_overheads(manager, inputs, calls):
            graph["call_overheads"].append(overhead)
        graph["host_steps_ms"] = measure_host_steps(manager, inputs, calls)

    def _derive_replay_times(self, graph: dict[str, Any]) -> None:
        """Fills `launch_gap` and the times of paths from the graphs that were timed."""
        timed = [row for row in graph["per_budget"] if row.get("launch_gap")]
        if timed:
            gaps, uses = [row["launch_gap"] for row in timed], [row["replays"] for row in timed]
            graph["launch_gap"] = float(np.average(gaps, weights=uses))
        requests = sum(call.requests for call in self.prepared.calls)
        for row in graph["per_path"]:
            row["replay_ms"] = replay_ms_of_path(row["path"], graph["per_budget"], requests)

    def _speed_of_light(self, device: torch.device, dtype: torch.dtype) -> None:
        """Adds the arithmetic limit of the unpadded items: its mean, and how far each mode is from it."""
        from vitgraph.measure.timing import matrix_rate_flops

        rate = matrix_rate_flops(device, dtype)
        if not rate:
            return
        rule = self.prepared.source.rule()
        limits = [sum(rule.flops(item) for item in call.items) / call.requests for call in self.prepared.calls]
        mean_ms = float(np.mean(limits)) / (rate * self.prepared.spec.parallel.ranks) * 1e3
        self.record["environment"]["matrix_rate_tflops"] = rate / 1e12
        for mode in self.record["summary"].values():
            mode["speed_of_light_ms"] = mean_ms
            mode["times_speed_of_light"] = mode["mean_ms"] / mean_ms
