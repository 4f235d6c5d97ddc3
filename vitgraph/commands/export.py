"""`vitgraph export`: tables, plots and a page from saved runs, and the comparison of two of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from vitgraph.commands import options as opt

Runs = Annotated[list[Path] | None, typer.Argument(metavar="RUN", help="Folders of saved runs, or their run.json.")]
Compare = Annotated[
    tuple[Path, Path] | None,
    typer.Option("--compare", metavar="A B", help="Two runs of the same requests on the same device: B against A."),
]
Across = Annotated[
    str | None,
    typer.Option(help="What may differ between the two, for example backend,dtype; unset: any one thing."),
]
Formats = Annotated[
    str | None,
    typer.Option(help="Some of csv, parquet, markdown, latex, plots, html; unset: all of them."),
]
OutputDir = Annotated[
    Path | None,
    typer.Option(help="Folder of the files; unset: export/ in the run's folder, or a new one under runs/ for several."),
]
Markdown = Annotated[
    bool,
    typer.Option(
        "--markdown", help="Print one Markdown table, a bench run (or one with --compile-rows) a line; write no files."
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace files of an earlier export.")]


def export(
    runs: Runs = None,
    compare: Compare = None,
    across: Across = None,
    formats: Formats = None,
    markdown: Markdown = False,
    output_dir: OutputDir = None,
    overwrite: Overwrite = False,
    json_output: opt.JsonOutput = False,
) -> None:
    """Rebuild tables, plots and one HTML page from saved runs, or compare two of them; needs no GPU.

    Of bench runs, writes tidy CSV and Parquet with their columns described, Markdown and LaTeX tables, plots as PNG and
    SVG, and one HTML page that loads nothing. Of one backend comparison, run of --compile-rows, tuning result, profile
    or verification, prints its tables again and writes their CSV and plots. With --compare, the files hold the deltas
    of two bench runs with their intervals.
    """
    from vitgraph.cli import reported_errors

    with reported_errors():
        from vitgraph.errors import UsageError

        if bool(runs) == (compare is not None):
            raise UsageError("give one or more runs, or --compare with two of them (and not both)")
        if across is not None and compare is None:
            raise UsageError(f"--across is {across!r}, but only --compare compares runs")
        if markdown:
            if compare or formats or output_dir or overwrite or json_output:
                raise UsageError("--markdown prints one table of the runs and writes no files; give it runs alone")
            _print_markdown(runs or [])
            return
        if compare:
            written = _compare(compare, across, formats, output_dir, overwrite, json_output)
        else:
            written = _export(runs or [], formats, output_dir, overwrite, json_output)
        if json_output and not compare:
            typer.echo(json.dumps([str(path) for path in written], indent=1))
        elif not json_output:
            _list_files(written)


def _export(
    paths: Sequence[Path], formats: str | None, output_dir: Path | None, overwrite: bool, json_output: bool
) -> list[Path]:
    from rich.console import Console

    from vitgraph.commands.spec_values import new_run_folder
    from vitgraph.records.saved_runs import BENCH_KIND, open_runs, record_file, record_kind
    from vitgraph.report.export import export_runs, parse_formats
    from vitgraph.report.scaling import render_scaling, scaling_tables

    chosen = parse_formats(formats)
    others = [path for path in paths if record_kind(record_file(path)) not in (None, BENCH_KIND)]
    if others:
        return _export_other(others[0], len(paths), chosen if formats else None, output_dir, overwrite, json_output)
    runs = open_runs(paths)
    for run in runs:
        _print_notes(run.notes)
    folder = output_dir
    if folder is None:
        own = runs[0].record.folder
        folder = own / "export" if len(runs) == 1 and own is not None else new_run_folder("export", "runs")
    written = export_runs(runs, folder, chosen, overwrite=overwrite)
    if not json_output:
        render_scaling(scaling_tables(runs), Console())
    return written


def _export_other(
    path: Path,
    count: int,
    formats: Sequence[str] | None,
    output_dir: Path | None,
    overwrite: bool,
    json_output: bool,
) -> list[Path]:
    """Exports one record that no `bench` saved."""
    from rich.console import Console

    from vitgraph.errors import UsageError
    from vitgraph.records.saved_runs import record_file, record_kind
    from vitgraph.report.record_files import EXPORTED_KINDS, RECORD_FORMATS, export_record

    file = record_file(path)
    kind = record_kind(file)
    if kind not in EXPORTED_KINDS:
        raise UsageError(
            f"{file} is a record of kind {kind!r}; export takes bench, {', '.join(EXPORTED_KINDS)}. "
            "Its JSON can be read as it is"
        )
    if count > 1:
        raise UsageError(f"{file} is a record of kind {kind!r}; only bench runs go together, so give it alone")
    return export_record(
        file,
        kind,
        output_dir or file.parent / "export",
        formats or RECORD_FORMATS,
        console=None if json_output else Console(),
        overwrite=overwrite,
    )


def _print_markdown(paths: Sequence[Path]) -> None:
    from vitgraph.records.compare_record import COMPILE_KIND, CompareRecord
    from vitgraph.records.saved_runs import open_runs, record_file, record_kind
    from vitgraph.report.compile_table import compile_rows_markdown
    from vitgraph.report.rows_table import rows_markdown

    files = [record_file(path) for path in paths]
    if {record_kind(file) for file in files} == {COMPILE_KIND}:
        typer.echo(compile_rows_markdown([CompareRecord.load(file, COMPILE_KIND) for file in files]), nl=False)
        return
    runs = open_runs(paths)
    for run in runs:
        _print_notes(run.notes)
    typer.echo(rows_markdown(runs), nl=False)


def _compare(
    paths: tuple[Path, Path],
    across: str | None,
    formats: str | None,
    output_dir: Path | None,
    overwrite: bool,
    json_output: bool,
) -> list[Path]:
    from rich.console import Console

    from vitgraph.commands.spec_values import new_run_folder
    from vitgraph.records.bench_record import encode
    from vitgraph.records.saved_runs import open_runs
    from vitgraph.records.two_runs import compare_runs
    from vitgraph.report.comparison_view import comparison_summary, render_comparison
    from vitgraph.report.export import export_comparison, parse_formats

    chosen = parse_formats(formats)
    first, second = open_runs(paths)
    names = tuple(name.strip() for name in (across or "").split(",") if name.strip())
    comparison = compare_runs(first, second, names)
    for run in (first, second):
        _print_notes(run.notes)
    written = export_comparison(
        comparison, output_dir or new_run_folder("comparison", first.record.model_name), chosen, overwrite=overwrite
    )
    if json_output:
        typer.echo(json.dumps(encode(comparison_summary(comparison)), indent=1))
    else:
        render_comparison(comparison, Console())
    return written


def _print_notes(notes: Sequence[str]) -> None:
    for note in notes:
        typer.echo(f"note: {note}", err=True)


def _list_files(written: Sequence[Path]) -> None:
    """Files by folder, one line a folder."""
    folders: dict[Path, list[str]] = {}
    for path in written:
        folders.setdefault(path.parent, []).append(path.name)
    for folder, names in folders.items():
        typer.echo(f"{folder}: {', '.join(names)}")
