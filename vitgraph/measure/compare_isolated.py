"""A backend comparison with each backend in a process of its own: starts them one by one and merges their records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vitgraph.measure.compare import STOPPED
from vitgraph.measure.compare_spec import PreparedCompare, new_draft
from vitgraph.measure.processes import last_line, run_process
from vitgraph.measure.progress import Progress
from vitgraph.records.candidates import COMPARE_KIND, COMPARED_MODES, ERROR, OK, derive_results, empty_row, set_status
from vitgraph.records.draft import Draft, facts_of
from vitgraph.records.record import CompareRecord
from vitgraph.records.sample_table import Samples, SampleWriter, read_samples
from vitgraph.records.store import RUN_FILE, ResultFolder, beside, read_record, refuse_to_replace

PARTS_FOLDER = "parts"
PartCommand = Callable[[str, Path], Sequence[str]]
"""Given a backend and its folder: the command line that measures it alone and leaves its record there."""


def run_isolated(
    prepared: PreparedCompare, folder: Path, command: Sequence[str], progress: Progress, part_command: PartCommand
) -> CompareRecord:
    """Runs a comparison in one process a backend and saves the merged record in `folder`, whatever ends it.

    The records of the processes stay under `parts/`. A process that crashes costs its own row only.

    Returns:
        The record; also where no backend could be measured, which `failure` of `vitgraph.records.candidates` tells.
    """
    parts = folder / PARTS_FOLDER
    if not prepared.spec.bench.run.overwrite:
        refuse_to_replace(parts)
    draft = new_draft(prepared, command)
    comparison, rows = draft.result["comparison"], draft.result["candidates"]
    comparison["isolated"] = True
    samples: list[Samples] = []
    is_interrupted = False
    progress.phase("measuring, one process a backend", len(prepared.spec.backends))
    with ResultFolder(folder, prepared.spec.bench.run.overwrite) as results, SampleWriter(results) as writer:
        try:
            for index, name in enumerate(prepared.spec.backends):
                is_interrupted, status = run_process(part_command(name, parts / name), parts / name)
                rows[index], found = _read_part(draft, name, parts / name, status)
                if found is not None:
                    samples.append(found)
                    writer.write_table(found)
                if is_interrupted:
                    break
                progress.step()
            seed, margin = prepared.spec.bench.model.seed, prepared.spec.bench.run.same_margin_pct
            together = Samples.joined(samples)
            draft.result["recommendation"] = derive_results(rows, comparison, together, seed, margin_pct=margin)
            if is_interrupted:
                draft.end("interrupted", STOPPED)
            else:
                draft.end("complete")
        finally:
            record = draft.save(results)
    assert isinstance(record, CompareRecord)
    return record


def _read_part(draft: Draft, name: str, part: Path, status: int) -> tuple[dict[str, Any], Samples | None]:
    """The row and the samples that a process left; what all rows share goes into `draft`."""
    row = empty_row(name)
    if not (part / RUN_FILE).exists():
        ended = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
        last = last_line(part)
        return _failed(row, f"its process {ended} and left no record{f': {last}' if last else ''}"), None
    found = read_record(part, COMPARE_KIND)
    assert isinstance(found, CompareRecord)
    row, theirs, ours = found.result.candidates[0].model_dump(), found.result.comparison, draft.result["comparison"]
    if found.environment is not None:
        facts = facts_of(found.environment)
        if draft.environment:
            draft.environment["gpu_states"] += facts["gpu_states"][1:]
        else:
            draft.environment = facts
    ours["mode"] = ours.get("mode") or theirs.mode
    ours["reference"] = ours.get("reference") or theirs.reference
    ours["invalid_reasons"] = list(dict.fromkeys([*ours["invalid_reasons"], *theirs.invalid_reasons]))
    if found.status == "error" and row["status"] != OK:
        return _failed(row, str(found.status_reason)), None
    return row, read_samples(beside(part / RUN_FILE, str(found.samples_file)))


def _failed(row: dict[str, Any], reason: str) -> dict[str, Any]:
    set_status(row, {mode: {"status": ERROR, "reason": reason} for mode in COMPARED_MODES})
    return row
