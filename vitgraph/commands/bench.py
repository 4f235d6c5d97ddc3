"""`vitgraph bench`: graph and eager mode on a workload, in one process, on ranks, or each plain and compiled."""

from __future__ import annotations

from dataclasses import replace

from vitgraph.commands.shell import Shown, check_run, described, shown_record
from vitgraph.measure.progress import Progress
from vitgraph.records.store import new_folder
from vitgraph.specs import BenchSpec


def bench(spec: BenchSpec, progress: Progress) -> Shown | None:
    """Measure the encoder in graph and eager mode on a workload, and say which is faster.

    Without --model, a first look: the Qwen3-VL-30B-A3B tower with random weights on a GPU, a small one on a CPU, and
    the shipped trace of real image sizes.
    """
    from vitgraph.commands.on_ranks import bench_on_rank, ran_on_ranks
    from vitgraph.errors import SlowerThanEagerError
    from vitgraph.measure.preparation import prepare_bench
    from vitgraph.ranks.launch import is_follower
    from vitgraph.report.documents import document_of, write_derived

    if spec.compile_rows:
        return _compile_rows(spec, progress)
    folder = spec.run.output_dir or new_folder("bench", spec.model.model)
    overwrite, launches = spec.run.overwrite, not spec.shell.dry_run
    if ran_on_ranks(spec.parallel, spec.model.device, folder, progress, overwrite=overwrite, launches=launches):
        return None
    prepared = prepare_bench(spec)
    check_run(spec.model, prepared.source, folder, overwrite=overwrite)
    if spec.shell.dry_run:
        return described(prepared.describe())
    for warning in prepared.warnings:
        progress.note(warning)
    try:
        record = bench_on_rank(prepared, folder, progress)
    finally:
        if not is_follower():
            write_derived(folder, progress.note)
    if record is None:
        return None
    document = document_of(record, sharing=prepared.sharing)
    verdict, failure = document.verdict, None
    if spec.run.fail_on_slower and verdict is not None and verdict.word == "slower":
        failure = SlowerThanEagerError(f"graphs are slower than eager here: {verdict.reason}")
    return shown_record(record, folder, failure, document)


def _compile_rows(spec: BenchSpec, progress: Progress) -> Shown:
    """Measures eager and graph, each plain and compiled."""
    from vitgraph.measure.compile_matrix import run_compile_matrix
    from vitgraph.measure.preparation import prepare_bench
    from vitgraph.records.candidates import failure as failure_of
    from vitgraph.report.documents import write_derived

    prepared = prepare_bench(replace(spec, model=replace(spec.model, compile=False)))
    folder = spec.run.output_dir or new_folder("compile-rows", spec.model.model)
    check_run(spec.model, prepared.source, folder, overwrite=spec.run.overwrite)
    if spec.shell.dry_run:
        return described(prepared.describe())
    for warning in prepared.warnings:
        progress.note(warning)
    record = run_compile_matrix(prepared, folder, progress)
    write_derived(folder, progress.note)
    return shown_record(record, folder, failure_of(record.result))
