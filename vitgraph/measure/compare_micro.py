"""`compare-backends --micro`: attention alone with the heads of a model's tower, for every backend, and its record."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vitgraph import __version__
from vitgraph.errors import BackendError, UsageError, VitgraphError
from vitgraph.measure.progress import Progress
from vitgraph.measure.setup import resolve_device, resolve_dtype, resolve_source
from vitgraph.records.bench_record import encode
from vitgraph.records.candidates import OK
from vitgraph.records.files import refuse_to_replace, write_atomically
from vitgraph.records.samples import RUN_FILE
from vitgraph.specs import CompareSpec

MICRO_KIND = "compare-backends-micro"
CPU_SEGMENT_LENGTHS = (64, 256, 400)
"""Longer segments would keep a CPU busy for minutes."""


def run_micro_comparison(spec: CompareSpec, folder: Path, command: Sequence[str], progress: Progress) -> dict[str, Any]:
    """Times attention alone and saves the rows in `folder` as `run.json`, whatever ends it.

    Returns:
        The record: `status`, `status_reason`, `settings`, `environment`, `heads`, `head_width`, `dtype`,
        `matrix_rate_tflops`, and `rows` as `run_micro` gives them.

    Raises:
        UsageError: The tower has heads of several kinds, or the folder holds a result.
    """
    from vitgraph.measure.environment import snapshot
    from vitgraph.measure.micro import SEGMENT_LENGTHS, MicroSpec, run_micro
    from vitgraph.measure.timing import matrix_rate_flops

    model = spec.bench.model
    if not spec.bench.run.overwrite:
        refuse_to_replace(folder / RUN_FILE)
    source = resolve_source(model)
    family = source.row.encoder_class()
    heads, width = family.head_count(source.vision_config), family.head_width(source.vision_config)
    if heads is None:
        raise UsageError(f"--micro needs a tower with heads of one kind, and {source.name} has several; leave it out")
    device = resolve_device(model.device)
    dtype = resolve_dtype(model.dtype, device)
    is_cuda = device.type == "cuda"
    if not is_cuda:
        progress.note(f"on a CPU, segments of more than {CPU_SEGMENT_LENGTHS[-1]} rows are left out")
    rate = matrix_rate_flops(device, dtype)
    lengths = SEGMENT_LENGTHS if is_cuda else CPU_SEGMENT_LENGTHS
    micro = MicroSpec(heads, width, dtype, segment_lengths=lengths)
    record: dict[str, Any] = {
        "schema_version": 1,
        "kind": MICRO_KIND,
        "status": "error",
        "status_reason": "the run ended before it measured anything",
        "vitgraph_version": __version__,
        "created_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": list(command),
        "settings": spec.as_dict(),
        "environment": snapshot(device),
        "heads": heads,
        "head_width": width,
        "dtype": str(dtype).removeprefix("torch."),
        "matrix_rate_tflops": rate / 1e12 if rate else None,
        "rows": [],
    }
    progress.phase("timing attention alone", len(spec.backends))
    version = model.flash_attn_version
    try:
        for name in spec.backends:
            record["rows"] += run_micro(micro, [name], device, flash_attn_version=version, matrix_rate=rate)
            progress.step()
        record |= {"status": "complete", "status_reason": None}
    except KeyboardInterrupt:
        record |= {"status": "interrupted", "status_reason": "stopped by the user; the backends before are complete"}
    finally:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / RUN_FILE, f"{json.dumps(encode(record), indent=2, ensure_ascii=False)}\n".encode())
    return record


def micro_failure(record: dict[str, Any]) -> VitgraphError | None:
    """What must not end with exit status 0: not one case of any backend was timed."""
    if any(row["status"] == OK for row in record["rows"]):
        return None
    reasons = "; ".join(dict.fromkeys(f"{row['backend']}: {row['reason']}" for row in record["rows"]))
    return BackendError(f"no backend could be timed ({reasons})")
