"""`vitgraph export`: tables, plots and a page from saved runs, and the comparison of two of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vitgraph.commands.shell import Shown, tell
from vitgraph.errors import IncomparableRunsError, SlowerError, VitgraphError
from vitgraph.records.store import new_folder
from vitgraph.specs.tools import ExportSpec

if TYPE_CHECKING:
    from rich.console import Console

    from vitgraph.records.two_runs import RunComparison
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


def _compare(spec: ExportSpec, sides: tuple[str, str], formats: Sequence[str]) -> Shown:
    from vitgraph.records.two_runs import compare_sides, open_runs
    from vitgraph.report.views.runs import comparison_summary, two_runs_document

    paths = [_runs_of(side) for side in sides]
    runs = open_runs([path for side in paths for path in side])
    firsts, seconds = runs[: len(paths[0])], runs[len(paths[0]) :]
    names = tuple(name.strip() for name in (spec.across or "").split(",") if name.strip())
    comparison = compare_sides(firsts, seconds, names, margin_pct=spec.same_margin_pct)
    for run in runs:
        _print_notes(run.notes)
    resolved = firsts[0].record.resolved
    folder = spec.output_dir or new_folder("comparison", resolved.model if resolved else "runs")
    shown = _written(two_runs_document(comparison), folder, formats, spec, stem="comparison")
    failure = None if spec.fail_on_slower is None else _gate(comparison, spec.fail_on_slower)
    return Shown(comparison_summary(comparison), shown.view, failure=failure)


def _runs_of(side: str) -> list[Path]:
    """The runs of one side: a path, or several with commas."""
    return [Path(side)] if Path(side).exists() else [Path(part.strip()) for part in side.split(",") if part.strip()]


def _gate(comparison: RunComparison, limit_pct: float) -> VitgraphError | None:
    """Why a regression test must fail; None where it passes, and a note where that is for want of evidence."""
    row = comparison.row("graph", "mean")
    loss = -(row.found.improvement_pct or 0.0)
    if comparison.verdict == "invalid":
        return IncomparableRunsError(f"no verdict on the second side: {comparison.verdict_reason}")
    if loss < limit_pct or comparison.verdict == "same":
        return None
    if comparison.verdict == "slower":
        return SlowerError(
            f"graph mode is {loss:.1f}% slower than the base, at least the {limit_pct:g}% of --fail-on-slower: "
            f"{comparison.verdict_reason}"
        )
    _print_notes([f"graph mode looks {loss:.1f}% slower, which is not sure: {comparison.verdict_reason}"])
    return None


def _written(document: Document, folder: Path, formats: Sequence[str], spec: ExportSpec, stem: str = "table") -> Shown:
    from vitgraph.report.to_files import write

    written = write(document, folder, formats, stem=stem, overwrite=spec.overwrite)

    def show_all(console: Console) -> None:
        from vitgraph.report.to_terminal import render

        render(document, console)
        console.print()
        folders: dict[Path, list[str]] = {}
        for path in written:
            folders.setdefault(path.parent, []).append(path.name)
        for folder, names in folders.items():
            print(f"{folder}: {', '.join(names)}")

    return Shown([str(path) for path in written], show_all)


def _print_notes(notes: Sequence[str]) -> None:
    for note in notes:
        tell(f"note: {note}")
