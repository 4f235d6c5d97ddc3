"""Checks that the patch-grid families' tests share: stock forward, padding, loading, processors, operations."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from vitgraph.attention.base import Packed, TorchSdpaBackend
from vitgraph.attention.registry import create_backend
from vitgraph.errors import InputError
from vitgraph.graphs.manager import EncoderCudaGraphManager
from vitgraph.models.base import EncoderInputs
from vitgraph.models.encoder import VisionEncoder
from vitgraph.models.geometry import GeometryRule, GridGeometry, ItemGeometry
from vitgraph.models.loading import load_encoder
from vitgraph.models.processor_classes import transformers_class
from vitgraph.models.registry import ModelSource, resolve_model
from vitgraph.models.replaced_modules import stock_modules
from vitgraph.planning.budgets import IMAGE, VIDEO, BudgetSettings, plan_budgets

CPU = torch.device("cpu")

SIZES = [
    (1, 1),
    (3, 2),
    (13, 14),
    (27, 29),
    (100, 100),
    (224, 224),
    (225, 223),
    (333, 77),
    (1280, 720),
    (1, 199),
    (41, 8200),
    (8000, 200),
    (4001, 3999),
]
"""Width and height; all of an aspect ratio that the processors take."""

MIXED = (
    GridGeometry(IMAGE, 1, 18, 30),
    GridGeometry(VIDEO, 3, 6, 10),
    GridGeometry(IMAGE, 1, 2, 2),
    GridGeometry(IMAGE, 1, 2, 50),
    GridGeometry(VIDEO, 2, 16, 16),
    GridGeometry(IMAGE, 1, 34, 2),
)
"""Images, videos, strips and the smallest grid; windows cut and uncut."""


class UnwrittenRowsBackend(TorchSdpaBackend):
    """Leaves NaN where a kernel may leave anything: in the rows past the last segment."""

    name: ClassVar[str] = "TEST_UNWRITTEN_ROWS"
    writes_padding_rows: ClassVar[bool] = False

    def varlen(self, *packed: *Packed) -> torch.Tensor:
        _, _, _, cu_seqlens, max_seqlen, _ = packed
        assert int(torch.diff(cu_seqlens).max()) <= max_seqlen, "max_seqlen is no upper bound"
        assert bool((torch.diff(cu_seqlens) >= 0).all()), "offsets fall"
        out = super().varlen(*packed)
        out[int(cu_seqlens[-1]) :] = float("nan")
        return out


def unwritten_rows_backend() -> UnwrittenRowsBackend:
    """The backend, made known to transformers."""
    from transformers import AttentionInterface

    backend = UnwrittenRowsBackend()
    AttentionInterface.register(backend.transformers_name, backend.transformers_function)
    return backend


def build(name: str, dtype: torch.dtype = torch.float32, backend: TorchSdpaBackend | None = None) -> VisionEncoder:
    """The preset's encoder on the CPU; every norm is drawn near one, so that the outputs depend on the input."""
    attention = backend or create_backend("TORCH_SDPA", CPU)
    encoder = load_encoder(resolve_model(name), attention, device=CPU, dtype=dtype, load_format="dummy")
    generator = torch.Generator().manual_seed(1)
    for parameter_name, parameter in encoder.modules.named_parameters():
        if parameter.ndim == 1 and parameter_name.endswith("weight"):
            parameter.copy_(1 + 0.1 * torch.randn(parameter.shape, generator=generator))
    return encoder


def rule_of(name: str, **processor: Any) -> Any:
    """The preset's rule, some processor settings replaced."""
    source = resolve_model(name)
    return source.row.encoder_class().rule_class(source.vision_config, {**source.processor, **processor}, source.extra)


def call_of(encoder: VisionEncoder, items: Sequence[ItemGeometry], seed: int = 0) -> EncoderInputs:
    """A call of `items` with seeded random pixels."""
    rows = sum(encoder.rule.pixel_rows(item)["pixel_values"] for item in items)
    return encoder.make_inputs(items, encoder.random_pixels({"pixel_values": rows}, seed))


def taken(encoder: VisionEncoder, items: Sequence[ItemGeometry]) -> list[ItemGeometry]:
    """The items of modalities that the model takes."""
    return [item for item in items if item.modality in encoder.rule.modalities]


def relative_l2(value: torch.Tensor, reference: torch.Tensor) -> float:
    return float((value - reference).norm() / reference.norm())


@torch.inference_mode()
def check_eager_equals_stock(encoder: VisionEncoder, items: Sequence[ItemGeometry] = MIXED) -> None:
    """A mixed batch and each of its items alone: rows as predicted, values as transformers' own forward gives them."""
    items = taken(encoder, items)
    for batch in (items, *([item] for item in items)):
        call = call_of(encoder, batch)
        stock, eager = encoder.stock_forward(call), encoder.encoder_eager_forward(call)
        tokens = sum(encoder.rule.item_spec(item).output_tokens for item in batch)
        assert stock.shape == eager.shape == (tokens, encoder.rule.output_width)
        assert relative_l2(eager, stock) <= 1e-6, batch
    alone = [
        encoder.encoder_eager_forward(encoder.select_encoder_cudagraph_items(full, [i])) for full, i in _parts(encoder)
    ]
    together = encoder.encoder_eager_forward(call_of(encoder, taken(encoder, MIXED)))
    assert relative_l2(torch.cat(alone), together) <= 1e-5, "items of one batch see each other"


def _parts(encoder: VisionEncoder) -> Iterator[tuple[EncoderInputs, int]]:
    items = taken(encoder, MIXED)
    full = call_of(encoder, items)
    return ((full, index) for index in range(len(items)))


@torch.inference_mode()
def check_graphs_equal_eager(name: str) -> None:
    """Replays of several budgets and slot counts, with NaN in every padded pixel and attention row."""
    encoder = build(name, backend=unwritten_rows_backend())
    plan = plan_budgets(BudgetSettings((4, 64, 150, 400), 4, 12))
    manager = EncoderCudaGraphManager(encoder, plan, policy="greedy")
    manager.capture()
    calls = [
        list(MIXED),
        [GridGeometry(IMAGE, 1, 2, 2)],
        [GridGeometry(IMAGE, 1, 16, 16), GridGeometry(IMAGE, 1, 16, 16)],
        [GridGeometry(VIDEO, 12, 2, 2)],
        [GridGeometry(IMAGE, 1, 2, 2 * 61)],
        [GridGeometry(IMAGE, 1, 2, 2 * 5), GridGeometry(VIDEO, 3, 2, 2), GridGeometry(IMAGE, 1, 2, 2 * 9)],
    ]
    keys = set()
    for seed, items in enumerate(filter(None, (taken(encoder, call) for call in calls))):
        call = call_of(encoder, items, seed)
        batches = manager.plan_call(call).batches
        assert all(batch.is_hit for batch in batches), items
        keys |= {key for batch in batches if (key := batch.runs["default"].key) is not None}
        assert manager._buffers is not None
        for buffer in manager._buffers.pixels.values():
            buffer.fill_(float("nan"))
        manager._buffers._written = dict.fromkeys(manager._buffers._written, 0)
        outputs = manager.execute(call)
        expected = encoder.encoder_eager_forward(call)
        assert [len(output) for output in outputs] == [encoder.rule.item_spec(item).output_tokens for item in items]
        assert bool(torch.isfinite(torch.cat(outputs)).all()), f"padding reached a valid row of {items}"
        assert relative_l2(torch.cat(outputs), expected) <= 1e-5, items
    assert len({key.token_budget for key in keys}) >= 3
    assert len({key.segment_slots for key in keys}) >= (3 if VIDEO in encoder.rule.modalities else 1)


def check_refusals(rule: GeometryRule) -> None:
    """What every rule of these families refuses, with the value and the rule in the message."""
    with pytest.raises(InputError, match="200"):
        rule.geometry(29 * 201, 29)
    with pytest.raises(InputError, match="200"):
        rule.geometry(29, 29 * 201, 8)
    with pytest.raises(InputError, match="0x5x1"):
        rule.geometry(0, 5)
    with pytest.raises(InputError, match=r"\[1, 5, 7\].*merge 2"):
        rule.item_spec(GridGeometry(IMAGE, 1, 5, 7))


@torch.inference_mode()
def check_flops(encoder: VisionEncoder) -> None:
    """The rule's operations are those that torch counts, attention included."""
    for item in taken(encoder, MIXED):
        call = call_of(encoder, [item])
        counter = FlopCounterMode(display=False)
        with sdpa_kernel(SDPBackend.MATH), stock_modules(encoder), counter:
            encoder.encoder_eager_forward(call)
        assert encoder.rule.flops(item) == counter.get_total_flops(), item


# -- processors ----------------------------------------------------------------------------------------------------


def video_processor(module: str, class_name: str, **settings: Any) -> Any:
    """transformers' video processor, whose sizing and sampling need no torchvision."""
    return transformers_class(f"{module}:{class_name}")(**settings)


def image_processor(name: str, size: Mapping[str, int], **settings: Any) -> Any:
    """The image processor that the preset's adapter uses, with other pixel bounds."""
    encoder_class: Any = resolve_model(name).row.encoder_class()
    return encoder_class.image_processor_class()(size=dict(size), **settings)


def sampled_frames(processor: Any, frames: int, file_fps: float, fps: float | None = None) -> int:
    """Frames that the processor takes of a file of `frames` frames, at `fps` or its own default rate."""
    from transformers.video_utils import VideoMetadata

    metadata = VideoMetadata(total_num_frames=frames, fps=file_fps, duration=frames / file_fps)
    return len(processor.sample_frames(metadata, fps=fps))


@torch.inference_mode()
def check_preprocess(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real images by the real processor: grids as the rule says, pixels that the tower takes, refusals in words."""
    encoder = build(name)
    low = 32**2 * 4
    monkeypatch.setitem(encoder.rule.processor, "size", {"shortest_edge": low, "longest_edge": low * 16})
    random = np.random.default_rng(0)
    images = [Image.fromarray(random.integers(0, 256, (h, w, 3), dtype=np.uint8)) for w, h in ((40, 61), (300, 90))]
    images.append(Image.new("L", (57, 31), 128))
    grids, pixels = encoder.preprocess(images)
    assert grids == [encoder.rule.image_geometry(image.width, image.height) for image in images]
    call = encoder.make_inputs(grids, pixels)
    assert len(encoder.encoder_eager_forward(call)) == sum(encoder.rule.item_spec(grid).output_tokens for grid in grids)
    grey = pixels["pixel_values"][call.row_offsets["pixel_values"][2] :]
    mean, std = (np.array(encoder.rule.processor[key]) for key in ("image_mean", "image_std"))
    expected = np.repeat((128 / 255 - mean) / std, grey.shape[1] // 3)
    assert np.allclose(grey.numpy(), expected[None, :], atol=1e-6)
    with pytest.raises(InputError, match="200"):
        encoder.preprocess([Image.new("RGB", (6000, 20))])


# -- loading -------------------------------------------------------------------------------------------------------


def write_checkpoint(
    folder: Path, name: str, prefix: str, vision_config: Mapping[str, Any], preprocessor: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """A published-style folder: two shards of encoder tensors, and language tensors in a shard that is not there.

    Returns:
        The encoder's tensors by their names in the adapter.
    """
    source = resolve_model(name)
    encoder_class = source.row.encoder_class()
    modules = encoder_class.build_modules(source.vision_config, source.extra, torch.bfloat16, CPU)
    generator = torch.Generator().manual_seed(3)
    state = {
        key: torch.randn(value.shape, generator=generator).to(torch.bfloat16)
        for key, value in modules.named_parameters()
    }
    published = {prefix + key.removeprefix("visual."): value for key, value in state.items()}
    weight_map = {}
    names = sorted(published)
    for shard, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-0000{shard}-of-00003.safetensors"
        tensors = {key: published[key] for key in part}
        tensors["model.language_model.norm.weight"] = torch.zeros(shard)
        save_file(tensors, folder / file)
        weight_map.update(dict.fromkeys(part, file))
    # Reading this shard would fail: a language tensor must not even be looked at.
    weight_map["model.language_model.embed_tokens.weight"] = "model-00003-of-00003.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = {"architectures": [source.architecture], "hidden_size": 64, "vision_config": dict(vision_config)}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(dict(preprocessor)))
    return state


def load_folder(folder: Path) -> tuple[ModelSource, VisionEncoder]:
    """The folder resolved as `--model` resolves it, and its encoder in bfloat16."""
    source = resolve_model(str(folder))
    backend = create_backend("TORCH_SDPA", CPU)
    return source, load_encoder(source, backend, device=CPU, dtype=torch.bfloat16)


def check_loaded(encoder: VisionEncoder, state: Mapping[str, torch.Tensor]) -> None:
    """Every tensor bit-equal, and the rotary frequencies still in float32."""
    loaded = dict(encoder.modules.named_parameters())
    assert loaded.keys() == state.keys()
    for key, value in state.items():
        # A layer of an unaligned width is held with zeros appended.
        own = torch.zeros_like(loaded[key])
        own[tuple(map(slice, value.shape))] = value
        assert torch.equal(loaded[key], own), key
    assert dict(encoder.modules.named_buffers())["visual.rotary_pos_emb.inv_freq"].dtype == torch.float32
