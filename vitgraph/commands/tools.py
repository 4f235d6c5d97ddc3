"""`vitgraph export` and `workload`: tables, plots and pages from saved runs; workloads shown, made and converted."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from vitgraph.commands.shell import Shown, tell
from vitgraph.errors import IncomparableRunsError, SlowerError, VitgraphError
from vitgraph.records.store import check_file, new_folder, write_file
from vitgraph.specs.tools import (
    ExportSpec,
    WorkloadCallsSpec,
    WorkloadConvertSpec,
    WorkloadInspectSpec,
    WorkloadMakeSpec,
)

if TYPE_CHECKING:
    from rich.console import Console

    from vitgraph.records.two_runs import RunComparison
    from vitgraph.report.document import Document
    from vitgraph.workloads.base import Workload


def export(spec: ExportSpec) -> Shown:
    """Rebuild tables, plots and one HTML page from saved runs, or compare two of them; needs no GPU.

    Prints the tables of one record of any kind again, and writes tidy CSV and Parquet with their columns described,
    Markdown and LaTeX tables, plots as PNG and SVG, and one HTML page that loads nothing. Several bench runs, or
    several runs of --compile-rows, go into one table. With --compare, the files hold what the second of two bench runs
    gains over the first, with its intervals.
    """
    from vitgraph.report.documents import document_of_paths, parse_formats

    formats = parse_formats(spec.formats)
    if spec.compare is not None:
        return _compare(spec, spec.compare, formats)
    document, notes = document_of_paths(spec.runs)
    _print_notes(notes)
    if spec.markdown:
        from vitgraph.report.markup import to_markdown

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
    from vitgraph.report.documents import write

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


FACTS_FILE = "workload.json"
MOST_SIZES = 12
"""Numbers of requests a call that each have a row of their own."""


def inspect(spec: WorkloadInspectSpec) -> Shown:
    """Show the sizes of a workload and the output tokens that models make of them: percentiles and a histogram."""
    from vitgraph.measure.setup import resolve_source
    from vitgraph.report.charts import chart_files
    from vitgraph.report.documents import write_files
    from vitgraph.report.views.plan import workload_document
    from vitgraph.workloads.inspect import inspect_workload
    from vitgraph.workloads.registry import build_workload

    if spec.output_dir is not None:
        # Before the source is read, which can take minutes.
        check_file(spec.output_dir / FACTS_FILE, spec.overwrite)
    rules = {}
    for name in dict.fromkeys(spec.models):
        source = resolve_source(replace(spec.model, model=name))
        rules[name] = (source.row.name, source.rule())
    # Rows repeated to fill a run are no further traffic.
    found = inspect_workload(build_workload(replace(spec.workload, no_oversample=True)), rules)
    document = workload_document(found.facts, found.sizes, found.tokens)
    if spec.output_dir is not None:
        plots = chart_files(document.charts)
        write_files({spec.output_dir / name: content for name, content in plots.items()}, spec.overwrite)
        content = json.dumps(found.facts, indent=1).encode()
        write_file(spec.output_dir / FACTS_FILE, content, "the facts of the workload")
    return Shown(found.facts, document, spec.output_dir, kept_as="plots")


def make(spec: WorkloadMakeSpec) -> Shown:
    """Draw random requests as random-mm does, and write their sizes as a trace."""
    from vitgraph.workloads.registry import build_workload

    check_file(spec.output, spec.overwrite)
    return _save(build_workload(spec.workload), spec.output, spec.overwrite)


def convert(spec: WorkloadConvertSpec) -> Shown:
    """Write the sizes of images or of logged requests as a trace, which others can replay without the images."""
    from vitgraph.workloads.registry import convert_source

    check_file(spec.output, spec.overwrite)
    workload = convert_source(
        spec.source,
        kind=spec.kind,
        pattern=spec.pattern,
        height_first=spec.height_first,
        fields=spec.fields,
        num_requests=spec.num_prompts,
        spec=spec.workload,
    )
    return _save(workload, spec.output, spec.overwrite)


def calls(spec: WorkloadCallsSpec) -> Shown:
    """Write the encoder calls that an engine makes of a workload's requests, as a trace that bench and tune run.

    Beside the trace, a picture of how many requests the calls have.
    """
    from vitgraph.measure.calls import make_calls
    from vitgraph.measure.preparation import arrived
    from vitgraph.measure.setup import resolve_source
    from vitgraph.report.charts import chart_files
    from vitgraph.report.views.plan import calls_document
    from vitgraph.workloads.base import grouping_of, split_by_calls
    from vitgraph.workloads.registry import build_workload
    from vitgraph.workloads.trace import save_trace

    check_file(spec.output, spec.overwrite)
    source = resolve_source(spec.model)
    workload = arrived(build_workload(spec.workload), spec, source)
    grouping = grouping_of(spec.run.requests_per_call, workload.requests, spec.workload.seed)
    made, skipped = make_calls(workload.requests, source.rule(), grouping)
    by_index = {request.index: request for request in workload.requests}
    places = [
        [(request, place) for request in call.requests for place in range(len(by_index[request].items))]
        for call in made
    ]
    saved = replace(workload, requests=tuple(split_by_calls(workload.requests, places)))
    path = save_trace(saved, spec.output, overwrite=spec.overwrite)
    facts = {
        **_call_facts([len(call.requests) for call in made], [len(call.items) for call in made]),
        "path": str(path),
        "name": workload.name,
        "skipped": [{"source": item.source, "reason": item.reason} for item in [*workload.skipped, *skipped]],
        "provenance": dict(workload.provenance),
    }
    document = calls_document(facts)
    for name, content in chart_files(document.charts).items():
        write_file(path.with_name(f"{path.stem}-{Path(name).name}"), content, "the picture of the calls")
    return Shown(facts, document)


def _call_facts(sizes: Sequence[int], items: Sequence[int]) -> dict[str, Any]:
    """How many calls have how many requests and items; the largest sizes are one row."""
    counts = Counter(sizes)
    ordered, total = sorted(counts), sum(sizes)
    groups = [[size] for size in ordered[:MOST_SIZES]] + [group for group in [ordered[MOST_SIZES:]] if group]
    rows = []
    for group in groups:
        name = f"{group[0]} to {group[-1]}" if len(group) > 1 else str(group[0])
        calls, requests = sum(counts[size] for size in group), sum(size * counts[size] for size in group)
        shares = {"share": calls / len(sizes), "of_requests": requests / total}
        rows.append({"requests": name, "calls": calls, **shares})
    return {
        "calls": len(sizes),
        "requests": total,
        "items": sum(items),
        "mean_requests_per_call": total / len(sizes),
        "median_items_per_call": float(median(items)),
        "sizes": rows,
    }


def _save(workload: Workload, output: Path, overwrite: bool) -> Shown:
    from vitgraph.report.views.plan import saved_trace_document
    from vitgraph.workloads.trace import save_trace

    path = save_trace(workload, output, overwrite=overwrite)
    facts = {
        "path": str(path),
        "requests": len(workload.requests),
        "items": workload.num_items,
        "videos": sum(item.frames > 1 for request in workload.requests for item in request.items),
        "fingerprint": workload.fingerprint(),
        "skipped": [{"source": item.source, "reason": item.reason} for item in workload.skipped],
        "provenance": dict(workload.provenance),
    }
    return Shown(facts, saved_trace_document(facts))
