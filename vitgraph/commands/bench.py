"""`vitgraph bench`: graph and eager mode on a workload, in one process, on ranks, or each plain and compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vitgraph.commands.checks import check_run
from vitgraph.commands.shell import Shown, command_line, new_run_folder
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
    from vitgraph.report.claims import verdict_of
    from vitgraph.report.derived import write_derived_or_say

    if spec.compile_rows:
        return _compile_rows(spec)
    folder = spec.run.output_dir or new_run_folder("bench", spec.model.model)
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
                write_derived_or_say(folder, progress.note)
    if record is None:
        return None
    failure = None
    if spec.run.fail_on_slower and record["comparison"].get("verdict") == "slower":
        failure = SlowerThanEagerError(f"graphs are slower than eager here: {verdict_of(record).reason}")

    def render(console: Console) -> None:
        from vitgraph.report.console import render_bench
        from vitgraph.report.rank_table import render_ranks, render_sharing

        render_bench(record, console)
        render_ranks(record, console)
        render_sharing(prepared.sharing, console)

    return Shown(record.as_json(), render, folder, is_interrupted=record["status"] == "interrupted", failure=failure)


def describe_plan(prepared: PreparedBench) -> Shown:
    """What `--dry-run` shows."""
    description: dict[str, Any] = prepared.describe()

    def render(console: Console) -> None:
        from vitgraph.report.plan_table import render_plan

        render_plan(description, console)

    return Shown(description, render)


def _compile_rows(spec: BenchSpec) -> Shown:
    """Measures eager and graph, each plain and compiled."""
    from dataclasses import replace

    from vitgraph.measure.compile_matrix import run_compile_matrix
    from vitgraph.measure.preparation import prepare_bench
    from vitgraph.report.compare_csv import BACKENDS_FILE, write_backends_csv
    from vitgraph.report.compile_table import render_compile_rows
    from vitgraph.report.progress import ConsoleProgress

    prepared = prepare_bench(replace(spec, model=replace(spec.model, compile=False)))
    folder = spec.run.output_dir or new_run_folder("compile-rows", spec.model.model)
    check_run(spec.model, prepared.source, folder, overwrite=spec.run.overwrite)
    if spec.shell.dry_run:
        return describe_plan(prepared)
    with ConsoleProgress(enabled=not spec.shell.quiet) as progress:
        for warning in prepared.warnings:
            progress.note(warning)
        record = run_compile_matrix(prepared, folder, command_line(), progress)
        write_backends_csv(record, folder / BACKENDS_FILE, overwrite=True)
    is_interrupted = record["status"] == "interrupted"
    return Shown(
        record.as_json(),
        lambda console: render_compile_rows(record, console),
        folder,
        is_interrupted=is_interrupted,
        failure=None if is_interrupted else record.failure(),
    )
