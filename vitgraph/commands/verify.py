"""The `verify` command's work between its options and its table: which rows, the run, its record."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitgraph import __version__
from vitgraph.errors import UsageError

if TYPE_CHECKING:
    import torch

    from vitgraph.measure.progress import Progress
    from vitgraph.ranks.group import ParallelGroup
    from vitgraph.verify.findings import VerifyResult

VERIFY_FILE = "run.json"


def run_verify(options: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Verifies the rows that the options name, and saves a record where an output folder is given.

    Returns:
        One `VerifyResult.as_dict()` a row, merged over the ranks where there are several; None where another process
        shows them: rank 0, or the ranks that this one started.

    Raises:
        UsageError: Neither or both of `--model` and `--all`.
    """
    from vitgraph.commands.on_ranks import is_follower, joined, ran_on_ranks, rank_progress
    from vitgraph.commands.spec_values import parallel_spec
    from vitgraph.measure.environment import snapshot
    from vitgraph.measure.setup import resolve_device
    from vitgraph.records.files import refuse_to_replace
    from vitgraph.verify.parallel import merge_ranks

    model, every_row = options["model"], options["every_row"]
    if bool(model) == every_row:
        raise UsageError("pass --model with a preset, hub id or folder (or several, with commas), or --all")
    folder: Path | None = options["output_dir"]
    parallel = parallel_spec(options)
    if ran_on_ranks(parallel, options["device"], folder, overwrite=options["overwrite"]):
        return None
    if folder is not None and not options["overwrite"] and not is_follower():
        refuse_to_replace(folder / VERIFY_FILE)
    with joined(parallel, options["device"]) as group, rank_progress(options["quiet"]) as progress:
        device = resolve_device(options["device"]) if group is None else group.device
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

        _verify_models(options, device, group, progress, keep)
        return None if is_follower() else results


def _verify_models(
    options: Mapping[str, Any],
    device: torch.device,
    group: ParallelGroup | None,
    progress: Progress,
    keep: Callable[[VerifyResult], None],
) -> None:
    from vitgraph.measure.setup import resolve_dtype, resolve_source
    from vitgraph.models.rows import ROWS
    from vitgraph.specs import ModelSpec, parse_token_budgets
    from vitgraph.verify.models import verify_model, verify_rows

    settings: dict[str, Any] = {
        "seed": options["seed"],
        "calls": options["calls"],
        "max_items": options["max_vision_items_per_batch"],
        "token_budgets": parse_token_budgets(options["token_budgets"]) if options["token_budgets"] else None,
        "device": device,
        "dtype": resolve_dtype(options["dtype"], device),
        "backend": options["mm_encoder_attn_backend"],
        "load_format": options["load_format"],
        "compiles": options["compile_blocks"],
        "flash_attn_version": options["flash_attn_version"],
        "group": group,
    }
    if options["every_row"]:
        progress.phase("verifying", len(ROWS))
        verify_rows(ROWS, debug_size=options["debug_size"], on_result=keep, **settings)
        return
    names = options["model"].split(",")
    sources = [resolve_source(ModelSpec(name, revision=options["revision"])) for name in names]
    progress.phase("verifying", len(sources))
    for source in sources:
        keep(verify_model(source, **settings))


def _save(folder: Path, results: list[dict[str, Any]], environment: dict[str, Any]) -> None:
    import json

    from vitgraph.records.bench_record import encode
    from vitgraph.records.files import write_atomically

    record = {
        "schema_version": 1,
        "kind": "verify",
        "vitgraph_version": __version__,
        "created_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": ["vitgraph", *sys.argv[1:]],
        "environment": environment,
        "rows": results,
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / VERIFY_FILE, json.dumps(encode(record), indent=1).encode())
