"""Rows that vLLM does not capture, against transformers: a checkpoint that it saved, values, padding, sizes."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import encoder_checks as checks
import pytest
import torch
from test_oracles import TEXT, TOLERANCE, draw_weights, replayed, rows_of

from vitgraph.errors import InputError, ModelError
from vitgraph.measure.series import encode_eagerly
from vitgraph.models.encoder import VisionEncoder
from vitgraph.models.families.llava_onevision import AnyresGeometry
from vitgraph.models.geometry import GridGeometry, ItemGeometry, TileGeometry
from vitgraph.models.loading import load_encoder
from vitgraph.models.processor_classes import transformers_class
from vitgraph.models.registry import resolve_model, row_of_config
from vitgraph.planning.budgets import GraphKey
from vitgraph.planning.items import IMAGE, VIDEO


@dataclass(frozen=True)
class Case:
    """One family: what of it transformers needs beside the preset.

    Attributes:
        preset: Its debug-size preset.
        model: transformers' model class, in `module:class`.
        processor: Settings of transformers' image processor, as the checkpoint's file has them.
        features: Rows of transformers' model for images.
        tokens: Rows that transformers counts for an image of a width and a height.
        items: Geometries of one call.
        capacity: Tokens and segments of a graph that holds them.
        config: Further fields of the config.
    """

    preset: str
    model: str
    processor: Mapping[str, Any]
    features: Callable[[Any, Mapping[str, Any], Sequence[Any]], torch.Tensor]
    tokens: Callable[[VisionEncoder, Mapping[str, Any], int, int], int]
    items: Sequence[ItemGeometry]
    capacity: tuple[int, int]
    config: Mapping[str, Any] = field(default_factory=dict)


def pixtral_processor(settings: Mapping[str, Any], merge: int) -> Any:
    """The image processor as `PixtralProcessor` calls it, which widens its patches by the merge."""
    side = settings["patch_size"] * merge
    processor = transformers_class(resolve_model("pixtral-debug").row.encoder_class().image_processor)  # type: ignore[arg-type]
    return processor(**{**settings, "patch_size": {"height": side, "width": side}})


def pixtral_features(model: Any, settings: Mapping[str, Any], images: Sequence[Any]) -> torch.Tensor:
    batch = pixtral_processor(settings, getattr(model.config, "spatial_merge_size", 1))(images, return_tensors="pt")
    return rows_of(model.get_image_features(batch["pixel_values"], image_sizes=batch["image_sizes"]))


def pixtral_tokens(encoder: VisionEncoder, settings: Mapping[str, Any], width: int, height: int) -> int:
    processor = pixtral_processor(settings, encoder.rule.merge)  # type: ignore[attr-defined]
    module = importlib.import_module(type(processor).__module__)
    longest, patch = settings["size"]["longest_edge"], processor.patch_size["height"]
    tall, wide = module.get_resize_output_image_size(torch.zeros(3, height, width).numpy(), longest, patch)
    return tall * wide // patch**2


def onevision_features(model: Any, settings: Mapping[str, Any], images: Sequence[Any]) -> torch.Tensor:
    processor = transformers_class(resolve_model("llava-onevision-debug").row.encoder_class().image_processor)  # type: ignore[arg-type]
    batch = processor(**settings)(images, return_tensors="pt")
    output = model.get_image_features(batch["pixel_values"], image_sizes=batch["image_sizes"])
    return rows_of(output)


def onevision_tokens(encoder: VisionEncoder, settings: Mapping[str, Any], width: int, height: int) -> int:
    names = {"num_image_tokens": encoder.rule.tokens_per_tile, "vision_aspect_ratio": "anyres_max_9"}  # type: ignore[attr-defined]
    processor_class = transformers_class("llava_onevision.processing_llava_onevision:LlavaOnevisionProcessor")
    processor = processor_class.__new__(processor_class)
    vars(processor).update(names, image_processor=SimpleNamespace(**settings))
    side = settings["size"]["height"]
    return int(processor._get_number_of_features(height, width, side, side))


def ovis_processor(settings: Mapping[str, Any]) -> Any:
    return transformers_class(resolve_model("ovis2-debug").row.encoder_class().image_processor)(**settings)  # type: ignore[arg-type]


def ovis_features(model: Any, settings: Mapping[str, Any], images: Sequence[Any]) -> torch.Tensor:
    batch = ovis_processor(settings)(images, return_tensors="pt")
    return rows_of(model.get_image_features(batch["pixel_values"]))


def ovis_tokens(encoder: VisionEncoder, settings: Mapping[str, Any], width: int, height: int) -> int:
    grid = importlib.import_module("transformers.models.ovis2.image_processing_pil_ovis2").get_min_tile_covering_grid
    rows, columns = grid((height, width), settings["size"]["height"], settings["max_patches"])
    tiles = rows * columns + (rows * columns > 1)
    return tiles * encoder.rule.tokens_per_tile  # type: ignore[attr-defined]


PINPOINTS = [[60 * tall, 60 * wide] for tall in range(1, 5) for wide in range(1, 5)]
GRIDS = (GridGeometry(IMAGE, 1, 4, 6), GridGeometry(IMAGE, 1, 2, 10), GridGeometry(IMAGE, 1, 8, 4))
CASES = (
    Case(
        "pixtral-debug",
        "mistral3:Mistral3ForConditionalGeneration",
        {"patch_size": 14, "size": {"longest_edge": 280}},
        pixtral_features,
        pixtral_tokens,
        GRIDS,
        (80, 8),
        {"spatial_merge_size": 2},
    ),
    Case(
        "pixtral-llava-debug",
        "llava:LlavaForConditionalGeneration",
        {"patch_size": 16, "size": {"longest_edge": 256}},
        pixtral_features,
        pixtral_tokens,
        GRIDS,
        (120, 8),
        {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
    ),
    Case(
        "llava-onevision-debug",
        "llava_onevision:LlavaOnevisionForConditionalGeneration",
        {"size": {"height": 60, "width": 60}, "image_grid_pinpoints": PINPOINTS},
        onevision_features,
        onevision_tokens,
        (AnyresGeometry(IMAGE, 7, 100, 151), TileGeometry(VIDEO, 3), AnyresGeometry(IMAGE, 2, 40, 31)),
        (14 * 16, 1),
        {"image_grid_pinpoints": PINPOINTS},
    ),
    Case(
        "ovis2-debug",
        "ovis2:Ovis2ForConditionalGeneration",
        {"size": {"height": 56, "width": 56}, "crop_to_patches": True, "max_patches": 6},
        ovis_features,
        ovis_tokens,
        (TileGeometry(IMAGE, 1), TileGeometry(IMAGE, 5), TileGeometry(IMAGE, 2)),
        (10 * 4, 1),
        {"hidden_size": 64, "vocab_size": 512},
    ),
)
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.preset)


@cache
def built(preset: str) -> VisionEncoder:
    return checks.build(checks.preset_source(preset))


@each_case
@torch.inference_mode()
def test_eager_equals_stock(case: Case) -> None:
    encoder = built(case.preset)
    inputs = checks.inputs_of(encoder, case.items)
    eager = encode_eagerly(encoder, inputs)
    assert [len(rows) for rows in eager] == [encoder.rule.final_tokens(item) for item in case.items]
    with checks.transformers_attention(encoder):
        assert checks.relative_error(torch.cat(eager), encoder.stock_forward(inputs)) <= 1e-6


@each_case
def test_padding_and_graphs_equal_eager(case: Case) -> None:
    encoder, (tokens, segments) = built(case.preset), case.capacity
    checks.assert_padded_equals_eager(encoder, case.items, GraphKey("default", tokens, segments))
    smallest = encoder.rule.budget_range(tokens)[0]
    checks.assert_manager_equals_eager(encoder, case.items, [min(smallest, tokens // 2), tokens], max_items=3)


@each_case
def test_operations_are_counted(case: Case) -> None:
    checks.assert_flops_are_counted(built(case.preset), case.items)


@each_case
@torch.inference_mode()
def test_a_saved_checkpoint_gives_transformers_features_and_counts(case: Case, tmp_path: Path) -> None:
    source = resolve_model(case.preset)
    module, name = case.model.split(":")
    model_class = getattr(importlib.import_module(f"transformers.models.{module}.modeling_{module}"), name)
    text = {**TEXT, "model_type": "qwen2", "hidden_size": source.extra["text_hidden_size"]}
    vision = {**dict(source.vision_config), "model_type": VISION_TYPES[source.row.name]}
    model = model_class(model_class.config_class(vision_config=vision, text_config=text, **case.config)).float().eval()
    draw_weights(model)
    model.save_pretrained(tmp_path)
    processor_class = source.row.encoder_class().image_processor_class()
    assert processor_class is not None
    processor_class(**case.processor).save_pretrained(tmp_path)
    encoder = load_encoder(resolve_model(str(tmp_path)), checks.plain_backend(), device=checks.CPU, dtype=torch.float32)
    images = [checks.random_image(90, 61), checks.random_image(57, 420, 1), checks.random_image(64, 64, 2)]
    wanted = case.features(model, case.processor, images)
    inputs = encoder.make_inputs(*encoder.preprocess(images))
    assert checks.relative_error(torch.cat(encode_eagerly(encoder, inputs)), wanted) <= TOLERANCE
    assert checks.relative_error(replayed(encoder, inputs), wanted) <= TOLERANCE
    for width, height in (*checks.random_sizes(300, 900), (2000, 3), (1, 1)):
        try:
            tokens = encoder.rule.final_tokens(encoder.rule.image_geometry(width, height))
        except InputError:
            tokens = 0
        assert tokens == case.tokens(encoder, case.processor, width, height), (width, height)


VISION_TYPES = {"pixtral": "pixtral", "llava_onevision": "siglip_vision_model", "ovis2": "ovis2_vision"}
"""transformers' `model_type` of each row's tower."""


def test_llava_with_another_tower_is_refused() -> None:
    config = {"architectures": ["LlavaForConditionalGeneration"], "vision_config": {"model_type": "clip_vision_model"}}
    with pytest.raises(ModelError, match="LlavaForConditionalGeneration"):
        row_of_config(config)
    pixtral = {**config, "vision_config": {"model_type": "pixtral"}, "vision_feature_layer": -2}
    with pytest.raises(ModelError, match="only -1"):
        row_of_config(pixtral).encoder_class().read_model_config(pixtral)
