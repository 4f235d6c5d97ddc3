"""The document of a record of any kind; the one place that knows which view is whose."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vitgraph.errors import VitgraphError
from vitgraph.records.record import (
    BenchRecord,
    CalibrateRecord,
    CompareRecord,
    MicroRecord,
    ProfileRecord,
    Record,
    TuneRecord,
    VerifyRecord,
)
from vitgraph.records.sample_table import Samples
from vitgraph.report.document import Document
from vitgraph.report.to_files import write
from vitgraph.report.views.bench import bench_document
from vitgraph.report.views.compare import compare_document
from vitgraph.report.views.compile_rows import compile_rows_document
from vitgraph.report.views.micro import micro_document
from vitgraph.report.views.profile import profile_document
from vitgraph.report.views.ranks import sharing_section
from vitgraph.report.views.tune import tune_document
from vitgraph.report.views.verify import verify_document

DERIVED = ("csv", "plots")
"""What a command writes beside its record; `export` makes the rest."""


def document_of(
    record: Record,
    samples: Samples | None = None,
    notes: Sequence[str] = (),
    sharing: Mapping[str, Any] | None = None,
) -> Document:
    """The report of a record.

    Args:
        record: A record of any kind but a calibration, which needs its cost model to be described.
        samples: The samples of a bench run, for its charts.
        notes: What had to be left out when it was read.
        sharing: What assigning by cost would change, as predicted.
    """
    document = _built(record, samples, notes)
    predicted = sharing_section(sharing)
    return document if predicted is None else dataclasses.replace(document, sections=(*document.sections, predicted))


def _built(record: Record, samples: Samples | None, notes: Sequence[str]) -> Document:
    if isinstance(record, BenchRecord):
        return bench_document(record, samples, notes)
    if isinstance(record, CompareRecord):
        return compare_document(record) if record.kind == "compare-backends" else compile_rows_document(record)
    if isinstance(record, MicroRecord):
        return micro_document(record)
    if isinstance(record, TuneRecord):
        return tune_document(record)
    if isinstance(record, VerifyRecord):
        return verify_document(record)
    if isinstance(record, ProfileRecord):
        return profile_document(record)
    if isinstance(record, CalibrateRecord):
        return _calibration(record)
    raise TypeError(f"a record of kind {record.kind!r} has no view")


def _calibration(record: CalibrateRecord) -> Document:
    from vitgraph.predict.profile import profile_of
    from vitgraph.predict.profile_summary import describe_profile
    from vitgraph.report.views.calibrate import calibrate_document

    return calibrate_document(describe_profile(profile_of(record)))


def write_derived(document: Callable[[], Document], folder: Path, say: Callable[[str], None]) -> list[Path]:
    """Writes (again) the tables and charts of a saved record into its folder; a failure there loses no measurement.

    Args:
        document: Makes the report.
        folder: Folder of the record.
        say: Told why the files were not written.
    """
    try:
        return write(document(), folder, DERIVED, overwrite=True)
    except (OSError, VitgraphError) as error:
        say(f"tables and plots were not written ({error}); the record itself is saved in {folder}")
        return []
