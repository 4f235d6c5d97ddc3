"""`compare-backends --micro`: attention alone with the heads of a model's tower, for every backend, and its record."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from vitgraph.errors import BackendError, UsageError, VitgraphError
from vitgraph.measure.progress import Progress
from vitgraph.measure.setup import resolve_device, resolve_dtype, resolve_source
from vitgraph.records.candidates import OK
from vitgraph.records.draft import Draft
from vitgraph.records.kinds.micro import MicroResult, crossings
from vitgraph.records.record import MicroRecord
from vitgraph.records.sections import Resolved
from vitgraph.specs import CompareSpec

MICRO_KIND = "compare-backends-micro"
CPU_SEGMENT_LENGTHS = (64, 256, 400)
"""Longer segments would keep a CPU busy for minutes."""


def run_micro_comparison(spec: CompareSpec, folder: Path, progress: Progress) -> MicroRecord:
    """Times attention alone and saves the rows in `folder` as `run.json`, whatever ends it.

    Raises:
        UsageError: The tower has heads of several kinds, or the folder holds a result.
    """
    from vitgraph.measure.environment import snapshot
    from vitgraph.measure.micro import SEGMENT_LENGTHS, MicroSpec, run_micro
    from vitgraph.measure.timing import matrix_rate_flops

    model = spec.bench.model
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
    draft = Draft(
        MicroRecord(
            settings=spec.as_dict(),
            resolved=Resolved(model=model.model, row=source.row.name),
            environment=snapshot(device).but(matrix_rate_tflops=rate / 1e12 if rate else None),
            result=MicroResult(heads=heads, head_width=width, dtype=str(dtype).removeprefix("torch.")),
        )
    )
    progress.phase("timing attention alone", len(spec.backends))
    stopped = "stopped by the user; the backends before are complete"
    with suppress(KeyboardInterrupt), draft.saved_in(folder, spec.bench.run.overwrite, lambda: stopped):
        for name in spec.backends:
            found = run_micro(micro, [name], device, flash_attn_version=model.flash_attn_version, matrix_rate=rate)
            rows = (*draft.record.result.rows, *found)
            draft.note_result(rows=rows, crossings=crossings(rows))
            progress.step()
        draft.end("complete")
    return draft.record


def micro_failure(record: MicroRecord) -> VitgraphError | None:
    """What must not end with exit status 0: not one case of any backend was timed."""
    rows = record.result.rows
    if any(row.status == OK for row in rows):
        return None
    reasons = "; ".join(dict.fromkeys(f"{row.backend}: {row.reason}" for row in rows))
    return BackendError(f"no backend could be timed ({reasons})")
