"""The work of `bench --compile-rows` between its options and its report."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from vitgraph.commands.compare_backends import Shown
from vitgraph.errors import UsageError

_UNUSED = {
    "baseline": ("eager", "--baseline"),
    "monolithic_crops": (None, "--monolithic-crops"),
    "fail_on_slower": (False, "--fail-on-slower"),
    "tensor_parallel_size": (1, "--tensor-parallel-size"),
}
"""Options of `bench` that the four rows do not have, with the value that leaves them out."""


def run_compile_rows(options: Mapping[str, Any]) -> Shown:
    """Measures eager and graph, each plain and compiled, and saves the record.

    Raises:
        UsageError: An option that these rows do not have.
        VitgraphError: What cannot be run at all.
    """
    from vitgraph.commands.spec_values import bench_spec, new_run_folder
    from vitgraph.measure.bench import prepare_bench
    from vitgraph.measure.compile_matrix import run_compile_matrix
    from vitgraph.report.compare_csv import BACKENDS_FILE, write_backends_csv
    from vitgraph.report.compile_table import render_compile_rows
    from vitgraph.report.plan_table import render_plan
    from vitgraph.report.progress import ConsoleProgress

    for name, (neutral, option) in _UNUSED.items():
        if options[name] != neutral:
            raise UsageError(f"--compile-rows measures four rows of its own; leave {option} out")
    spec = bench_spec({**options, "compile_blocks": False})
    prepared = prepare_bench(spec)
    if options["dry_run"]:
        description = prepared.describe()
        return Shown(description, lambda console: render_plan(description, console))
    folder = spec.run.output_dir or new_run_folder("compile-rows", spec.model.model)
    with ConsoleProgress(enabled=not options["quiet"]) as progress:
        for warning in prepared.warnings:
            progress.note(warning)
        record = run_compile_matrix(prepared, folder, ["vitgraph", *sys.argv[1:]], progress)
        write_backends_csv(record, folder / BACKENDS_FILE, overwrite=True)
    is_interrupted = record["status"] == "interrupted"
    failure = None if is_interrupted else record.failure()
    return Shown(record.data, lambda console: render_compile_rows(record, console), folder, is_interrupted, failure)
