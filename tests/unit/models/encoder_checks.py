"""Checks that every adapter's tests share: builds debug encoders, compares forwards, writes small checkpoints."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AttentionInterface

from vitgraph.attention.base import AttentionBackend, Packed, TorchSdpaBackend
from vitgraph.attention.registry import create_backend
from vitgraph.graphs.manager import EncoderCudaGraphManager
from vitgraph.measure.series import encode_eagerly
from vitgraph.models.base import EncoderInputs, MetadataLayout
from vitgraph.models.encoder import VisionEncoder
from vitgraph.models.geometry import GeometryRule, ItemGeometry
from vitgraph.models.loading import load_encoder
from vitgraph.models.processor_classes import transformers_class
from vitgraph.models.registry import ROWS, ModelSource, all_presets, resolve_model, row_presets
from vitgraph.models.replaced_modules import WidenedLinear, stock_modules
from vitgraph.planning.budgets import GraphKey, plan_budgets, resolve_budget_settings

CPU = torch.device("cpu")


@cache
def debug_encoder(row_name: str) -> VisionEncoder:
    """The debug-size encoder of a row with seeded random weights, float32 on the CPU; shared, so not to be changed."""
    (row,) = (row for row in ROWS if row.name == row_name)
    backend = create_backend("TORCH_SDPA", CPU)
    return load_encoder(resolve_model(row.debug_preset), backend, device=CPU, dtype=torch.float32, load_format="dummy")


class PoisoningBackend(TorchSdpaBackend):
    """Leaves NaN in the rows past the last segment, as a kernel may that does not write them."""

    name: ClassVar[str] = "TORCH_SDPA_POISONING"
    writes_padding_rows: ClassVar[bool] = False

    def varlen(self, *packed: *Packed) -> torch.Tensor:
        _, _, _, cu_seqlens, max_seqlen, _ = packed
        longest = int(torch.diff(cu_seqlens).max())
        assert longest <= max_seqlen, f"a segment has {longest} rows, max_seqlen says {max_seqlen}"
        assert bool((torch.diff(cu_seqlens) >= 0).all()), "offsets must not fall"
        out = super().varlen(*packed)
        out[int(cu_seqlens[-1]) :] = float("nan")
        return out


@cache
def poisoning_backend() -> AttentionBackend:
    backend = PoisoningBackend()
    AttentionInterface.register(backend.transformers_name, backend.transformers_function)
    return backend


@cache
def plain_backend() -> AttentionBackend:
    return create_backend("TORCH_SDPA", CPU)


def preset_source(preset: str, **changes: Mapping[str, Any]) -> ModelSource:
    """The preset as a resolved model; `changes` update its `vision_config`, `processor` or `extra`."""
    row = all_presets()[preset]
    found = row_presets(row.name)[preset]
    parts = {name: {**found[name], **changes.get(name, {})} for name in ("vision_config", "processor", "extra")}
    return ModelSource(
        row=row,
        name=preset,
        vision_config=parts["vision_config"],
        processor=parts["processor"],
        extra=parts["extra"],
        weights=None,
        architecture=found["architecture"],
        config_source="preset",
    )


def build(source: ModelSource, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> VisionEncoder:
    """The encoder with seeded random weights on the CPU; its attention leaves NaN in padded rows."""
    return load_encoder(source, poisoning_backend(), device=CPU, dtype=dtype, load_format="dummy", seed=seed)


def inputs_of(encoder: VisionEncoder, items: Sequence[ItemGeometry], seed: int = 1) -> EncoderInputs:
    """A call of random pixels."""
    rows: dict[str, int] = {}
    for item in items:
        for name, count in encoder.rule.pixel_rows(item).items():
            rows[name] = rows.get(name, 0) + count
    return encoder.make_inputs(items, encoder.random_pixels(rows, seed))


def tokens_of(rule: GeometryRule, items: Sequence[ItemGeometry]) -> list[int]:
    return [rule.item_spec(item).output_tokens for item in items]


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """L2 norm of the difference over that of `expected`; NaN where either holds one."""
    assert actual.shape == expected.shape
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@contextmanager
def transformers_attention(encoder: VisionEncoder) -> Iterator[None]:
    """Runs the tower on transformers' own attention instead of the encoder's backend."""
    found: list[Any] = [module.config for module in encoder.modules.modules() if hasattr(module, "config")]
    configs = {id(config): config for config in found}
    before = {key: config._attn_implementation for key, config in configs.items()}
    for config in configs.values():
        config._attn_implementation = "sdpa"
    try:
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation = before[key]


@torch.inference_mode()
def assert_eager_equals_stock(encoder: VisionEncoder, items: Sequence[ItemGeometry]) -> None:
    """The packed forward equals transformers' own, item order and row counts included."""
    inputs = inputs_of(encoder, items)
    eager = encoder.encoder_eager_forward(inputs)
    with transformers_attention(encoder):
        stock = encoder.stock_forward(inputs)
    assert eager.shape == (sum(tokens_of(encoder.rule, items)), encoder.rule.output_width)
    assert relative_error(eager, stock) <= 1e-6


@torch.inference_mode()
def assert_padded_equals_eager(encoder: VisionEncoder, items: Sequence[ItemGeometry], capacity: GraphKey) -> None:
    """Garbage in every padded pixel row and NaN in every padded attention row do not reach a valid row."""
    inputs = inputs_of(encoder, items)
    eager = encoder.encoder_eager_forward(inputs)
    wanted = encoder.prepare_encoder_cudagraph_capture_inputs(capacity)
    values = encoder.prepare_encoder_cudagraph_replay_buffers(inputs, capacity)
    layout = MetadataLayout(wanted.metadata)
    assert layout.overflow(values.metadata) is None
    assert layout.overflow(wanted.dummy) is None
    assert all(values.scalars[name] <= bound for name, bound in wanted.scalars.items())
    arena = torch.full((max(layout.nbytes, 1),), 0x5A, dtype=torch.uint8)
    layout.write(layout.host_views(arena.numpy()), values.metadata)
    buffers = layout.device_views(arena)
    for garbage in (1e3, float("nan")):
        for name, field in wanted.pixels.items():
            buffers[name] = torch.full((field.rows, *field.row_shape), garbage, dtype=encoder.dtype)
            assert values.pixels[name].copy_into(buffers[name]) <= field.rows
        padded = torch.cat(list(encoder.encoder_cudagraph_forward(buffers, wanted.scalars, capacity.path)), dim=-1)
        assert len(padded) >= len(eager)
        assert relative_error(padded[: len(eager)], eager) <= 1e-5


def assert_manager_equals_eager(
    encoder: VisionEncoder, items: Sequence[ItemGeometry], budgets: Sequence[int], max_items: int
) -> EncoderCudaGraphManager:
    """Every item is replayed and equals eager, in input order; returns the manager for further questions."""
    config = encoder.get_encoder_cudagraph_config()
    settings = resolve_budget_settings(
        encoder.rule.budget_range(budgets[-1]),
        budgets,
        max_items,
        max_frames_per_video=config.max_frames_per_video,
    )
    plan = plan_budgets(
        settings,
        min_tokens_per_segment=config.min_tokens_per_segment,
        axes=config.axes,
        segment_free_paths=frozenset(path for path, policy in config.paths.items() if not policy.has_segments),
    )
    manager = EncoderCudaGraphManager(encoder, plan)
    manager.capture()
    inputs = inputs_of(encoder, items)
    with torch.inference_mode():
        expected = encode_eagerly(encoder, inputs)
    # A second call finds the pixels and metadata of the first in the buffers.
    manager.execute(inputs_of(encoder, list(reversed(items)), seed=2))
    outputs = manager.execute(inputs)
    assert [batch.miss_reason for batch in manager.plan_call(inputs).batches if not batch.is_hit] == []
    for actual, wanted in zip(outputs, expected, strict=True):
        assert relative_error(actual, wanted) <= 1e-5
    return manager


def write_checkpoint(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """A sharded checkpoint: `tensors` over two shards, and language-model tensors in a third that cannot be read."""
    names = sorted(tensors)
    shards = {f"model-0000{part + 1}-of-00003.safetensors": names[part::2] for part in range(2)}
    weight_map = {}
    for file, keys in shards.items():
        decoys = {f"language_model.model.layers.{file[6:11]}.mlp.up_proj.weight": torch.full((4, 4), float("nan"))}
        save_file({**{key: tensors[key].contiguous() for key in keys}, **decoys}, folder / file)
        weight_map.update(dict.fromkeys([*keys, *decoys], file))
    unreadable = "model-00003-of-00003.safetensors"
    (folder / unreadable).write_bytes(b"not safetensors")
    weight_map.update(dict.fromkeys(("language_model.lm_head.weight", "model.embed_tokens.weight"), unreadable))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config))


def stock_state(encoder: VisionEncoder) -> dict[str, torch.Tensor]:
    """The encoder's tensors by name, in the shapes that transformers' own modules have."""
    state: dict[str, torch.Tensor] = dict(encoder.modules.named_parameters())
    for name, module in encoder.modules.named_modules():
        if isinstance(module, WidenedLinear):
            outputs, inputs = module.stock_shape
            state[f"{name}.weight"] = module.weight[:outputs, :inputs].contiguous()
            if module.bias is not None:
                state[f"{name}.bias"] = module.bias[:outputs]
    return state


def published(state: Mapping[str, torch.Tensor], rename: Callable[[str], str | None]) -> dict[str, torch.Tensor]:
    """`state` under the names that `rename` gives; entries with none are left out."""
    return {name: tensor.clone() for key, tensor in state.items() if (name := rename(key)) is not None}


def load_folder(folder: Path, source: ModelSource) -> VisionEncoder:
    """Loads the checkpoint in `folder` with the config of `source`."""
    loaded = ModelSource(
        row=source.row,
        name=str(folder),
        vision_config=source.vision_config,
        processor=source.processor,
        extra=source.extra,
        weights=str(folder),
        architecture=source.architecture,
        config_source="folder",
    )
    return load_encoder(loaded, plain_backend(), device=CPU, dtype=torch.float32)


def assert_same_weights(actual: VisionEncoder, expected: VisionEncoder) -> None:
    """Every parameter is bit-equal."""
    state = dict(actual.modules.named_parameters())
    for name, parameter in expected.modules.named_parameters():
        assert torch.equal(state[name], parameter), name


def transformers_processor(name: str) -> tuple[type[Any], Any]:
    """A processor class of transformers by `module:class` under `transformers.models`, and its module."""
    found = transformers_class(name)
    return found, sys.modules[found.__module__]


@torch.inference_mode()
def assert_flops_are_counted(encoder: VisionEncoder, items: Sequence[ItemGeometry]) -> None:
    """The rule's operations are those that torch counts in the forward, attention included."""
    for item in items:
        counter = FlopCounterMode(display=False)
        inputs = inputs_of(encoder, [item])
        with sdpa_kernel(SDPBackend.MATH), stock_modules(encoder), counter:
            encoder.encoder_eager_forward(inputs)
        assert encoder.rule.flops(item) == counter.get_total_flops(), item


def random_image(width: int, height: int, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


SIZES = (
    (1, 1),
    (2, 3),
    (13, 13),
    (28, 28),
    (224, 224),
    (225, 223),
    (337, 1009),
    (448, 448),
    (449, 447),
    (1280, 720),
    (720, 1280),
    (1921, 1079),
    (3000, 3001),
    (8000, 200),
    (200, 8000),
)
"""(width, height) in pixels, odd ones and extremes included."""


def random_sizes(count: int, largest: int) -> list[tuple[int, int]]:
    """`count` seeded sizes; small and large ones are equally frequent."""
    generator = np.random.default_rng(11)
    sides = np.exp(generator.uniform(0, np.log(largest), (count, 2))).astype(int)
    return [(int(width), int(height)) for width, height in sides]
