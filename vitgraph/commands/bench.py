"""`vitgraph bench`: graph and eager mode on a workload, in one process, on ranks, or each plain and compiled."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from vitgraph.commands.shell import Shown
from vitgraph.errors import SlowerError, VitgraphError
from vitgraph.measure.progress import Progress
from vitgraph.records.record import Record
from vitgraph.records.store import new_folder
from vitgraph.specs import BenchSpec

if TYPE_CHECKING:
    from vitgraph.report.document import Document


def bench(spec: BenchSpec, progress: Progress) -> Shown | None:
    """Measure the encoder in graph and eager mode on a workload, and say which is faster.

    Without --model, a first look: the Qwen3-VL-30B-A3B tower with random weights on a GPU, a small one on a CPU, and
    the shipped trace of real image sizes.
    """
    from vitgraph.commands.on_ranks import measured, on_rank, ran_on_ranks
    from vitgraph.measure.bench import run_bench
    from vitgraph.measure.compare import run_compile_rows
    from vitgraph.measure.preparation import prepare_bench
    from vitgraph.records.candidates import failure as failure_of

    folder = spec.run.output_dir or new_folder("compile-rows" if spec.compile_rows else "bench", spec.model.model)
    if ran_on_ranks(spec, folder, progress):
        return None
    asked = replace(spec, model=replace(spec.model, compile=False)) if spec.compile_rows else spec
    prepared = prepare_bench(asked)

    def measure() -> Record | None:
        if spec.compile_rows:
            return run_compile_rows(prepared, folder, progress)
        return on_rank(asked, folder, lambda group: run_bench(prepared, folder, progress, group))

    def failure(record: Record, document: Document) -> VitgraphError | None:
        verdict = document.verdict
        if spec.compile_rows:
            return failure_of(record.result)
        if spec.run.fail_on_slower and verdict is not None and verdict.word == "slower":
            return SlowerError(f"graphs are slower than eager here: {verdict.reason}")
        return None

    return measured(prepared, folder, progress, prepared.describe, measure, failure)
