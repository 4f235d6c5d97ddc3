"""Which backends `auto` may use: those that can run this tower's heads here and are right, each with its reason."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from vitgraph.attention.base import AttentionBackend
from vitgraph.attention.measure import AttentionCase, reference_attention, relative_error, segments_of
from vitgraph.errors import BackendError, first_line

logger = logging.getLogger(__name__)

CHECKED_LENGTHS = (64, 400, 3072)
"""Segment lengths that every candidate must be right at: a window, one small image, one large image."""

CHECKED_ROWS = 3072
"""Packed rows of each checked case."""

TOLERANCE = 2e-2
"""Largest relative error against float32; half-precision attention is near 2e-3."""

OK, INCORRECT, UNSUPPORTED, CAPTURE_FAILED = "ok", "incorrect", "unsupported", "capture_failed"
OUT_OF_MEMORY, ERROR = "out_of_memory", "error"


@dataclass(frozen=True, slots=True)
class Candidate:
    """What `auto` found out about one implementation.

    Attributes:
        name: Registry name.
        variant: Which of a backend's implementations, for those that have several.
        status: `ok`, `incorrect`, `unsupported`, `out_of_memory` or `error`.
        reason: Why it is not `ok`.
        implementation: What ran.
        relative_error: The largest against float32.
        seconds: What finding out took, plans and compilation included.
        backend: The backend itself, where it is `ok`.
    """

    name: str
    variant: str | None
    status: str
    reason: str | None = None
    implementation: str | None = None
    relative_error: float | None = None
    seconds: float = 0.0
    backend: AttentionBackend | None = None

    @property
    def label(self) -> str:
        """The name, with the variant where it is not the default."""
        return self.name if self.variant is None else f"{self.name}:{self.variant}"

    def as_record(self) -> dict[str, Any]:
        """The finding as plain values."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "backend"}


def try_candidates(
    device: torch.device,
    head_width: int,
    heads: int,
    dtype: torch.dtype,
    *,
    backends: Mapping[str, type[AttentionBackend]],
) -> list[Candidate]:
    """Makes every backend that can run here and checks it against float32.

    Args:
        device: Where the encoder will run.
        head_width: Width of one head.
        heads: Heads.
        dtype: Dtype of the encoder.
        backends: Name to class, in order of preference.

    Raises:
        BackendError: Nothing can run these heads here; every reason is named.
    """
    cases = [AttentionCase(heads, head_width, dtype, segments_of(length, CHECKED_ROWS)) for length in CHECKED_LENGTHS]
    tried = [
        _try_candidate(backend, variant, cases, device)
        for backend in backends.values()
        # One without any that is usable is tried all the same, so that its reason is recorded.
        for variant in backend.variants(device) or (None,)
    ]
    if not any(candidate.status == OK for candidate in tried):
        reasons = "; ".join(f"{candidate.name}: {candidate.reason}" for candidate in tried)
        raise BackendError(f"no attention backend can run these heads here ({reasons}); use TORCH_SDPA and eager mode")
    return tried


def _try_candidate(
    backend_class: type[AttentionBackend], variant: str | None, cases: Sequence[AttentionCase], device: torch.device
) -> Candidate:
    started = time.perf_counter()
    name = backend_class.name
    reason = backend_class.unavailable_reason(device)
    if reason is None and not backend_class.is_capture_safe:
        reason = "its call cannot be captured"
    if reason is not None:
        return Candidate(name, variant, UNSUPPORTED, reason)
    try:
        backend = backend_class.for_device(device, variant)
    except BackendError as error:
        return Candidate(name, variant, UNSUPPORTED, str(error))
    found = check_backend(backend, cases, device)
    kept = backend if found["status"] == OK else None
    candidate = Candidate(name, variant, seconds=time.perf_counter() - started, backend=kept, **found)
    logger.info("auto: %s", candidate.as_record())
    return candidate


def check_backend(backend: AttentionBackend, cases: Sequence[AttentionCase], device: torch.device) -> dict[str, Any]:
    """Checks a backend on every case, as `Candidate`'s fields; failures keep a reason."""
    outcome: dict[str, Any] = {"implementation": backend.implementation, "status": ERROR}
    reason = backend.unsupported_reason(cases[0].head_width, cases[0].dtype)
    if reason is not None:
        return {**outcome, "status": UNSUPPORTED, "reason": reason}
    try:
        errors = [check_case(backend, case, device) for case in cases]
    except torch.OutOfMemoryError as error:
        return {**outcome, "status": OUT_OF_MEMORY, "reason": first_line(error)}
    except Exception as error:  # whatever a package raises, the others are still to be tried
        return {**outcome, "reason": first_line(error)}
    worst = max(errors, key=lambda error: math.inf if math.isnan(error) else error)
    outcome["relative_error"] = worst
    if not worst <= TOLERANCE:
        return {**outcome, "status": INCORRECT, "reason": f"relative error {worst:.3g} against float32"}
    return {**outcome, "status": OK}


def check_case(backend: AttentionBackend, case: AttentionCase, device: torch.device) -> float:
    """Relative error of a backend against float32 attention of the same case."""
    query, key, value, offsets, _, scale = packed = case.arguments(device)
    actual = backend.varlen(*packed)
    return relative_error(actual, reference_attention(query, key, value, offsets, scale), offsets)
