"""The document of a record of any kind; the one place that knows which view is whose."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vitgraph.errors import UsageError, VitgraphError
from vitgraph.records.record import CalibrateRecord, Record
from vitgraph.records.store import RUN_FILE, read_record, record_kind
from vitgraph.records.two_runs import BENCH_KIND, open_runs
from vitgraph.report.document import Document
from vitgraph.report.to_files import write
from vitgraph.report.views.bench import bench_document
from vitgraph.report.views.compare import compare_document
from vitgraph.report.views.compile_rows import COMPILE_ROWS, compile_rows_document, compile_rows_table
from vitgraph.report.views.machine import verify_document
from vitgraph.report.views.parts import calibrate_document, micro_document, profile_document
from vitgraph.report.views.ranks import sharing_section
from vitgraph.report.views.runs import run_document, runs_document
from vitgraph.report.views.tune import tune_document

DERIVED = ("csv", "plots")
"""What a command writes beside its record; `export` makes the rest."""


def _calibration(record: CalibrateRecord) -> Document:
    from vitgraph.predict.profile import profile_of
    from vitgraph.predict.profile_summary import describe_profile

    return calibrate_document(describe_profile(profile_of(record)))


_VIEWS: Mapping[str, Callable[[Any], Document]] = {
    BENCH_KIND: bench_document,
    "compare-backends": compare_document,
    COMPILE_ROWS: compile_rows_document,
    "compare-backends-micro": micro_document,
    "tune-budgets": tune_document,
    "verify": verify_document,
    "profile": profile_document,
    "calibrate": _calibration,
}


def document_of(record: Record, sharing: Mapping[str, Any] | None = None) -> Document:
    """The report of a record, with what assigning by cost would change, as predicted, where that is known."""
    document, predicted = _VIEWS[record.kind](record), sharing_section(sharing)
    return document if predicted is None else dataclasses.replace(document, sections=(*document.sections, predicted))


def document_of_paths(paths: Sequence[Path]) -> tuple[Document, list[str]]:
    """The report of one saved record of any kind or of several that go together, and what had to be left out.

    Raises:
        UsageError: There is no record, none that can be shown, or they do not go together.
    """
    kinds = [record_kind(path) or BENCH_KIND for path in paths]
    if set(kinds) == {BENCH_KIND}:
        runs = open_runs(paths)
        return runs_document(runs), [note for run in runs for note in run.notes]
    if len(paths) == 1:
        return document_of(read_record(paths[0])), []
    if set(kinds) == {COMPILE_ROWS}:
        return compile_rows_table([read_record(path) for path in paths]), []
    other, kind = next((path, kind) for path, kind in zip(paths, kinds, strict=True) if kind != BENCH_KIND)
    raise UsageError(
        f"{other} is a record of kind {kind!r}; only bench runs go together, or runs of --compile-rows, so give it "
        "alone"
    )


def saved_document(path: Path) -> Document:
    """The report of one saved record, of a bench run without the tables of an export; raises as `document_of_paths`."""
    if record_kind(path) in (None, BENCH_KIND):
        return run_document(open_runs([path])[0])
    return document_of(read_record(path))


def write_derived(folder: Path, say: Callable[[str], None]) -> list[Path]:
    """Writes (again) the tables and charts of a saved record into its folder; a failure there loses no measurement.

    Args:
        say: Told why the files were not written.
    """
    if not (folder / RUN_FILE).exists():
        return []
    try:
        return write(saved_document(folder), folder, DERIVED, overwrite=True, describes=False)
    except (OSError, VitgraphError) as error:
        say(f"tables and plots were not written ({error}); the record itself is saved in {folder}")
        return []
