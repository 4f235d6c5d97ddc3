"""Gemma 4: tokens against processor and tower, packed rows against transformers' padded ones, padding, loading."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.gemma4.image_processing_pil_gemma4 import (
    Gemma4ImageProcessorPil,
    get_aspect_ratio_preserving_size,
)

from vitgraph.attention.base import AttentionBackend
from vitgraph.attention.registry import _register_with_transformers
from vitgraph.attention.torch_sdpa import TorchSdpaBackend
from vitgraph.errors import InputError, ModelError
from vitgraph.graphs.manager import EncoderCudaGraphManager
from vitgraph.models.base import EncoderInputs, GraphCapacity
from vitgraph.models.gemma4 import Gemma4Encoder, Gemma4Rule
from vitgraph.models.geometry import GridGeometry, ItemGeometry
from vitgraph.models.loading import load_encoder
from vitgraph.models.registry import ModelRow, ModelSource, row_presets
from vitgraph.planning.budgets import plan_budgets, resolve_budget_settings
from vitgraph.planning.items import IMAGE, VIDEO

ROW = ModelRow(
    "gemma4",
    "Gemma 4",
    "vitgraph.models.gemma4:Gemma4Encoder",
    ("Gemma4ForConditionalGeneration",),
    "gemma-4-26b-a4b",
    "gemma-4-debug",
)
CPU = torch.device("cpu")
SIZES = (
    (1, 1),
    (3, 1),
    (48, 48),
    (224, 224),
    (337, 211),
    (1000, 53),
    (1280, 720),
    (8000, 200),
    (200, 8000),
    (5000, 17),
)


class UnwrittenRowsBackend(TorchSdpaBackend):
    """Leaves NaN in the rows past the last segment, as a kernel that does not write them may."""

    name: ClassVar[str] = "TEST_UNWRITTEN_ROWS"

    def varlen(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_seqlen: int,
        scale: float,
    ) -> torch.Tensor:
        assert int(cu_seqlens.diff().max()) <= max_seqlen
        out = super().varlen(query, key, value, cu_seqlens, max_seqlen, scale)
        out[int(cu_seqlens[-1]) :] = torch.nan
        return out


def debug_source(weights: str | None = None, image_tokens: int = 70) -> ModelSource:
    preset = row_presets("gemma4")["gemma-4-debug"]
    return ModelSource(
        row=ROW,
        name="gemma-4-debug",
        vision_config=preset["vision_config"],
        processor={**preset["processor"], "max_soft_tokens": image_tokens},
        extra=preset["extra"],
        weights=weights,
        architecture=preset["architecture"],
        config_source="preset",
    )


def make_encoder(backend: AttentionBackend, source: ModelSource | None = None) -> Gemma4Encoder:
    _register_with_transformers(backend)
    encoder = load_encoder(
        source or debug_source(), backend, device=CPU, dtype=torch.float32, load_format="dummy", seed=3
    )
    assert isinstance(encoder, Gemma4Encoder)
    # The tower starts with no clipping and no standardisation, which would hide a mistake in either.
    tower: Any = encoder.modules["vision_tower"]
    generator = torch.Generator().manual_seed(5)
    for name, buffer in tower.named_buffers():
        if name.endswith(("_min", "_max")):
            buffer.fill_(2.0 if name.endswith("_max") else -2.0)
        elif name in ("std_bias", "std_scale"):
            buffer.copy_(1 + 0.3 * torch.randn(buffer.shape, generator=generator))
    return encoder


@pytest.fixture(scope="module")
def encoder() -> Iterator[Gemma4Encoder]:
    with torch.inference_mode():
        yield make_encoder(TorchSdpaBackend())


def call_of(encoder: Gemma4Encoder, items: list[ItemGeometry], seed: int = 0) -> EncoderInputs:
    patches = sum(encoder.rule.pixel_rows(item)["pixel_values"] for item in items)
    return encoder.make_inputs(items, encoder.random_pixels({"pixel_values": patches}, seed))


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    assert actual.shape == expected.shape
    return float((actual - expected).norm() / expected.norm())


def mixed_items(rule: Gemma4Rule) -> list[ItemGeometry]:
    return [
        rule.image_geometry(640, 480),
        rule.video_geometry(320, 240, 3, None),
        rule.image_geometry(20, 900),
        rule.video_geometry(100, 400, 1, None),
        rule.image_geometry(33, 35),
    ]


@pytest.mark.parametrize("preset", ["gemma-4-26b-a4b", "gemma-4-e2b"])
@pytest.mark.parametrize("soft_tokens", [70, 280, 1120])
def test_tokens_equal_the_processors_rule(preset: str, soft_tokens: int) -> None:
    facts = row_presets("gemma4")[preset]
    rule = Gemma4Rule(facts["vision_config"], {**facts["processor"], "max_soft_tokens": soft_tokens}, facts["extra"])
    generator = np.random.default_rng(soft_tokens)
    sizes = [*SIZES, *map(tuple, generator.integers(1, 5000, (150, 2)).tolist())]
    for width, height in sizes:
        for modality, limit, frames in ((IMAGE, soft_tokens, 1), (VIDEO, 70, 5)):
            new_height, new_width = get_aspect_ratio_preserving_size(height, width, 16, limit * 9, 3)
            grid = rule.geometry(width, height, frames)
            assert grid == GridGeometry(modality, frames, new_height // 16, new_width // 16), (width, height)
            spec = rule.item_spec(grid)
            assert spec.output_tokens == frames * new_height * new_width // 48**2
            assert spec.segments == frames
            assert spec.output_tokens // frames >= rule.graph_config().min_tokens_per_segment


def test_smallest_row_is_no_larger_than_the_segment_bound_says() -> None:
    rule = debug_source().rule()
    fewest = min(
        rule.item_spec(rule.image_geometry(width, height)).output_tokens
        for width in range(1, 400, 3)
        for height in (1, 2, 7, 10, 20, 40)
    )
    assert fewest in (34, 35)
    assert rule.graph_config().min_tokens_per_segment == 34


def test_rows_of_eager_and_stock_and_processor_agree(encoder: Gemma4Encoder) -> None:
    processor = Gemma4ImageProcessorPil(max_soft_tokens=70)
    for width, height in SIZES:
        item = encoder.rule.image_geometry(width, height)
        call = call_of(encoder, [item])
        (expected,) = processor([Image.new("RGB", (width, height))])["num_soft_tokens_per_image"]
        assert encoder.rule.item_spec(item).output_tokens == expected
        assert encoder.encoder_eager_forward(call).shape == (expected, 64)
        assert encoder.stock_forward(call).shape == (expected, 64)


@pytest.mark.parametrize("frames", [1, 2, 9])
def test_video_rows_are_frames_times_row_tokens(encoder: Gemma4Encoder, frames: int) -> None:
    item = encoder.rule.video_geometry(320, 200, frames, None)
    call = call_of(encoder, [item])
    rows = frames * 6 * 10
    assert encoder.rule.item_spec(item).output_tokens == rows
    assert len(encoder.encoder_eager_forward(call)) == len(encoder.stock_forward(call)) == rows


def test_loader_samples_a_file_to_the_processors_frames() -> None:
    rule = debug_source().rule()
    assert rule.item_spec(rule.video_geometry(64, 64, 900, 30.0)).segments == 32
    assert rule.item_spec(rule.video_geometry(64, 64, 12, 30.0)).segments == 12
    assert rule.item_spec(rule.video_geometry(64, 64, 40, None)).segments == 40


@pytest.mark.parametrize(
    ("grid", "value"),
    [(GridGeometry(IMAGE, 1, 6, 8), r"\[1, 6, 8\]"), (GridGeometry(IMAGE, 1, 27, 27), "81 soft tokens.*70")],
)
def test_impossible_grids_are_refused(grid: GridGeometry, value: str) -> None:
    with pytest.raises(InputError, match=value):
        debug_source().rule().item_spec(grid)


def test_unsupported_row_width_is_refused() -> None:
    with pytest.raises(ModelError, match="max_soft_tokens is 100"):
        debug_source(image_tokens=100).rule()


def test_eager_equals_transformers_padded_rows(encoder: Gemma4Encoder) -> None:
    call = call_of(encoder, mixed_items(encoder.rule))
    assert relative_error(encoder.encoder_eager_forward(call), encoder.stock_forward(call)) <= 1e-6


def test_half_precision_rounds_where_transformers_does() -> None:
    backend = TorchSdpaBackend()
    _register_with_transformers(backend)
    encoder = load_encoder(debug_source(), backend, device=CPU, dtype=torch.bfloat16, load_format="dummy")
    assert encoder.modules["vision_tower"].encoder.rotary_emb.inv_freq.dtype == torch.float32
    with torch.inference_mode():
        call = encoder.make_inputs(
            [encoder.rule.image_geometry(300, 200)], encoder.random_pixels({"pixel_values": 600}, 0)
        )
        eager, stock = encoder.encoder_eager_forward(call), encoder.stock_forward(call)
    assert eager.dtype == torch.bfloat16
    assert relative_error(eager.float(), stock.float()) <= 1e-2


def test_upstream_axis_multiplies_graphs_that_packing_does_not_need() -> None:
    facts = row_presets("gemma4")["gemma-4-26b-a4b"]
    rule = Gemma4Rule(facts["vision_config"], facts["processor"], facts["extra"])
    (axis,) = rule.upstream_axes
    assert axis.keys == ((70,), (140,), (280,))
    image, video = rule.geometry(1280, 720), rule.geometry(1280, 720, 8)
    needs = [rule.item_spec(item).axis_sizes[axis.name] for item in (image, video)]
    assert [axis.covering_key([need]) for need in needs] == [(280,), (70,)]
    settings = resolve_budget_settings(rule.budget_range(560), max_frames_per_video=32)
    assert rule.graph_config().axes == ()
    packed, padded = (plan_budgets(settings, axes=axes) for axes in ((), rule.upstream_axes))
    assert len(padded.graph_keys()) == 3 * len(packed.graph_keys())


@pytest.mark.parametrize(
    ("budgets", "max_items", "max_frames"), [((70, 300), 1, 4), ((420, 600), 8, 16), ((140,), 5, 5)]
)
def test_replay_with_poisoned_padding_equals_eager(budgets: tuple[int, ...], max_items: int, max_frames: int) -> None:
    with torch.inference_mode():
        encoder = make_encoder(UnwrittenRowsBackend())
        config = encoder.get_encoder_cudagraph_config()
        settings = resolve_budget_settings((70, 600), budgets, max_items, max_frames)
        plan = plan_budgets(settings, min_tokens_per_segment=config.min_tokens_per_segment)
        manager = EncoderCudaGraphManager(encoder, plan, policy="greedy")
        manager.capture()
        assert manager._buffers is not None
        items = mixed_items(encoder.rule)
        for seed, chosen in enumerate((items, items[::-1], items[2:3], items[:2])):
            call = call_of(encoder, chosen, seed)
            expected = encoder.encoder_eager_forward(call)
            # As a replay of a larger batch leaves it: garbage past the rows that this call brings.
            manager._buffers.pixels["pixel_values"].fill_(torch.nan)
            manager._buffers._written["pixel_values"] = 0
            outputs = manager.execute(call)
            assert relative_error(torch.cat(outputs), expected) <= 1e-5
        assert sum(graph.replay_count for graph in manager.graphs.values()) >= 4


def test_capture_scalars_bound_every_batch(encoder: Gemma4Encoder) -> None:
    spec = encoder.get_encoder_cudagraph_config()
    assert spec.paths["default"].min_token_budget == 70
    assert encoder.capture_scalars(GraphCapacity("default", 40, 1)) == {"max_seqlen": 360}
    assert encoder.capture_scalars(GraphCapacity("default", 600, 4)) == {"max_seqlen": 630}


def test_preprocess_packs_the_processors_patches(encoder: Gemma4Encoder) -> None:
    generator = np.random.default_rng(0)
    images = [
        Image.fromarray(generator.integers(0, 255, (height, width, 3), dtype=np.uint8))
        for height, width in ((90, 130), (1, 1), (3, 40))
    ]
    items, pixels = encoder.preprocess(images)
    stock = Gemma4ImageProcessorPil(max_soft_tokens=70)(images, return_tensors="pt")
    tower: Any = encoder.modules["vision_tower"]
    features = tower(stock["pixel_values"], stock["image_position_ids"]).last_hidden_state
    expected = encoder.modules["embed_vision"](features)
    actual = encoder.encoder_eager_forward(encoder.make_inputs(items, pixels))
    assert relative_error(actual, expected) <= 1e-5


def test_published_checkpoint_loads_bit_equal(encoder: Gemma4Encoder, tmp_path: Path) -> None:
    state = encoder.modules.state_dict()
    tensors = {f"model.{name}": tensor.clone() for name, tensor in state.items()}
    assert "model.embed_vision.embedding_projection.weight" in tensors
    assert "model.vision_tower.encoder.layers.0.self_attn.q_proj.linear.weight" in tensors
    assert "model.vision_tower.encoder.layers.2.mlp.down_proj.input_min" in tensors
    keys = sorted(tensors)
    shards = {"model-1.safetensors": keys[::2], "model-2.safetensors": keys[1::2]}
    for file, names in shards.items():
        save_file({name: tensors[name] for name in names}, tmp_path / file)
    # A shard of the language and audio models alone must not even be opened.
    (tmp_path / "model-3.safetensors").write_bytes(b"not safetensors")
    others = (
        "model.language_model.embed_tokens.weight",
        "model.audio_tower.layers.0.weight",
        "model.embed_audio.weight",
    )
    index = {name: file for file, names in shards.items() for name in names}
    index |= dict.fromkeys(others, "model-3.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    loaded = load_encoder(debug_source(str(tmp_path)), TorchSdpaBackend(), device=CPU, dtype=torch.float32)
    assert loaded.modules.state_dict().keys() == state.keys()
    for name, tensor in loaded.modules.state_dict().items():
        assert torch.equal(tensor, state[name]), name


def test_published_config_files_are_read() -> None:
    vision = {
        "model_type": "gemma4_vision",
        "hidden_size": 96,
        "head_dim": 24,
        "rope_parameters": {"rope_theta": 50.0, "rope_type": "default"},
        "default_output_length": 280,
    }
    config = {"vision_config": vision, "text_config": {"hidden_size": 64}}
    vision_config, extra = Gemma4Encoder.read_model_config(config)
    assert extra == {"text_hidden_size": 64, "rope_theta": 50.0}
    full = {**row_presets("gemma4")["gemma-4-debug"]["vision_config"], **vision_config}
    modules = Gemma4Encoder.build_modules(full, extra, torch.float32, CPU)
    frequencies = modules["vision_tower"].encoder.rotary_emb.inv_freq
    assert torch.allclose(frequencies, 50.0 ** (-torch.arange(0, 12, 2) / 12))
    processor = {
        "max_soft_tokens": 560,
        "patch_size": 16,
        "pooling_kernel_size": 3,
        "size": None,
        "image_seq_length": 280,
    }
    assert Gemma4Encoder.read_processor_config(processor) == {
        "max_soft_tokens": 560,
        "patch_size": 16,
        "pooling_kernel_size": 3,
    }
    assert Gemma4Encoder.read_video_processor_config({"max_soft_tokens": 70, "num_frames": 16, "fps": None}) == {
        "max_soft_tokens": 70,
        "num_frames": 16,
    }


def test_flops_count_the_towers_products(encoder: Gemma4Encoder) -> None:
    items = [encoder.rule.image_geometry(300, 200)]
    call = call_of(encoder, items)
    # The counter knows the products of attention only where attention is plain products.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        encoder.encoder_eager_forward(call)
    assert encoder.rule.flops(items[0]) == pytest.approx(counter.get_total_flops(), rel=1e-6)


@pytest.mark.parametrize("preset", [name for name, facts in row_presets("gemma4").items() if facts["parameters"]])
def test_full_size_preset_has_the_published_parameters(preset: str) -> None:
    facts = row_presets("gemma4")[preset]
    modules = Gemma4Encoder.build_modules(facts["vision_config"], facts["extra"], torch.bfloat16, torch.device("meta"))
    assert sum(parameter.numel() for parameter in modules.parameters()) == facts["parameters"]


def test_importing_the_family_does_not_load_torch() -> None:
    code = (
        "import json, sys, vitgraph.models.gemma4 as g;"
        "from vitgraph.models.registry import row_presets;"
        "p = row_presets('gemma4')['gemma-4-debug'];"
        "r = g.Gemma4Rule(p['vision_config'], p['processor'], p['extra']);"
        "assert r.item_spec(r.geometry(640, 480)).output_tokens == 266;"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_source_without_weights_names_the_way_out() -> None:
    with pytest.raises(ModelError, match="dummy"):
        load_encoder(replace(debug_source(), weights=None), TorchSdpaBackend(), device=CPU, dtype=torch.float32)
