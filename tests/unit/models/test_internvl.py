"""InternVL: tiles as the processor cuts them, equality with transformers, padding, both published checkpoint forms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import encoder_checks as checks
import pytest
import torch
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

from vitgraph.errors import BudgetError, InputError, ModelError
from vitgraph.models.families.internvl import InternVLEncoder
from vitgraph.models.geometry import GridGeometry, TileGeometry
from vitgraph.models.registry import ModelSource
from vitgraph.planning.budgets import IMAGE, VIDEO, GraphKey

MIXED = (
    TileGeometry(IMAGE, 1),
    TileGeometry(VIDEO, 3),
    TileGeometry(IMAGE, 5),
    TileGeometry(VIDEO, 2),
    TileGeometry(IMAGE, 13),
)


def source(preset: str = "internvl-debug", **changes: Any) -> ModelSource:
    return checks.preset_source(preset, **changes)


def build(**changes: Any) -> InternVLEncoder:
    """The debug encoder with layer scales near one, so that every block counts."""
    encoder = checks.build(source(**changes))
    assert isinstance(encoder, InternVLEncoder)
    for name, parameter in encoder.modules.named_parameters():
        if ".lambda_" in name:
            parameter.add_(1)
    return encoder


@pytest.fixture(scope="module")
def encoder() -> InternVLEncoder:
    return build()


@pytest.mark.parametrize(("fewest", "most"), [(1, 12), (1, 6), (2, 4), (1, 1)])
def test_tiles_are_those_of_the_processor(fewest: int, most: int) -> None:
    settings = {"min_dynamic_patch": fewest, "max_dynamic_patch": most}
    rule = source("internvl3.5-8b", processor=settings).rule()
    processor = GotOcr2ImageProcessorPil(
        size={"height": 448, "width": 448}, crop_to_patches=True, min_patches=fewest, max_patches=most
    )
    for width, height in (*checks.SIZES, *checks.random_sizes(400, 8000)):
        tiles = processor.get_number_of_image_patches(height, width)
        spec = rule.item_spec(rule.geometry(width, height))
        assert (spec.input_size, spec.output_tokens, spec.segments) == (tiles, 256 * tiles, tiles), (width, height)


def test_tiles_without_thumbnail_are_one_fewer() -> None:
    rule = source("internvl3.5-8b", processor={"use_thumbnail": False}).rule()
    items = [rule.geometry(*size) for size in ((448, 448), (896, 448), (4000, 3000))]
    assert items == [TileGeometry(IMAGE, tiles) for tiles in (1, 2, 12)]


@torch.inference_mode()
def test_token_counts_are_the_rows_of_the_forward(encoder: InternVLEncoder) -> None:
    items = [encoder.rule.geometry(width, height) for width, height in checks.SIZES]
    items += [encoder.rule.geometry(320, 240, frames) for frames in (1, 2, 40)]
    rows = len(encoder.encoder_eager_forward(checks.inputs_of(encoder, items)))
    assert rows == sum(checks.tokens_of(encoder.rule, items))
    assert [encoder.rule.item_spec(item).segments for item in items[-3:]] == [encoder.rule.image_tiles(320, 240), 2, 40]


def test_video_files_are_sampled_and_given_frames_are_kept() -> None:
    rule = source("internvl3.5-8b").rule()
    assert rule.geometry(1920, 1080, 900, fps=30) == TileGeometry(VIDEO, 32)
    assert rule.geometry(1920, 1080, 32, fps=30) == TileGeometry(VIDEO, 32)
    assert rule.geometry(1920, 1080, 100) == TileGeometry(VIDEO, 100)


def test_sizes_and_geometries_that_make_no_tile_are_refused() -> None:
    rule = source().rule()
    for bad in ((0, 5, 1), (5, -1, 1), (5, 5, 0)):
        with pytest.raises(InputError, match=f"{bad[0]}x{bad[1]}x{bad[2]}"):
            rule.geometry(*bad)
    for geometry in (TileGeometry(IMAGE, 0), GridGeometry(IMAGE, 1, 4, 4)):
        with pytest.raises(InputError, match="one tile or more"):
            rule.item_spec(geometry)


@pytest.mark.parametrize("side", [120, 126])
def test_tiles_that_do_not_merge_are_refused(side: int) -> None:
    with pytest.raises(ModelError, match=f"{side} pixels.*multiple of 28"):
        source(vision_config={"image_size": [side, side]}).rule()


def test_eager_equals_stock(encoder: InternVLEncoder) -> None:
    checks.assert_eager_equals_stock(encoder, MIXED)


def test_the_6b_tower_equals_stock() -> None:
    norms = {"norm_type": "rms_norm", "use_qk_norm": True, "attention_bias": False}
    checks.assert_eager_equals_stock(build(vision_config=norms), MIXED)


@pytest.mark.parametrize("budget", [24 * 16, 27 * 16, 40 * 16 + 5])
def test_padded_equals_eager(encoder: InternVLEncoder, budget: int) -> None:
    checks.assert_padded_equals_eager(encoder, MIXED, GraphKey("default", budget, budget // 16))


def test_items_of_many_tiles_are_replayed_under_a_small_item_limit(encoder: InternVLEncoder) -> None:
    manager = checks.assert_manager_equals_eager(encoder, MIXED, [16, 64, 208, 512], max_items=2)
    assert all(key.segment_slots == key.token_budget // 16 for key in manager.graphs)


def test_a_graph_has_only_whole_tiles(encoder: InternVLEncoder) -> None:
    inputs = encoder.prepare_encoder_cudagraph_capture_inputs(GraphKey("default", 100, 6))
    assert inputs.pixels["pixel_values"].rows == 6
    with pytest.raises(BudgetError, match=r"token budget 15 holds no tile.*at least 16"):
        encoder.prepare_encoder_cudagraph_capture_inputs(GraphKey("default", 15, 1))


def test_operations_are_those_that_torch_counts(encoder: InternVLEncoder) -> None:
    checks.assert_flops_are_counted(encoder, (TileGeometry(IMAGE, 1), TileGeometry(VIDEO, 3)))


LAYER = {
    "layernorm_before": "norm1",
    "layernorm_after": "norm2",
    "attention.projection_layer": "attn.proj",
    "attention.q_norm": "attn.q_norm",
    "attention.k_norm": "attn.k_norm",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}


def original_tensors(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state under the original repositories' names, q, k and v fused."""
    tensors = {
        "vision_model.embeddings.class_embedding": state["visual.embeddings.cls_token"],
        "vision_model.embeddings.position_embedding": state["visual.embeddings.position_embeddings"],
    }
    for part in ("weight", "bias"):
        projection = state[f"visual.embeddings.patch_embeddings.projection.{part}"]
        tensors[f"vision_model.embeddings.patch_embedding.{part}"] = projection
        for number, name in ((0, "layer_norm"), (1, "linear_1"), (3, "linear_2")):
            tensors[f"mlp1.{number}.{part}"] = state[f"projector.{name}.{part}"]
    for layer in range(3):
        ours, theirs = f"visual.encoder.layer.{layer}.", f"vision_model.encoder.layers.{layer}."
        for scale in (1, 2):
            tensors[f"{theirs}ls{scale}"] = state[f"{ours}lambda_{scale}"]
        for part in ("weight", "bias"):
            for name, published in LAYER.items():
                if f"{ours}{name}.{part}" in state:
                    tensors[f"{theirs}{published}.{part}"] = state[f"{ours}{name}.{part}"]
            fused = [state.get(f"{ours}attention.{letter}_proj.{part}") for letter in "qkv"]
            if fused[0] is not None:
                tensors[f"{theirs}attn.qkv.{part}"] = torch.cat(fused)  # type: ignore[arg-type]
    return tensors


@pytest.mark.parametrize(
    "vision", [{}, {"norm_type": "rms_norm", "use_qk_norm": True, "attention_bias": False}], ids=["300m", "6b"]
)
def test_original_checkpoint_loads(tmp_path: Path, vision: dict[str, Any]) -> None:
    expected = build(vision_config=vision)
    checks.write_checkpoint(tmp_path, {}, original_tensors(expected.modules.state_dict()))
    loaded = checks.load_folder(tmp_path, source(vision_config=vision))
    checks.assert_same_weights(loaded, expected)


@pytest.mark.parametrize("prefix", ["", "model."])
def test_transformers_checkpoint_loads(tmp_path: Path, prefix: str) -> None:
    expected = build()
    names = {"visual": f"{prefix}vision_tower", "projector": f"{prefix}multi_modal_projector"}
    tensors = checks.published(
        expected.modules.state_dict(), lambda key: ".".join([names[key.split(".")[0]], *key.split(".")[1:]])
    )
    checks.write_checkpoint(tmp_path, {}, tensors)
    checks.assert_same_weights(checks.load_folder(tmp_path, source()), expected)


def test_original_config_is_read() -> None:
    vision = {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
        "image_size": 448,
        "patch_size": 14,
        "qkv_bias": True,
        "qk_normalization": False,
        "norm_type": "layer_norm",
        "layer_norm_eps": 1e-6,
        "hidden_act": "gelu",
        "architectures": ["InternVisionModel"],
        "drop_path_rate": 0.1,
        "torch_dtype": "bfloat16",
    }
    config = {
        "vision_config": vision,
        "llm_config": {"hidden_size": 896},
        "downsample_ratio": 0.5,
        "select_layer": -1,
        "ps_version": "v2",
        "dynamic_image_size": True,
        "min_dynamic_patch": 1,
        "max_dynamic_patch": 6,
        "use_thumbnail": True,
    }
    read, extra = InternVLEncoder.read_model_config(config)
    assert read == {
        **{name: vision[name] for name in list(vision)[:6]},
        "attention_bias": True,
        "use_qk_norm": False,
        "norm_type": "layer_norm",
        "layer_norm_eps": 1e-6,
        "hidden_act": "gelu",
    }
    assert extra["text_hidden_size"] == 896 and extra["vision_feature_layer"] == -1
    rule = InternVLEncoder.rule_class(read, source().processor, extra)
    assert rule.item_spec(rule.geometry(4000, 3000)).segments == 7, "config.json allows six tiles"
    _, single = InternVLEncoder.read_model_config({**config, "dynamic_image_size": False})
    assert InternVLEncoder.rule_class(read, source().processor, single).image_geometry(4000, 3000).tiles == 1  # type: ignore[attr-defined]


def test_transformers_config_is_read() -> None:
    vision = {"hidden_size": 1024, "attention_bias": True, "image_size": [448, 448], "patch_size": [14, 14]}
    config = {
        "vision_config": {**vision, "model_type": "internvl_vision", "torch_dtype": "bfloat16"},
        "text_config": {"hidden_size": 2048},
        "downsample_ratio": 0.5,
        "vision_feature_layer": -1,
    }
    read, extra = InternVLEncoder.read_model_config(config)
    assert read == vision
    assert extra == {"text_hidden_size": 2048, "downsample_ratio": 0.5, "vision_feature_layer": -1}
    processor = {
        "size": {"height": 448, "width": 448},
        "min_patches": 1,
        "max_patches": 9,
        "image_mean": [0.1, 0.2, 0.3],
    }
    assert InternVLEncoder.read_processor_config(processor) == {
        "min_dynamic_patch": 1,
        "max_dynamic_patch": 9,
        "image_mean": [0.1, 0.2, 0.3],
    }
    assert InternVLEncoder.read_video_processor_config({"num_frames": 8, "fps": None}) == {"num_frames": 8}


@pytest.mark.parametrize(
    ("fields", "named"),
    [({"select_layer": -2}, "select_layer is -2"), ({"ps_version": "v1"}, "ps_version is 'v1'")],
    ids=["layer", "shuffle"],
)
def test_other_networks_are_refused(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        InternVLEncoder.read_model_config({"vision_config": {}, **fields})
