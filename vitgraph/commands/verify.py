"""`vitgraph verify`: which rows, the run, its record."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitgraph import __version__
from vitgraph.commands.shell import Shown, command_line
from vitgraph.specs import VerifySpec

if TYPE_CHECKING:
    import torch

    from vitgraph.measure.progress import Progress
    from vitgraph.ranks.group import ParallelGroup
    from vitgraph.verify.findings import VerifyResult

VERIFY_FILE = "run.json"


def verify(spec: VerifySpec) -> Shown | None:
    """Prove that replay equals eager: every graph, random packings, poisoned memory, order, aliasing, clean-up."""
    from vitgraph.errors import IncorrectOutputError
    from vitgraph.report.verify_table import render_verify

    results = _run(spec)
    if results is None:
        return None
    faults = [row for row in results if row["status"] != "ok"]
    failure = None
    if faults:
        named = "; ".join(f"{row['row']}: {row['status']}" for row in faults)
        failure = IncorrectOutputError(f"{len(faults)} of {len(results)} rows are not ok ({named})")
    return Shown({"rows": results}, lambda console: render_verify(results, console), failure=failure)


def _run(spec: VerifySpec) -> list[dict[str, Any]] | None:
    """Verifies the rows that are asked for, and saves a record where an output folder is given.

    Returns:
        One `VerifyResult.as_dict()` a row, merged over the ranks where there are several; None where another process
        shows them: rank 0, or the ranks that this one started.
    """
    from vitgraph.commands.on_ranks import is_follower, joined, ran_on_ranks, rank_progress
    from vitgraph.measure.environment import snapshot
    from vitgraph.measure.setup import resolve_device
    from vitgraph.records.files import refuse_to_replace
    from vitgraph.verify.parallel import merge_ranks

    folder = spec.output_dir
    if ran_on_ranks(spec.parallel, spec.model.device, folder, overwrite=spec.overwrite):
        return None
    if folder is not None and not spec.overwrite and not is_follower():
        refuse_to_replace(folder / VERIFY_FILE)
    with joined(spec.parallel, spec.model.device) as group, rank_progress(spec.shell.quiet) as progress:
        device = resolve_device(spec.model.device) if group is None else group.device
        results: list[dict[str, Any]] = []
        environment = snapshot(device)

        def keep(result: VerifyResult) -> None:
            """Saves after every row, so that a run that is stopped leaves what it verified."""
            row = result.as_dict()
            if group is not None:
                row = merge_ranks(group.exchange(row, f"the result of {result.preset}", slow=True))
            results.append(row)
            if folder is not None and not is_follower():
                _save(folder, results, environment)
            progress.step()

        _verify_models(spec, device, group, progress, keep)
        return None if is_follower() else results


def _verify_models(
    spec: VerifySpec,
    device: torch.device,
    group: ParallelGroup | None,
    progress: Progress,
    keep: Callable[[VerifyResult], None],
) -> None:
    from vitgraph.measure.setup import resolve_dtype, resolve_source
    from vitgraph.models.rows import ROWS
    from vitgraph.verify.models import verify_model, verify_rows

    model = spec.model
    settings: dict[str, Any] = {
        "seed": model.seed,
        "calls": spec.calls,
        "max_items": spec.graph.max_vision_items_per_batch,
        "token_budgets": spec.graph.token_budgets or None,
        "device": device,
        "dtype": resolve_dtype(model.dtype, device),
        "backend": model.attn_backend,
        "load_format": model.load_format,
        "compiles": model.compile,
        "flash_attn_version": model.flash_attn_version,
        "group": group,
    }
    if spec.every_row:
        progress.phase("verifying", len(ROWS))
        verify_rows(ROWS, debug_size=spec.debug_size, on_result=keep, **settings)
        return
    sources = [resolve_source(replace(model, model=name)) for name in spec.models]
    progress.phase("verifying", len(sources))
    for source in sources:
        keep(verify_model(source, **settings))


def _save(folder: Path, results: list[dict[str, Any]], environment: dict[str, Any]) -> None:
    from vitgraph.records.bench_record import encode
    from vitgraph.records.files import write_atomically

    record = {
        "schema_version": 1,
        "kind": "verify",
        "vitgraph_version": __version__,
        "created_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command_line(),
        "environment": environment,
        "rows": results,
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / VERIFY_FILE, json.dumps(encode(record), indent=1).encode())
