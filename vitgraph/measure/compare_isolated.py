"""A backend comparison with each backend in a process of its own: starts them one by one and merges their records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from vitgraph.measure.compare import PreparedCompare, new_draft
from vitgraph.measure.processes import last_line, run_process
from vitgraph.measure.progress import Progress
from vitgraph.measure.run import STOPPED
from vitgraph.records.candidates import COMPARE_KIND, COMPARED_MODES, ERROR, OK, derive_results
from vitgraph.records.draft import Draft
from vitgraph.records.kinds.compare import Candidate, CandidateComparison, CandidateMode
from vitgraph.records.record import CompareRecord
from vitgraph.records.sample_table import Samples, SampleWriter, read_samples
from vitgraph.records.store import RUN_FILE, beside, read_record, refuse_to_replace

PARTS_FOLDER = "parts"
PartCommand = Callable[[str, Path], Sequence[str]]
"""Given a backend and its folder: the command line that measures it alone and leaves its record there."""


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


def _failed(row: Candidate, reason: str) -> Candidate:
    return row.with_modes(**dict.fromkeys(COMPARED_MODES, CandidateMode(status=ERROR, reason=reason)))
