"""`auto`: times the backends that can run here on this tower's heads, and takes the fastest that is right."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from vitgraph.attention.base import AttentionBackend
from vitgraph.attention.measure import AttentionCase, graph_ms, reference_attention, relative_error, segments_of
from vitgraph.errors import BackendError

logger = logging.getLogger(__name__)

DEFAULT_LENGTHS = (64, 400, 3072)
"""Segment lengths that are timed where the caller knows none: windows, one small image, one large image."""

CASE_ROWS = 3072
"""Packed rows of each timed case."""

TOLERANCE = 2e-2
"""Largest relative error against float32; half-precision attention is near 2e-3."""

OK, INCORRECT, UNSUPPORTED, CAPTURE_FAILED = "ok", "incorrect", "unsupported", "capture_failed"
OUT_OF_MEMORY, ERROR = "out_of_memory", "error"


@dataclass(frozen=True, slots=True)
class Candidate:
    """What `auto` found out about one implementation.

    Attributes:
        name: Registry name.
        version: FlashAttention generation, for backends that have several.
        status: `ok`, `incorrect`, `unsupported`, `capture_failed`, `out_of_memory` or `error`.
        reason: Why it is not `ok`.
        implementation: What ran.
        milliseconds: GPU time of one call at each length; empty unless `ok`.
        relative_error: The largest against float32.
        seconds: What finding out took, plans and compilation included.
    """

    name: str
    version: int | None
    status: str
    reason: str | None = None
    implementation: str | None = None
    milliseconds: tuple[float, ...] = ()
    relative_error: float | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Selection:
    """The outcome of a measurement.

    Attributes:
        name: The chosen backend.
        version: Its generation, or None.
        lengths: Segment lengths that were timed.
        candidates: Everything that was tried, in the registry's order.
    """

    name: str
    version: int | None
    lengths: tuple[int, ...]
    candidates: tuple[Candidate, ...]

    def as_records(self) -> tuple[Mapping[str, Any], ...]:
        """The candidates as plain values, for a record."""
        return tuple({**asdict(candidate), "lengths": list(self.lengths)} for candidate in self.candidates)


_SELECTIONS: dict[tuple[Any, ...], Selection] = {}


def pick_backend(
    device: torch.device,
    head_width: int,
    heads: int,
    dtype: torch.dtype,
    lengths: Sequence[int] | None = None,
    *,
    backends: Mapping[str, type[AttentionBackend]],
) -> Selection:
    """Chooses by measuring; the result is kept for the process.

    On a CPU nothing is measured: only torch's own attention runs there.

    Args:
        device: Where the encoder will run.
        head_width: Width of one head.
        heads: Heads.
        dtype: Dtype of the encoder.
        lengths: Segment lengths that matter; None takes windows, a small and a large image.
        backends: Name to class, in order of preference.

    Raises:
        BackendError: Nothing can run these heads here; every reason is named.
    """
    timed = tuple(lengths or DEFAULT_LENGTHS)
    if device.type != "cuda":
        return Selection("TORCH_SDPA", None, timed, ())
    key = (device, torch.cuda.get_device_name(device), head_width, heads, dtype, timed, tuple(backends))
    if key not in _SELECTIONS:
        cases = [AttentionCase(heads, head_width, dtype, segments_of(length, CASE_ROWS)) for length in timed]
        tried = [
            _try_candidate(backend, version, cases, device)
            for backend in backends.values()
            for version in _versions(backend, device)
        ]
        _SELECTIONS[key] = choose(tried, timed)
    return _SELECTIONS[key]


def choose(candidates: Sequence[Candidate], lengths: Sequence[int]) -> Selection:
    """The candidate whose times have the smallest geometric mean; the first where two are equal.

    Raises:
        BackendError: No candidate is `ok`.
    """
    usable = [candidate for candidate in candidates if candidate.status == OK]
    if not usable:
        reasons = "; ".join(f"{candidate.name}: {candidate.reason}" for candidate in candidates)
        raise BackendError(f"no attention backend can run these heads here ({reasons}); use TORCH_SDPA and eager mode")
    best = min(usable, key=lambda candidate: sum(math.log(ms) for ms in candidate.milliseconds))
    return Selection(best.name, best.version, tuple(lengths), tuple(candidates))


def _versions(backend: type[AttentionBackend], device: torch.device) -> tuple[int | None, ...]:
    # A backend without a usable version is tried once all the same, so that its reason is recorded.
    return backend.versions(device) or (None,)


def _try_candidate(
    backend_class: type[AttentionBackend], version: int | None, cases: Sequence[AttentionCase], device: torch.device
) -> Candidate:
    started = time.perf_counter()
    name = backend_class.name
    reason = backend_class.unavailable_reason(device)
    if reason is None and not backend_class.is_capture_safe:
        reason = "its call cannot be captured"
    if reason is not None:
        return Candidate(name, version, UNSUPPORTED, reason)
    try:
        backend = backend_class.for_device(device, version)
    except BackendError as error:
        return Candidate(name, version, UNSUPPORTED, str(error))
    measured = time_backend(backend, cases, device)
    candidate = Candidate(name, version, seconds=time.perf_counter() - started, **measured)
    logger.info("auto: %s", candidate)
    return candidate


def time_backend(backend: AttentionBackend, cases: Sequence[AttentionCase], device: torch.device) -> dict[str, Any]:
    """Checks a backend on every case, then times it on every case, as `Candidate`'s fields; failures keep a reason."""
    outcome: dict[str, Any] = {"implementation": backend.implementation, "status": ERROR}
    reason = backend.unsupported_reason(cases[0].head_width, cases[0].dtype)
    if reason is not None:
        return {**outcome, "status": UNSUPPORTED, "reason": reason}
    try:
        errors = [check_case(backend, case, device) for case in cases]
        worst = max(errors, key=lambda error: math.inf if math.isnan(error) else error)
        outcome["relative_error"] = worst
        if not worst <= TOLERANCE:
            return {**outcome, "status": INCORRECT, "reason": f"relative error {worst:.3g} against float32"}
        outcome["status"] = CAPTURE_FAILED
        milliseconds = tuple(graph_ms(backend, case_call(backend, case, device), device) for case in cases)
        return {**outcome, "status": OK, "milliseconds": milliseconds}
    except torch.OutOfMemoryError as error:
        return {**outcome, "status": OUT_OF_MEMORY, "reason": first_line(error)}
    except Exception as error:  # whatever a package raises, the others are still to be tried
        return {**outcome, "reason": first_line(error)}
    finally:
        backend.release_padding_safe_output()


def case_call(backend: AttentionBackend, case: AttentionCase, device: torch.device) -> Callable[[], torch.Tensor]:
    """The varlen call of a case on tensors of its own."""
    query, key, value = case.tensors(device)
    offsets = case.offsets(device)
    longest, scale = max(case.lengths), case.head_width**-0.5
    return lambda: backend.varlen(query, key, value, offsets, longest, scale)


def check_case(backend: AttentionBackend, case: AttentionCase, device: torch.device) -> float:
    """Relative error of a backend against float32 attention of the same case."""
    query, key, value = case.tensors(device)
    offsets = case.offsets(device)
    scale = case.head_width**-0.5
    actual = backend.varlen(query, key, value, offsets, max(case.lengths), scale)
    return relative_error(actual, reference_attention(query, key, value, offsets, scale), offsets)


def first_line(error: BaseException) -> str:
    """Kind and first line of an error; CUDA's go on for a page."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
