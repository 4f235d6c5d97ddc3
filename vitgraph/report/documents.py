"""The document of a record of any kind, and its files: tables as CSV and Parquet, Markdown, LaTeX, charts, one page.

A tidy table has one fact a row, one header row and fixed columns. What was not measured is an empty cell in CSV and
null in Parquet. Nothing here needs a GPU or torch.
"""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitgraph.errors import UsageError, VitgraphError
from vitgraph.records.candidates import COMPARE_KIND, COMPILE_KIND
from vitgraph.records.record import CalibrateRecord, Record
from vitgraph.records.store import RUN_FILE, read_record, record_kind, refuse_to_replace, write_file
from vitgraph.records.two_runs import BENCH_KIND, open_runs
from vitgraph.report.columns import Table, column, table_of
from vitgraph.report.document import Document
from vitgraph.report.say import clean
from vitgraph.report.views.bench import bench_document
from vitgraph.report.views.compare import compare_document, compile_rows_document, compile_rows_table
from vitgraph.report.views.machine import verify_document
from vitgraph.report.views.parts import calibrate_document, micro_document, profile_document
from vitgraph.report.views.ranks import sharing_section
from vitgraph.report.views.runs import run_document, runs_document
from vitgraph.report.views.tune import tune_document

if TYPE_CHECKING:
    import pyarrow as pa

CSV, PARQUET, MARKDOWN, LATEX, PLOTS, HTML = FORMATS = ("csv", "parquet", "markdown", "latex", "plots", "html")
PAGE_FILE = "report.html"
PLOTS_FOLDER = "plots"

COLUMNS_TABLE = table_of(
    "columns",
    column("table", "table"),
    column("column", "column of that table", of="of.name"),
    column("kind", "`text`, `integer`, `number` or `truth`", of="of.kind"),
    column("unit", "unit of its values", of="of.unit"),
    column("meaning", "what it holds", of="of.meaning"),
    one_row="a column of the tables",
)
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")


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


def write(
    document: Document,
    folder: Path,
    formats: Sequence[str] = FORMATS,
    *,
    stem: str = "table",
    describes: bool = True,
    overwrite: bool = False,
) -> list[Path]:
    """Writes a document into `folder`.

    Args:
        stem: Name of its Markdown and LaTeX file, and of the page where it is another than `table`.
        describes: Whether `columns.csv` describes the columns of the CSV files.

    Returns:
        The written files.

    Raises:
        UsageError: A file exists and `overwrite` is off; nothing is written then.
        RecordFileError: A file could not be written.
    """
    return write_files(
        {folder / name: content for name, content in _contents(document, formats, stem, describes).items()}, overwrite
    )


def write_files(files: Mapping[Path, bytes], overwrite: bool = False) -> list[Path]:
    """Writes files and the folders that they need; raises as `write` does."""
    for path in () if overwrite else files:
        refuse_to_replace(path)
    written: list[Path] = []
    left = "it and what follows; `vitgraph export` writes a run's tables and plots again, with --output-dir elsewhere"
    for path, content in files.items():
        written.append(write_file(path, content, left, lambda: ", ".join(one.name for one in written) or "nothing"))
    return written


def _contents(document: Document, formats: Sequence[str], stem: str, describes: bool) -> dict[str, bytes]:
    from vitgraph.report.charts import chart_files
    from vitgraph.report.markup import to_html, to_latex, to_markdown

    files: dict[str, bytes] = {}
    tables = [table for table in document.tables if table.rows or not table.is_optional]
    if CSV in formats:
        files |= {f"{table.name}.csv": csv_bytes(table) for table in tables}
    if PARQUET in formats:
        files |= {f"{table.name}.parquet": parquet_bytes(table) for table in tables}
    if CSV in formats and tables and describes:
        columns = ({"table": table.name, "of": column} for table in tables for column in table.columns)
        files["columns.csv"] = csv_bytes(COLUMNS_TABLE.of(columns))
    if MARKDOWN in formats:
        files[f"{stem}.md"] = to_markdown(document).encode("utf-8")
    if LATEX in formats:
        files[f"{stem}.tex"] = to_latex(document).encode("utf-8")
    for part in (document, *document.parts) if PLOTS in formats else ():
        # Each part has a folder of its own.
        place = PLOTS_FOLDER if part is document else f"{PLOTS_FOLDER}/{part.name.replace('/', '_')}"
        files |= {f"{place}/{name}": content for name, content in chart_files(part.charts).items()}
    if HTML in formats:
        page = PAGE_FILE if stem == "table" else f"{stem}.html"
        files[page] = to_html(document).encode("utf-8")
    return files


def csv_bytes(table: Table) -> bytes:
    """A table as CSV in UTF-8; numbers with the table's significant digits."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = [column.name for column in table.columns]
    writer.writerow(names)
    writer.writerows([_cell(row.get(name), table.digits) for name in names] for row in table.rows)
    return text.getvalue().encode("utf-8")


def _cell(value: Any, digits: int) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.{digits}g}"
    if isinstance(value, int):
        return str(value)
    text = str(_plain(value))
    cleaned = clean(text)
    # A spreadsheet takes such a cell for a formula; the quote is its sign for text.
    return f"'{cleaned}" if text.startswith(_FORMULA_STARTS) else cleaned


def parquet_bytes(table: Table) -> bytes:
    """A table as Parquet; each field carries its unit and meaning as metadata."""
    import pyarrow.parquet as pq

    content = io.BytesIO()
    pq.write_table(arrow_table(table), content)
    return content.getvalue()


def arrow_table(table: Table) -> pa.Table:
    """A table with a type a column; each field carries its unit and meaning as metadata."""
    import pyarrow as pa

    types = {"text": pa.string(), "integer": pa.int64(), "number": pa.float64(), "truth": pa.bool_()}
    columns = {column.name: column for column in table.columns}
    schema = pa.schema(
        pa.field(name, types[column.kind], metadata={"unit": column.unit, "meaning": column.meaning})
        for name, column in columns.items()
    )
    return pa.Table.from_pylist([{name: _plain(row.get(name)) for name in columns} for row in table.rows], schema)


def _plain(value: Any) -> Any:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else value


DERIVED = ("csv", "plots")
"""What a command writes beside its record; `export` makes the rest."""


def _calibration(record: CalibrateRecord) -> Document:
    from vitgraph.predict.doubt import describe_profile
    from vitgraph.predict.profile import profile_of

    return calibrate_document(describe_profile(profile_of(record)))


_VIEWS: Mapping[str, Callable[[Any], Document]] = {
    BENCH_KIND: bench_document,
    COMPARE_KIND: compare_document,
    COMPILE_KIND: compile_rows_document,
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
    if set(kinds) == {COMPILE_KIND}:
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
