"""Rebuilds everything that is derived from saved runs: tidy tables, text tables, plots and one HTML page.

Nothing here needs a GPU or torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vitgraph.errors import UsageError
from vitgraph.records.saved_runs import SavedRun
from vitgraph.records.two_runs import RunComparison
from vitgraph.report.comparison_view import (
    COMPARISON_COLUMNS,
    comparison_latex,
    comparison_markdown,
    comparison_page,
    comparison_rows,
)
from vitgraph.report.files import write_files
from vitgraph.report.html_page import runs_page
from vitgraph.report.plots import plot_files
from vitgraph.report.scaling import SCALING_COLUMNS, ScalingTable, scaling_markdown, scaling_tables
from vitgraph.report.text_tables import latex_tables, markdown_tables
from vitgraph.report.tidy_tables import COLUMNS_TABLE, TABLES, describe_columns, parquet_bytes, table_csv

CSV, PARQUET, MARKDOWN, LATEX, PLOTS, HTML = FORMATS = ("csv", "parquet", "markdown", "latex", "plots", "html")
PAGE_FILE = "report.html"
COMPARISON_NAME = "comparison"
SCALING_NAME = "scaling"
PLOTS_FOLDER = "plots"


def parse_formats(text: str | None) -> tuple[str, ...]:
    """Reads `csv,html`; None is all of them.

    Raises:
        UsageError: A format that is not known, or none.
    """
    if text is None:
        return FORMATS
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    unknown = [name for name in names if name not in FORMATS]
    if unknown or not names:
        raise UsageError(f"--formats is {text!r}; give some of {', '.join(FORMATS)}")
    return names


def export_runs(
    runs: Sequence[SavedRun], folder: Path, formats: Sequence[str] = FORMATS, *, overwrite: bool = False
) -> list[Path]:
    """Writes the tables, plots and page of saved runs into `folder`.

    Args:
        runs: The runs, in the order in which tables list them.
        folder: Where the files go; created if needed.
        formats: Which of `FORMATS`.
        overwrite: Whether files of the same names may be replaced.

    Returns:
        The written files.

    Raises:
        UsageError: A file exists and `overwrite` is off; nothing is written then.
        RecordFileError: A file could not be written.
    """
    files: dict[str, bytes] = {}
    written = []
    for table in TABLES:
        rows = table.of_runs(runs)
        if table.is_optional and not rows:
            continue
        written.append(table)
        if CSV in formats:
            files[f"{table.name}.csv"] = table_csv(table.columns, rows, table.digits)
        if PARQUET in formats:
            files[f"{table.name}.parquet"] = parquet_bytes(table.columns, rows)
    if CSV in formats:
        files["columns.csv"] = table_csv(COLUMNS_TABLE, describe_columns(written))
    if MARKDOWN in formats:
        files["table.md"] = markdown_tables(runs).encode("utf-8")
    if LATEX in formats:
        files["table.tex"] = latex_tables(runs).encode("utf-8")
    files |= _scaling_files(scaling_tables(runs), formats)
    if HTML in formats:
        files[PAGE_FILE] = runs_page(runs).encode("utf-8")
    if PLOTS in formats:
        for run in runs:
            # A folder of its own where there are several runs.
            place = PLOTS_FOLDER if len(runs) == 1 else f"{PLOTS_FOLDER}/{run.name.replace('/', '_')}"
            files |= {f"{place}/{name}": content for name, content in plot_files(run.record, run.samples).items()}
    return write_files({folder / name: content for name, content in files.items()}, overwrite)


def export_comparison(
    comparison: RunComparison, folder: Path, formats: Sequence[str] = FORMATS, *, overwrite: bool = False
) -> list[Path]:
    """Writes a comparison of two runs into `folder`: `comparison.csv`, `.parquet`, `.md`, `.tex` and `.html`.

    Its charts are in the page; there are no plots of their own.

    Raises:
        UsageError: A file exists and `overwrite` is off; nothing is written then.
        RecordFileError: A file could not be written.
    """
    rows = comparison_rows(comparison)
    contents = {
        CSV: ("csv", lambda: table_csv(COMPARISON_COLUMNS, rows)),
        PARQUET: ("parquet", lambda: parquet_bytes(COMPARISON_COLUMNS, rows)),
        MARKDOWN: ("md", lambda: comparison_markdown(comparison).encode("utf-8")),
        LATEX: ("tex", lambda: comparison_latex(comparison).encode("utf-8")),
        HTML: ("html", lambda: comparison_page(comparison).encode("utf-8")),
    }
    chosen = [contents[name] for name in formats if name in contents]
    return write_files({folder / f"{COMPARISON_NAME}.{ending}": make() for ending, make in chosen}, overwrite)


def _scaling_files(tables: Sequence[ScalingTable], formats: Sequence[str]) -> dict[str, bytes]:
    """What runs on different numbers of GPUs have beside the rest; nothing where there are none."""
    rows = [row for table in tables for row in table.rows]
    if not rows:
        return {}
    contents = {
        CSV: ("csv", lambda: table_csv(SCALING_COLUMNS, rows)),
        PARQUET: ("parquet", lambda: parquet_bytes(SCALING_COLUMNS, rows)),
        MARKDOWN: ("md", lambda: scaling_markdown(tables).encode("utf-8")),
    }
    chosen = [contents[name] for name in formats if name in contents]
    return {f"{SCALING_NAME}.{ending}": make() for ending, make in chosen}
