"""Gemma 4: tokens against processor and tower, packed rows against transformers' padded ones, padding, loading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import encoder_checks as checks
import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.gemma4.image_processing_pil_gemma4 import (
    Gemma4ImageProcessorPil,
    get_aspect_ratio_preserving_size,
)

from vitgraph.errors import InputError, ModelError
from vitgraph.models.families.gemma4 import Gemma4Encoder, Gemma4Rule
from vitgraph.models.geometry import GridGeometry, ItemGeometry
from vitgraph.models.registry import ModelSource, row_presets
from vitgraph.planning.budgets import IMAGE, VIDEO, GraphKey

FULL_PRESETS = [name for name, facts in row_presets("gemma4").items() if facts["parameters"]]


def source(preset: str = "gemma-4-debug", image_tokens: int = 70, **changes: Any) -> ModelSource:
    changes.setdefault("processor", {"max_soft_tokens": image_tokens})
    return checks.preset_source(preset, **changes)


def rule_of(preset: str = "gemma-4-debug", image_tokens: int = 70) -> Gemma4Rule:
    rule = source(preset, image_tokens).rule()
    assert isinstance(rule, Gemma4Rule)
    return rule


@pytest.fixture(scope="module")
def encoder() -> Gemma4Encoder:
    """The debug encoder, clipping and standardising: a fresh one does neither, which would hide a mistake in them."""
    encoder = checks.build(source())
    assert isinstance(encoder, Gemma4Encoder)
    generator = torch.Generator().manual_seed(5)
    for name, buffer in encoder.modules["visual"].named_buffers():
        if name.endswith(("_min", "_max")):
            buffer.fill_(2.0 if name.endswith("_max") else -2.0)
        elif name in ("std_bias", "std_scale"):
            buffer.copy_(1 + 0.3 * torch.randn(buffer.shape, generator=generator))
    return encoder


def mixed_items(rule: Gemma4Rule) -> list[ItemGeometry]:
    return [
        rule.image_geometry(640, 480),
        rule.video_geometry(320, 240, 3, None),
        rule.image_geometry(20, 900),
        rule.video_geometry(100, 400, 1, None),
        rule.image_geometry(33, 35),
    ]


@pytest.mark.parametrize("image_tokens", [70, 280, 1120])
def test_tokens_equal_the_processors_rule(image_tokens: int) -> None:
    rule = rule_of("gemma-4-26b-a4b", image_tokens)
    for width, height in (*checks.SIZES, *checks.random_sizes(300, 8000)):
        for modality, limit, frames in ((IMAGE, image_tokens, 1), (VIDEO, 70, 5)):
            new_height, new_width = get_aspect_ratio_preserving_size(height, width, 16, limit * 9, 3)
            grid = rule.geometry(width, height, frames)
            assert grid == GridGeometry(modality, frames, new_height // 16, new_width // 16), (width, height)
            spec = rule.item_spec(grid)
            assert spec.output_tokens == frames * new_height * new_width // 48**2
            assert spec.segments == frames
            assert spec.output_tokens // frames >= rule.graph_config().min_tokens_per_segment


def test_segment_bound_is_the_worst_rounding() -> None:
    rule = rule_of()
    sizes = [(width, height) for width in range(1, 400) for height in (1, 2, 4, 7, 10, 20, 40)]
    fewest = min(rule.item_spec(rule.image_geometry(*size)).output_tokens for size in sizes)
    assert rule.graph_config().min_tokens_per_segment == 34
    assert fewest in (34, 35)


def test_rows_of_eager_and_stock_and_processor_agree(encoder: Gemma4Encoder) -> None:
    processor = Gemma4ImageProcessorPil(max_soft_tokens=70)
    for width, height in checks.SIZES:
        item = encoder.rule.image_geometry(width, height)
        (expected,) = processor([Image.new("RGB", (width, height))])["num_soft_tokens_per_image"]
        assert encoder.rule.item_spec(item).output_tokens == expected
        checks.assert_eager_equals_stock(encoder, [item])


@pytest.mark.parametrize("frames", [1, 2, 9])
def test_video_rows_are_frames_times_row_tokens(encoder: Gemma4Encoder, frames: int) -> None:
    item = encoder.rule.video_geometry(320, 200, frames, None)
    assert checks.tokens_of(encoder.rule, [item]) == [frames * 6 * 10]
    checks.assert_eager_equals_stock(encoder, [item])


def test_loader_samples_a_file_to_the_processors_frames() -> None:
    rule = rule_of()
    assert rule.item_spec(rule.video_geometry(64, 64, 900, 30.0)).segments == 32
    assert rule.item_spec(rule.video_geometry(64, 64, 32, 30.0)).segments == 32
    assert rule.item_spec(rule.video_geometry(64, 64, 40, None)).segments == 40


@pytest.mark.parametrize(
    ("grid", "message"),
    [(GridGeometry(IMAGE, 1, 6, 8), r"\[1, 6, 8\]"), (GridGeometry(IMAGE, 1, 27, 27), "81 soft tokens.*above the 70")],
)
def test_impossible_grids_are_refused(grid: GridGeometry, message: str) -> None:
    with pytest.raises(InputError, match=message):
        rule_of().item_spec(grid)


def test_unsupported_row_width_is_refused() -> None:
    with pytest.raises(ModelError, match=r"max_soft_tokens is 100.*70, 140"):
        source(image_tokens=100).rule()


def test_eager_equals_transformers_padded_rows(encoder: Gemma4Encoder) -> None:
    checks.assert_eager_equals_stock(encoder, mixed_items(encoder.rule))


@torch.inference_mode()
def test_half_precision_equals_transformers() -> None:
    encoder = checks.build(source(), dtype=torch.bfloat16)
    tower: Any = encoder.modules["visual"]
    assert tower.encoder.rotary_emb.inv_freq.dtype == torch.float32
    inputs = checks.inputs_of(encoder, [encoder.rule.image_geometry(300, 200)])
    eager = encoder.encoder_eager_forward(inputs)
    with checks.transformers_attention(encoder):
        stock = encoder.stock_forward(inputs)
    assert eager.dtype == stock.dtype == torch.bfloat16
    assert checks.relative_error(eager, stock) <= 1e-2


@torch.inference_mode()
def test_pooling_rounds_where_transformers_does() -> None:
    encoder = checks.build(source(), dtype=torch.bfloat16)
    assert isinstance(encoder, Gemma4Encoder)
    tower: Any = encoder.modules["visual"]
    hidden = torch.randn(1, 630, 48, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))
    metadata = encoder.compute_metadata([GridGeometry(IMAGE, 1, 30, 21)])
    positions = torch.from_numpy(metadata["position_ids"].copy()).unsqueeze(0)
    expected, _ = tower.pooler(hidden, positions, torch.zeros(1, 630, dtype=torch.bool), output_length=70)
    same = encoder._pool(hidden[0]) == expected[0].to(torch.bfloat16)
    # Sums of nine in another order may fall on the other side of a rounding edge, rarely.
    assert same.float().mean() > 0.99


@pytest.mark.parametrize(("budget", "slots"), [(600, 7), (309, 7), (330, 64)])
def test_garbage_in_padding_does_not_reach_a_row(encoder: Gemma4Encoder, budget: int, slots: int) -> None:
    items = mixed_items(encoder.rule)
    chosen = items if budget == 600 else items[1:4]
    checks.assert_padded_equals_eager(encoder, chosen, GraphKey("default", budget, slots))


@pytest.mark.parametrize(("budgets", "max_items"), [((70, 300), 1), ((420, 600), 8), ((210,), 5)])
def test_replay_equals_eager(encoder: Gemma4Encoder, budgets: tuple[int, ...], max_items: int) -> None:
    manager = checks.assert_manager_equals_eager(encoder, mixed_items(encoder.rule), budgets, max_items)
    assert sum(graph.replay_count for graph in manager.graphs.values()) >= 2


def test_capture_scalars_bound_a_row_not_the_budget(encoder: Gemma4Encoder) -> None:
    assert encoder.capture_scalars(GraphKey("default", 40, 1)) == {"max_seqlen": 360}
    assert encoder.capture_scalars(GraphKey("default", 600, 4)) == {"max_seqlen": 630}


def test_published_checkpoint_loads_bit_equal(encoder: Gemma4Encoder, tmp_path: Path) -> None:
    def rename(name: str) -> str:
        return "model." + name.replace("visual.", "vision_tower.", 1).replace("projector.", "embed_vision.", 1)

    tensors = checks.published(encoder.modules.state_dict(), rename)
    for name in (
        "model.embed_vision.embedding_projection.weight",
        "model.vision_tower.patch_embedder.position_embedding_table",
        "model.vision_tower.encoder.layers.0.self_attn.q_proj.linear.weight",
        "model.vision_tower.encoder.layers.1.mlp.down_proj.input_min",
        "model.vision_tower.std_bias",
    ):
        assert name in tensors
    others = {"model.audio_tower.output_proj.weight", "model.embed_audio.embedding_projection.weight"}
    checks.write_checkpoint(tmp_path, {}, {**tensors, **{name: torch.zeros(2) for name in others}})
    loaded = checks.load_folder(tmp_path, source())
    state = loaded.modules.state_dict()
    assert state.keys() == encoder.modules.state_dict().keys()
    for name, tensor in encoder.modules.state_dict().items():
        assert torch.equal(state[name], tensor), name


def test_published_config_files_are_read() -> None:
    vision = {
        "model_type": "gemma4_vision",
        "hidden_size": 96,
        "head_dim": 24,
        "rope_parameters": {"rope_theta": 50.0, "rope_type": "default"},
        "default_output_length": 280,
    }
    vision_config, extra = Gemma4Encoder.read_model_config(
        {"vision_config": vision, "text_config": {"hidden_size": 64}}
    )
    assert extra == {"text_hidden_size": 64}
    full = {**source().vision_config, **vision_config}
    tower: Any = Gemma4Encoder.build_modules(full, extra, torch.float32, checks.CPU)["visual"]
    np.testing.assert_allclose(tower.encoder.rotary_emb.inv_freq, 50.0 ** (-np.arange(0, 12, 2) / 12), rtol=1e-6)
    settings = {"patch_size": 16, "pooling_kernel_size": 3, "max_soft_tokens": 560}
    published = {**settings, "size": None, "image_seq_length": 280}
    assert Gemma4Encoder.read_processor_config(published) == settings
    video = {"max_soft_tokens": 140, "num_frames": 16, "fps": None}
    assert Gemma4Encoder.read_video_processor_config(video) == {"max_soft_tokens": 140, "num_frames": 16}


def test_flops_are_those_that_torch_counts(encoder: Gemma4Encoder) -> None:
    checks.assert_flops_are_counted(encoder, mixed_items(encoder.rule))


@pytest.mark.parametrize("preset", FULL_PRESETS)
def test_full_size_preset_has_the_published_parameters(preset: str) -> None:
    facts = row_presets("gemma4")[preset]
    modules = Gemma4Encoder.build_modules(facts["vision_config"], facts["extra"], torch.bfloat16, torch.device("meta"))
    assert sum(parameter.numel() for parameter in modules.parameters()) == facts["parameters"]
