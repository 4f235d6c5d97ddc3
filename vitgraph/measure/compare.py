"""The `compare-backends` command's work: every backend in both modes on one workload, interleaved."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from vitgraph.measure.calls import CallInputs, EncoderCall
from vitgraph.measure.compare_spec import PreparedCompare, new_draft
from vitgraph.measure.preparation import shared_facts
from vitgraph.measure.progress import Progress
from vitgraph.measure.setup import resolve_device, resolve_dtype
from vitgraph.records.candidates import COMPARE_KIND, COMPARED_MODES, derive_results
from vitgraph.records.draft import Draft
from vitgraph.records.record import CompareRecord
from vitgraph.records.sample_table import Sample, Samples, SampleWriter
from vitgraph.records.store import ResultFolder
from vitgraph.records.summary import CPU_REPLAY_REASON

if TYPE_CHECKING:
    from vitgraph.measure.candidate import Candidate
    from vitgraph.measure.experiment import Experiment
    from vitgraph.measure.on_ranks import RanksOfRun
    from vitgraph.ranks.group import ParallelGroup

STOPPED = "stopped by the user while measuring"
STOPPED_BEFORE = "stopped by the user before the measuring began"


def run_compare(
    prepared: PreparedCompare,
    folder: Path,
    command: Sequence[str],
    progress: Progress,
    group: ParallelGroup | None = None,
    comparison: type[Comparison] | None = None,
) -> CompareRecord:
    """Runs a comparison in this process and saves its record in `folder`, whatever ends it.

    Args:
        prepared: What to compare.
        folder: Where the record goes.
        command: The command line, for the record.
        progress: Told about the work.
        group: The ranks that share the calls; this one is rank 0, and the others run `follow_compare`.
        comparison: What runs it; `Comparison` unless given.

    Returns:
        The record; also where no backend could be measured, which `failure` of `vitgraph.records.candidates` tells.

    Raises:
        VitgraphError: The model itself cannot be loaded or checked, or another rank failed.
    """
    chosen = comparison or Comparison
    draft = new_draft(prepared, command, chosen.kind)
    with ExitStack() as stack:
        results = stack.enter_context(ResultFolder(folder, prepared.spec.bench.run.overwrite))
        stack.enter_context(draft.saved_in(results, lambda: STOPPED_BEFORE))
        running = chosen(prepared, draft, progress, group)
        running.execute(stack.enter_context(SampleWriter(results)))
    record = draft.record()
    assert isinstance(record, CompareRecord)
    return record


def follow_compare(prepared: PreparedCompare, command: Sequence[str], group: ParallelGroup, progress: Progress) -> None:
    """A rank's part of a comparison where it is not rank 0: the same work, and no record.

    Raises:
        VitgraphError: This rank, or another one, failed.
    """
    Comparison(prepared, new_draft(prepared, command), progress, group).execute(None)


class Comparison:
    """One comparison in progress, or one rank's part of it; fills `draft` as facts become known."""

    kind: ClassVar[str] = COMPARE_KIND

    def __init__(
        self, prepared: PreparedCompare, draft: Draft, progress: Progress, group: ParallelGroup | None = None
    ) -> None:
        model = prepared.bench.spec.model
        self.prepared = prepared
        self.calls = prepared.bench.calls
        self.draft = draft
        self.progress = progress
        self.device = resolve_device(model.device) if group is None else group.device
        self.dtype = resolve_dtype(model.dtype, self.device)
        self.candidates: list[Candidate] = []
        self.group = group
        self.ranks: RanksOfRun | None = None

    @property
    def live(self) -> list[Candidate]:
        return [candidate for candidate in self.candidates if candidate.modes]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The candidates of the record."""
        rows: list[dict[str, Any]] = self.draft.result["candidates"]
        return rows

    def execute(self, writer: SampleWriter | None) -> None:
        """Runs it all.

        Args:
            writer: Takes the samples; None where this process has none to save.
        """
        try:
            self._execute(writer)
        except KeyboardInterrupt as stop:
            failure = self.group.failure_behind_stop() if self.group is not None else None
            if failure is not None:
                raise failure from stop
            raise
        finally:
            self._release()

    def _release(self) -> None:
        """Frees every backend, once the device has done what a stop or a failure left under way."""
        # A rank's process ends with its run, and where another rank failed, its device may wait for ever.
        for candidate in self.candidates if self.group is None else []:
            candidate.release()

    def _execute(self, writer: SampleWriter | None) -> None:
        import torch

        from vitgraph.measure.experiment import Control, Experiment, rounds_over
        from vitgraph.measure.record_samples import SampleKeeper
        from vitgraph.measure.timing import CallTimer

        bench = self.prepared.bench
        # Weights are made outside inference mode, as in `bench`, whose eager calls they must cost as much as.
        inputs = self._open()
        own_calls = self.calls if self.ranks is None else self.ranks.own_calls(self.calls)
        self.progress.phase("warming up", len(self.live) + len(bench.warmups))
        for candidate in self.live:
            candidate.prepare(own_calls)
            self.progress.step()
        series = [series for candidate in self.live for series in candidate.series]
        timer = CallTimer(self.device) if self.ranks is None else self.ranks.timer
        experiment = Experiment(series, inputs, timer, self.device, self.ranks)
        experiment.warm_up(bench.warmups, self.progress.step)
        rounds = bench.spec.run.rounds
        steps, names = rounds * len(self.calls), [one.name for one in series]
        self.progress.phase("measuring", steps)
        problems: list[str] = []
        keep = SampleKeeper(writer)
        try:
            control = Control.of(names, len(self.calls), rounds, kinds=len(COMPARED_MODES))
            experiment.measure(rounds_over(self.calls, rounds), steps, keep, control=control, tick=self.progress.step)
            if self.ranks is not None:
                problems = self.ranks.after(experiment)
        finally:
            if self._records:
                self.summarize(experiment, keep.table(), problems)
        is_interrupted = experiment.is_interrupted
        try:
            # Replays alone are rank 0's on its own share, and the others wait for it at the end of the run.
            if not is_interrupted and self._records:
                with torch.inference_mode():
                    self._diagnose(inputs, own_calls, keep.samples)
        except KeyboardInterrupt:
            is_interrupted = True
        if is_interrupted:
            self.draft.end("interrupted", STOPPED)
        else:
            self.draft.end("complete")

    @property
    def _records(self) -> bool:
        return self.group is None or self.group.is_leader

    def _open(self) -> CallInputs:
        """Builds the reference, then loads, captures and checks every backend; returns what makes all their pixels."""
        from vitgraph.measure.correctness import float32_reference, load_base
        from vitgraph.measure.environment import snapshot

        bench, draft = self.prepared.bench, self.draft
        names, comparison = self.prepared.spec.backends, draft.result["comparison"]
        if self.group is not None:
            from vitgraph.measure.on_ranks import RanksOfRun

            assert bench.assign is not None
            self.ranks = RanksOfRun(self.group, bench.assign)
            self.ranks.agree(shared_facts(bench) | {"backends": ", ".join(names)})
        self.progress.phase("float32 reference")
        base, facts = load_base(bench, self.device, self.dtype)
        kept = {name: facts[name] for name in ("dtype", "parameters", "weight_bytes")}
        draft.environment = snapshot(self.device) | kept
        is_cuda = self.device.type == "cuda"
        comparison |= {
            "mode": "cuda" if is_cuda else "cpu-replay",
            "invalid_reasons": [] if is_cuda else [CPU_REPLAY_REASON],
        }
        inputs = CallInputs(base, [*bench.calls, *bench.warmups], bench.spec.model.seed)
        reference, comparison["reference"] = float32_reference(bench, base, inputs)
        self.progress.phase("loading, capturing and checking", len(names))
        for index, name in enumerate(names):
            candidate = self.make_candidate(name, inputs)
            # Known before it is opened, so that a stop in the middle of its captures releases them too.
            self.candidates.append(candidate)
            candidate.open(self.device, self.dtype, reference)
            self.rows[index] = candidate.row
            self.progress.step()
        if self.ranks is not None:
            draft.environment["ranks"] = self.ranks.meet(device_name=draft.environment["device"])
        return inputs

    def make_candidate(self, name: str, inputs: CallInputs) -> Candidate:
        """The candidate of one row, not loaded yet."""
        from vitgraph.measure.candidate import Candidate

        return Candidate(name, self.prepared.bench, inputs, self.ranks)

    def summarize(self, experiment: Experiment, samples: Samples, problems: Sequence[str]) -> None:
        """Fills what the samples tell into the record."""
        from vitgraph.measure.environment import validity_problems

        result = self.draft.result
        comparison = result["comparison"]
        comparison["invalid_reasons"] += [*problems, *validity_problems(experiment.gpu_states)]
        for candidate in self.live:
            candidate.count(experiment.counters)
        seed, ranks = self.prepared.spec.bench.model.seed, 1 if self.group is None else self.group.size
        margin = self.prepared.spec.bench.run.same_margin_pct
        result["recommendation"] = derive_results(self.rows, comparison, samples, seed, ranks, margin)
        self.draft.environment["gpu_states"] += experiment.gpu_states

    def _diagnose(self, inputs: CallInputs, calls: Sequence[EncoderCall], samples: Sequence[Sample]) -> None:
        from vitgraph.attention.selection import first_line
        from vitgraph.measure.compare_diagnosis import diagnose

        if self.device.type != "cuda":
            return
        self.progress.phase("timing replays alone", len(self.live))
        for candidate in self.live:
            try:
                diagnose(candidate, inputs, calls, samples, self.device)
            except Exception as error:  # the latencies are measured already, and are worth more than their diagnosis
                self.progress.note(f"{candidate.name}: GPU-busy time was not measured ({first_line(error)})")
            self.progress.step()
