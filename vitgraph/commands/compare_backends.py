"""`vitgraph compare-backends`: what to run, where, and what to show of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from vitgraph.commands.checks import check_run
from vitgraph.commands.shell import Shown, command_line, new_run_folder
from vitgraph.errors import UsageError, VitgraphError
from vitgraph.specs import CompareSpec
from vitgraph.specs.fields import as_options

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import Console

    from vitgraph.measure.compare_spec import PreparedCompare
    from vitgraph.measure.progress import Progress
    from vitgraph.records.compare_record import CompareRecord

PART_OPTIONS_FILE = "options.json"


def compare_backends(spec: CompareSpec) -> Shown | None:
    """Compare attention backends in graph and eager mode on one workload, and say which to use and how sure that is.

    Every backend's outputs are checked against the same tower in float32 before anything is timed. A backend that is
    missing, fails or is wrong keeps its row with the reason.
    """
    from vitgraph.commands.on_ranks import is_follower, is_rank, ran_on_ranks, rank_progress
    from vitgraph.measure.compare_micro import MICRO_KIND
    from vitgraph.measure.compare_spec import choose_backends, prepare_compare
    from vitgraph.records.compare_record import KIND

    if spec.isolate and is_rank():
        raise UsageError("--isolate starts processes of its own; run it without torchrun, or leave it out")
    spec = replace(spec, backends=choose_backends(spec.backends))
    bench = spec.bench
    folder = bench.run.output_dir or new_run_folder(MICRO_KIND if spec.micro else KIND, bench.model.model)
    if spec.micro:
        return _run_micro(spec, folder)
    is_on_ranks = not (spec.shell.dry_run or spec.isolate)
    if is_on_ranks and ran_on_ranks(bench.parallel, bench.model.device, folder, overwrite=bench.run.overwrite):
        return None
    prepared = prepare_compare(spec)
    check_run(bench.model, prepared.bench.source, folder, overwrite=bench.run.overwrite, parallel=bench.parallel)
    if spec.shell.dry_run:
        return _describe(prepared)
    with rank_progress(spec.shell.quiet) as progress:
        for warning in prepared.bench.warnings:
            progress.note(warning)
        try:
            record = _run(prepared, folder, progress)
        finally:
            if not is_follower():
                _write_derived(folder, progress)
    if record is None:
        return None
    is_interrupted = record["status"] == "interrupted"
    failure = None if is_interrupted else record.failure()
    render = partial(_render, record, prepared.bench.sharing)
    return Shown(record.as_json(), render, folder, is_interrupted=is_interrupted, failure=failure)


def _render(record: CompareRecord, sharing: Mapping[str, object] | None, console: Console) -> None:
    from vitgraph.report.compare_table import render_compare
    from vitgraph.report.rank_table import render_compared_ranks, render_sharing

    render_compare(record, console)
    render_compared_ranks(record, console)
    render_sharing(sharing, console)


def _run(prepared: PreparedCompare, folder: Path, progress: Progress) -> CompareRecord | None:
    from vitgraph.commands.on_ranks import joined, naming_folder
    from vitgraph.measure.compare import follow_compare, run_compare
    from vitgraph.measure.compare_isolated import run_isolated

    command, spec = command_line(), prepared.spec
    if spec.isolate:
        return run_isolated(prepared, folder, command, progress, lambda name, part: _part_command(name, part, spec))
    with naming_folder(folder), joined(spec.bench.parallel, spec.bench.model.device) as group:
        if group is None or group.is_leader:
            return run_compare(prepared, folder, command, progress, group)
        follow_compare(prepared, command, group, progress)
        return None


def _part_command(backend: str, part: Path, spec: CompareSpec) -> Sequence[str]:
    """The command line that measures one backend alone; its options are a config file beside its record."""
    run = replace(spec.bench.run, output_dir=part, overwrite=True)
    shell = replace(spec.shell, config=None, quiet=True, json=True)
    alone = replace(spec, bench=replace(spec.bench, run=run, shell=shell), backends=(backend,), isolate=False)
    part.mkdir(parents=True, exist_ok=True)
    file = part / PART_OPTIONS_FILE
    file.write_text(json.dumps(as_options(alone), indent=1), encoding="utf-8")
    return [sys.executable, "-m", "vitgraph", "compare-backends", "--config", str(file)]


def _describe(prepared: PreparedCompare) -> Shown:
    description = prepared.describe()

    def render(console: Console) -> None:
        from vitgraph.report.compare_table import render_availability
        from vitgraph.report.plan_table import render_plan

        render_plan(description, console)
        render_availability(description["backends"], console)

    return Shown(description, render)


def _run_micro(spec: CompareSpec, folder: Path) -> Shown:
    from vitgraph.measure.compare_micro import micro_failure, run_micro_comparison
    from vitgraph.records.old_forms import old_form
    from vitgraph.report.compare_csv import MICRO_FILE, write_micro_csv
    from vitgraph.report.micro_table import render_micro
    from vitgraph.report.progress import ConsoleProgress

    with ConsoleProgress(enabled=not spec.shell.quiet) as progress:
        record = run_micro_comparison(spec, folder, command_line(), progress)
    shown = old_form(record)
    write_micro_csv(shown["rows"], folder / MICRO_FILE, overwrite=True)
    is_interrupted = record.status == "interrupted"
    failure = None if is_interrupted else micro_failure(record)
    data, render = record.model_dump(mode="json"), partial(render_micro, shown)
    return Shown(data, render, folder, is_interrupted=is_interrupted, failure=failure)


def _write_derived(folder: Path, progress: Progress) -> None:
    """Writes the CSV file and the plot of a saved record; a failure there loses no measurement."""
    from vitgraph.records.compare_record import CompareRecord
    from vitgraph.records.store import RUN_FILE
    from vitgraph.report.compare_csv import BACKENDS_FILE, write_backends_csv
    from vitgraph.report.compare_plots import write_compare_plots

    if not (folder / RUN_FILE).exists():
        return
    try:
        record = CompareRecord.load(folder)
        write_backends_csv(record, folder / BACKENDS_FILE, overwrite=True)
        write_compare_plots(record, folder / "plots", overwrite=True)
    except (OSError, VitgraphError) as error:
        progress.note(f"table and plot were not written ({error}); the record itself is saved in {folder}")
