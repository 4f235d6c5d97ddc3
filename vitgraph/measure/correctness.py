"""What is checked before anything is timed: that every series gives the embeddings of a reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from vitgraph.attention.registry import create_backend
from vitgraph.errors import IncorrectOutputError, VitgraphError
from vitgraph.measure.calls import CallInputs, EncoderCall
from vitgraph.measure.series import Encode, encode_eagerly
from vitgraph.measure.setup import load
from vitgraph.models.base import EncoderInputs
from vitgraph.models.encoder import VisionEncoder
from vitgraph.models.loading import set_implementation

if TYPE_CHECKING:
    from vitgraph.measure.preparation import PreparedBench

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-2}
"""Relative L2 distance of replay and eager that always passes, by dtype; see `item_limits`."""

EAGER_CALLS = 8
"""Calls of different items on which series are compared with eager."""

REFERENCE_BACKEND = "TORCH_SDPA"
"""Takes every device, head width and dtype; the same attention in float32 and in the run's dtype."""

FLOAT32_CALLS = 4

FLOOR = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 3e-2}
"""Relative L2 distance from float32 that always passes; full-size towers in bfloat16 are near 1.3e-2 by themselves."""

OWN_ROUNDING_FACTOR = 1.5
"""A half-precision tower differs from float32 by the rounding of all its layers, whichever backend attends, and by how
much depends on its depth and weights. So it is measured with torch's own attention, and a backend may have half as much
again."""


@dataclass(frozen=True, slots=True)
class Reference:
    """What series are compared with.

    Attributes:
        expected: The embedding of each item of a call, from the call and its inputs.
        limit: Largest distance that passes.
        encoder: What gives the expected embeddings; items beyond the limit may have its own rounding, see
            `item_limits`. None where the limit holds for all.
    """

    calls: tuple[EncoderCall, ...]
    expected: Callable[[EncoderCall, EncoderInputs], Sequence[torch.Tensor]]
    limit: float
    encoder: VisionEncoder | None = None


@dataclass(frozen=True, slots=True)
class Deviation:
    """The item whose embedding is farthest from the reference's.

    Attributes:
        distance: Relative L2 distance; NaN or infinite where an output is.
        limit: Largest distance that passes for the item.
    """

    distance: float
    item: int
    call: EncoderCall
    limit: float

    @property
    def passes(self) -> bool:
        return self.distance <= self.limit


def relative_l2(value: torch.Tensor, reference: torch.Tensor) -> float:
    """`|value - reference| / |reference|` in float32; NaN stays NaN."""
    value, reference = value.float(), reference.float()
    return ((value - reference).norm() / reference.norm().clamp(min=1e-30)).item()


def worst(distances: Iterable[float | None]) -> float | None:
    """The largest distance, None without any; a NaN is the worst, which `max` would drop."""
    known = [distance for distance in distances if distance is not None]
    return max(known, key=lambda distance: (math.isnan(distance), distance), default=None)


@torch.inference_mode()
def largest_deviation(encode: Encode, reference: Reference, inputs: CallInputs) -> Deviation:
    """Runs the reference's calls, and finds the item that is farthest from it; one that does not pass comes first."""
    found = []
    for call in reference.calls:
        call_inputs = inputs.make(call)
        expected = reference.expected(call, call_inputs)
        pairs = zip(encode(call_inputs), expected, strict=True)
        measured = [relative_l2(actual, wanted.to(actual.device)) for actual, wanted in pairs]
        limits = [reference.limit] * len(measured)
        if reference.encoder is not None:
            limits = item_limits(reference.encoder, call_inputs, expected, measured)
        rows = zip(measured, limits, strict=True)
        found += [Deviation(distance, item, call, limit) for item, (distance, limit) in enumerate(rows)]
    return max(found, key=lambda one: (not one.passes, math.isnan(one.distance), one.distance))


def eager_reference(encoder: VisionEncoder, calls: Sequence[EncoderCall]) -> Reference:
    """The same encoder's eager run of some calls."""
    chosen = list({call.items: call for call in calls}.values())[:EAGER_CALLS]
    limit = TOLERANCE[encoder.dtype]
    return Reference(tuple(chosen), lambda call, inputs: encode_eagerly(encoder, inputs), limit, encoder)


def item_limits(
    encoder: VisionEncoder, inputs: EncoderInputs, eager: Sequence[torch.Tensor], measured: Sequence[float]
) -> list[float]:
    """Largest distance of a replay from eager that passes, for each item of a call.

    Two runs of a half-precision tower by other kernels differ by the rounding of both. Where that is beyond the dtype's
    tolerance, it is measured what eager itself is from float32 on that very item, and half as much again passes.
    """
    tolerance = TOLERANCE[encoder.dtype]
    if all(distance <= tolerance for distance in measured):
        return [tolerance] * len(measured)
    return [limit_of(error, tolerance) for error in own_errors(encoder, inputs, eager)]


def own_errors(encoder: VisionEncoder, inputs: EncoderInputs, eager: Sequence[torch.Tensor]) -> list[float]:
    """Relative L2 distance of each item's eager output from that of the same weights in float32 with torch's attention;
    0 in float32, where it is not finite, and where the weights or the call do not fit in float32."""
    if encoder.dtype == torch.float32:
        return [0.0] * len(eager)
    attention = create_backend(REFERENCE_BACKEND, encoder.device)
    try:
        modules = deepcopy(encoder.modules).float()
        set_implementation(modules, attention.transformers_name)
        exact = encode_eagerly(type(encoder)(modules, encoder.rule, attention), _in_float32(inputs))
    except torch.OutOfMemoryError:
        return [0.0] * len(eager)
    errors = [relative_l2(value, reference) for value, reference in zip(eager, exact, strict=True)]
    return [error if math.isfinite(error) else 0.0 for error in errors]


def incorrect(name: str, deviation: Deviation) -> IncorrectOutputError:
    """What ends a run in which a series is too far from its own eager run."""
    return IncorrectOutputError(
        f"item {deviation.item} of a call with {deviation.call.tokens} tokens: {name} and eager differ by "
        f"{deviation.distance:.3g} (relative L2, at most {deviation.limit:.3g} passes); nothing was timed. "
        "Try another --mm-encoder-attn-backend, and `vitgraph verify` for the details"
    )


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
def float32_reference(
    prepared: PreparedBench, base: VisionEncoder, inputs: CallInputs
) -> tuple[Reference, dict[str, Any]]:
    """Runs some calls in float32 with the very weights of `base`, and measures what its dtype alone costs.

    Args:
        base: The tower in the run's dtype with torch's attention.
        inputs: Makes the calls' pixels, in the run's dtype.

    Returns:
        The reference, its outputs in host memory, and its facts for the record.

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
        outputs = _outputs_that_fit(encoder, calls, inputs)
        reference = Reference(tuple(calls[: len(outputs)]), lambda call, _: outputs[call.items], FLOOR[base.dtype])
        own_error = largest_deviation(partial(encode_eagerly, base), reference, inputs).distance
    except torch.OutOfMemoryError as error:
        raise VitgraphError(
            f"the float32 reference does not fit on {base.device} ({str(error).splitlines()[0]}), so no output could "
            "be checked; nothing was timed. Use smaller items (--max-pixels-per-item) or `vitgraph bench`"
        ) from error
    limit = limit_of(own_error, FLOOR[base.dtype])
    return replace(reference, limit=limit), {
        "backend": REFERENCE_BACKEND,
        "dtype": "float32",
        "calls": len(reference.calls),
        "items": sum(len(call.items) for call in reference.calls),
        "own_error": own_error,
        "limit": limit,
    }


def limit_of(own_error: float, least: float) -> float:
    """Largest distance that passes where the tower's own is `own_error`; `least` in any case."""
    scaled = OWN_ROUNDING_FACTOR * own_error
    return max(least, scaled) if math.isfinite(scaled) else least


def _outputs_that_fit(
    encoder: VisionEncoder, calls: Sequence[EncoderCall], inputs: CallInputs
) -> dict[tuple[Any, ...], tuple[torch.Tensor, ...]]:
    """Float32 outputs by items, smallest call first, up to one that does not fit in memory; at least of the first."""
    outputs: dict[tuple[Any, ...], tuple[torch.Tensor, ...]] = {}
    for call in calls:
        try:
            rows = encode_eagerly(encoder, _in_float32(inputs.make(call)))
            outputs[call.items] = tuple(row.cpu() for row in rows)
        except torch.OutOfMemoryError:
            if not outputs:
                raise
            break
    return outputs


def choose_calls(calls: Sequence[EncoderCall]) -> list[EncoderCall]:
    """A few calls of different geometries, from the fewest to the most tokens."""
    distinct = sorted({call.items: call for call in calls}.values(), key=lambda call: call.tokens)
    if len(distinct) <= FLOAT32_CALLS:
        return distinct
    last = len(distinct) - 1
    return [distinct[round(place * last / (FLOAT32_CALLS - 1))] for place in range(FLOAT32_CALLS)]


def _in_float32(inputs: EncoderInputs) -> EncoderInputs:
    pixels = {name: rows.float() for name, rows in inputs.pixels.items()}
    return replace(inputs, pixels=pixels)
