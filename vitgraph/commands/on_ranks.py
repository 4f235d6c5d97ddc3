"""Commands on several ranks, between their options and their work: launching, rank 0's part and the others'."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from vitgraph.commands.process import keep_stdout
from vitgraph.commands.shell import Shown, check_run, shown_record
from vitgraph.errors import EXIT_INTERRUPTED, EXIT_UNEXPECTED, RankFailedError, VitgraphError
from vitgraph.ranks.launch import (
    check_ranks,
    end_with_parent,
    is_follower,
    is_rank,
    launch_ranks,
    leave_word,
    rank_device,
)
from vitgraph.records.store import ResultFolder
from vitgraph.specs.asked import BenchSpec, VerifySpec
from vitgraph.specs.parts import ParallelSpec

if TYPE_CHECKING:
    from vitgraph.measure.preparation import PreparedBench
    from vitgraph.measure.progress import Progress
    from vitgraph.ranks.group import ParallelGroup
    from vitgraph.records.record import Record
    from vitgraph.report.document import Document

Found = TypeVar("Found")


def ran_on_ranks(
    spec: BenchSpec | VerifySpec, folder: Path | None, progress: Progress, *, launches: bool = True
) -> bool:
    """Runs this command line again on several ranks of this host, where they are wanted and not there yet.

    Args:
        folder: Where rank 0 saves; decided here, so that the user can be told whatever happens.
        progress: That of this process; rank 0 tells of its own.
        launches: Run it; else only what stands in the way is refused.

    Returns:
        False where this process does the work itself: it is the only one, or one of the ranks, or nothing is launched.

    Raises:
        UsageError: There are not enough devices, or torchrun started another number of processes.
        RankFailedError: A rank ended with an error that rank 0 could not tell.
        KeyboardInterrupt: The run was stopped.
        Exit: A rank ended with an error that rank 0 has told.
    """
    ranks, overwrite = spec.parallel.ranks, spec.overwrite if isinstance(spec, VerifySpec) else spec.run.overwrite
    check_ranks(ranks)
    if ranks == 1 or is_rank():
        return False
    rank_device(spec.model.device, ranks - 1)
    if folder is not None:
        # Refused here, before processes are started; the folder is rank 0's afterwards.
        ResultFolder(folder, overwrite).close()
    if spec.shell.dry_run or not launches:
        return False
    progress.close()
    output = ["--output-dir", str(folder)] if folder is not None else []
    ended = launch_ranks(ranks, [*sys.argv[1:], *output])
    if ended.exit_status == EXIT_INTERRUPTED:
        raise KeyboardInterrupt
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


def on_rank(spec: BenchSpec, folder: Path, measure: Callable[[ParallelGroup | None], Found | None]) -> Found | None:
    """This rank's part of a run: the record on rank 0 and in a run of one process, None elsewhere."""
    try:
        with joined(spec.parallel, spec.model.device) as group:
            return measure(group)
    except RankFailedError as error:
        raise RankFailedError(f"{error}. What was measured is saved in {folder}", error.exit_status) from error


def measured(
    bench: PreparedBench,
    folder: Path,
    progress: Progress,
    describe: Callable[[], Mapping[str, Any]],
    measure: Callable[[], Record | None],
    failure: Callable[[Record, Document], VitgraphError | None],
) -> Shown | None:
    """What a command does around its measuring, and what it shows of the record; None on a rank that has none.

    Args:
        describe: What a dry run shows.
        measure: Measures, and saves the record in the folder.
        failure: What the command must end with.
    """
    from vitgraph.report.documents import document_of, write_derived
    from vitgraph.report.views.plan import dry_run_document

    spec = bench.spec
    check_run(spec.model, bench.source, folder, overwrite=spec.run.overwrite)
    if spec.shell.dry_run:
        description = describe()
        return Shown(description, dry_run_document(description))
    for warning in bench.warnings:
        progress.note(warning)
    try:
        record = measure()
    finally:
        if not is_follower():
            write_derived(folder, progress.note)
    if record is None:
        return None
    document = document_of(record, sharing=bench.sharing)
    return shown_record(record, folder, failure(record, document), document)


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
