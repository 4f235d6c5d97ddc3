"""`vitgraph bench`: graph and eager mode on a workload, in one process, on ranks, or each plain and compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vitgraph.commands.checks import check_run
from vitgraph.commands.shell import Shown, command_line
from vitgraph.records.store import new_folder
from vitgraph.specs import BenchSpec

if TYPE_CHECKING:
    from rich.console import Console

    from vitgraph.measure.preparation import PreparedBench


def bench(spec: BenchSpec) -> Shown | None:
    """Measure the encoder in graph and eager mode on a workload, and say which is faster.

    Without --model, a first look: the Qwen3-VL-30B-A3B tower with random weights on a GPU, a small one on a CPU, and
    the shipped trace of real image sizes.
    """
    from vitgraph.commands.on_ranks import bench_on_rank, is_follower, ran_on_ranks, rank_progress
    from vitgraph.errors import SlowerThanEagerError
    from vitgraph.measure.preparation import prepare_bench
    from vitgraph.report.documents import document_of, write_derived

    if spec.compile_rows:
        return _compile_rows(spec)
    folder = spec.run.output_dir or new_folder("bench", spec.model.model)
    if not spec.shell.dry_run and ran_on_ranks(spec.parallel, spec.model.device, folder, overwrite=spec.run.overwrite):
        return None
    prepared = prepare_bench(spec)
    check_run(spec.model, prepared.source, folder, overwrite=spec.run.overwrite, parallel=spec.parallel)
    if spec.shell.dry_run:
        return describe_plan(prepared)
    with rank_progress(spec.shell.quiet) as progress:
        for warning in prepared.warnings:
            progress.note(warning)
        try:
            record = bench_on_rank(prepared, folder, command_line(), progress)
        finally:
            if not is_follower():
                write_derived(folder, progress.note)
    if record is None:
        return None
    document = document_of(record, sharing=prepared.sharing)
    verdict, failure = document.verdict, None
    if spec.run.fail_on_slower and verdict is not None and verdict.word == "slower":
        failure = SlowerThanEagerError(f"graphs are slower than eager here: {verdict.reason}")

    def render(console: Console) -> None:
        from vitgraph.report.to_terminal import render as show

        show(document, console)

    return Shown(
        record.model_dump(mode="json"), render, folder, is_interrupted=record.status == "interrupted", failure=failure
    )


def describe_plan(prepared: PreparedBench) -> Shown:
    """What `--dry-run` shows."""
    description: dict[str, Any] = prepared.describe()

    def render(console: Console) -> None:
        from vitgraph.report.to_terminal import render as show
        from vitgraph.report.views.plan import dry_run_document

        show(dry_run_document(description), console)

    return Shown(description, render)


def _compile_rows(spec: BenchSpec) -> Shown:
    """Measures eager and graph, each plain and compiled."""
    from dataclasses import replace

    from vitgraph.measure.compile_matrix import run_compile_matrix
    from vitgraph.measure.preparation import prepare_bench
    from vitgraph.records.candidates import failure as failure_of
    from vitgraph.report.documents import document_of, write_derived
    from vitgraph.report.progress import ConsoleProgress
    from vitgraph.report.to_terminal import render

    prepared = prepare_bench(replace(spec, model=replace(spec.model, compile=False)))
    folder = spec.run.output_dir or new_folder("compile-rows", spec.model.model)
    check_run(spec.model, prepared.source, folder, overwrite=spec.run.overwrite)
    if spec.shell.dry_run:
        return describe_plan(prepared)
    with ConsoleProgress(enabled=not spec.shell.quiet) as progress:
        for warning in prepared.warnings:
            progress.note(warning)
        record = run_compile_matrix(prepared, folder, command_line(), progress)
        write_derived(folder, progress.note)
    is_interrupted = record.status == "interrupted"
    return Shown(
        record.model_dump(mode="json"),
        lambda console: render(document_of(record), console),
        folder,
        is_interrupted=is_interrupted,
        failure=None if is_interrupted else failure_of(record.result),
    )
