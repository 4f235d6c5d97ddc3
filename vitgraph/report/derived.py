"""The files that are derived from a saved run: CSV tables and plots, rebuilt at any time from the record."""

from __future__ import annotations

from pathlib import Path

from vitgraph.records import RunRecord
from vitgraph.report.csv_tables import write_per_budget_csv, write_summary_csv
from vitgraph.report.plots import write_plots

SUMMARY_FILE = "summary.csv"
PER_BUDGET_FILE = "per_budget.csv"
PLOTS_FOLDER = "plots"


def write_derived_files(record: RunRecord, folder: Path) -> list[Path]:
    """Writes (again) `summary.csv`, `per_budget.csv` and the plots of a saved record into `folder`.

    Returns:
        The files written; none where the run ended before it measured anything.
    """
    if not record["summary"]:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    tables = [folder / SUMMARY_FILE, folder / PER_BUDGET_FILE]
    write_summary_csv(record, tables[0], overwrite=True)
    write_per_budget_csv(record, tables[1], overwrite=True)
    samples = record.load_samples().samples
    return [*tables, *write_plots(record, samples, folder / PLOTS_FOLDER, overwrite=True)]
