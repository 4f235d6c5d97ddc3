"""`vitgraph export`: tables, plots and a page from saved runs, and the comparison of two of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitgraph.commands.shell import Shown, new_run_folder
from vitgraph.errors import UsageError
from vitgraph.specs.asked import ExportSpec

if TYPE_CHECKING:
    from rich.console import Console


def export(spec: ExportSpec) -> Shown:
    """Rebuild tables, plots and one HTML page from saved runs, or compare two of them; needs no GPU.

    Of bench runs, writes tidy CSV and Parquet with their columns described, Markdown and LaTeX tables, plots as PNG and
    SVG, and one HTML page that loads nothing. Of one backend comparison, run of --compile-rows, tuning result, profile
    or verification, prints its tables again and writes their CSV and plots. With --compare, the files hold the deltas
    of two bench runs with their intervals.
    """
    from vitgraph.records.saved_runs import BENCH_KIND, record_file, record_kind
    from vitgraph.report.export import parse_formats

    if spec.markdown:
        return Shown(None, lambda console: _print_markdown(spec.runs))
    formats = parse_formats(spec.formats)
    if spec.compare is not None:
        return _compare(spec, spec.compare, formats)
    others = [path for path in spec.runs if record_kind(record_file(path)) not in (None, BENCH_KIND)]
    return _export_other(spec, others[0], formats) if others else _export_benches(spec, formats)


def _export_benches(spec: ExportSpec, formats: Sequence[str]) -> Shown:
    from vitgraph.records.saved_runs import open_runs
    from vitgraph.report.export import export_runs
    from vitgraph.report.scaling import render_scaling, scaling_tables

    runs = open_runs(spec.runs)
    for run in runs:
        _print_notes(run.notes)
    own = runs[0].record.folder if len(runs) == 1 else None
    folder = spec.output_dir or (own / "export" if own is not None else new_run_folder("export", "runs"))
    written = export_runs(runs, folder, formats, overwrite=spec.overwrite)
    return _shown(written, lambda console: render_scaling(scaling_tables(runs), console))


def _export_other(spec: ExportSpec, path: Path, formats: Sequence[str]) -> Shown:
    """Exports one record that no `bench` saved."""
    from rich.console import Console

    from vitgraph.records.saved_runs import record_file, record_kind
    from vitgraph.report.record_files import EXPORTED_KINDS, RECORD_FORMATS, export_record

    file = record_file(path)
    kind = record_kind(file)
    if kind not in EXPORTED_KINDS:
        raise UsageError(
            f"{file} is a record of kind {kind!r}; export takes bench, {', '.join(EXPORTED_KINDS)}. "
            "Its JSON can be read as it is"
        )
    if len(spec.runs) > 1:
        raise UsageError(f"{file} is a record of kind {kind!r}; only bench runs go together, so give it alone")
    written = export_record(
        file,
        kind,
        spec.output_dir or file.parent / "export",
        formats if spec.formats else RECORD_FORMATS,
        console=None if spec.shell.json else Console(),
        overwrite=spec.overwrite,
    )
    return _shown(written)


def _compare(spec: ExportSpec, paths: tuple[Path, Path], formats: Sequence[str]) -> Shown:
    from vitgraph.records.saved_runs import open_runs
    from vitgraph.records.two_runs import compare_runs
    from vitgraph.report.comparison_view import comparison_summary, render_comparison
    from vitgraph.report.export import export_comparison

    first, second = open_runs(paths)
    names = tuple(name.strip() for name in (spec.across or "").split(",") if name.strip())
    comparison = compare_runs(first, second, names)
    for run in (first, second):
        _print_notes(run.notes)
    folder = spec.output_dir or new_run_folder("comparison", first.record.model_name)
    written = export_comparison(comparison, folder, formats, overwrite=spec.overwrite)
    shown = _shown(written, lambda console: render_comparison(comparison, console))
    return Shown(comparison_summary(comparison), shown.render)


def _shown(written: Sequence[Path], render: Callable[[Console], None] | None = None) -> Shown:
    def show_all(console: Console) -> None:
        if render is not None:
            render(console)
        _list_files(written)

    data: Any = [str(path) for path in written]
    return Shown(data, show_all)


def _print_markdown(paths: Sequence[Path]) -> None:
    from vitgraph.records.compare_record import COMPILE_KIND, CompareRecord
    from vitgraph.records.saved_runs import open_runs, record_file, record_kind
    from vitgraph.report.compile_table import compile_rows_markdown
    from vitgraph.report.rows_table import rows_markdown

    files = [record_file(path) for path in paths]
    if {record_kind(file) for file in files} == {COMPILE_KIND}:
        print(compile_rows_markdown([CompareRecord.load(file, COMPILE_KIND) for file in files]), end="")
        return
    runs = open_runs(paths)
    for run in runs:
        _print_notes(run.notes)
    print(rows_markdown(runs), end="")


def _print_notes(notes: Sequence[str]) -> None:
    for note in notes:
        print(f"note: {note}", file=sys.stderr)


def _list_files(written: Sequence[Path]) -> None:
    """Files by folder, one line a folder."""
    folders: dict[Path, list[str]] = {}
    for path in written:
        folders.setdefault(path.parent, []).append(path.name)
    for folder, names in folders.items():
        print(f"{folder}: {', '.join(names)}")
