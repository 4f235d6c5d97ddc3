"""The `compare-backends` command's work between its options and its report: what to run, where, and what to show."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitgraph.errors import UsageError, VitgraphError
from vitgraph.ranks.launch import is_follower, is_rank

if TYPE_CHECKING:
    from rich.console import Console

    from vitgraph.measure.compare_spec import CompareSpec, PreparedCompare
    from vitgraph.measure.progress import Progress
    from vitgraph.records.compare_record import CompareRecord

PART_OPTIONS_FILE = "options.json"
_FIXED_OPTIONS = {
    "mm_encoder_attn_backend": "auto",
    "baseline": "eager",
    "monolithic_crops": None,
    "fail_on_slower": False,
}
"""Options of `bench` that a comparison does not have."""


@dataclass(frozen=True, slots=True)
class Shown:
    """What the command line shows of a finished command.

    Attributes:
        data: For `--json`.
        render: Prints it as tables.
        folder: Where the record is; None for a dry run.
        is_interrupted: The user stopped the run; what was measured is saved and shown.
        failure: What the command must end with after showing it all; None where it went well.
    """

    data: Mapping[str, Any]
    render: Callable[[Console], None]
    folder: Path | None = None
    is_interrupted: bool = False
    failure: VitgraphError | None = None


def compare_spec(options: Mapping[str, Any]) -> CompareSpec:
    """The spec of `vitgraph compare-backends` from its options by parameter name.

    Raises:
        UsageError: An option that cannot be read, or two that contradict each other.
    """
    from vitgraph.commands.spec_values import bench_spec
    from vitgraph.measure.compare_spec import CompareSpec, choose_backends

    for name in ("isolate", "dry_run"):
        if options["micro"] and options[name]:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"--micro times attention alone, in this process and without a plan; leave {option} out")
    if options["micro"] and options["tensor_parallel_size"] > 1:
        raise UsageError("--micro times attention alone, on one GPU; leave --tensor-parallel-size out")
    if options["isolate"] and is_rank():
        raise UsageError("--isolate starts processes of its own; run it without torchrun, or leave it out")
    backends = choose_backends(options["backends"])
    return CompareSpec(bench_spec({**options, **_FIXED_OPTIONS}), backends, options["isolate"])


def run_comparison(options: Mapping[str, Any]) -> Shown | None:
    """Runs what the options ask for and saves it.

    Returns:
        What to show; None where another process shows it: rank 0, or the ranks that this one started.

    Raises:
        VitgraphError: What cannot be run at all.
    """
    from vitgraph.commands.on_ranks import ran_on_ranks, rank_progress
    from vitgraph.commands.spec_values import new_run_folder
    from vitgraph.measure.compare_micro import MICRO_KIND
    from vitgraph.measure.compare_spec import prepare_compare
    from vitgraph.records.compare_record import KIND
    from vitgraph.report.progress import ConsoleProgress

    if options["part_options"] is not None:
        options = json.loads(options["part_options"].read_text(encoding="utf-8"))
        options = {**options, "output_dir": Path(options["output_dir"])}
    spec = compare_spec(options)
    command = ["vitgraph", *sys.argv[1:]]
    kind = MICRO_KIND if options["micro"] else KIND
    folder = spec.bench.run.output_dir or new_run_folder(kind, spec.bench.model.model)
    if options["micro"]:
        with ConsoleProgress(enabled=not options["quiet"]) as progress:
            return _run_micro(spec, folder, command, progress)
    parallel, device, overwrite = spec.bench.parallel, spec.bench.model.device, spec.bench.run.overwrite
    if not (options["dry_run"] or spec.isolate) and ran_on_ranks(parallel, device, folder, overwrite=overwrite):
        return None
    prepared = prepare_compare(spec)
    if options["dry_run"]:
        return _describe(prepared)
    with rank_progress(options["quiet"]) as progress:
        for warning in prepared.bench.warnings:
            progress.note(warning)
        try:
            record = _run(prepared, folder, command, options, progress)
        finally:
            if not is_follower():
                _write_derived(folder, progress)
    if record is None:
        return None
    is_interrupted = record["status"] == "interrupted"
    failure = None if is_interrupted else record.failure()
    return Shown(record.data, partial(_render, record, prepared.bench.sharing), folder, is_interrupted, failure)


def _render(record: CompareRecord, sharing: Mapping[str, Any] | None, console: Console) -> None:
    from vitgraph.report.compare_table import render_compare
    from vitgraph.report.rank_table import render_compared_ranks, render_sharing

    render_compare(record, console)
    render_compared_ranks(record, console)
    render_sharing(sharing, console)


def _run(
    prepared: PreparedCompare, folder: Path, command: Sequence[str], options: Mapping[str, Any], progress: Progress
) -> CompareRecord | None:
    from vitgraph.commands.on_ranks import joined, naming_folder
    from vitgraph.measure.compare import follow_compare, run_compare
    from vitgraph.measure.compare_isolated import run_isolated

    if prepared.spec.isolate:
        return run_isolated(prepared, folder, command, progress, lambda name, part: _part_command(name, part, options))
    with naming_folder(folder), joined(prepared.spec.bench.parallel, prepared.spec.bench.model.device) as group:
        if group is None or group.is_leader:
            return run_compare(prepared, folder, command, progress, group)
        follow_compare(prepared, command, group, progress)
        return None


def _part_command(backend: str, part: Path, options: Mapping[str, Any]) -> list[str]:
    """The command line that measures one backend alone; its options go through a file beside its record."""
    kept = {name: value for name, value in options.items() if isinstance(value, str | int | float | None)}
    changed = {"backends": backend, "isolate": False, "output_dir": str(part), "overwrite": True, "quiet": True}
    part.mkdir(parents=True, exist_ok=True)
    file = part / PART_OPTIONS_FILE
    file.write_text(json.dumps(kept | changed, indent=1), encoding="utf-8")
    return [sys.executable, "-m", "vitgraph", "compare-backends", "--part-options", str(file), "--json"]


def _describe(prepared: PreparedCompare) -> Shown:
    from vitgraph.report.compare_table import render_availability
    from vitgraph.report.plan_table import render_plan

    description = prepared.describe()

    def render(console: Console) -> None:
        render_plan(description, console)
        render_availability(description["backends"], console)

    return Shown(description, render)


def _run_micro(spec: CompareSpec, folder: Path, command: Sequence[str], progress: Progress) -> Shown:
    from vitgraph.measure.compare_micro import micro_failure, run_micro_comparison
    from vitgraph.report.compare_csv import MICRO_FILE, write_micro_csv
    from vitgraph.report.micro_table import render_micro

    record = run_micro_comparison(spec, folder, command, progress)
    write_micro_csv(record["rows"], folder / MICRO_FILE, overwrite=True)
    is_interrupted = record["status"] == "interrupted"
    failure = None if is_interrupted else micro_failure(record)
    return Shown(record, lambda console: render_micro(record, console), folder, is_interrupted, failure)


def _write_derived(folder: Path, progress: Progress) -> None:
    """Writes the CSV file and the plot of a saved record; a failure there loses no measurement."""
    from vitgraph.records.compare_record import CompareRecord
    from vitgraph.records.samples import RUN_FILE
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
