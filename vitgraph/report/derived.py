"""The files that are derived from a saved run: CSV tables and plots, rebuilt at any time from the record."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from vitgraph.errors import VitgraphError
from vitgraph.records.bench_record import RunRecord
from vitgraph.records.samples import RUN_FILE
from vitgraph.report.csv_tables import (
    write_monolithic_csv,
    write_per_budget_csv,
    write_per_path_csv,
    write_summary_csv,
)
from vitgraph.report.paths_view import has_monolithic
from vitgraph.report.plots import write_plots

SUMMARY_FILE = "summary.csv"
PER_BUDGET_FILE = "per_budget.csv"
PER_PATH_FILE = "per_path.csv"
MONOLITHIC_FILE = "monolithic.csv"
PLOTS_FOLDER = "plots"


def write_derived_files(record: RunRecord, folder: Path) -> list[Path]:
    """Writes (again) `summary.csv`, `per_budget.csv`, `per_path.csv` and the plots of a saved record into `folder`, and
    `monolithic.csv` where it has monolithic graphs.

    Returns:
        The files written; none where the run ended before it measured anything.
    """
    if not record["summary"]:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    writers = {
        SUMMARY_FILE: write_summary_csv,
        PER_BUDGET_FILE: write_per_budget_csv,
        PER_PATH_FILE: write_per_path_csv,
        **({MONOLITHIC_FILE: write_monolithic_csv} if has_monolithic(record) else {}),
    }
    tables = [write(record, folder / name, overwrite=True) for name, write in writers.items()]
    samples = record.load_samples().samples
    return [*tables, *write_plots(record, samples, folder / PLOTS_FOLDER, overwrite=True)]


def write_derived_or_say(folder: Path, say: Callable[[str], None]) -> None:
    """Writes the derived files of the record in `folder`, if there is one; a failure there loses no measurement.

    Args:
        folder: Folder of the run.
        say: Told why the files were not written.
    """
    if not (folder / RUN_FILE).exists():
        return
    try:
        write_derived_files(RunRecord.load(folder), folder)
    except (OSError, VitgraphError) as error:
        say(f"tables and plots were not written ({error}); the record itself is saved in {folder}")
