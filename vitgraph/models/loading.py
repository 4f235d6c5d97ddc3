"""Builds an encoder: modules from the config, weights from a checkpoint or a seed, attention set to a backend."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from vitgraph.attention.base import AttentionBackend
from vitgraph.errors import BackendError, ModelError
from vitgraph.hub import say
from vitgraph.models.encoder import VisionEncoder
from vitgraph.models.registry import ModelSource
from vitgraph.models.replaced_modules import use_aligned_mlps, use_patch_products
from vitgraph.models.weights import (
    check_files,
    encoder_tensors,
    nothing_found,
    quantisation,
    quantised,
    some_of,
)

LOAD_FORMATS = ("auto", "dummy")

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
FLOAT_DTYPES = (*DTYPES.values(), torch.float64)
LAYER = re.compile(r"\.\d+\.")
"""Marks the tensors of repeated layers."""


def load_encoder(
    source: ModelSource,
    attention: AttentionBackend,
    *,
    device: torch.device,
    dtype: torch.dtype,
    load_format: str = "auto",
    seed: int = 0,
) -> VisionEncoder:
    """Builds the encoder of `source` on `device`; nothing of the language model is read or made.

    Args:
        attention: Backend that every attention layer calls.
        dtype: Dtype of its weights; buffers that transformers keeps in float32 stay so.
        load_format: `auto` reads the checkpoint's tensors, `dummy` draws random weights from `seed`.

    Raises:
        ModelError: The checkpoint lacks tensors or their shapes differ, or `load_format` is unknown.
        BackendError: The backend does not take the tower's head width or dtype.
    """
    check_weights(source, load_format)
    encoder_class = source.row.encoder_class()
    rule = source.rule()
    reason = attention.unsupported_reason(encoder_class.head_width(source.vision_config), dtype)
    if reason is not None:
        raise BackendError(f"{attention.name} does not fit {source.name}: {reason}")
    modules = encoder_class.build_modules(source.vision_config, source.extra, dtype, device)
    if load_format == "dummy":
        randomize(modules, seed)
    else:
        _load_weights(encoder_class, modules, source)
    set_implementation(modules, attention.transformers_name)
    encoder = encoder_class(modules.eval().requires_grad_(False), rule, attention)
    use_patch_products(encoder)
    use_aligned_mlps(encoder)
    return encoder


def check_weights(source: ModelSource, load_format: str) -> None:
    """Refuses a way of loading that is unknown, or weights that are nowhere; reads none of them.

    Raises:
        ModelError: Either.
        HubUnreachableError: They are on the hub, which does not answer, and not cached.
    """
    if load_format not in LOAD_FORMATS:
        raise ModelError(f"unknown load format {load_format!r}; known: {', '.join(LOAD_FORMATS)}")
    if load_format == "dummy":
        return
    if source.weights is None:
        raise ModelError(f"{source.name} has no published weights; use --load-format dummy")
    check_files(source.weights, source.row.encoder_class().owns_checkpoint_key, source.revision)


MATRIX_GAIN = 0.5
"""Standard deviation of random matrices, in units of one over the root of their inputs. At 1, thirty layers amplify the
rounding of bfloat16 until two kernels for the same product look like two results."""


def randomize(modules: nn.Module, seed: int) -> None:
    """Fills every parameter with seeded random values of a trained network's scale; norms stay near one.

    Timing does not depend on the values as long as they are finite and varied; zeros would run faster.
    """
    device = next(modules.parameters()).device
    generator = torch.Generator(device=device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in modules.named_parameters():
            values = torch.randn(parameter.shape, generator=generator, device=device)
            if parameter.ndim < 2 and not name.endswith("bias"):
                # Scales of norms and layers: near zero they would hide the blocks, and with them every error.
                values = 1 + 0.1 * values
            elif parameter.ndim < 2:
                values = 0.02 * values
            else:
                values = values * (MATRIX_GAIN * parameter[0].numel() ** -0.5)
            if "q_norm" in name or "k_norm" in name:
                # Attention over normalised queries and keys has no other scale; at 1 its scores would all saturate.
                values = values * parameter.shape[-1] ** -0.25
            parameter.copy_(values)


def _load_weights(encoder_class: type[VisionEncoder], modules: nn.ModuleDict, source: ModelSource) -> None:
    """Copies the checkpoint's tensors into the modules, each once, and says which of the tower's were left over."""
    assert source.weights is not None
    state = modules.state_dict()
    weights = {name for name, _ in modules.named_parameters()}
    loaded: dict[str, str] = {}
    unread = []
    tensors = encoder_tensors(source.weights, encoder_class.owns_checkpoint_key, source.revision, names=list(state))
    for key, tensor in tensors:
        values = encoder_class.convert_tensor(key, tensor, modules)
        if not values.keys() <= state.keys():
            unread.append(key)
        for name in values.keys() & state.keys():
            if name in loaded and not torch.equal(state[name], values[name].to(state[name])):
                raise ModelError(
                    f"{source.name}: {loaded[name]} and {key} both are the tower's {name}, with different values; "
                    "remove the one that is not meant"
                )
            _copy(source, key, name, values[name], state[name], is_weight=name in weights)
            loaded[name] = key
    if not loaded:
        raise ModelError(nothing_found(source.name, unread, list(state)))
    missing = sorted(state.keys() - loaded.keys())
    if missing and unread and (method := quantisation(source.weights, source.revision)):
        raise quantised(source.weights, missing[0], "is not there as a plain tensor", method)
    if missing:
        raise ModelError(
            f"{source.name}: the checkpoint lacks {len(missing)} tensors of the vision encoder: {some_of(missing, 5)}"
        )
    deeper = [key for key in unread if LAYER.search(key)]
    if deeper:
        raise ModelError(
            f"{source.name}: {len(deeper)} tensors of the tower were not read ({some_of(deeper)}): the layers that "
            "config.json asks for do not have them, or are fewer; config and checkpoint do not belong together"
        )
    if unread:
        say(f"{source.name}: {len(unread)} tensors of the vision encoder were not read: {some_of(unread)}")


def _copy(
    source: ModelSource, key: str, name: str, value: torch.Tensor, target: torch.Tensor, *, is_weight: bool
) -> None:
    """Copies a tensor of the checkpoint into one of the modules; bounds that are no weight may be infinite.

    Raises:
        ModelError: It has another shape, holds codes instead of values, or is not finite in the tower's dtype.
    """
    assert source.weights is not None
    if target.is_floating_point() and value.dtype not in FLOAT_DTYPES:
        what = f"is {str(value.dtype).removeprefix('torch.')} without a scale"
        raise quantised(source.weights, key, what, quantisation(source.weights, source.revision))
    shape = value.shape
    if target.shape != shape and value.ndim > 2:
        value = value.movedim(-1, 1)  # MLX's kernels have their input channels last.
    if target.shape != value.shape:
        raise ModelError(
            f"{source.name}: tensor {key} has shape {list(shape)}, the config asks for {list(target.shape)} "
            f"({name}); config and checkpoint do not belong together"
        )
    target.copy_(value)
    if torch.isnan(target).any() or (is_weight and not torch.isfinite(target).all()):
        if torch.isfinite(value).all():
            raise ModelError(f"{source.name}: tensor {key} overflows {target.dtype}; use --dtype bfloat16 or float32")
        what = "NaN" if torch.isnan(value).any() else "infinity"
        raise ModelError(f"{source.name}: tensor {key} holds {what}: the checkpoint is damaged; copy it again")


def set_implementation(modules: nn.Module, name: str) -> None:
    """Sets the attention implementation of every transformers module; constructors refuse names that are not theirs."""
    for module in modules.modules():
        config: Any = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation"):
            config._attn_implementation = name
