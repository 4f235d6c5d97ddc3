"""`vitgraph compare-backends`: what to run, where, and what to show of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from vitgraph.commands.config_file import NOT_IN_FILES, command_of_options
from vitgraph.commands.shell import Shown, shown_record
from vitgraph.errors import UsageError
from vitgraph.measure.progress import Progress
from vitgraph.records.record import Record
from vitgraph.records.store import new_folder
from vitgraph.specs import CompareSpec
from vitgraph.specs.fields import as_options


def compare_backends(spec: CompareSpec, progress: Progress) -> Shown | None:
    """Compare attention backends in graph and eager mode on one workload, and say which to use and how sure that is.

    Every backend's outputs are checked against the same tower in float32 before anything is timed. A backend that is
    missing, fails or is wrong keeps its row with the reason.
    """
    from vitgraph.commands.on_ranks import measured, on_rank, ran_on_ranks
    from vitgraph.measure.compare import choose_backends, prepare_compare, run_compare, run_isolated
    from vitgraph.measure.micro import MICRO_KIND
    from vitgraph.ranks.launch import is_rank
    from vitgraph.records.candidates import COMPARE_KIND as KIND
    from vitgraph.records.candidates import failure as failure_of

    if spec.isolate and is_rank():
        raise UsageError("--isolate starts processes of its own; run it without torchrun, or leave it out")
    spec = replace(spec, backends=choose_backends(spec.backends))
    bench = spec.bench
    folder = bench.run.output_dir or new_folder(MICRO_KIND if spec.micro else KIND, bench.model.model)
    if spec.micro:
        return _run_micro(spec, folder, progress)
    if ran_on_ranks(bench, folder, progress, launches=not spec.isolate):
        return None
    prepared = prepare_compare(spec)

    def measure() -> Record | None:
        if spec.isolate:
            return run_isolated(prepared, folder, progress, lambda name, part: _part_command(name, part, spec))
        return on_rank(bench, folder, lambda group: run_compare(prepared, folder, progress, group))

    return measured(
        prepared.bench, folder, progress, prepared.describe, measure, lambda record, _: failure_of(record.result)
    )


def _part_command(backend: str, part: Path, spec: CompareSpec) -> Sequence[str]:
    """The command line that measures one backend alone."""
    run = replace(spec.bench.run, output_dir=part, overwrite=True)
    shell = replace(spec.shell, config=None, quiet=True, json=True, debug=False)
    alone = replace(spec, bench=replace(spec.bench, run=run, shell=shell), backends=(backend,), isolate=False)
    options = {key: value for key, value in as_options(alone).items() if key not in NOT_IN_FILES}
    return command_of_options("compare-backends", options, part)


def _run_micro(spec: CompareSpec, folder: Path, progress: Progress) -> Shown:
    from vitgraph.measure.micro import micro_failure, run_micro_comparison
    from vitgraph.report.documents import write_derived

    record = run_micro_comparison(spec, folder, progress)
    write_derived(folder, progress.note)
    return shown_record(record, folder, micro_failure(record))
