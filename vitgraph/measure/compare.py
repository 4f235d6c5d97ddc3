"""Encoders of the same weights in both modes on one workload, interleaved: of every backend, or plain and compiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from vitgraph.attention.registry import AUTO, BACKENDS, backend_class, describe_backends
from vitgraph.errors import UsageError, first_line
from vitgraph.measure.calls import CallInputs, EncoderCall
from vitgraph.measure.candidate import COMPILED, PLAIN, Candidate, CompileCandidate
from vitgraph.measure.correctness import float32_reference, load_base
from vitgraph.measure.environment import snapshot
from vitgraph.measure.experiment import Control
from vitgraph.measure.preparation import PreparedBench, prepare_bench, resolved_bench, workload_of
from vitgraph.measure.processes import last_line, run_process
from vitgraph.measure.progress import Progress
from vitgraph.measure.run import STOPPED, MeasuredRun
from vitgraph.measure.series import Series
from vitgraph.measure.setup import resolve_device
from vitgraph.planning.accounting import GraphCounters
from vitgraph.ranks.group import ParallelGroup
from vitgraph.records.candidates import (
    COMPARE_KIND,
    COMPARED_MODES,
    ERROR,
    NOTHING_MEASURED,
    OK,
    before_its_turn,
    contrast,
    derive_results,
    series_name,
)
from vitgraph.records.record import CompareKind, CompareRecord
from vitgraph.records.results import Candidate as CandidateRow
from vitgraph.records.results import CandidateComparison, CandidateMode, CompareResult, Recommendation
from vitgraph.records.sample_table import EAGER, GRAPH, Sample, Samples, SampleWriter, read_samples
from vitgraph.records.stats import CPU_REPLAY_REASON
from vitgraph.records.store import RUN_FILE, SAMPLES_FILE, Draft, beside, read_record, refuse_to_replace
from vitgraph.specs.asked import CompareSpec

CONTRASTS: Sequence[tuple[str, str]] = tuple(
    (series_name(*base), series_name(*series))
    for base, series in (
        ((PLAIN, EAGER), (PLAIN, GRAPH)),
        ((COMPILED, EAGER), (COMPILED, GRAPH)),
        ((PLAIN, EAGER), (COMPILED, EAGER)),
        ((PLAIN, GRAPH), (COMPILED, GRAPH)),
        ((PLAIN, EAGER), (COMPILED, GRAPH)),
    )
)
"""What `--compile-rows` compares with what: graphs on either tower, compilation in either mode, and both together."""

PARTS_FOLDER = "parts"
PartCommand = Callable[[str, Path], Sequence[str]]
"""Given a backend and its folder: the command line that measures it alone and leaves its record there."""


@dataclass(frozen=True, slots=True)
class PreparedCompare:
    """A comparison that was planned without touching a device."""

    spec: CompareSpec
    bench: PreparedBench

    def describe(self) -> dict[str, Any]:
        """Resolved settings, plan, expected packing and what each backend says about this device, for `--dry-run`."""
        described = describe_backends(resolve_device(self.spec.bench.model.device))
        chosen = [row for row in described if row["name"] in self.spec.backends]
        return self.bench.describe() | {"settings": self.spec.as_dict(), "backends": chosen}


def choose_backends(names: Sequence[str]) -> tuple[str, ...]:
    """The backends that are named, `auto` among them where it is; every registered one where none is.

    Raises:
        BackendError: An unknown name.
        UsageError: One twice.
    """
    if not names:
        return tuple(BACKENDS)
    for name in names:
        if list(names).count(name) > 1:
            raise UsageError(f"--backends names {name} twice; name each backend once")
        if name != AUTO:
            backend_class(name)
    return tuple(names)


def prepare_compare(spec: CompareSpec) -> PreparedCompare:
    """Everything that can be decided and refused before a device is touched."""
    return PreparedCompare(spec, prepare_bench(spec.bench))


def new_draft(prepared: PreparedCompare, kind: CompareKind = "compare-backends") -> Draft[CompareRecord]:
    """A record of a comparison that has not measured anything yet."""
    return Draft(
        CompareRecord(
            kind=kind,
            settings=prepared.spec.as_dict(),
            resolved=resolved_bench(prepared.bench).but(attn_backend=None),
            workload=workload_of(prepared.bench),
            samples_file=SAMPLES_FILE,
            result=CompareResult(
                candidates=tuple(map(before_its_turn, prepared.spec.backends)),
                recommendation=Recommendation(text=NOTHING_MEASURED),
            ),
        )
    )


def run_compile_rows(prepared: PreparedBench, folder: Path, progress: Progress) -> CompareRecord:
    """Measures eager and graph, each plain and with compiled blocks, and saves the record, whatever ends it.

    Returns:
        A record of kind `compile-rows`, in the shape of a backend comparison, whose candidates are `compiled` and
        `plain`. What cannot run keeps its row with the reason.

    Raises:
        VitgraphError: The model itself cannot be loaded or checked.
    """
    # The plain tower is loaded last: transformers finds an attention function by name, and compiled blocks have their
    # own name for it, so each tower calls the backend that it was given.
    spec = CompareSpec(prepared.spec, (COMPILED, PLAIN))
    record = CompileComparison.of(PreparedCompare(spec, prepared), progress).record(folder)
    assert record is not None
    return record


def run_isolated(
    prepared: PreparedCompare, folder: Path, progress: Progress, part_command: PartCommand
) -> CompareRecord:
    """Runs a comparison in one process a backend and saves the merged record in `folder`, whatever ends it.

    The records of the processes stay under `parts/`. A process that crashes costs its own row only.

    Returns:
        The record; also where no backend could be measured, which `failure` of `vitgraph.records.candidates` tells.
    """
    parts, run = folder / PARTS_FOLDER, prepared.spec.bench.run
    if not run.overwrite:
        refuse_to_replace(parts)
    draft = new_draft(prepared)
    draft.note_result(comparison=CandidateComparison(isolated=True))
    samples: list[Samples] = []
    is_interrupted = False
    progress.phase("measuring, one process a backend", len(prepared.spec.backends))
    with draft.saved_in(folder, run.overwrite, lambda: STOPPED) as results, SampleWriter(results) as writer:
        for place, name in enumerate(prepared.spec.backends):
            is_interrupted, status = run_process(part_command(name, parts / name), parts / name)
            found = _read_part(draft, place, parts / name, status)
            if found is not None:
                samples.append(found)
                writer.write_table(found)
            if is_interrupted:
                break
            progress.step()
        seed, together = prepared.spec.bench.model.seed, Samples.joined(samples)
        draft.note(result=derive_results(draft.record.result, together, seed, margin_pct=run.same_margin_pct))
        draft.end(*("interrupted", STOPPED) if is_interrupted else ("complete",))
    return draft.record


def _read_part(draft: Draft[CompareRecord], place: int, part: Path, status: int) -> Samples | None:
    """The samples that a process left; its row, and what all rows share, go into `draft`."""
    rows = list(draft.record.result.candidates)
    if not (part / RUN_FILE).exists():
        ended = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
        last = last_line(part)
        rows[place] = _failed(rows[place], f"its process {ended} and left no record{f': {last}' if last else ''}")
        draft.note_result(candidates=tuple(rows))
        return None
    found = read_record(part, COMPARE_KIND)
    assert isinstance(found, CompareRecord)
    known, more = draft.record.environment, found.environment
    if known is None:
        draft.note(environment=more)
    elif more is not None:
        draft.note_environment(gpu_states=(*known.gpu_states, *more.gpu_states[1:]))
    ours, theirs = draft.record.result.comparison, found.result.comparison
    rows[place] = found.result.candidates[0]
    is_lost = found.status == "error" and rows[place].status != OK
    if is_lost:
        rows[place] = _failed(rows[place], str(found.status_reason))
    comparison = ours.but(
        mode=ours.mode or theirs.mode,
        reference=ours.reference or theirs.reference,
        invalid_reasons=tuple(dict.fromkeys([*ours.invalid_reasons, *theirs.invalid_reasons])),
    )
    draft.note_result(candidates=tuple(rows), comparison=comparison)
    return None if is_lost else read_samples(beside(part / RUN_FILE, str(found.samples_file)))


def _failed(row: CandidateRow, reason: str) -> CandidateRow:
    return row.with_modes(**dict.fromkeys(COMPARED_MODES, CandidateMode(status=ERROR, reason=reason)))


class Comparison(MeasuredRun[CompareRecord]):
    """Candidates, each in both modes; what goes wrong with one of them ends up in its row.

    Its record is whole where no candidate could be measured, which `failure` of `vitgraph.records.candidates` tells.
    """

    kind: ClassVar[CompareKind] = "compare-backends"
    candidate_class: ClassVar[type[Candidate]] = Candidate

    candidates: Sequence[Candidate] = ()

    @classmethod
    def of(cls, prepared: PreparedCompare, progress: Progress, group: ParallelGroup | None = None) -> Self:
        """A comparison that has not begun."""
        return cls(prepared.bench, new_draft(prepared, cls.kind), progress, group)

    @property
    def live(self) -> list[Candidate]:
        """The candidates that can be measured in some mode."""
        return [candidate for candidate in self.candidates if candidate.modes]

    def open(self) -> CallInputs:
        bench, draft = self.prepared, self.draft
        names = [row.name for row in draft.record.result.candidates]
        self.join_ranks(backends=", ".join(names))
        self.progress.phase("float32 reference")
        base, facts = load_base(bench, self.device, self.dtype)
        common = facts.model_dump(include={"dtype", "parameters", "weight_bytes"})
        draft.note(environment=snapshot(self.device).but(encoder=common))
        inputs = CallInputs(base, [*bench.calls, *bench.warmups], bench.spec.model.seed)
        reference, described = float32_reference(bench, base, inputs)
        is_cuda = self.device.type == "cuda"
        self._note_comparison(
            mode="cuda" if is_cuda else "cpu-replay",
            invalid_reasons=() if is_cuda else (CPU_REPLAY_REASON,),
            reference=described,
        )
        self.progress.phase("loading, capturing and checking", len(names))
        # Known before any is opened, so that a stop in the middle of its captures releases it too.
        self.candidates = [self.candidate_class(place, draft, bench, inputs, self.ranks) for place in range(len(names))]
        for candidate in self.candidates:
            candidate.open(self.device, self.dtype, reference)
            self.progress.step()
        if self.ranks is not None:
            assert draft.record.environment is not None
            draft.note_environment(ranks=self.ranks.meet(device_name=draft.record.environment.device))
        return inputs

    def _note_comparison(self, **changes: object) -> None:
        self.draft.note_result(comparison=self.draft.record.result.comparison.but(**changes))

    def prepare(self, calls: Sequence[EncoderCall], inputs: CallInputs) -> None:
        self.progress.phase("preparing attention", len(self.live))
        for candidate in self.live:
            candidate.prepare(calls)
            self.progress.step()

    def series(self) -> list[Series]:
        return [series for candidate in self.live for series in candidate.series]

    def control(self) -> Control:
        names = [one.name for one in self.series()]
        return Control.of(names, len(self.calls), self.prepared.spec.run.rounds, kinds=len(COMPARED_MODES))

    def summarize(
        self, samples: Samples, counters: Mapping[str, GraphCounters], invalid_reasons: Sequence[str]
    ) -> None:
        for candidate in self.live:
            candidate.count(counters)
        self._note_comparison(invalid_reasons=invalid_reasons)
        spec = self.prepared.spec
        facts = (spec.model.seed, spec.parallel.ranks, spec.run.same_margin_pct)
        self.draft.note(result=derive_results(self.draft.record.result, samples, *facts))

    def diagnose(self, inputs: CallInputs, calls: Sequence[EncoderCall], samples: Sequence[Sample]) -> None:
        if self.device.type != "cuda":
            return
        self.progress.phase("timing replays alone", len(self.live))
        for candidate in self.live:
            walls = {
                mode: [one for one in samples if one.series == series_name(candidate.name, mode) and one.rank is None]
                for mode in candidate.modes
            }
            try:
                candidate.diagnose(inputs, calls, walls)
            except Exception as error:  # the latencies are measured already, and are worth more than their diagnosis
                self.progress.note(f"{candidate.name}: GPU-busy time was not measured ({first_line(error)})")
            self.progress.step()

    def release(self) -> None:
        for candidate in self.candidates:
            candidate.release()


class CompileComparison(Comparison):
    """The tower as it is and with compiled blocks, both with the attention backend that was asked for."""

    kind: ClassVar[CompareKind] = "compile-rows"
    candidate_class: ClassVar[type[Candidate]] = CompileCandidate

    def summarize(
        self, samples: Samples, counters: Mapping[str, GraphCounters], invalid_reasons: Sequence[str]
    ) -> None:
        super().summarize(samples, counters, invalid_reasons)
        self._note_comparison(
            contrasts=contrast(self.draft.record.result, samples, CONTRASTS, self.prepared.spec.model.seed),
            speed_of_light_ms=self.speed_of_light_ms(),
        )
