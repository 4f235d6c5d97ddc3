"""The `verify` command's work between its options and its table: which rows, the run, its record."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitgraph import __version__
from vitgraph.errors import UsageError

if TYPE_CHECKING:
    from vitgraph.bench.verify_record import VerifyResult

VERIFY_FILE = "run.json"


def run_verify(options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Verifies the rows that the options name, and saves a record where an output folder is given.

    Returns:
        One `VerifyResult.as_dict()` a row.

    Raises:
        UsageError: Neither or both of `--model` and `--all`.
    """
    from vitgraph.bench.session import resolve_device, resolve_dtype, resolve_source
    from vitgraph.bench.verify import verify_model, verify_rows
    from vitgraph.config import ModelSpec, parse_token_budgets
    from vitgraph.environment import snapshot
    from vitgraph.models.registry import ROWS
    from vitgraph.report.progress import ConsoleProgress
    from vitgraph.result_files import refuse_to_replace

    model, every_row = options["model"], options["every_row"]
    if bool(model) == every_row:
        raise UsageError("pass --model with a preset, hub id or folder (or several, with commas), or --all")
    folder: Path | None = options["output_dir"]
    if folder is not None and not options["overwrite"]:
        refuse_to_replace(folder / VERIFY_FILE)
    device = resolve_device(options["device"])
    dtype = resolve_dtype(options["dtype"], device)
    settings: dict[str, Any] = {
        "seed": options["seed"],
        "calls": options["calls"],
        "max_items": options["max_vision_items_per_batch"],
        "token_budgets": parse_token_budgets(options["token_budgets"]) if options["token_budgets"] else None,
    }
    common: dict[str, Any] = {
        "device": device,
        "dtype": dtype,
        "backend": options["mm_encoder_attn_backend"],
        "load_format": options["load_format"],
    }
    results: list[dict[str, Any]] = []
    environment = snapshot(device)

    def keep(result: VerifyResult) -> None:
        """Saves after every row, so that a run that is stopped leaves what it verified."""
        results.append(result.as_dict())
        if folder is not None:
            _save(folder, results, environment)
        progress.step()

    with ConsoleProgress(enabled=not options["quiet"]) as progress:
        version = options["flash_attn_version"]
        if every_row:
            progress.phase("verifying", len(ROWS))
            size = options["debug_size"]
            verify_rows(ROWS, debug_size=size, on_result=keep, flash_attn_version=version, **common, **settings)
        else:
            sources = [resolve_source(ModelSpec(name, revision=options["revision"])) for name in model.split(",")]
            progress.phase("verifying", len(sources))
            for source in sources:
                keep(verify_model(source, flash_attn_version=version, **common, **settings))
    return results


def _save(folder: Path, results: list[dict[str, Any]], environment: dict[str, Any]) -> None:
    import json

    from vitgraph.records import encode
    from vitgraph.result_files import write_atomically

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
