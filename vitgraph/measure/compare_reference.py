"""The float32 reference of a comparison: what every backend's outputs are checked against, and how far they may be."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from vitgraph.errors import VitgraphError
from vitgraph.graphs.manager import EncoderCudaGraphManager
from vitgraph.measure.bench import PreparedBench
from vitgraph.measure.calls import CallInputs, EncoderCall
from vitgraph.measure.runner import BenchRunner, relative_l2
from vitgraph.measure.setup import load
from vitgraph.models.base import EncoderInputs
from vitgraph.models.encoder import VisionEncoder

REFERENCE_BACKEND = "TORCH_SDPA"
"""Takes every device, head width and dtype; the same attention in float32 and in the run's dtype."""

CHECKED_CALLS = 4

FLOOR = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 3e-2}
"""Relative L2 distance from float32 that always passes; full-size towers in bfloat16 are near 1.3e-2 by themselves."""

OWN_ROUNDING_FACTOR = 1.5
"""A half-precision tower differs from float32 by the rounding of all its layers, whichever backend attends, and by how
much depends on its depth and weights. So it is measured with torch's own attention, and a backend may have half as much
again."""

Encode = Callable[[EncoderInputs], Sequence[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Reference:
    """Float32 outputs of some calls.

    Attributes:
        calls: The calls.
        outputs: For each call, the float32 embedding of each item, in host memory.
        own_error: Largest distance of the same tower in the run's dtype with torch's attention.
        floor: Distance that passes whatever `own_error` is.
    """

    calls: tuple[EncoderCall, ...]
    outputs: tuple[tuple[torch.Tensor, ...], ...]
    own_error: float
    floor: float

    @property
    def limit(self) -> float:
        """Largest distance that passes."""
        scaled = OWN_ROUNDING_FACTOR * self.own_error
        return max(self.floor, scaled) if math.isfinite(scaled) else self.floor

    def as_dict(self) -> dict[str, Any]:
        """The facts for the record."""
        return {
            "backend": REFERENCE_BACKEND,
            "dtype": "float32",
            "calls": len(self.calls),
            "items": sum(len(call.items) for call in self.calls),
            "own_error": self.own_error,
            "limit": self.limit,
        }


def load_base(prepared: PreparedBench, device: torch.device, dtype: torch.dtype) -> tuple[VisionEncoder, Any]:
    """The tower in the run's dtype with torch's attention, and its facts; what fails here is the model, no backend.

    Raises:
        VitgraphError: The model cannot be loaded.
    """
    spec = replace(prepared.spec.model, attn_backend=REFERENCE_BACKEND, flash_attn_version=None, compile=False)
    try:
        return load(prepared.source, spec, device=device, dtype=dtype)
    except torch.OutOfMemoryError as error:
        raise VitgraphError(
            f"the encoder does not fit on {device} ({str(error).splitlines()[0]}); nothing was compared. Use another "
            "device or a smaller model"
        ) from error


@torch.inference_mode()
def build_reference(prepared: PreparedBench, base: VisionEncoder, inputs: CallInputs) -> Reference:
    """Runs some calls in float32 with the very weights of `base`, and measures what its dtype alone costs.

    Args:
        prepared: Model, calls and plan.
        base: The tower in the run's dtype with torch's attention.
        inputs: Makes the calls' pixels, in the run's dtype.

    Raises:
        VitgraphError: The float32 tower or its calls do not fit in memory.
    """
    calls = choose_calls([*prepared.warmups, *prepared.calls])
    spec = replace(prepared.spec.model, attn_backend=REFERENCE_BACKEND, flash_attn_version=None, compile=False)
    # The weights drawn here are replaced at once; a checkpoint need not be read twice for them.
    spec = replace(spec, load_format="dummy")
    try:
        encoder, _ = load(prepared.source, spec, device=base.device, dtype=torch.float32)
        encoder.modules.load_state_dict(base.modules.state_dict())
        outputs = _outputs_that_fit(eager_of(encoder, prepared), calls, inputs)
        reference = Reference(tuple(calls[: len(outputs)]), outputs, 0.0, FLOOR[base.dtype])
        return replace(reference, own_error=largest_error(eager_of(base, prepared), reference, inputs))
    except torch.OutOfMemoryError as error:
        raise VitgraphError(
            f"the float32 reference does not fit on {base.device} ({str(error).splitlines()[0]}), so no output could "
            "be checked; nothing was timed. Use smaller items (--max-pixels-per-item) or `vitgraph bench`"
        ) from error


def _outputs_that_fit(
    encode: Encode, calls: Sequence[EncoderCall], inputs: CallInputs
) -> tuple[tuple[torch.Tensor, ...], ...]:
    """Float32 outputs of the calls, smallest first, up to one that does not fit in memory; at least of the first."""
    outputs: list[tuple[torch.Tensor, ...]] = []
    for call in calls:
        try:
            outputs.append(tuple(rows.cpu() for rows in encode(_in_float32(inputs.make(call)))))
        except torch.OutOfMemoryError:
            if not outputs:
                raise
            break
    return tuple(outputs)


def choose_calls(calls: Sequence[EncoderCall]) -> list[EncoderCall]:
    """A few calls of different geometries, from the fewest to the most tokens."""
    distinct = sorted({call.items: call for call in calls}.values(), key=lambda call: call.tokens)
    if len(distinct) <= CHECKED_CALLS:
        return distinct
    last = len(distinct) - 1
    return [distinct[round(place * last / (CHECKED_CALLS - 1))] for place in range(CHECKED_CALLS)]


@torch.inference_mode()
def largest_error(encode: Encode, reference: Reference, inputs: CallInputs) -> float:
    """Largest relative L2 distance of an item from the reference; NaN or infinite where an output is."""
    largest = 0.0
    for call, expected in zip(reference.calls, reference.outputs, strict=True):
        for actual, wanted in zip(encode(inputs.make(call)), expected, strict=True):
            distance = relative_l2(actual, wanted.to(actual.device))
            if math.isnan(distance):
                return distance
            largest = max(largest, distance)
    return largest


def eager_of(encoder: VisionEncoder, prepared: PreparedBench) -> Encode:
    """The eager call of an encoder: every item's embedding, in input order."""
    manager = EncoderCudaGraphManager(encoder, prepared.plan)
    return BenchRunner(encoder, manager, CallInputs(encoder, (), 0)).run_eager


def _in_float32(inputs: EncoderInputs) -> EncoderInputs:
    pixels = {name: rows.float() for name, rows in inputs.pixels.items()}
    return replace(inputs, pixels=pixels)
