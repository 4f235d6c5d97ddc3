"""Kimi-VL: the published resize rule, an independent MoonViT on the published weights, padding, loading."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import encoder_checks as checks
import numpy as np
import pytest
import torch
from torch.nn import functional

from vitgraph.errors import InputError, ModelError
from vitgraph.models.encoder import VisionEncoder
from vitgraph.models.families.kimi_vl import KimiVLEncoder
from vitgraph.models.geometry import GridGeometry
from vitgraph.models.registry import ModelSource
from vitgraph.planning.budgets import IMAGE, VIDEO, GraphKey

MIXED = (
    GridGeometry(IMAGE, 1, 4, 6),
    GridGeometry(IMAGE, 1, 2, 2),
    GridGeometry(IMAGE, 1, 20, 2),
    GridGeometry(IMAGE, 1, 2, 34),
    GridGeometry(IMAGE, 1, 16, 16),
)
TOKENS = 6 + 1 + 10 + 17 + 64
LAYERS, HEADS, WIDTH, TABLE = 3, 2, 48, 16


def source(preset: str = "kimi-vl-debug", **changes: Any) -> ModelSource:
    return checks.preset_source(preset, **changes)


@pytest.fixture(scope="module")
def encoder() -> VisionEncoder:
    return checks.build(source())


def test_sizes_follow_the_resize_that_transformers_has() -> None:
    """Kimi K2.5's processor resizes alike where an image has a whole patch and no side reaches the limit."""
    rule = source("kimi-vl-a3b").rule()
    _, module = checks.transformers_processor("kimi_k25.image_processing_kimi_k25:Kimi_K25ImageProcessor")
    compared = 0
    for width, height in (*checks.SIZES, *checks.random_sizes(400, 8000)):
        shrunk, padded = module.navit_resize(height, width, 14, 2, 4096, 10**6)
        if min(width, height) < 14 or max(padded) // 14 >= 512:
            continue
        compared += 1
        spec = rule.item_spec(rule.geometry(width, height))
        assert rule.resized(width, height) == (shrunk[1], shrunk[0])  # type: ignore[attr-defined]
        assert spec.input_size == padded[0] * padded[1] // 14**2
        assert (spec.output_tokens * 4, spec.segments) == (spec.input_size, 1)
    assert compared > 150


@pytest.mark.parametrize(
    ("width", "height", "tokens"),
    [
        (1, 1, 1),
        (27, 29, 2),
        (28, 28, 1),
        (224, 224, 64),
        # 91 x 51 patches are above 4096: shrunk to 1202 x 676 pixels, then padded, which may exceed the limit again.
        (1280, 720, 43 * 25),
        # 571 x 14 patches are above 4096 and shrink by sqrt(4096 / 7994).
        (8000, 200, 205 * 6),
        (7000, 13, 250),
        (7140, 13, 255),
    ],
)
def test_tokens_of_known_sizes(width: int, height: int, tokens: int) -> None:
    rule = source("kimi-vl-a3b").rule()
    assert rule.item_spec(rule.geometry(width, height)).output_tokens == tokens


@pytest.mark.parametrize(("width", "height"), [(7141, 13), (8000, 14), (13, 8000), (200000, 20)])
def test_sides_of_512_patches_are_refused(width: int, height: int) -> None:
    with pytest.raises(InputError, match=f"{width}x{height}.*1 to 511"):
        source("kimi-vl-a3b").rule().geometry(width, height)


def test_videos_and_odd_grids_are_refused() -> None:
    rule = source().rule()
    with pytest.raises(InputError, match=r"640x480x2.*images only"):
        rule.geometry(640, 480, 2)
    with pytest.raises(InputError, match=r"\[1, 5, 7\].*merge 2"):
        rule.item_spec(GridGeometry(IMAGE, 1, 5, 7))
    with pytest.raises(InputError, match="2 frames"):
        rule.item_spec(GridGeometry(VIDEO, 2, 4, 4))
    with pytest.raises(ModelError, match="pad_input is false"):
        source(processor={"pad_input": False}).rule()
    with pytest.raises(ModelError, match=r"merge_kernel_size is \[2, 1\]"):
        source(vision_config={"merge_kernel_size": [2, 1]}).rule()


@torch.inference_mode()
def test_token_counts_are_the_rows_of_the_forward(encoder: VisionEncoder) -> None:
    items = [encoder.rule.geometry(width, height) for width, height in checks.SIZES]
    rows = len(encoder.encoder_eager_forward(checks.inputs_of(encoder, items)))
    assert rows == sum(checks.tokens_of(encoder.rule, items))


def test_eager_equals_stock(encoder: VisionEncoder) -> None:
    checks.assert_eager_equals_stock(encoder, MIXED)


@pytest.mark.parametrize(("budget", "slots"), [(TOKENS, 5), (TOKENS + 1, 8), (200, 40)])
def test_padded_equals_eager(encoder: VisionEncoder, budget: int, slots: int) -> None:
    checks.assert_padded_equals_eager(encoder, MIXED, GraphKey("default", budget, slots))


def test_replayed_equals_eager(encoder: VisionEncoder) -> None:
    checks.assert_manager_equals_eager(encoder, MIXED, [4, 16, 64], max_items=3)


def test_operations_are_those_that_torch_counts(encoder: VisionEncoder) -> None:
    checks.assert_flops_are_counted(encoder, MIXED)


@torch.inference_mode()
def test_preprocess_pads_with_black_and_keeps_raster_order(encoder: VisionEncoder) -> None:
    large, odd = checks.random_image(560, 1000), checks.random_image(30, 20)
    items, pixels = encoder.preprocess([large, odd])
    assert items == [encoder.rule.image_geometry(560, 1000), GridGeometry(IMAGE, 1, 2, 4)]
    patches = pixels["pixel_values"][items[0].patches :]  # type: ignore[attr-defined]
    canvas = torch.full((3, 28, 56), -1.0)
    canvas[:, :20, :30] = torch.from_numpy(np.array(odd)).permute(2, 0, 1) / 127.5 - 1
    raster = patches.view(2, 4, 3, 14, 14).permute(2, 0, 3, 1, 4).reshape(3, 28, 56)
    assert torch.allclose(raster, canvas, atol=1e-6)
    rows = encoder.encoder_eager_forward(encoder.make_inputs(items, pixels))
    assert len(rows) == sum(checks.tokens_of(encoder.rule, items))


def published_tensors() -> dict[str, torch.Tensor]:
    """Random weights under the published names and in the published layout."""
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    tensors = {"vision_tower.patch_embed.pos_emb.weight": draw(TABLE, TABLE, WIDTH)}

    def linear(name: str, out: int, width: int) -> None:
        tensors[f"{name}.weight"], tensors[f"{name}.bias"] = draw(out, width), 0.1 * draw(out)

    def norm(name: str) -> None:
        tensors[f"{name}.weight"], tensors[f"{name}.bias"] = 1 + 0.1 * draw(WIDTH), 0.1 * draw(WIDTH)

    linear("vision_tower.patch_embed.proj", WIDTH, 3 * 14 * 14)
    tensors["vision_tower.patch_embed.proj.weight"] = tensors["vision_tower.patch_embed.proj.weight"].view(
        -1, 3, 14, 14
    )
    for layer in range(LAYERS):
        block = f"vision_tower.encoder.blocks.{layer}"
        norm(f"{block}.norm0")
        norm(f"{block}.norm1")
        linear(f"{block}.wqkv", 3 * WIDTH, WIDTH)
        linear(f"{block}.wo", WIDTH, WIDTH)
        linear(f"{block}.mlp.fc0", 104, WIDTH)
        linear(f"{block}.mlp.fc1", WIDTH, 104)
    norm("vision_tower.encoder.final_layernorm")
    norm("multi_modal_projector.pre_norm")
    linear("multi_modal_projector.linear_1", 4 * WIDTH, 4 * WIDTH)
    linear("multi_modal_projector.linear_2", 96, 4 * WIDTH)
    return tensors


def moonvit(tensors: Mapping[str, torch.Tensor], pixels: torch.Tensor, h: int, w: int) -> torch.Tensor:
    """MoonViT and projector for one image on the published weights: complex rotary over neighbouring pairs, columns
    before rows; table resized as an image; `[h * w, 3, 14, 14]` to `[h * w / 4, 96]`."""

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, tensors[f"{name}.weight"].flatten(1), tensors[f"{name}.bias"])

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, (WIDTH,), tensors[f"{name}.weight"], tensors[f"{name}.bias"], 1e-5)

    table = tensors["vision_tower.patch_embed.pos_emb.weight"].permute(2, 0, 1)[None]
    positions = functional.interpolate(table, (h, w), mode="bicubic")[0].permute(1, 2, 0).reshape(h * w, WIDTH)
    x = linear("vision_tower.patch_embed.proj", pixels.flatten(1)) + positions
    head = WIDTH // HEADS
    frequencies = 10000.0 ** -(torch.arange(0, head, 4).float() / head)
    rows, columns = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
    angles = torch.stack([columns.reshape(-1, 1) * frequencies, rows.reshape(-1, 1) * frequencies], -1).flatten(1)
    turns = torch.polar(torch.ones_like(angles), angles)[:, None]

    def rotated(part: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(torch.view_as_complex(part.unflatten(-1, (-1, 2))) * turns).flatten(-2)

    for layer in range(LAYERS):
        block = f"vision_tower.encoder.blocks.{layer}"
        q, k, v = linear(f"{block}.wqkv", norm(f"{block}.norm0", x)).view(-1, 3, HEADS, head).unbind(1)
        scores = torch.einsum("nhe,mhe->hnm", rotated(q.contiguous()), rotated(k.contiguous())) * head**-0.5
        x = x + linear(f"{block}.wo", torch.einsum("hnm,mhe->nhe", scores.softmax(-1), v).flatten(1))
        hidden = functional.gelu(linear(f"{block}.mlp.fc0", norm(f"{block}.norm1", x)), approximate="tanh")
        x = x + linear(f"{block}.mlp.fc1", hidden)
    x = norm("multi_modal_projector.pre_norm", norm("vision_tower.encoder.final_layernorm", x))
    x = x.view(h // 2, 2, w // 2, 2, WIDTH).transpose(1, 2).reshape(-1, 4 * WIDTH)
    return linear("multi_modal_projector.linear_2", functional.gelu(linear("multi_modal_projector.linear_1", x)))


@torch.inference_mode()
def test_published_weights_give_what_the_published_network_gives(tmp_path: Path) -> None:
    tensors = published_tensors()
    checks.write_checkpoint(tmp_path, {}, tensors)
    encoder = checks.load_folder(tmp_path, source())
    inputs = checks.inputs_of(encoder, MIXED)
    parts = inputs.pixels["pixel_values"].split([grid.patches for grid in MIXED])
    expected = [moonvit(tensors, part, grid.h, grid.w) for part, grid in zip(parts, MIXED, strict=True)]
    assert checks.relative_error(encoder.encoder_eager_forward(inputs), torch.cat(expected)) <= 1e-5


def test_published_tensors_are_copied_bit_by_bit(tmp_path: Path) -> None:
    tensors = published_tensors()
    checks.write_checkpoint(tmp_path, {}, tensors)
    loaded = checks.stock_state(checks.load_folder(tmp_path, source()))
    for name, published in (
        ("visual.patch_embed.pos_emb.position_embeddings", "vision_tower.patch_embed.pos_emb.weight"),
        ("visual.layers.1.norm1.weight", "vision_tower.encoder.blocks.1.norm0.weight"),
        ("visual.layers.1.norm2.bias", "vision_tower.encoder.blocks.1.norm1.bias"),
        ("visual.layers.2.mlp.fc1.weight", "vision_tower.encoder.blocks.2.mlp.fc0.weight"),
        ("visual.layers.2.mlp.fc2.weight", "vision_tower.encoder.blocks.2.mlp.fc1.weight"),
        ("projector.in_proj.weight", "multi_modal_projector.linear_1.weight"),
        ("projector.out_proj.bias", "multi_modal_projector.linear_2.bias"),
    ):
        assert torch.equal(loaded[name], tensors[published]), name
    fused = tensors["vision_tower.encoder.blocks.0.wqkv.bias"]
    first_head = [*range(0, 24, 2), *range(1, 24, 2)]
    assert torch.equal(loaded["visual.layers.0.attn.q_proj.bias"][:24], fused[first_head])
    assert torch.equal(loaded["visual.layers.0.attn.k_proj.bias"][:24], fused[WIDTH : 2 * WIDTH][first_head])
    assert torch.equal(loaded["visual.layers.0.attn.v_proj.bias"], fused[2 * WIDTH :])


def test_published_config_is_read() -> None:
    vision = {
        "model_type": "moonvit",
        "patch_size": 14,
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "init_pos_emb_height": 64,
        "init_pos_emb_width": 64,
        "merge_kernel_size": [2, 2],
        "torch_dtype": "bfloat16",
    }
    read, extra = KimiVLEncoder.read_model_config({"vision_config": vision, "text_config": {"hidden_size": 2048}})
    assert {**read, "pos_emb_time": 4} == source("kimi-vl-a3b").vision_config
    assert extra == {"text_hidden_size": 2048}
    published = {"patch_size": 14, "in_token_limit": 16384, "pad_input": True, "num_pooled_tokens": 1024}
    read_processor = KimiVLEncoder.read_processor_config(published)
    assert read_processor == {"patch_size": 14, "in_token_limit": 16384, "pad_input": True}
