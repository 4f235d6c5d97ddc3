"""Step3-VL and Step3: crops as the published processor cuts them, equality with transformers, padding, loading."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import encoder_checks as checks
import numpy as np
import pytest
import torch
import two_path_checks
from transformers.models.step3p7.modeling_step3p7 import Step3p7Model
from two_path_checks import MIXED, UNTILED

from vitgraph.errors import InputError, ModelError
from vitgraph.models.families.step3_vl import Step3VLEncoder, Step3VLRule
from vitgraph.models.families.step3_vl_modules import LEADING_ROWS
from vitgraph.models.family import halves_of_pairs
from vitgraph.models.geometry import TileGeometry
from vitgraph.models.registry import ModelSource, row_presets
from vitgraph.models.two_path import GLOBAL, LOCAL, CropGeometry
from vitgraph.planning.budgets import IMAGE, generate_budgets

DEBUG = ("step3-vl-debug", "step3-321b-debug")


def source(preset: str = "step3-vl-debug", **changes: Any) -> ModelSource:
    return checks.preset_source(preset, **changes)


def full_rule(preset: str = "step3-vl-10b", **processor: Any) -> Step3VLRule:
    rule = source(preset, processor=processor).rule()
    assert isinstance(rule, Step3VLRule)
    return rule


@pytest.fixture(scope="module", params=DEBUG)
def encoder(request: pytest.FixtureRequest) -> Step3VLEncoder:
    built = two_path_checks.build(source(request.param))
    assert isinstance(built, Step3VLEncoder)
    return built


@pytest.fixture(scope="module")
def perception() -> Step3VLEncoder:
    built = two_path_checks.build(source())
    assert isinstance(built, Step3VLEncoder)
    return built


# -- sizes and tokens --------------------------------------------------------------------------------------------------


def leaves_a_fifth(rule: Step3VLRule, width: int, height: int) -> bool:
    """True where a side leaves exactly a fifth of a window over; there the two processors differ by rounding."""
    size = rule.bounded_size(width, height)
    window = rule.window(*size)
    return window > 0 and any(5 * (side % window) == window for side in size)


def test_crops_are_those_of_transformers_processor() -> None:
    processor_class, _ = checks.transformers_processor("step3p7.image_processing_step3p7:Step3p7ImageProcessor")
    processor = processor_class()
    rule = full_rule()
    compared = 0
    sizes = [(width, height) for width in range(1, 120, 7) for height in range(1, 700, 23)]
    for width, height in (*checks.SIZES, *checks.random_sizes(1500, 9000), *sizes):
        if max(width, height) > 3000 * min(width, height) or leaves_a_fifth(rule, width, height):
            continue
        _, _, _, columns, rows, _ = processor._plan_patches(width, height, 728, 504)
        assert rule.crop_grid(width, height) == (columns, rows), (width, height)
        compared += 1
    assert compared > 1900


@pytest.mark.parametrize(
    ("size", "grid"),
    [
        ((1, 1), (0, 0)),
        ((2, 1), (2, 1)),
        ((5, 1), (0, 0)),
        ((512, 512), (0, 0)),
        ((728, 485), (2, 1)),
        ((728, 486), (0, 0)),
        ((1024, 448), (2, 1)),
        ((1280, 720), (3, 2)),
        ((3024, 3024), (6, 6)),
        ((8000, 6000), (6, 5)),
        ((8000, 200), (41, 1)),
        ((200, 8000), (1, 41)),
        ((8000, 20), (6, 6)),
        # 2.2 windows: the published comparison in floating point takes a third one.
        ((110, 50), (3, 1)),
    ],
)
def test_known_sizes(size: tuple[int, int], grid: tuple[int, int]) -> None:
    rule = full_rule()
    item = rule.image_geometry(*size)
    crops = grid[0] * grid[1]
    assert item == CropGeometry(IMAGE, *grid)
    spec = rule.item_spec(item)
    assert (spec.input_size, spec.output_tokens, spec.segments) == (1 + crops, 169 + 81 * crops, 1)
    assert spec.path_output_tokens == {GLOBAL: 169, LOCAL: 81 * crops}
    assert rule.pixel_rows(item) == {"pixel_values": 1, "patch_pixel_values": crops}
    assert rule.final_tokens(item) == spec.output_tokens


def test_the_larger_model_cuts_images_as_long_as_the_global_view() -> None:
    grids = {name: full_rule(name).crop_grid(728, 728) for name in ("step3-vl-10b", "step3-321b")}
    assert grids == {"step3-vl-10b": (0, 0), "step3-321b": (2, 2)}
    assert full_rule("step3-321b").crop_grid(727, 727) == (0, 0)


@pytest.mark.parametrize("preset", ["step3-vl-10b", "step3-321b"])
def test_each_path_has_budgets_from_its_own_view(preset: str) -> None:
    rule = full_rule(preset)
    config = rule.graph_config()
    assert {path: policy.min_token_budget for path, policy in config.paths.items()} == {GLOBAL: 169, LOCAL: 81}
    assert [policy.allow_zero_tokens for policy in config.paths.values()] == [False, True]
    assert generate_budgets(*rule.budget_range(1000)) == [169, 338, 676, 1000]


def test_sizes_that_the_processor_refuses() -> None:
    rule = full_rule()
    assert rule.image_geometry(96767, 32) == CropGeometry(IMAGE, 3024, 1)
    with pytest.raises(InputError, match=r"image of 96769x32 would shrink to 3024x0.*above 3024"):
        rule.image_geometry(96769, 32)
    with pytest.raises(InputError, match="5x-1x1"):
        rule.geometry(5, -1)
    with pytest.raises(InputError, match="takes images only"):
        rule.geometry(640, 480, 8)
    with pytest.raises(InputError, match="crops"):
        rule.item_spec(TileGeometry(IMAGE, 3))


@pytest.mark.parametrize("side", [500, 42])
def test_views_that_do_not_divide_into_patches_are_refused(side: int) -> None:
    with pytest.raises(ModelError, match=f"local side is {side} pixels.*patch size 14"):
        full_rule(local_size=side)


@torch.inference_mode()
def test_token_counts_are_the_rows_of_the_forward(encoder: Step3VLEncoder) -> None:
    items = [encoder.rule.image_geometry(*size) for size in checks.SIZES]
    inputs = checks.inputs_of(encoder, items)
    for path in (GLOBAL, LOCAL):
        rows = sum(encoder.rule.item_spec(item).tokens_on(path) for item in items)
        assert encoder.encoder_eager_forward(inputs, path).shape == (rows, 96)


# -- the forward -------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def test_embeddings_are_those_of_transformers(perception: Step3VLEncoder) -> None:
    views = two_path_checks.tower_views(perception, MIXED, checks.inputs_of(perception, MIXED).pixels)
    model = SimpleNamespace(
        vision_model=perception.modules["visual"],
        multi_modal_projector=perception.modules["projector"],
        config=SimpleNamespace(return_dict=True),
    )
    with checks.transformers_attention(perception):
        features: Any = Step3p7Model.get_image_features
        found = features(model, views.whole, views.crops, views.counts, return_dict=True)
    two_path_checks.assert_equals(perception, MIXED, found.pooler_output)


def plain_view(tower: Any, view: torch.Tensor) -> torch.Tensor:
    """The 321B model's tower over one view `[1, 3, side, side]`, written out: `[1, cells, 2 * output_hidden_size]`."""
    embeddings = tower.embeddings
    patches = embeddings.patch_embedding(view)
    width, grid = patches.shape[1], patches.shape[2]
    hidden = torch.cat([embeddings.class_embedding, patches[0].reshape(width, -1).T]) + embeddings.positions(grid)
    hidden = torch.cat([hidden[:1]] * (LEADING_ROWS - 1) + [hidden])
    for layer in tower.layers:
        attention = layer.self_attn
        heads = []
        for query, key, value in zip(
            attention.q_proj(hidden).chunk(attention.num_heads, dim=1),
            attention.k_proj(hidden).chunk(attention.num_heads, dim=1),
            attention.v_proj(hidden).chunk(attention.num_heads, dim=1),
            strict=True,
        ):
            scores = (query @ key.T * attention.head_dim**-0.5).float().softmax(dim=-1).to(value.dtype)
            heads.append(scores @ value)
        hidden = hidden + layer.layer_norm1(attention.out_proj(torch.cat(heads, dim=1)))
        hidden = hidden + layer.layer_norm2(layer.mlp(hidden))
    square = hidden[LEADING_ROWS:].T.reshape(1, width, grid, grid)
    return tower.vit_downsampler2(tower.vit_downsampler(square)).flatten(2).transpose(1, 2)


@torch.inference_mode()
def test_the_larger_model_equals_its_plain_form() -> None:
    encoder = two_path_checks.build(source("step3-321b-debug"))
    inputs = checks.inputs_of(encoder, MIXED)
    for name, path in (("pixel_values", GLOBAL), ("patch_pixel_values", LOCAL)):
        plain = torch.cat([plain_view(encoder.modules["visual"], view[None]) for view in inputs.pixels[name]])
        found = encoder.encode_views(inputs.pixels[name], path)
        assert checks.relative_error(found, encoder.modules["projector"](plain)) <= 1e-6
    stock = encoder.stock_forward(inputs)
    two_path_checks.assert_equals(encoder, MIXED, stock.split([encoder.rule.final_tokens(item) for item in MIXED]))


@torch.inference_mode()
def test_columns_turn_the_first_half_of_a_head() -> None:
    encoder = two_path_checks.build(source())
    assert isinstance(encoder, Step3VLEncoder)
    cos, sin = encoder._positions[LOCAL][1]
    assert cos.dtype == sin.dtype == torch.float32
    frequencies = 10000.0 ** (-torch.arange(0, 8, 2) / 8)
    for row, column in ((0, 5), (7, 2)):
        angles = torch.cat([column * frequencies, row * frequencies]).repeat(2)
        assert torch.allclose(cos[row * 8 + column], angles.cos(), atol=1e-6)
        assert torch.allclose(sin[row * 8 + column], angles.sin(), atol=1e-6)


@torch.inference_mode()
def test_reordered_rows_turn_as_the_published_pairs_do(perception: Step3VLEncoder) -> None:
    generator = torch.Generator().manual_seed(3)
    published = torch.randn(64, 16, generator=generator)
    row, column = (axis.flatten() for axis in torch.meshgrid(torch.arange(8), torch.arange(8), indexing="ij"))
    frequencies = 10000.0 ** (-torch.arange(0, 8, 2) / 8)
    angles = torch.cat([column[:, None] * frequencies, row[:, None] * frequencies], dim=1).repeat_interleave(2, dim=1)
    swapped = torch.stack([-published[:, 1::2], published[:, ::2]], dim=-1).flatten(1)
    turned = published * angles.cos() + swapped * angles.sin()
    cos, sin = perception._positions[LOCAL][1]
    ours = halves_of_pairs(published.T, 1).T
    assert torch.equal(as_pairs(ours.T, 1).T, published)
    halves = torch.cat([-ours[:, 8:], ours[:, :8]], dim=1)
    assert torch.allclose(ours * cos + halves * sin, halves_of_pairs(turned.T, 1).T, atol=1e-5)


def test_rotary_stays_float32_in_a_half_precision_tower() -> None:
    encoder = checks.build(source(), dtype=torch.bfloat16)
    assert isinstance(encoder, Step3VLEncoder)
    single = checks.build(source())
    assert isinstance(single, Step3VLEncoder)
    for path in (GLOBAL, LOCAL):
        learned, (cos, _) = encoder._positions[path]
        assert learned.dtype == torch.bfloat16
        assert torch.equal(cos, single._positions[path][1][0])


@pytest.mark.parametrize("spare", [0, 1, 40])
def test_padded_equals_eager(encoder: Step3VLEncoder, spare: int) -> None:
    two_path_checks.assert_padded_equals_eager(encoder, MIXED, spare)


def test_operations_are_those_that_torch_counts(encoder: Step3VLEncoder) -> None:
    two_path_checks.assert_flops_are_counted(encoder)


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["step3-vl-10b", "step3-321b", *DEBUG])
def test_the_captured_forward_stays_on_the_device(preset: str) -> None:
    two_path_checks.assert_forward_stays_on_device(source(preset))


@pytest.mark.parametrize(("preset", "parameters"), [("step3-vl-10b", 1_981_014_784), ("step3-321b", 4_675_374_592)])
def test_the_full_presets_have_the_published_parameters(preset: str, parameters: int) -> None:
    full = source(preset)
    modules = Step3VLEncoder.build_modules(full.vision_config, full.extra, torch.bfloat16, torch.device("meta"))
    assert sum(parameter.numel() for parameter in modules.parameters()) == parameters
    assert row_presets("step3_vl")[preset]["parameters"] == parameters


# -- images ------------------------------------------------------------------------------------------------------------


def test_preprocess_cuts_windows_and_keeps_the_whole(perception: Step3VLEncoder) -> None:
    rule = perception.rule
    # Sides that need no resizing: what comes out is the image itself, cut and normalised.
    image = checks.random_image(336, 224)
    items, pixels = perception.preprocess([image, checks.random_image(168, 168, 1).convert("L")])
    assert items == [CropGeometry(IMAGE, 3, 2), UNTILED]
    assert {name: len(rows) for name, rows in pixels.items()} == {"pixel_values": 2, "patch_pixel_values": 6}
    mean, std = (torch.tensor(rule.processor[name]).view(3, 1, 1) for name in ("image_mean", "image_std"))
    whole = (torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255 - mean) / std
    for number, crop in enumerate(pixels["patch_pixel_values"]):
        top, left = 112 * (number // 3), 112 * (number % 3)
        assert torch.allclose(crop, whole[:, top : top + 112, left : left + 112], atol=1e-5), number
    shrunk = torch.nn.functional.interpolate(whole[None], (168, 168), mode="bilinear", antialias=True)
    assert torch.allclose(pixels["pixel_values"][0], shrunk[0], atol=1e-5)


def test_preprocess_pads_thin_strips_and_short_windows(perception: Step3VLEncoder) -> None:
    rule = perception.rule
    strip, low = checks.random_image(160, 10), checks.random_image(300, 100)
    items, pixels = perception.preprocess([strip, low])
    assert items == [UNTILED, CropGeometry(IMAGE, 3, 1)]
    mean, std = (torch.tensor(rule.processor[name]).view(3, 1, 1) for name in ("image_mean", "image_std"))
    black = -mean / std
    # 160 x 10 becomes 160 x 160, the strip at the top, then 168 x 168.
    assert torch.allclose(pixels["pixel_values"][0, :, 20:], black.expand(3, 148, 168), atol=1e-5)
    assert not torch.allclose(pixels["pixel_values"][0, :, 5], black[:, 0].expand(3, 168), atol=0.1)
    # A window of 112 over an image 100 high reaches 12 rows below it.
    assert torch.allclose(pixels["patch_pixel_values"][:, :, 100:], black.expand(3, 3, 12, 112), atol=1e-5)


# -- checkpoints -------------------------------------------------------------------------------------------------------

PERCEPTION_PARTS = {
    "visual.embeddings.patch_embedding.": "vision_model.conv1.",
    "visual.embeddings.position_embedding.weight": "vision_model.positional_embedding",
    "visual.pre_layernorm.": "vision_model.ln_pre.",
    "visual.layers.": "vision_model.transformer.resblocks.",
    "visual.downsampler1.": "vision_model.vit_downsampler1.",
    "visual.downsampler2.": "vision_model.vit_downsampler2.",
    "projector.": "vit_large_projector.",
}
LAYER_PARTS = {
    "layernorm_before": "ln_1",
    "layernorm_after": "ln_2",
    "lambda_1": "ls_1.gamma",
    "lambda_2": "ls_2.gamma",
    "self_attn.out_proj": "attn.out_proj",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
}


def as_pairs(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of q or k with the two halves of every head interleaved, as the checkpoint has them."""
    width = tensor.shape[0] // heads
    order = [
        head * width + half * (width // 2) + pair
        for head in range(heads)
        for pair in range(width // 2)
        for half in (0, 1)
    ]
    return tensor[order]


def perception_tensors(state: dict[str, torch.Tensor], heads: int) -> dict[str, torch.Tensor]:
    """The 10B model's weights under the published names: fused in_proj, rotary pairs side by side."""
    tensors = {}
    for key, tensor in state.items():
        ours = next(part for part in PERCEPTION_PARTS if key.startswith(part))
        name = PERCEPTION_PARTS[ours] + key.removeprefix(ours)
        for layer_part, published in LAYER_PARTS.items():
            name = name.replace(layer_part, published)
        if ".q_proj." in key:
            query, key_rows, value = (state[key.replace("q_proj", f"{part}_proj")] for part in "qkv")
            fused = torch.cat([as_pairs(query, heads), as_pairs(key_rows, heads), value])
            tensors[name.replace("self_attn.q_proj.", "attn.in_proj_")] = fused
        elif ".k_proj." not in key and ".v_proj." not in key:
            tensors[name] = tensor.clone()
    return tensors


def test_published_10b_checkpoint_loads(perception: Step3VLEncoder, tmp_path: Path) -> None:
    tensors = perception_tensors(checks.stock_state(perception), 4)
    assert {
        "vision_model.transformer.resblocks.2.attn.in_proj_bias",
        "vision_model.transformer.resblocks.0.ls_2.gamma",
        "vit_large_projector.weight",
    } <= tensors.keys()
    checks.write_checkpoint(tmp_path, {}, tensors)
    checks.assert_same_weights(checks.load_folder(tmp_path, source()), perception)


def test_10b_checkpoint_as_transformers_saves_it_loads(perception: Step3VLEncoder, tmp_path: Path) -> None:
    names = {"visual": "model.vision_model", "projector": "model.multi_modal_projector"}
    tensors = checks.published(
        checks.stock_state(perception),
        lambda key: ".".join([names[key.split(".")[0]], *key.split(".")[1:]]),
    )
    checks.write_checkpoint(tmp_path, {}, tensors)
    checks.assert_same_weights(checks.load_folder(tmp_path, source()), perception)


def test_published_321b_checkpoint_loads(tmp_path: Path) -> None:
    expected = two_path_checks.build(source("step3-321b-debug"))
    state = checks.stock_state(expected)
    tensors = {}
    for key, tensor in state.items():
        name = key.replace("visual.vit_downsampler", "vit_downsampler").replace("visual.", "vision_model.")
        name = name.replace("projector.", "vit_large_projector.")
        if ".q_proj." in key:
            fused = [state[key.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            tensors[name.replace("q_proj", "qkv_proj")] = torch.cat(fused)
        elif ".k_proj." not in key and ".v_proj." not in key:
            tensors[name] = tensor.clone()
    assert {
        "vision_model.transformer.layers.1.self_attn.qkv_proj.weight",
        "vision_model.embeddings.class_embedding",
        "vit_downsampler.weight",
        "vit_downsampler2.bias",
    } <= tensors.keys()
    checks.write_checkpoint(tmp_path, {}, tensors)
    checks.assert_same_weights(checks.load_folder(tmp_path, source("step3-321b-debug")), expected)


def test_language_model_tensors_are_not_the_encoders() -> None:
    for key in (
        "model.embed_tokens.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.norm.weight",
        "lm_head.weight",
    ):
        assert not Step3VLEncoder.owns_checkpoint_key(key)


PUBLISHED_10B: dict[str, Any] = {
    "architectures": ["StepVLForConditionalGeneration"],
    "model_type": "step_robotics",
    "understand_projector_stride": 2,
    "projector_bias": False,
    "text_config": {"model_type": "qwen3", "hidden_size": 4096},
    "vision_config": {
        "image_size": 728,
        "patch_size": 14,
        "width": 1536,
        "layers": 47,
        "heads": 16,
        "pool_type": "none",
        "output_dim": None,
        "use_cls_token": False,
        "ls_init_value": 0.1,
        "use_ln_post": False,
        "hidden_act": "quick_gelu",
    },
}
PUBLISHED_321B: dict[str, Any] = {
    "architectures": ["Step3VLForConditionalGeneration"],
    "model_type": "step3_vl",
    "understand_projector_stride": 2,
    "projector_bias": False,
    "text_config": {"model_type": "step3_text", "hidden_size": 7168},
    "vision_config": {
        "hidden_size": 1792,
        "output_hidden_size": 4096,
        "image_size": 728,
        "intermediate_size": 15360,
        "num_attention_heads": 16,
        "num_hidden_layers": 63,
        "patch_size": 14,
    },
}


@pytest.mark.parametrize(("preset", "config"), [("step3-vl-10b", PUBLISHED_10B), ("step3-321b", PUBLISHED_321B)])
def test_published_configs_are_the_presets(preset: str, config: dict[str, Any]) -> None:
    found = row_presets("step3_vl")[preset]
    assert Step3VLEncoder.read_model_config(config) == (found["vision_config"], found["extra"])


def test_other_networks_are_refused() -> None:
    vision = {**PUBLISHED_10B["vision_config"], "use_cls_token": True}
    with pytest.raises(ModelError, match="use_cls_token is True"):
        Step3VLEncoder.read_model_config({**PUBLISHED_10B, "vision_config": vision})


def test_processor_settings_are_read() -> None:
    assert Step3VLEncoder.read_processor_config(
        {"size": {"height": 728, "width": 728}, "patch_size": 504, "max_image_size": 2048, "do_resize": True}
    ) == {"global_size": 728, "local_size": 504, "max_image_side": 2048}


# -- graphs ------------------------------------------------------------------------------------------------------------


def test_replays_equal_eager_in_every_order(encoder: Step3VLEncoder) -> None:
    manager = two_path_checks.capture(encoder, [9, 27, 50], max_items=4)
    calls = [[UNTILED], [MIXED[1]], [UNTILED, UNTILED], list(MIXED), [UNTILED], list(reversed(MIXED))]
    for seed, (call, following) in enumerate(pairwise([*calls, calls[0]])):
        plan = two_path_checks.assert_manager_equals_eager(manager, call, seed)
        assert all(batch.is_hit for batch in plan.batches)
        two_path_checks.assert_manager_equals_eager(manager, following, seed + 100)
