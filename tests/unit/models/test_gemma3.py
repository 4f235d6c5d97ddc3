"""Gemma 3: crops as the processor makes them, equality with transformers, padding, published checkpoint forms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import encoder_checks as checks
import numpy as np
import pytest
import torch
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

from vitgraph.errors import InputError, ModelError
from vitgraph.models.encoder import VisionEncoder
from vitgraph.models.families.gemma3 import Gemma3Encoder
from vitgraph.models.geometry import TileGeometry
from vitgraph.models.registry import ModelSource
from vitgraph.planning.budgets import IMAGE, GraphKey

MIXED = (TileGeometry(IMAGE, 1), TileGeometry(IMAGE, 4), TileGeometry(IMAGE, 1), TileGeometry(IMAGE, 3))
SCANNING = {"do_pan_and_scan": True}


def source(preset: str = "gemma3-debug", **changes: Any) -> ModelSource:
    return checks.preset_source(preset, **changes)


@pytest.fixture(scope="module")
def encoder() -> VisionEncoder:
    return checks.build(source())


def test_every_image_is_one_crop_by_default() -> None:
    rule = source("gemma-3-4b").rule()
    specs = [rule.item_spec(rule.geometry(*size)) for size in checks.SIZES]
    assert {(spec.input_size, spec.output_tokens, spec.segments) for spec in specs} == {(1, 256, 1)}


@pytest.mark.parametrize("changes", [{}, {"pan_and_scan_min_crop_size": 64, "pan_and_scan_max_num_crops": 7}])
def test_pan_and_scan_crops_are_those_of_the_processor(changes: dict[str, int]) -> None:
    rule = source("gemma-3-4b", processor={**SCANNING, **changes}).rule()
    processor = Gemma3ImageProcessorPil()
    settings = {name: rule.processor[name] for name in Gemma3Encoder.image_settings[1:4]}
    seen = set()
    for width, height in (*checks.SIZES, *checks.random_sizes(400, 8000)):
        # One byte that stands for every pixel: only the sizes matter.
        image = np.broadcast_to(np.uint8(0), (3, height, width))
        crops = 1 + len(processor.pan_and_scan(image, **settings))
        spec = rule.item_spec(rule.geometry(width, height))
        assert (spec.input_size, spec.output_tokens) == (crops, 256 * crops), (width, height)
        assert crops <= rule.graph_config().max_frames_per_video
        seen.add(crops)
    assert seen >= {1, 3, 4, 5}


@torch.inference_mode()
def test_token_counts_are_the_rows_of_the_forward() -> None:
    encoder = checks.build(source(processor={**SCANNING, "pan_and_scan_min_crop_size": 16}))
    items = [encoder.rule.geometry(width, height) for width, height in checks.SIZES]
    rows = len(encoder.encoder_eager_forward(checks.inputs_of(encoder, items)))
    assert rows == sum(checks.tokens_of(encoder.rule, items)) > 16 * len(items)


def test_videos_and_sizes_without_pixels_are_refused() -> None:
    rule = source().rule()
    with pytest.raises(InputError, match=r"640x480x2.*images only"):
        rule.geometry(640, 480, 2)
    with pytest.raises(InputError, match="0x480x1"):
        rule.geometry(0, 480)


@pytest.mark.parametrize("tokens", [10, 9])
def test_crops_that_do_not_pool_are_refused(tokens: int) -> None:
    with pytest.raises(ModelError, match=f"mm_tokens_per_image is {tokens}.*16 patches"):
        source(extra={"mm_tokens_per_image": tokens}).rule()


def test_eager_equals_stock(encoder: VisionEncoder) -> None:
    checks.assert_eager_equals_stock(encoder, MIXED)


@pytest.mark.parametrize("budget", [9 * 16, 10 * 16, 16 * 16 + 3])
def test_padded_equals_eager(encoder: VisionEncoder, budget: int) -> None:
    checks.assert_padded_equals_eager(encoder, MIXED, GraphKey("default", budget, budget // 16))


def test_replayed_equals_eager(encoder: VisionEncoder) -> None:
    checks.assert_manager_equals_eager(encoder, MIXED, [32, 64, 96], max_items=3)


def test_operations_are_those_that_torch_counts(encoder: VisionEncoder) -> None:
    checks.assert_flops_are_counted(encoder, (TileGeometry(IMAGE, 1), TileGeometry(IMAGE, 3)))


@torch.inference_mode()
def test_preprocess_is_the_processors() -> None:
    encoder = checks.build(source(processor={**SCANNING, "pan_and_scan_min_crop_size": 16}))
    images = [checks.random_image(*size) for size in ((500, 90), (224, 224), (60, 71))]
    items, pixels = encoder.preprocess(images)
    assert items == [TileGeometry(IMAGE, 5), TileGeometry(IMAGE, 1), TileGeometry(IMAGE, 1)]
    expected = torch.from_numpy(np.array(images[1])).permute(2, 0, 1) / 127.5 - 1
    assert torch.allclose(pixels["pixel_values"][5], expected, atol=1e-5)
    assert len(encoder.encoder_eager_forward(encoder.make_inputs(items, pixels))) == 7 * 16


@pytest.mark.parametrize(
    ("tower", "projector"),
    [
        ("vision_tower.vision_model", "multi_modal_projector"),
        ("model.vision_tower.vision_model", "model.multi_modal_projector"),
        ("model.vision_tower", "model.multi_modal_projector"),
    ],
)
def test_published_checkpoint_loads(tmp_path: Path, tower: str, projector: str) -> None:
    expected = checks.build(source())
    prefixes = {"visual": tower, "projector": projector}
    tensors = checks.published(
        checks.stock_state(expected), lambda key: ".".join([prefixes[key.split(".")[0]], *key.split(".")[1:]])
    )
    # Checkpoints saved before the attention-pooling head was dropped hold it; the tower has none.
    tensors[f"{tower}.head.probe"] = torch.zeros(1, 1, 48)
    checks.write_checkpoint(tmp_path, {}, tensors)
    checks.assert_same_weights(checks.load_folder(tmp_path, source()), expected)


def test_published_config_is_read() -> None:
    config = {
        "mm_tokens_per_image": 64,
        "text_config": {"hidden_size": 2560},
        "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model", "vision_use_head": False},
    }
    assert Gemma3Encoder.read_model_config(config) == (
        {"hidden_size": 1152, "vision_use_head": False},
        {"text_hidden_size": 2560, "mm_tokens_per_image": 64},
    )
    published = {
        "do_pan_and_scan": None,
        "pan_and_scan_max_num_crops": None,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    assert Gemma3Encoder.read_processor_config(published) == {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    assert Gemma3Encoder.read_processor_config({"do_pan_and_scan": True}) == {"do_pan_and_scan": True}
