"""`vitgraph export`: tables, plots and a page from saved runs, and the comparison of two of them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitgraph.commands.shell import Shown
from vitgraph.records.store import new_folder
from vitgraph.specs.tools import ExportSpec

if TYPE_CHECKING:
    from rich.console import Console

    from vitgraph.report.document import Document


def export(spec: ExportSpec) -> Shown:
    """Rebuild tables, plots and one HTML page from saved runs, or compare two of them; needs no GPU.

    Prints the tables of one record of any kind again, and writes tidy CSV and Parquet with their columns described,
    Markdown and LaTeX tables, plots as PNG and SVG, and one HTML page that loads nothing. Several bench runs, or
    several runs of --compile-rows, go into one table. With --compare, the files hold what the second of two bench runs
    gains over the first, with its intervals.
    """
    from vitgraph.report.documents import document_of_paths
    from vitgraph.report.to_files import parse_formats

    formats = parse_formats(spec.formats)
    if spec.compare is not None:
        return _compare(spec, spec.compare, formats)
    document, notes = document_of_paths(spec.runs)
    _print_notes(notes)
    if spec.markdown:
        from vitgraph.report.to_markdown import to_markdown

        return Shown(None, lambda console: print(to_markdown(document), end=""))
    folder = spec.output_dir
    if folder is None:
        own = spec.runs[0] if spec.runs[0].is_dir() else spec.runs[0].parent
        folder = own / "export" if len(spec.runs) == 1 else new_folder("export", "runs")
    return _written(document, folder, formats, spec)


def _compare(spec: ExportSpec, paths: tuple[Path, Path], formats: Sequence[str]) -> Shown:
    from vitgraph.records.saved_runs import open_runs
    from vitgraph.records.two_runs import compare_runs
    from vitgraph.report.views.two_runs import comparison_summary, two_runs_document

    first, second = open_runs(paths)
    names = tuple(name.strip() for name in (spec.across or "").split(",") if name.strip())
    comparison = compare_runs(first, second, names)
    for run in (first, second):
        _print_notes(run.notes)
    folder = spec.output_dir or new_folder(
        "comparison", first.record.resolved.model if first.record.resolved else "runs"
    )
    shown = _written(two_runs_document(comparison), folder, formats, spec, stem="comparison")
    return Shown(comparison_summary(comparison), shown.render)


def _written(document: Document, folder: Path, formats: Sequence[str], spec: ExportSpec, stem: str = "table") -> Shown:
    from vitgraph.report.to_files import write

    written = write(document, folder, formats, stem=stem, overwrite=spec.overwrite)

    def show_all(console: Console) -> None:
        from vitgraph.report.to_terminal import render

        render(document, console)
        console.print()
        _list_files(written)

    data: Any = [str(path) for path in written]
    return Shown(data, show_all)


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
