"""Times attention alone over segment lengths and slot counts, with the arithmetic limit beside it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from vitgraph.attention.base import AttentionBackend
from vitgraph.attention.measure import AttentionCase, graph_ms, queued_ms
from vitgraph.attention.registry import backend_class
from vitgraph.attention.selection import (
    CAPTURE_FAILED,
    ERROR,
    INCORRECT,
    OK,
    OUT_OF_MEMORY,
    TOLERANCE,
    check_case,
)
from vitgraph.errors import BackendError, UsageError, first_line
from vitgraph.measure.timing import matrix_rate_flops
from vitgraph.records.kinds.micro import MicroRow

SEGMENT_LENGTHS = (64, 256, 400, 1024, 3072, 8160)
SEGMENT_COUNTS = (1, 8)
SLOT_COUNTS = (1, 8, 64, 256, 1024)
SLOT_LENGTH = 400

LENGTH_SWEEP, SLOT_SWEEP = "length", "slots"

GRAPH_MODE, EAGER_MODE = "graph", "eager"


@dataclass(frozen=True, slots=True)
class MicroSpec:
    """What `run_micro` times.

    Attributes:
        heads: Heads of the tower.
        head_width: Width of one head.
        dtype: Dtype of the tower.
        segment_lengths: Rows of a segment.
        segment_counts: Equal segments of a call, each with every length.
        slot_counts: Segment slots of a call of one segment; the others are empty.
        slot_length: Rows of that segment.
    """

    heads: int
    head_width: int
    dtype: torch.dtype
    segment_lengths: tuple[int, ...] = SEGMENT_LENGTHS
    segment_counts: tuple[int, ...] = SEGMENT_COUNTS
    slot_counts: tuple[int, ...] = SLOT_COUNTS
    slot_length: int = SLOT_LENGTH

    def __post_init__(self) -> None:
        numbers = (*self.segment_lengths, *self.segment_counts, *self.slot_counts, self.slot_length)
        if min(numbers, default=1) < 1:
            raise UsageError(f"segment lengths, counts and slots must be at least 1, got {min(numbers)}")

    def cases(self) -> list[tuple[str, AttentionCase]]:
        """Sweep and input of every row, in order."""
        base = AttentionCase(self.heads, self.head_width, self.dtype, ())
        lengths = [
            (LENGTH_SWEEP, replace(base, lengths=(length,) * count))
            for length in self.segment_lengths
            for count in self.segment_counts
        ]
        slots = [
            (SLOT_SWEEP, replace(base, lengths=(self.slot_length,), slots=slot_count))
            for slot_count in self.slot_counts
        ]
        return lengths + slots


def run_micro(
    spec: MicroSpec,
    backends: Sequence[str],
    device: torch.device,
    *,
    flash_attn_version: int | None = None,
    matrix_rate: float | None = None,
) -> list[MicroRow]:
    """Times one varlen call for every backend and case; a backend that cannot run keeps one row with the reason.

    Every case is checked against float32 attention before it is timed. Backends that can be captured are timed as a
    graph of many calls, the others eagerly; `timed_as` says which.

    Args:
        spec: Cases.
        backends: Registry names.
        device: Where to run.
        flash_attn_version: Forces the generation of the backend that has several.
        matrix_rate: Floating-point operations a second of a large matrix product; None measures it on a GPU.

    Raises:
        BackendError: An unknown backend name.
    """
    classes = {name: backend_class(name) for name in backends}
    rate = matrix_rate if matrix_rate is not None else matrix_rate_flops(device, spec.dtype)
    cases = spec.cases()
    rows: list[MicroRow] = []
    for name, chosen in classes.items():
        try:
            reason = chosen.unavailable_reason(device)
            variant = str(flash_attn_version) if chosen.has_versions and flash_attn_version is not None else None
            backend = chosen.for_device(device, variant) if reason is None else None
            if backend is not None:
                reason = backend.unsupported_reason(spec.head_width, spec.dtype)
        except BackendError as error:
            reason, backend = str(error), None
        if reason is not None or backend is None:
            rows.append(MicroRow(backend=name, status="unsupported", reason=reason))
            continue
        rows += [_measure(name, backend, sweep, case, rate, device) for sweep, case in cases]
    return rows


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
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - started) * 1e3
