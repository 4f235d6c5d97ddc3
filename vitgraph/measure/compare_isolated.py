"""A backend comparison with each backend in a process of its own: starts them one by one and merges their records."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vitgraph.measure.compare import STOPPED
from vitgraph.measure.compare_results import COMPARED_MODES, OK, derive_results
from vitgraph.measure.compare_spec import PreparedCompare, new_record
from vitgraph.measure.progress import Progress
from vitgraph.records.compare_record import ERROR, CompareRecord, empty_row, set_status
from vitgraph.records.compare_samples import BackendSample, BackendSampleWriter
from vitgraph.records.files import refuse_to_replace
from vitgraph.records.samples import RUN_FILE

PARTS_FOLDER = "parts"
STDERR_FILE = "stderr.txt"
STOP_WAIT_S = 60.0
"""What a process that is asked to stop gets to save what it has."""

PartCommand = Callable[[str, Path], Sequence[str]]
"""Given a backend and its folder: the command line that measures it alone and leaves its record there."""


def run_isolated(
    prepared: PreparedCompare, folder: Path, command: Sequence[str], progress: Progress, part_command: PartCommand
) -> CompareRecord:
    """Runs a comparison in one process a backend and saves the merged record in `folder`, whatever ends it.

    The records of the processes stay under `parts/`. A process that crashes costs its own row only.

    Returns:
        The record; also where no backend could be measured, which `CompareRecord.failure` tells.
    """
    overwrite = prepared.spec.bench.run.overwrite
    parts = folder / PARTS_FOLDER
    for path in () if overwrite else (folder / RUN_FILE, parts):
        refuse_to_replace(path)
    record = new_record(prepared, command)
    record["comparison"]["isolated"] = True
    samples: list[BackendSample] = []
    is_interrupted = False
    progress.phase("measuring, one process a backend", len(prepared.spec.backends))
    with BackendSampleWriter(folder, overwrite=overwrite) as writer:
        try:
            for index, name in enumerate(prepared.spec.backends):
                is_interrupted, status = _run_process(part_command(name, parts / name), parts / name)
                record.rows[index], found = _read_part(record, name, parts / name, status)
                for sample in found:
                    samples.append(sample)
                    writer.write(sample)
                if is_interrupted:
                    break
                progress.step()
            seed = prepared.spec.bench.model.seed
            record.data["recommendation"] = derive_results(record.rows, record["comparison"], samples, seed)
            status_of_run = ("interrupted", STOPPED) if is_interrupted else ("complete", None)
            record.data["status"], record.data["status_reason"] = status_of_run
        finally:
            record.save(folder, overwrite=overwrite)
    return record


def _run_process(command: Sequence[str], part: Path) -> tuple[bool, int]:
    """Runs one process to its end; returns whether the user stopped it, and its exit status."""
    part.mkdir(parents=True, exist_ok=True)
    (part / RUN_FILE).unlink(missing_ok=True)
    with (part / STDERR_FILE).open("wb") as errors:
        # In a session of its own it gets one interrupt, from here, and not a second from the terminal while it saves.
        process = subprocess.Popen(
            list(command), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True
        )
        try:
            return False, process.wait()
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            try:
                return True, process.wait(STOP_WAIT_S)
            except subprocess.TimeoutExpired:
                return True, _kill(process)
        except BaseException:
            _kill(process)
            raise


def _kill(process: subprocess.Popen[bytes]) -> int:
    process.kill()
    return process.wait()


def _read_part(record: CompareRecord, name: str, part: Path, status: int) -> tuple[dict[str, Any], list[BackendSample]]:
    """The row and the samples that a process left; what all rows share goes into `record`."""
    row = empty_row(name)
    if not (part / RUN_FILE).exists():
        ended = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
        # A process that died may have left anything there.
        lines = (part / STDERR_FILE).read_text(encoding="utf-8", errors="replace").strip().splitlines()
        last = f": {lines[-1]}" if lines else ""
        return _failed(row, f"its process {ended} and left no record{last}"), []
    found = CompareRecord.load(part)
    row, theirs, ours = found.rows[0], found["comparison"], record["comparison"]
    environment = record.data["environment"]
    states = environment.get("gpu_states", []) + found["environment"].get("gpu_states", [])
    record.data["environment"] = (environment or found["environment"]) | {"gpu_states": states}
    ours["mode"] = ours["mode"] or theirs["mode"]
    ours["reference"] = ours["reference"] or theirs["reference"]
    ours["invalid_reasons"] = list(dict.fromkeys([*ours["invalid_reasons"], *theirs["invalid_reasons"]]))
    if found["status"] == "error" and row["status"] != OK:
        return _failed(row, str(found["status_reason"])), []
    return row, found.load_samples()


def _failed(row: dict[str, Any], reason: str) -> dict[str, Any]:
    set_status(row, {mode: {"status": ERROR, "reason": reason} for mode in COMPARED_MODES})
    return row
