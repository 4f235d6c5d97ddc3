"""`compare-backends --micro`: attention alone, with the heads of a model's tower and its arithmetic limit beside it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from vitgraph.attention.base import AttentionBackend
from vitgraph.attention.measure import (
    CAPTURE_FAILED,
    ERROR,
    INCORRECT,
    OK,
    OUT_OF_MEMORY,
    TOLERANCE,
    AttentionCase,
    check_case,
    graph_ms,
    queued_ms,
)
from vitgraph.attention.registry import backend_class
from vitgraph.errors import BackendError, UsageError, VitgraphError, first_line
from vitgraph.measure.environment import snapshot
from vitgraph.measure.progress import Progress
from vitgraph.measure.series import matrix_rate_flops, synchronize
from vitgraph.measure.setup import resolve_device, resolve_dtype, resolve_source
from vitgraph.records.record import MicroRecord
from vitgraph.records.results import MicroResult, MicroRow, crossings
from vitgraph.records.sections import Resolved
from vitgraph.records.store import Draft
from vitgraph.specs.asked import CompareSpec

MICRO_KIND = "compare-backends-micro"

SEGMENT_LENGTHS = (64, 256, 400, 1024, 3072, 8160)
CPU_SEGMENT_LENGTHS = (64, 256, 400)
"""Longer segments would keep a CPU busy for minutes."""
SEGMENT_COUNTS = (1, 8)
SLOT_COUNTS = (1, 8, 64, 256, 1024)
SLOT_LENGTH = 400

LENGTH_SWEEP, SLOT_SWEEP = "length", "slots"

GRAPH_MODE, EAGER_MODE = "graph", "eager"

SweepCase = tuple[str, AttentionCase]
"""Sweep and input of a row."""


def run_micro_comparison(spec: CompareSpec, folder: Path, progress: Progress) -> MicroRecord:
    """Times attention alone and saves the rows in `folder` as `run.json`, whatever ends it.

    Raises:
        UsageError: The tower has heads of several kinds, or the folder holds a result.
    """
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
    cases = sweep_cases(AttentionCase(heads, width, dtype, ()), SEGMENT_LENGTHS if is_cuda else CPU_SEGMENT_LENGTHS)
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
            rows = (*draft.record.result.rows, *time_backend(name, cases, device, rate, model.flash_attn_version))
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


def sweep_cases(
    base: AttentionCase,
    segment_lengths: Sequence[int],
    segment_counts: Sequence[int] = SEGMENT_COUNTS,
    slot_counts: Sequence[int] = SLOT_COUNTS,
    slot_length: int = SLOT_LENGTH,
) -> list[SweepCase]:
    """What is timed, in order.

    Args:
        base: Heads and dtype of the tower.
        segment_lengths: Rows of a segment.
        segment_counts: Equal segments of a call, each with every length.
        slot_counts: Segment slots of a call of one segment; the others are empty.
        slot_length: Rows of that segment.
    """
    lengths = [(length,) * count for length in segment_lengths for count in segment_counts]
    return [
        *((LENGTH_SWEEP, replace(base, lengths=each)) for each in lengths),
        *((SLOT_SWEEP, replace(base, lengths=(slot_length,), slots=slots)) for slots in slot_counts),
    ]


def time_backend(
    name: str,
    cases: Sequence[SweepCase],
    device: torch.device,
    rate: float | None = None,
    flash_attn_version: int | None = None,
) -> list[MicroRow]:
    """Times one varlen call for every case of a backend; one that cannot run has one row with the reason.

    Every case is checked against float32 attention before it is timed. Backends that can be captured are timed as a
    graph of many calls, the others eagerly; `timed_as` says which.

    Args:
        rate: Floating-point operations a second of a large matrix product; None leaves the limits out.
        flash_attn_version: Forces the generation of the backend that has several.

    Raises:
        BackendError: An unknown backend name.
    """
    chosen = backend_class(name)
    backend = None
    try:
        reason = chosen.unavailable_reason(device)
        variant = str(flash_attn_version) if chosen.has_versions and flash_attn_version is not None else None
        backend = chosen.for_device(device, variant) if reason is None else None
        if backend is not None:
            reason = backend.unsupported_reason(cases[0][1].head_width, cases[0][1].dtype)
    except BackendError as error:
        reason = str(error)
    if reason is not None or backend is None:
        return [MicroRow(backend=name, status="unsupported", reason=reason)]
    return [_measure(name, backend, sweep, case, rate, device) for sweep, case in cases]


@torch.inference_mode()
def _measure(
    name: str, backend: AttentionBackend, sweep: str, case: AttentionCase, rate: float | None, device: torch.device
) -> MicroRow:
    row: dict[str, Any] = {
        "backend": name,
        "status": ERROR,
        "implementation": backend.implementation,
        "sweep": sweep,
        "segment_length": case.lengths[0],
        "segments": len(case.lengths),
        "slots": max(case.slots, len(case.lengths)),
        "rows": case.rows,
        "limit_ms": case.flops / rate * 1e3 if rate else None,
    }
    is_captured = device.type == "cuda" and backend.is_capture_safe
    row["timed_as"] = GRAPH_MODE if is_captured else EAGER_MODE
    try:
        call = partial(backend.varlen, *case.arguments(device))
        row["first_call_ms"] = _first_call_ms(call, device)
        error = check_case(backend, case, device)
        row["relative_error"] = error
        if not error <= TOLERANCE:
            row |= {"status": INCORRECT, "reason": f"relative error {error:.3g} against float32, above {TOLERANCE}"}
            return MicroRow(**row)
        row["status"] = CAPTURE_FAILED if is_captured else ERROR
        row["milliseconds"] = graph_ms(backend, call, device) if is_captured else queued_ms(call, device)
        row["status"] = OK
        if row["limit_ms"] is not None:
            row["limit_share"] = row["limit_ms"] / row["milliseconds"]
    except torch.OutOfMemoryError as failure:
        row |= {"status": OUT_OF_MEMORY, "reason": first_line(failure)}
    except Exception as failure:  # whatever a package raises, the other rows are still to be measured
        row["reason"] = first_line(failure)
    finally:
        backend.outputs.release()
    return MicroRow(**row)


def _first_call_ms(call: Callable[[], object], device: torch.device) -> float:
    started = time.perf_counter()
    call()
    synchronize(device)
    return (time.perf_counter() - started) * 1e3
