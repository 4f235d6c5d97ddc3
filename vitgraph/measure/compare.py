"""The `compare-backends` command's work in one process: every backend in both modes on one workload, interleaved."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from vitgraph.errors import VitgraphError
from vitgraph.measure.bench import Progress
from vitgraph.measure.calls import CallInputs, EncoderCall
from vitgraph.measure.compare_results import derive_results
from vitgraph.measure.compare_spec import PreparedCompare, new_record
from vitgraph.measure.setup import resolve_device, resolve_dtype
from vitgraph.records.bench_record import CPU_REPLAY_REASON
from vitgraph.records.compare_record import CPU_REPLAY, CUDA, KIND, CompareRecord
from vitgraph.records.compare_samples import BackendSample, BackendSampleWriter
from vitgraph.records.files import refuse_to_replace
from vitgraph.records.samples import RUN_FILE

if TYPE_CHECKING:
    from vitgraph.measure.compare_candidates import Candidate
    from vitgraph.measure.environment import GpuState
    from vitgraph.measure.timing import CallTime
    from vitgraph.models.base import EncoderInputs

MIN_REPEATED_CALLS = 600
REPEATED_SHARE = 0.2
"""One backend repeats one mode on this share of the calls, and on at least so many: half of them for each mode, where
a P99 needs 300."""

STOPPED = "stopped by the user while measuring"
STOPPED_BEFORE = "stopped by the user before the measuring began"


def run_compare(
    prepared: PreparedCompare,
    folder: Path,
    command: Sequence[str],
    progress: Progress,
    comparison: Callable[[PreparedCompare, CompareRecord, Progress], Comparison] | None = None,
) -> CompareRecord:
    """Runs a comparison in this process and saves its record in `folder`, whatever ends it.

    Args:
        prepared: What to compare.
        folder: Where the record goes.
        command: The command line, for the record.
        progress: Told about the work.
        comparison: Makes what runs it; `Comparison` unless given.

    Returns:
        The record; also where no backend could be measured, which `CompareRecord.failure` tells.

    Raises:
        VitgraphError: The model itself cannot be loaded or checked.
    """
    overwrite = prepared.spec.bench.run.overwrite
    if not overwrite:
        refuse_to_replace(folder / RUN_FILE)
    record = new_record(prepared, command)
    with BackendSampleWriter(folder, overwrite=overwrite) as writer:
        try:
            running = (comparison or Comparison)(prepared, record, progress)
            record.data["kind"] = running.kind
            running.execute(writer)
        except VitgraphError as error:
            record.data |= {"status": "error", "status_reason": str(error)}
            raise
        except KeyboardInterrupt:
            record.data |= {"status": "interrupted", "status_reason": STOPPED_BEFORE}
            raise
        finally:
            record.save(folder, overwrite=overwrite)
    return record


def call_order(step: int, backends: Sequence[tuple[str, Sequence[str]]]) -> list[tuple[str, str]]:
    """Backends and modes of one call: who comes first rotates, and which mode comes first alternates.

    Args:
        step: Number of the call, plus that of the round.
        backends: Names and their modes.
    """
    first = (step // 2) % len(backends)
    order = []
    for name, modes in (*backends[first:], *backends[:first]):
        order += [(name, mode) for mode in (reversed(modes) if step % 2 else modes)]
    return order


def repeated(step: int, backends: Sequence[tuple[str, Sequence[str]]]) -> tuple[str, str]:
    """The backend and mode that a call measures twice; both rotate."""
    name, modes = backends[(step // 4) % len(backends)]
    return name, modes[(step // 2) % len(modes)]


class Comparison:
    """One comparison in progress; fills `record` as facts become known."""

    kind: ClassVar[str] = KIND

    def __init__(self, prepared: PreparedCompare, record: CompareRecord, progress: Progress) -> None:
        from vitgraph.measure.timing import CallTimer

        model = prepared.bench.spec.model
        self.prepared = prepared
        self.calls = prepared.bench.calls
        self.record = record
        self.progress = progress
        self.device = resolve_device(model.device)
        self.dtype = resolve_dtype(model.dtype, self.device)
        self.timer = CallTimer(self.device)
        self.samples: list[BackendSample] = []
        self.states: list[GpuState | None] = []
        self.candidates: list[Candidate] = []
        self.is_interrupted = False

    @property
    def live(self) -> list[Candidate]:
        return [candidate for candidate in self.candidates if candidate.modes]

    def execute(self, writer: BackendSampleWriter | None) -> None:
        """Runs it all.

        Args:
            writer: Takes the samples; None where this process has none to save.
        """
        try:
            self._execute(writer)
        finally:
            self._release()

    def _execute(self, writer: BackendSampleWriter | None) -> None:
        import torch

        data = self.record.data
        # Weights are made outside inference mode, as in `bench`, whose eager calls they must cost as much as.
        inputs = self._open()
        with torch.inference_mode():
            self._warm_up(inputs)
            try:
                self._measure(inputs, writer)
            finally:
                self.summarize()
            try:
                if not self.is_interrupted:
                    self._diagnose(inputs)
            except KeyboardInterrupt:
                self.is_interrupted = True
        done = {"status": "complete", "status_reason": None}
        data |= {"status": "interrupted", "status_reason": STOPPED} if self.is_interrupted else done

    def _release(self) -> None:
        """Frees every backend, once the device has done what a stop or a failure left under way."""
        for candidate in self.candidates:
            candidate.release()

    def _open(self) -> CallInputs:
        """Builds the reference, then loads, captures and checks every backend; returns what makes all their pixels."""
        from vitgraph.measure.compare_reference import build_reference, load_base
        from vitgraph.measure.environment import snapshot

        bench, data = self.prepared.bench, self.record.data
        comparison = data["comparison"]
        self.progress.phase("float32 reference")
        base, facts = load_base(bench, self.device, self.dtype)
        kept = {name: facts[name] for name in ("dtype", "parameters", "weight_bytes")}
        data["environment"] = snapshot(self.device) | kept
        is_cuda = self.device.type == "cuda"
        comparison |= {
            "mode": CUDA if is_cuda else CPU_REPLAY,
            "invalid_reasons": [] if is_cuda else [CPU_REPLAY_REASON],
        }
        inputs = CallInputs(base, [*bench.calls, *bench.warmups], bench.spec.model.seed)
        reference = build_reference(bench, base, inputs)
        comparison["reference"] = reference.as_dict()
        names = self.prepared.spec.backends
        self.progress.phase("loading, capturing and checking", len(names))
        for index, name in enumerate(names):
            candidate = self.make_candidate(name, inputs)
            # Known before it is opened, so that a stop in the middle of its captures releases them too.
            self.candidates.append(candidate)
            candidate.open(self.device, self.dtype, reference)
            self.record.rows[index] = candidate.row
            self.progress.step()
        return inputs

    def make_candidate(self, name: str, inputs: CallInputs) -> Candidate:
        """The candidate of one row, not loaded yet."""
        from vitgraph.measure.compare_candidates import Candidate

        return Candidate(name, self.prepared.bench, inputs)

    def own_calls(self) -> list[EncoderCall]:
        """The measured calls as this process encodes them."""
        return self.calls

    def _warm_up(self, inputs: CallInputs) -> None:
        """Plans and tuning of every backend, then warm-up calls in every mode."""
        warmups = self.prepared.bench.warmups
        self.progress.phase("warming up", len(self.live) + len(warmups))
        for candidate in self.live:
            candidate.prepare(self.own_calls())
            self.progress.step()
        for call in warmups:
            call_inputs = inputs.make(call)
            for candidate in self.live:
                for mode in candidate.modes:
                    self._time(candidate, mode, call_inputs)
            self.progress.step()

    def _time(self, candidate: Candidate, mode: str, inputs: EncoderInputs) -> CallTime | None:
        return candidate.attempt(mode, partial(self.timer.time, partial(candidate.run, mode, inputs)))

    def _measure(self, inputs: CallInputs, writer: BackendSampleWriter | None) -> None:
        from vitgraph.measure.environment import read_gpu_state
        from vitgraph.measure.runner import STATE_READS

        rounds = self.prepared.spec.bench.run.rounds
        total = rounds * len(self.calls)
        repeat_every = max(1, total // max(MIN_REPEATED_CALLS, int(total * REPEATED_SHARE)))
        read_every = max(1, total // STATE_READS)
        self.progress.phase("measuring", total)
        gc.collect()
        gc.disable()
        try:
            for done in range(total):
                if not self.live:
                    break
                if done % read_every == 0:
                    self.states.append(read_gpu_state(self.device))
                round_index, index = divmod(done, len(self.calls))
                for sample in self._measure_call(self.calls[index], round_index, done % repeat_every == 0, inputs):
                    self.samples.append(sample)
                    if writer is not None:
                        writer.write(sample)
                self.progress.step()
        except KeyboardInterrupt:
            self.is_interrupted = True
        finally:
            gc.enable()
            self.states.append(read_gpu_state(self.device))

    def _measure_call(
        self, call: EncoderCall, round_index: int, is_repeated: bool, inputs: CallInputs
    ) -> Iterator[BackendSample]:
        """Runs one call with every backend in every mode, and yields each sample as soon as it is measured."""
        from vitgraph.measure.runner import make_sample

        candidates = {candidate.name: candidate for candidate in self.live}
        call_inputs = inputs.make(call)
        for position, (name, mode, is_repeat) in enumerate(self._order(call, round_index, is_repeated)):
            candidate = candidates[name]
            time = self._time(candidate, mode, call_inputs) if mode in candidate.modes else None
            if time is not None:
                batches = candidate.batches_of(call)
                yield BackendSample(name, is_repeat, make_sample(call, round_index, mode, position, time, batches))

    def _order(self, call: EncoderCall, round_index: int, is_repeated: bool) -> list[tuple[str, str, bool]]:
        """Backends and modes of one call in the order of measuring, and whether each is a repeat."""
        backends = [(candidate.name, candidate.modes) for candidate in self.live]
        step = call.index + round_index
        order = [(*series, False) for series in call_order(step, backends)]
        if is_repeated:
            again = (*repeated(step, backends), True)
            # At the far end of the call, so that drift within it shows in the noise, and in either direction.
            order.insert(0, again) if step % 2 else order.append(again)
        return order

    def summarize(self) -> None:
        """Fills what the samples tell into the record."""
        from vitgraph.measure.environment import validity_problems

        data = self.record.data
        comparison = data["comparison"]
        comparison["invalid_reasons"] = [*comparison["invalid_reasons"], *validity_problems(self.states)]
        for candidate in self.live:
            candidate.count()
        data["recommendation"] = derive_results(
            self.record.rows, comparison, self.samples, self.prepared.spec.bench.model.seed
        )
        data["environment"]["gpu_states"] = [
            None if state is None else {**state.values, "other_processes": state.other_processes}
            for state in self.states
        ]

    def _diagnose(self, inputs: CallInputs) -> None:
        from vitgraph.attention.selection import first_line
        from vitgraph.measure.compare_diagnosis import diagnose

        if self.device.type != "cuda":
            return
        self.progress.phase("timing replays alone", len(self.live))
        for candidate in self.live:
            try:
                diagnose(candidate, inputs, self.own_calls(), self.samples, self.device)
            except Exception as error:  # the latencies are measured already, and are worth more than their diagnosis
                self.progress.note(f"{candidate.name}: GPU-busy time was not measured ({first_line(error)})")
            self.progress.step()
