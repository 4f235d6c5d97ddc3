"""Commands on several ranks, between their options and their work: launching, rank 0's part and the others'."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from vitgraph.commands.process import keep_stdout
from vitgraph.errors import EXIT_UNEXPECTED, RankFailedError
from vitgraph.ranks.launch import (
    check_devices,
    check_ranks,
    end_with_parent,
    is_rank,
    launch_ranks,
    leave_word,
)
from vitgraph.records.store import ResultFolder
from vitgraph.specs import ParallelSpec

if TYPE_CHECKING:
    from vitgraph.measure.preparation import PreparedBench
    from vitgraph.measure.progress import Progress
    from vitgraph.ranks.group import ParallelGroup
    from vitgraph.records.record import BenchRecord


def ran_on_ranks(
    spec: ParallelSpec, device: str, folder: Path | None, progress: Progress, *, overwrite: bool, launches: bool
) -> bool:
    """Runs this command line again on several ranks of this host, where they are wanted and not there yet.

    Args:
        spec: How many.
        device: `--device`.
        folder: Where rank 0 saves; decided here, so that the user can be told whatever happens.
        progress: That of this process; rank 0 tells of its own.
        overwrite: Results in it may be replaced.
        launches: Run it; else only what stands in the way is refused.

    Returns:
        False where this process does the work itself: it is the only one, or one of the ranks, or nothing is launched.

    Raises:
        UsageError: There are not enough devices, or torchrun started another number of processes.
        RankFailedError: A rank ended with an error that rank 0 could not tell.
        Exit: A rank ended with an error that rank 0 has told.
    """
    check_ranks(spec.ranks)
    if spec.ranks == 1 or is_rank():
        return False
    check_devices(device, spec.ranks)
    if folder is not None:
        # Refused here, before processes are started; the folder is rank 0's afterwards.
        ResultFolder(folder, overwrite).close()
    if not launches:
        return False
    progress.close()
    output = ["--output-dir", str(folder)] if folder is not None else []
    ended = launch_ranks(spec.ranks, [*sys.argv[1:], *output])
    if ended.message is not None:
        raise RankFailedError(ended.message, ended.exit_status)
    if ended.exit_status:
        raise typer.Exit(ended.exit_status)
    return True


@contextmanager
def joined(spec: ParallelSpec, device: str) -> Iterator[ParallelGroup | None]:
    """This process as a rank of its run; None in a run of one process."""
    if spec.ranks == 1:
        yield None
        return
    from vitgraph.ranks.group import ParallelGroup

    with ParallelGroup.join(device, spec.rank_timeout_s) as group:
        yield group


def bench_on_rank(prepared: PreparedBench, folder: Path, progress: Progress) -> BenchRecord | None:
    """This rank's part of `bench`; the record on rank 0 and in a run of one process, None elsewhere."""
    from vitgraph.measure.bench import follow_bench, run_bench

    spec = prepared.spec
    with naming_folder(folder), joined(spec.parallel, spec.model.device) as group:
        if group is None or group.is_leader:
            return run_bench(prepared, folder, progress, group)
        follow_bench(prepared, group, progress)
        return None


@contextmanager
def naming_folder(folder: Path) -> Iterator[None]:
    """Adds to the failure of a rank where the run is saved all the same."""
    try:
        yield
    except RankFailedError as error:
        raise RankFailedError(f"{error}. What was measured is saved in {folder}", error.exit_status) from error


def main_of_rank(app: Callable[[], object]) -> None:
    """Runs the program as one of several ranks.

    A rank that left its group may still have a collective on its GPU. Cleaning up would wait for that, and so for a
    rank that is gone; such a process ends at once.
    """
    keep_stdout()
    end_with_parent()
    try:
        app()
    except SystemExit as end:
        _leave_at_once(end.code if isinstance(end.code, int) else EXIT_UNEXPECTED)
        raise
    except Exception as error:
        leave_word(error)
        traceback.print_exc()
        _leave_at_once(EXIT_UNEXPECTED)
        sys.exit(EXIT_UNEXPECTED)


def _leave_at_once(exit_status: int) -> None:
    group = sys.modules.get("vitgraph.ranks.group")
    if group is not None and group.was_abandoned():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_status)
