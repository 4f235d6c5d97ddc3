"""`vitgraph sweep`: a command with several settings or models, a process and a folder a run, and one table of all."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from vitgraph.commands.options import command_of_options, read_mapping
from vitgraph.commands.shell import Shown
from vitgraph.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_UNEXPECTED, UsageError, VitgraphError
from vitgraph.measure.progress import Progress
from vitgraph.records.record import version_of_code
from vitgraph.records.store import DEFAULT_ROOT, RUN_FILE, ResultFolder, read_record
from vitgraph.specs.asked import BenchSpec, CalibrateSpec, CompareSpec, ProfileSpec, RecommendSpec, TuneSpec, VerifySpec
from vitgraph.specs.fields import Spec, options_of, spec_from
from vitgraph.specs.tools import SweepSpec
from vitgraph.specs.values import near

COMMANDS: Mapping[str, type[Spec]] = {
    "bench": BenchSpec,
    "compare-backends": CompareSpec,
    "tune-budgets": TuneSpec,
    "recommend": RecommendSpec,
    "calibrate": CalibrateSpec,
    "verify": VerifySpec,
    "profile": ProfileSpec,
}
SWEEP_FILE, PROFILE_FILE, EXPORT_FOLDER = "sweep.json", "profile.json", "export"
COMPLETE, FAILED, WAITING = "complete", "failed", "not run"
EXAMPLE = "`axes: {packing: [greedy, exact]}`"


@dataclass(frozen=True, slots=True)
class SweepRun:
    """One run of a sweep.

    Attributes:
        command: What it runs.
        name: What sets it apart from the others, and of its folder.
        status: `complete`, `failed`, `interrupted` or `not run`.
        exit_status: Of its process; None where none ended.
        seconds: How long it took; None where it was there.
    """

    command: str
    name: str
    options: dict[str, Any]
    folder: Path
    result: Path
    status: str = WAITING
    exit_status: int | None = None
    seconds: float | None = None
    reason: str = ""

    def is_whole(self) -> bool:
        """Its result is there, complete, and of this very code."""
        try:
            record = read_record(self.result)
            return (record.status, record.vitgraph_version) == (COMPLETE, version_of_code())
        except VitgraphError:
            return False


def sweep(spec: SweepSpec, progress: Progress) -> Shown:
    """Run a command with several settings or models, one process after the other, and print one table of them all.

    Each run has a folder of its own. Run again, a sweep goes on: what is whole, and was measured by the same version of
    vitgraph, is not run a second time. A run that fails keeps its row with the reason, and the others go on.
    """
    ends = time.monotonic() + (spec.time_limit or math.inf)
    root = spec.output_dir or DEFAULT_ROOT / f"sweep-{spec.file.stem}"
    runs = read_sweep(spec.file, root)
    with ResultFolder(root, overwrite=True) as results:
        if spec.shell.dry_run:
            return _shown([replace(run, status=COMPLETE) if run.is_whole() else run for run in runs])
        known = _known(root)
        progress.phase(_commands(runs), len(runs))
        for place, run in enumerate(runs):
            if time.monotonic() < ends or run.is_whole():
                runs[place] = _run(run, known.get(run.name, {}))
            results.write(SWEEP_FILE, json.dumps(_data(runs), indent=1).encode())
            if runs[place].status == FAILED:
                progress.note(f"{run.name} failed: {runs[place].reason}")
            if runs[place].status == "interrupted":
                break
            progress.step()
        left = sum(run.status == WAITING for run in runs)
        if left and time.monotonic() >= ends:
            progress.note(f"the time was up before {left} of {len(runs)} runs began; run the sweep again to go on")
        return _shown(runs, root / EXPORT_FOLDER)


def read_sweep(file: Path, root: Path) -> list[SweepRun]:
    """The runs of a sweep, each checked as far as its options go."""
    given = read_mapping(file, "sweep", EXAMPLE)
    names = ("command", "settings", "axes", "runs")
    for name in given:
        if name not in names:
            raise UsageError(f"{file}: unknown key {name!r}; {near(str(name), names)}")
    shared, axes, others = given.get("settings") or {}, given.get("axes") or {}, given.get("runs") or []
    if not isinstance(shared, dict):
        raise UsageError(f"{file}: settings is {shared!r}; it must be a mapping from option names to values")
    if not isinstance(axes, dict) or not all(isinstance(values, list) and values for values in axes.values()):
        raise UsageError(f"{file}: axes must give each option a list of values, for example {EXAMPLE}")
    if not isinstance(others, list) or not all(isinstance(one, dict) and one for one in others):
        raise UsageError(f"{file}: runs must be a list of mappings from option names to values")
    combined = itertools.product(*axes.values()) if axes else ()
    varied = [dict(zip(axes, values, strict=True)) for values in combined] + others
    shared = {"command": given.get("command", "bench")} | shared
    if not varied:
        raise UsageError(f"{file} names no runs; give axes or runs, for example {EXAMPLE}")
    runs = [_planned(file, shared, one, root) for one in varied]
    for name in {run.name for run in runs if [other.name for other in runs].count(run.name) > 1}:
        raise UsageError(f"{file}: two runs are {name!r}; name each once")
    return runs


def _planned(file: Path, shared: Mapping[str, Any], varied: Mapping[str, Any], root: Path) -> SweepRun:
    options = {str(name).lstrip("-").replace("-", "_"): value for name, value in {**shared, **varied}.items()}
    place, command = f"{file}, run {_words(varied)}", options.pop("command")
    if command not in COMMANDS:
        raise UsageError(f"{place}: command is {command!r}; {near(str(command), COMMANDS)}")
    for name in ("output_dir", "output", "overwrite"):
        if name in options:
            raise UsageError(
                f"{place}: {name} is what the sweep decides; leave it out, and give the sweep --output-dir"
            )
    spec_from(COMMANDS[command], options, place)
    # A setting that all runs share and that changes makes other runs of them.
    digest = hashlib.sha256(json.dumps([command, options], sort_keys=True, default=str).encode()).hexdigest()[:6]
    name = f"{re.sub(r'[^A-Za-z0-9=,.+-]+', '-', _words(varied)).strip('-.')[:80]}-{digest}"
    folder = root / name
    has_folder = "output_dir" in options_of(COMMANDS[command])
    return SweepRun(command, name, options, folder, folder / (RUN_FILE if has_folder else PROFILE_FILE))


def _words(varied: Mapping[str, Any]) -> str:
    return ",".join(
        f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in varied.items()
    )


def _known(root: Path) -> dict[str, Any]:
    """What an earlier start of the sweep found of its runs, by name."""
    try:
        return {run["name"]: run for run in json.loads((root / SWEEP_FILE).read_bytes())["runs"]}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _run(run: SweepRun, before: Mapping[str, Any]) -> SweepRun:
    """Runs it, unless its result is there and whole."""
    from vitgraph.measure import processes

    if run.is_whole():
        kept = {name: before[name] for name in ("status", "exit_status", "seconds", "reason") if name in before}
        return replace(run, **{"status": COMPLETE, "exit_status": EXIT_OK, **kept})
    place = {"output_dir": run.folder} if run.result.name == RUN_FILE else {"output": run.result}
    own = {name: str(path) for name, path in place.items()} | {"overwrite": True, "quiet": True}
    began = time.monotonic()
    is_stopped, status = processes.run_process(
        command_of_options(run.command, run.options | own, run.folder), run.folder
    )
    run = replace(run, exit_status=status, seconds=round(time.monotonic() - began, 1))
    if is_stopped or status == EXIT_INTERRUPTED:
        return replace(run, status="interrupted", reason="stopped by the user")
    reason = processes.last_line(run.folder).removeprefix("error: ") if status else ""
    return replace(run, status=FAILED if status else COMPLETE, reason=reason or (f"status {status}" if status else ""))


def _commands(runs: Sequence[SweepRun]) -> str:
    return ", ".join(dict.fromkeys(run.command for run in runs))


def _data(runs: Sequence[SweepRun]) -> dict[str, Any]:
    return {"runs": [json.loads(json.dumps(asdict(run), default=str)) for run in runs]}


def _shown(runs: Sequence[SweepRun], folder: Path | None = None) -> Shown:
    """The table of the runs, and for `bench` that of their figures; as files too where a folder is given."""
    from vitgraph.report.documents import document_of_paths, write
    from vitgraph.report.views.runs import sweep_document

    whole = [run.folder for run in runs if run.command == "bench" and run.is_whole()]
    figures = document_of_paths(whole)[0] if len(whole) > 1 else None
    rows = [asdict(run) for run in runs]
    document = sweep_document(_commands(runs), rows, [_verdict(run) for run in runs], figures)
    if folder is not None:
        write(document, folder, ("csv", "markdown", "html"), stem="sweep", overwrite=True)
    failed = [run for run in runs if run.status == FAILED]
    statuses = {run.exit_status for run in failed}
    failure = None
    if failed:
        text = f"{len(failed)} of {len(runs)} runs failed: {', '.join(run.name for run in failed)}"
        failure = VitgraphError(text)
        # Of runs that all ended with the same status it is that of the sweep.
        failure.exit_status = (statuses.pop() if len(statuses) == 1 else None) or EXIT_UNEXPECTED
    is_stopped = any(run.status == "interrupted" for run in runs)
    return Shown(_data(runs), document, folder, kept_as="tables", is_interrupted=is_stopped, failure=failure)


def _verdict(run: SweepRun) -> str:
    """What a run found, in one sentence; empty where it has no result."""
    from vitgraph.report.documents import document_of

    if not run.is_whole():
        return ""
    verdict = document_of(read_record(run.result)).verdict
    return verdict.headline if verdict is not None else ""
