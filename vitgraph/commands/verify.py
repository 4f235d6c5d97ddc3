"""`vitgraph verify`: which rows, the run, its record."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from vitgraph.commands.shell import Shown, check_run, dry_run, shown_record
from vitgraph.measure.progress import Progress
from vitgraph.records.store import RecordFileError, ResultFolder
from vitgraph.specs import VerifySpec

if TYPE_CHECKING:
    from vitgraph.records.record import Record
    from vitgraph.verify.models import PreparedVerification


def verify(spec: VerifySpec, progress: Progress) -> Shown | None:
    """Prove that replay equals eager: every graph, random packings, poisoned memory, order, aliasing, clean-up."""
    from vitgraph.commands.on_ranks import ran_on_ranks
    from vitgraph.verify.models import failure_of

    folder = spec.output_dir
    if ran_on_ranks(spec, folder, progress):
        return None
    prepared = _prepare(spec)
    check_run(spec.model, None, folder, overwrite=spec.overwrite)
    if spec.shell.dry_run:
        return dry_run(spec, f"would verify {'every row' if spec.every_row else ', '.join(spec.models)}")
    record, unsaved = _run(spec, prepared, progress)
    if record is None:
        return None
    return shown_record(record, None if unsaved else folder, unsaved or failure_of(record))


def _prepare(spec: VerifySpec) -> PreparedVerification:
    from vitgraph.models.loading import check_weights
    from vitgraph.models.registry import ROWS, ModelSource
    from vitgraph.verify.models import prepare_rows, prepare_verification

    settings = {
        "calls": spec.calls,
        "token_budgets": spec.graph.token_budgets or None,
        "max_items": spec.graph.max_vision_items_per_batch or None,
    }
    if spec.every_row:
        return prepare_rows(ROWS, spec.model, debug_size=spec.debug_size, **settings)
    prepared = prepare_verification(spec.models, spec.model, **settings)
    for target in prepared.targets.values():
        if isinstance(target, ModelSource):
            check_weights(target, spec.model.load_format)
    return prepared


def _run(
    spec: VerifySpec, prepared: PreparedVerification, progress: Progress
) -> tuple[Record | None, RecordFileError | None]:
    """Verifies what is asked for, and saves a record where an output folder is given.

    Returns:
        The record, of all ranks where there are several, or None on a rank that another one shows it for; and why it
        could not be saved.
    """
    from vitgraph.commands.on_ranks import joined
    from vitgraph.ranks.launch import is_follower
    from vitgraph.verify.models import run_verification

    with ExitStack() as stack:
        folder = None
        if spec.output_dir is not None and not is_follower():
            folder = stack.enter_context(ResultFolder(spec.output_dir, spec.overwrite))
        group = stack.enter_context(joined(spec.parallel, spec.model.device))
        record = run_verification(prepared, progress, folder=folder, group=group, settings={"verify": spec.as_dict()})
    return None if is_follower() else record, folder.failure if folder is not None else None
