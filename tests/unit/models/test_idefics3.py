"""Idefics 3 and SmolVLM against transformers: tiles, values, padding, loading, operations."""

from pathlib import Path

import encoder_checks as checks
import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from vitgraph.models.encoder import VisionEncoder
from vitgraph.models.geometry import TileGeometry
from vitgraph.planning.budgets import IMAGE, GraphKey

ITEMS = [TileGeometry(IMAGE, 1), TileGeometry(IMAGE, 5), TileGeometry(IMAGE, 2)]


@pytest.fixture(scope="module")
def encoder() -> VisionEncoder:
    return checks.build(checks.preset_source("idefics3-debug"))


@pytest.mark.parametrize(("longest", "split"), [(128, True), (32, True), (20, True), (100, True), (128, False)])
def test_tiles_are_those_of_the_processor(longest: int, split: bool) -> None:
    changes = {"longest_edge": longest, "do_image_splitting": split}
    rule = checks.preset_source("smolvlm-500m", vision_config={"image_size": 64}, processor=changes).rule()
    processor = Idefics3ImageProcessorPil(
        size={"longest_edge": longest}, max_image_size={"longest_edge": 64}, do_image_splitting=split
    )
    for width, height in ((1, 1), (7, 300), (300, 7), (64, 64), (65, 63), (90, 61), (61, 90), (333, 77), (128, 100)):
        image = Image.new("RGB", (width, height))
        tiles = len(processor(images=[image], return_tensors="np")["pixel_values"][0])
        spec = rule.item_spec(rule.geometry(width, height))
        assert (spec.input_size, spec.output_tokens) == (tiles, tiles), (width, height)
        assert tiles <= rule.most_segments()


def test_eager_equals_stock(encoder: VisionEncoder) -> None:
    checks.assert_eager_equals_stock(encoder, ITEMS)


def test_padding_and_graphs_equal_eager(encoder: VisionEncoder) -> None:
    checks.assert_padded_equals_eager(encoder, ITEMS, GraphKey("default", 10 * 4, 1))
    checks.assert_manager_equals_eager(encoder, ITEMS, [4, 12, 40], max_items=3)


def test_operations_are_counted(encoder: VisionEncoder) -> None:
    checks.assert_flops_are_counted(encoder, ITEMS)


@torch.inference_mode()
def test_real_images_become_the_rules_tiles(encoder: VisionEncoder) -> None:
    random = np.random.default_rng(0)
    images = [Image.fromarray(random.integers(0, 256, (h, w, 3), dtype=np.uint8)) for w, h in ((200, 90), (40, 40))]
    items, pixels = encoder.preprocess(images)
    assert bool(torch.isfinite(encoder.encoder_eager_forward(encoder.make_inputs(items, pixels))).all())


def test_published_checkpoint_loads(tmp_path: Path, encoder: VisionEncoder) -> None:
    source = checks.preset_source("idefics3-debug")
    state = checks.stock_state(encoder)
    published = {"visual": "model.vision_model", "projector": "model.connector"}
    names = {name: ".".join([published[name.split(".")[0]], *name.split(".")[1:]]) for name in state}
    config = {
        "architectures": ["Idefics3ForConditionalGeneration"],
        "vision_config": dict(source.vision_config),
        "text_config": {"hidden_size": 64},
        "scale_factor": 2,
    }
    checks.write_checkpoint(tmp_path, config, {names[name]: tensor for name, tensor in state.items()})
    checks.assert_same_weights(checks.load_folder(tmp_path, source), encoder)
