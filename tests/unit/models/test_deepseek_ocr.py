"""DeepSeek-OCR: crops as the processors cut them, equality with transformers, padding, published keys and configs."""

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
from transformers import AttentionInterface
from transformers.models.deepseek_ocr2.image_processing_pil_deepseek_ocr2 import DeepseekOcr2ImageProcessorPil
from transformers.models.unlimited_ocr import UnlimitedOcrModel
from two_path_checks import MIXED, UNTILED

from vitgraph.errors import InputError, ModelError
from vitgraph.models.families import deepseek_ocr
from vitgraph.models.families.deepseek_ocr import DeepseekOCREncoder, DeepseekOCRRule
from vitgraph.models.geometry import TileGeometry
from vitgraph.models.registry import ModelSource, row_presets
from vitgraph.models.two_path import GLOBAL, LOCAL, CropGeometry
from vitgraph.planning.budgets import IMAGE, generate_budgets


def source(preset: str = "deepseek-ocr-debug", **changes: Any) -> ModelSource:
    return checks.preset_source(preset, **changes)


def full_rule(**processor: Any) -> DeepseekOCRRule:
    rule = source("deepseek-ocr", processor=processor).rule()
    assert isinstance(rule, DeepseekOCRRule)
    return rule


@pytest.fixture(scope="module")
def encoder() -> DeepseekOCREncoder:
    built = two_path_checks.build(source())
    assert isinstance(built, DeepseekOCREncoder)
    return built


# -- sizes and tokens --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fewest", "most"), [(2, 6), (2, 9), (2, 32)])
def test_crops_are_those_of_transformers_processor(fewest: int, most: int) -> None:
    name = "unlimited_ocr.image_processing_unlimited_ocr:UnlimitedOcrImageProcessor"
    processor_class, module = checks.transformers_processor(name)
    processor = processor_class(min_patches=fewest, max_patches=most, tile_size=640)
    rule = full_rule(min_crops=fewest, max_crops=most)
    for width, height in (*checks.SIZES, *checks.random_sizes(400, 8000)):
        if max(width, height) > 2000 * min(width, height):
            continue
        item = rule.image_geometry(width, height)
        assert 1 + item.crops == processor.get_number_of_image_patches(height, width), (width, height)
        if item.crops:
            canvas = module.get_optimal_tiled_canvas((height, width), (640, 640), fewest, most)
            assert (item.columns, item.rows) == canvas, (width, height)


@pytest.mark.parametrize(
    ("size", "grid", "final"),
    [
        ((1, 1), (0, 0), 273),
        ((640, 640), (0, 0), 273),
        ((641, 640), (2, 2), 273 + 20 * 21),
        ((1280, 640), (2, 1), 273 + 10 * 21),
        ((720, 1280), (1, 2), 273 + 20 * 11),
        ((8000, 200), (6, 1), 273 + 10 * 61),
        ((200, 8000), (1, 6), 273 + 60 * 11),
        ((3000, 2000), (3, 2), 273 + 20 * 31),
    ],
)
def test_known_sizes(size: tuple[int, int], grid: tuple[int, int], final: int) -> None:
    rule = full_rule()
    item = rule.image_geometry(*size)
    crops = grid[0] * grid[1]
    assert item == CropGeometry(IMAGE, *grid)
    spec = rule.item_spec(item)
    assert (spec.input_size, spec.output_tokens, spec.segments) == (1 + crops, 272 + 100 * crops, 1)
    assert spec.path_output_tokens == {GLOBAL: 272, LOCAL: 100 * crops}
    assert rule.pixel_rows(item) == {"pixel_values": 1, "images_crop": crops}
    assert rule.final_tokens(item) == final


def test_each_path_has_budgets_from_its_own_view() -> None:
    rule = full_rule()
    config = rule.graph_config()
    assert {path: policy.min_token_budget for path, policy in config.paths.items()} == {GLOBAL: 272, LOCAL: 100}
    assert [policy.allow_zero_tokens for policy in config.paths.values()] == [False, True]
    assert not any(policy.has_segments for policy in config.paths.values())
    assert generate_budgets(*rule.budget_range(4096)) == [272, 544, 1088, 2176, 4096]


@pytest.mark.parametrize(
    ("processor", "tokens"),
    [
        ({"global_size": 512, "local_size": 512, "crop_mode": False}, (72, 64)),
        ({"global_size": 640, "local_size": 640, "crop_mode": False}, (110, 100)),
        ({"global_size": 1024, "local_size": 1024, "crop_mode": False}, (272, 256)),
        ({"global_size": 1280, "local_size": 1280, "crop_mode": False}, (420, 400)),
        ({"global_size": 1280, "local_size": 1024}, (420, 256)),
    ],
)
def test_the_published_modes(processor: dict[str, Any], tokens: tuple[int, int]) -> None:
    rule = full_rule(**processor)
    assert tuple(rule.path_tokens.values()) == tokens
    assert rule.image_geometry(3000, 2000).crops == (6 if rule.processor["crop_mode"] else 0)


def test_a_single_crop_is_left_out() -> None:
    assert full_rule(min_crops=1).image_geometry(1000, 1000) == CropGeometry(IMAGE, 2, 2)
    assert full_rule(min_crops=1).image_geometry(900, 900) == UNTILED


def test_images_that_vanish_in_the_global_view_are_refused() -> None:
    assert full_rule().image_geometry(2047, 1) == CropGeometry(IMAGE, 6, 1)
    with pytest.raises(InputError, match=r"image of 2048x1 would be 1024x0 pixels.*refuses"):
        full_rule().image_geometry(2048, 1)
    # The small modes without crops stretch the image instead.
    assert full_rule(global_size=640, crop_mode=False).image_geometry(2048, 1) == UNTILED
    with pytest.raises(InputError, match="0x5x1"):
        full_rule().geometry(0, 5)
    with pytest.raises(InputError, match="takes images only"):
        full_rule().geometry(640, 480, 8)


def test_what_no_view_can_be_is_refused() -> None:
    for geometry in (TileGeometry(IMAGE, 3), CropGeometry(IMAGE, 2, 0), CropGeometry(IMAGE, -1, -1)):
        with pytest.raises(InputError, match="crop"):
            full_rule().item_spec(geometry)
    with pytest.raises(ModelError, match=r"local side is 600 pixels.*multiple of 64"):
        full_rule(local_size=600)


@torch.inference_mode()
def test_token_counts_are_the_rows_of_the_forward(encoder: DeepseekOCREncoder) -> None:
    items = [encoder.rule.image_geometry(*size) for size in checks.SIZES if max(size) < 500 * min(size)]
    inputs = checks.inputs_of(encoder, items)
    for path in (GLOBAL, LOCAL):
        rows = sum(encoder.rule.item_spec(item).tokens_on(path) for item in items)
        assert encoder.encoder_eager_forward(inputs, path).shape == (rows, 96)


# -- the forward -------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def test_embeddings_are_those_of_transformers(encoder: DeepseekOCREncoder) -> None:
    views = two_path_checks.tower_views(encoder, MIXED, checks.inputs_of(encoder, MIXED).pixels)
    modules: Any = encoder.modules
    model = SimpleNamespace(
        vision_tower=modules["visual"],
        multi_modal_projector=modules["projector"],
        image_newline=modules["tokens"].image_newline,
        view_separator=modules["tokens"].view_separator,
        config=SimpleNamespace(return_dict=True),
    )
    with checks.transformers_attention(encoder):
        features: Any = UnlimitedOcrModel.get_image_features
        found = features(model, views.whole, views.crops, views.counts, views.grids, return_dict=True)
    two_path_checks.assert_equals(encoder, MIXED, found.pooler_output)


@torch.inference_mode()
def test_the_stock_forward_reads_no_table(encoder: DeepseekOCREncoder) -> None:
    inputs = checks.inputs_of(encoder, MIXED)
    before = encoder.stock_forward(inputs), encoder.encoder_eager_forward(inputs, LOCAL)
    layers: Any = encoder.modules["visual"].sam_encoder.layers  # type: ignore[union-attr]
    kept = [dict(layer.attn.tables) for layer in layers]
    for layer in layers:
        layer.attn.tables = {side: (2 * rows, 2 * columns) for side, (rows, columns) in layer.attn.tables.items()}
    after = encoder.stock_forward(inputs), encoder.encoder_eager_forward(inputs, LOCAL)
    for layer, tables in zip(layers, kept, strict=True):
        layer.attn.tables = tables
    assert torch.equal(before[0], after[0])
    assert not torch.allclose(before[1], after[1])


@pytest.mark.parametrize("spare", [0, 1, 41])
def test_padded_equals_eager(encoder: DeepseekOCREncoder, spare: int) -> None:
    two_path_checks.assert_padded_equals_eager(encoder, MIXED, spare)


@torch.inference_mode()
def test_global_attention_in_turns_gives_the_same(encoder: DeepseekOCREncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = checks.inputs_of(encoder, MIXED)
    expected = [encoder.encoder_eager_forward(inputs, path) for path in (GLOBAL, LOCAL)]
    monkeypatch.setattr(deepseek_ocr, "GLOBAL_BIAS_BYTES", 2 * 3 * 256**2 * 4)
    turns: list[int] = []
    layer: Any = encoder.repeated_blocks()[1]
    hook = layer.register_forward_pre_hook(lambda _, args: turns.append(len(args[0])))
    actual = [encoder.encoder_eager_forward(inputs, path) for path in (GLOBAL, LOCAL)]
    hook.remove()
    assert turns == [2, 2, 1, 10], "two tiles of the global view fit, all crops do"
    for found, wanted in zip(actual, expected, strict=True):
        assert checks.relative_error(found, wanted) <= 1e-6


@torch.inference_mode()
def test_only_clip_calls_the_backend(encoder: DeepseekOCREncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []
    dense = encoder.attention.dense

    def counted(query: torch.Tensor, *rest: Any) -> torch.Tensor:
        shapes.append(tuple(query.shape))
        return dense(query, *rest)

    backend = encoder.attention
    monkeypatch.setattr(backend, "dense", counted)
    # transformers holds the function that was made of the backend's methods.
    monkeypatch.setitem(AttentionInterface._global_mapping, backend.transformers_name, backend.transformers_function)
    encoder.encoder_eager_forward(checks.inputs_of(encoder, [UNTILED]), GLOBAL)
    assert shapes == [(1, 4, 17, 16)] * 3


def test_operations_are_those_that_torch_counts(encoder: DeepseekOCREncoder) -> None:
    two_path_checks.assert_flops_are_counted(encoder)


@pytest.mark.parametrize("preset", ["deepseek-ocr", "deepseek-ocr-debug"])
def test_the_captured_forward_stays_on_the_device(preset: str) -> None:
    two_path_checks.assert_forward_stays_on_device(source(preset))


def test_the_full_preset_has_the_published_parameters() -> None:
    full = source("deepseek-ocr")
    modules = DeepseekOCREncoder.build_modules(full.vision_config, full.extra, torch.bfloat16, torch.device("meta"))
    assert sum(parameter.numel() for parameter in modules.parameters()) == 400_770_048
    assert row_presets("deepseek_ocr")["deepseek-ocr"]["parameters"] == 400_770_048


# -- images ------------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def test_preprocess_cuts_and_pads_as_published(encoder: DeepseekOCREncoder) -> None:
    images = [checks.random_image(*size, seed) for seed, size in enumerate(((500, 300), (100, 128), (129, 64)))]
    items, pixels = encoder.preprocess([images[0], images[1].convert("L"), images[2]])
    assert items == [CropGeometry(IMAGE, 3, 2), UNTILED, CropGeometry(IMAGE, 2, 1)]
    processor = DeepseekOcr2ImageProcessorPil(
        size={"height": 256, "width": 256}, tile_size=128, min_patches=2, max_patches=6, image_mean=[0.5] * 3
    )
    processor.image_std = [0.5] * 3
    found = processor(images=[images[0], images[2]], return_tensors="pt")
    assert torch.allclose(pixels["images_crop"], found["pixel_values_local"], atol=1e-5)
    # Views of 256 x 154 and 256 x 127: half the rest above, rounded.
    for row, (top, height) in ((0, (51, 154)), (2, (64, 127))):
        view = pixels["pixel_values"][row]
        gray = (torch.tensor(127) / 255 - 0.5) / 0.5
        assert torch.allclose(view[:, :top], gray.expand(3, top, 256))
        assert torch.allclose(view[:, top + height :], gray.expand(3, 256 - top - height, 256))
        assert not torch.allclose(view[:, top], gray.expand(3, 256))
        assert not torch.allclose(view[:, top + height - 1], gray.expand(3, 256))
    embeddings = encoder.encoder_eager_forward(encoder.make_inputs(items, pixels), LOCAL)
    assert len(embeddings) == 8 * 4


def test_preprocess_without_crops_gives_an_empty_buffer(encoder: DeepseekOCREncoder) -> None:
    items, pixels = encoder.preprocess([checks.random_image(128, 100)])
    assert items == [UNTILED]
    assert {name: tuple(rows.shape) for name, rows in pixels.items()} == {
        "pixel_values": (1, 3, 256, 256),
        "images_crop": (0, 3, 128, 128),
    }


def test_the_small_modes_stretch_the_image() -> None:
    encoder = two_path_checks.build(source(processor={"crop_mode": False}))
    image = checks.random_image(128, 8)
    _, pixels = encoder.preprocess([image])
    expected = torch.from_numpy(np.array(image.resize((256, 256)))).permute(2, 0, 1) / 255 * 2 - 1
    assert torch.allclose(pixels["pixel_values"][0], expected, atol=1e-5)


# -- checkpoints -------------------------------------------------------------------------------------------------------

PUBLISHED_PARTS = {
    "visual.sam_encoder.patch_embed.projection.": "sam_model.patch_embed.proj.",
    "visual.sam_encoder.pos_embed": "sam_model.pos_embed",
    "visual.sam_encoder.neck.conv1.": "sam_model.neck.0.",
    "visual.sam_encoder.neck.layer_norm1.": "sam_model.neck.1.",
    "visual.sam_encoder.neck.conv2.": "sam_model.neck.2.",
    "visual.sam_encoder.neck.layer_norm2.": "sam_model.neck.3.",
    "visual.sam_encoder.proj.conv1.": "sam_model.net_2.",
    "visual.sam_encoder.proj.conv2.": "sam_model.net_3.",
    "visual.sam_encoder.layers.": "sam_model.blocks.",
    "visual.vision_encoder.encoder.layers.": "vision_model.transformer.layers.",
    "visual.vision_encoder.": "vision_model.",
    "projector.": "projector.layers.",
    "tokens.image_newline": "image_newline",
    "tokens.view_separator": "view_seperator",
}


def published_tensors(encoder: DeepseekOCREncoder, prefix: str) -> dict[str, torch.Tensor]:
    """The weights under the published names, CLIP's q, k and v fused, with what the checkpoint has and nobody reads."""
    tensors: dict[str, torch.Tensor] = {}
    state = checks.stock_state(encoder)
    for key in state:
        ours = next(part for part in PUBLISHED_PARTS if key.startswith(part))
        name = prefix + PUBLISHED_PARTS[ours] + key.removeprefix(ours)
        if "sam_model.blocks" in name:
            name = name.replace("layer_norm", "norm")
        if ".self_attn.q_proj." in key:
            fused = [state[key.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            tensors[name.replace("q_proj", "qkv_proj")] = torch.cat(fused)
        elif ".k_proj." not in key and ".v_proj." not in key:
            tensors[name] = state[key].clone()
    tensors[prefix + "vision_model.embeddings.patch_embedding.weight"] = torch.full((64, 3, 14, 14), float("nan"))
    return tensors


@pytest.mark.parametrize("prefix", ["model.", ""])
def test_published_checkpoint_loads(encoder: DeepseekOCREncoder, tmp_path: Path, prefix: str) -> None:
    tensors = published_tensors(encoder, prefix)
    assert prefix + "sam_model.blocks.3.attn.rel_pos_w" in tensors
    assert prefix + "vision_model.transformer.layers.2.self_attn.qkv_proj.weight" in tensors
    checks.write_checkpoint(tmp_path, {}, tensors)
    loaded = checks.load_folder(tmp_path, source())
    checks.assert_same_weights(loaded, encoder)
    # Tables are made of the loaded weights.
    inputs = checks.inputs_of(encoder, MIXED)
    with torch.inference_mode():
        assert torch.equal(loaded.encoder_eager_forward(inputs, LOCAL), encoder.encoder_eager_forward(inputs, LOCAL))


def test_language_model_tensors_are_not_the_encoders() -> None:
    for key in (
        "model.embed_tokens.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.norm.weight",
        "lm_head.weight",
    ):
        assert not DeepseekOCREncoder.owns_checkpoint_key(key)


PUBLISHED_CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekOCRForCausalLM"],
    "model_type": "deepseek_vl_v2",
    "candidate_resolutions": [[1024, 1024]],
    "global_view_pos": "head",
    "tile_tag": "2D",
    "hidden_size": 1280,
    "language_config": {"hidden_size": 1280},
    "projector_config": {"input_dim": 2048, "model_type": "mlp_projector", "n_embed": 1280, "projector_type": "linear"},
    "vision_config": {
        "image_size": 1024,
        "mlp_ratio": 3.7362,
        "model_name": "deeplip_b_l",
        "model_type": "vision",
        "width": {
            "clip-l-14-224": {"heads": 16, "image_size": 224, "layers": 24, "patch_size": 14, "width": 1024},
            "sam_vit_b": {
                "downsample_channels": [512, 1024],
                "global_attn_indexes": [2, 5, 8, 11],
                "heads": 12,
                "layers": 12,
                "width": 768,
            },
        },
    },
}


def test_published_config_is_the_preset() -> None:
    preset = row_presets("deepseek_ocr")["deepseek-ocr"]
    vision, extra = DeepseekOCREncoder.read_model_config(PUBLISHED_CONFIG)
    assert extra == preset["extra"]
    for part, fields in preset["vision_config"].items():
        assert {name: vision[part][name] for name in fields} == fields
    smaller = {**PUBLISHED_CONFIG["vision_config"], "width": {"sam_vit_b": {"layers": 2, "global_attn_indexes": [1]}}}
    vision, _ = DeepseekOCREncoder.read_model_config({**PUBLISHED_CONFIG, "vision_config": smaller})
    assert (vision["sam_config"]["num_hidden_layers"], vision["sam_config"]["global_attn_indexes"]) == (2, [1])
    assert preset["vision_config"]["encoder_config"].items() <= vision["encoder_config"].items()


@pytest.mark.parametrize("changes", [{"tile_tag": "1D"}, {"projector_config": {"projector_type": "mlp_gelu"}}])
def test_other_networks_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"1D|mlp_gelu"):
        DeepseekOCREncoder.read_model_config({**PUBLISHED_CONFIG, **changes})


def test_published_processor_settings_are_read() -> None:
    published = {
        "candidate_resolutions": [[1024, 1024]],
        "downsample_ratio": 4,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "normalize": True,
        "patch_size": 16,
        "processor_class": "DeepseekVLV2Processor",
    }
    assert DeepseekOCREncoder.read_processor_config(published) == {
        "global_size": 1024,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    mode = {"base_size": 1280, "image_size": 1024, "crop_mode": False, "max_crops": 9}
    assert DeepseekOCREncoder.read_processor_config(mode) == {
        "global_size": 1280,
        "local_size": 1024,
        "crop_mode": False,
        "max_crops": 9,
    }


# -- graphs ------------------------------------------------------------------------------------------------------------


def test_replays_equal_eager_in_every_order(encoder: DeepseekOCREncoder) -> None:
    manager = two_path_checks.capture(encoder, [20, 60, 110], max_items=4)
    budgets = {
        path: [key.token_budget for key in sorted(manager.graphs) if key.path == path] for path in (GLOBAL, LOCAL)
    }
    assert budgets == {GLOBAL: [20, 40, 80, 110], LOCAL: [4, 8, 16, 32, 64, 110]}
    calls = [[UNTILED], [MIXED[1]], [UNTILED, UNTILED], list(MIXED), [UNTILED], list(reversed(MIXED))]
    for seed, (call, following) in enumerate(pairwise([*calls, calls[0]])):
        plan = two_path_checks.assert_manager_equals_eager(manager, call, seed)
        assert all(batch.is_hit for batch in plan.batches)
        two_path_checks.assert_manager_equals_eager(manager, following, seed + 100)
