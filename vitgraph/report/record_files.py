"""Rebuilds the tables and plots of saved records other than `bench` runs from their `run.json` alone.

Runs of `bench` have an export of their own, which puts several runs into one table. Nothing here needs a GPU or torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from vitgraph.errors import UsageError
from vitgraph.records.compare_record import COMPILE_KIND, CompareRecord
from vitgraph.records.compare_record import KIND as COMPARE_KIND
from vitgraph.records.old_forms import old_form
from vitgraph.records.store import read_record
from vitgraph.report.compare_csv import BACKENDS_FILE, MICRO_FILE, backends_csv, micro_csv
from vitgraph.report.compare_plots import compare_plot_files
from vitgraph.report.compare_table import render_compare
from vitgraph.report.compile_table import render_compile_rows
from vitgraph.report.export import CSV, PLOTS, PLOTS_FOLDER
from vitgraph.report.files import write_files
from vitgraph.report.micro_table import render_micro
from vitgraph.report.profile_plot import profile_plot_files
from vitgraph.report.profile_table import render_profile
from vitgraph.report.rank_table import render_compared_ranks
from vitgraph.report.tune_plots import tune_plot_files
from vitgraph.report.tune_tables import render_tune, tune_csv_files
from vitgraph.report.verify_table import render_verify

MICRO_KIND, TUNE_KIND, PROFILE_KIND, VERIFY_KIND = "compare-backends-micro", "tune-budgets", "profile", "verify"
RECORD_FORMATS = (CSV, PLOTS)


@dataclass(frozen=True, slots=True)
class _Openable:
    """What can be rebuilt from one record.

    Attributes:
        csv: Makes the tables, by file name; none where its command writes none.
        plots: Makes the figures, by file name; none where its command draws none.
        render: Prints the record as its command did.
    """

    csv: Callable[[], dict[str, bytes]]
    plots: Callable[[], dict[str, bytes]]
    render: Callable[[Console], None]


def export_record(
    file: Path,
    kind: str,
    folder: Path,
    formats: Sequence[str] = RECORD_FORMATS,
    *,
    console: Console | None = None,
    overwrite: bool = False,
) -> list[Path]:
    """Writes the tables and plots of one record into `folder`, and prints it as its command did.

    Args:
        file: Its `run.json`.
        kind: Its kind, one of `EXPORTED_KINDS`.
        folder: Where the files go; created if needed.
        formats: Some of `RECORD_FORMATS`.
        console: Where to print; None prints nothing.
        overwrite: Whether files of the same names may be replaced.

    Returns:
        The written files.

    Raises:
        UsageError: The file is no whole record of that kind, it has no such format, or a file is in the way.
        RecordFileError: A file could not be written.
    """
    unknown = [name for name in formats if name not in RECORD_FORMATS]
    if unknown:
        raise UsageError(
            f"--formats has {', '.join(unknown)}, but {file} is a record of kind {kind!r}, which has "
            f"{' and '.join(RECORD_FORMATS)}; the other formats are of bench runs"
        )
    try:
        record = _OPENERS[kind](file)
        files = record.csv() if CSV in formats else {}
        if PLOTS in formats:
            files |= {f"{PLOTS_FOLDER}/{name}": content for name, content in record.plots().items()}
        if console is not None:
            record.render(console)
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise UsageError(f"{file} is no whole record of kind {kind!r} ({error!r}); give the folder of one") from error
    return write_files({folder / name: content for name, content in files.items()}, overwrite)


def _open_comparison(file: Path) -> _Openable:
    record = CompareRecord.load(file)

    def render(console: Console) -> None:
        render_compare(record, console)
        render_compared_ranks(record, console)

    return _Openable(lambda: {BACKENDS_FILE: backends_csv(record)}, lambda: compare_plot_files(record), render)


def _open_compile_rows(file: Path) -> _Openable:
    record = CompareRecord.load(file, COMPILE_KIND)
    return _Openable(
        lambda: {BACKENDS_FILE: backends_csv(record)}, dict, lambda console: render_compile_rows(record, console)
    )


def _open_micro(file: Path) -> _Openable:
    record = _read(file)
    return _Openable(
        lambda: {MICRO_FILE: micro_csv(record["rows"])}, dict, lambda console: render_micro(record, console)
    )


def _open_tuning(file: Path) -> _Openable:
    data = _read(file)
    return _Openable(
        lambda: tune_csv_files(data), lambda: tune_plot_files(data), lambda console: render_tune(data, console)
    )


def _open_profile(file: Path) -> _Openable:
    record = _read(file)
    return _Openable(dict, lambda: profile_plot_files(record), lambda console: render_profile(record, console))


def _open_verification(file: Path) -> _Openable:
    results = _read(file)["rows"]
    return _Openable(dict, dict, lambda console: render_verify(results, console))


def _read(file: Path) -> Mapping[str, Any]:
    return old_form(read_record(file))


_OPENERS: dict[str, Callable[[Path], _Openable]] = {
    COMPARE_KIND: _open_comparison,
    COMPILE_KIND: _open_compile_rows,
    MICRO_KIND: _open_micro,
    TUNE_KIND: _open_tuning,
    PROFILE_KIND: _open_profile,
    VERIFY_KIND: _open_verification,
}
EXPORTED_KINDS = tuple(_OPENERS)
