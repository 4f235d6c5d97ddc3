"""Llama 4: canvases as the processor picks them, equality with transformers, rotary dtype, padding, loading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import encoder_checks as checks
import pytest
import torch
from transformers.image_utils import SizeDict

from vitgraph.errors import InputError, ModelError
from vitgraph.models.encoder import VisionEncoder
from vitgraph.models.families.llama4 import Llama4Encoder
from vitgraph.models.geometry import TileGeometry
from vitgraph.models.registry import ModelSource
from vitgraph.planning.budgets import IMAGE, GraphKey

MIXED = (TileGeometry(IMAGE, 1), TileGeometry(IMAGE, 5), TileGeometry(IMAGE, 17), TileGeometry(IMAGE, 3))

_, PROCESSOR = checks.transformers_processor("llama4.image_processing_llama4:Llama4ImageProcessor")


def source(preset: str = "llama4-debug", **changes: Any) -> ModelSource:
    return checks.preset_source(preset, **changes)


@pytest.fixture(scope="module")
def encoder() -> VisionEncoder:
    return checks.build(source())


@pytest.mark.parametrize(("most", "to_max"), [(16, False), (16, True), (5, False), (1, False)])
def test_tiles_are_those_of_the_processor(most: int, to_max: bool) -> None:
    settings = {"max_patches": most, "resize_to_max_canvas": to_max}
    rule = source("llama-4-scout", processor=settings).rule()
    canvases = torch.tensor(PROCESSOR.find_supported_resolutions(most, SizeDict(height=336, width=336)))
    for width, height in (*checks.SIZES, *checks.random_sizes(400, 8000)):
        canvas = [int(side) for side in PROCESSOR.get_best_fit((height, width), canvases, to_max)]
        tiles = canvas[0] * canvas[1] // 336**2
        tiles += tiles > 1
        spec = rule.item_spec(rule.geometry(width, height))
        assert (spec.input_size, spec.output_tokens, spec.segments) == (tiles, 144 * tiles, tiles), (width, height)


@torch.inference_mode()
def test_token_counts_are_the_rows_of_the_forward(encoder: VisionEncoder) -> None:
    items = [encoder.rule.geometry(width, height) for width, height in checks.SIZES]
    rows = len(encoder.encoder_eager_forward(checks.inputs_of(encoder, items)))
    assert rows == sum(checks.tokens_of(encoder.rule, items))
    assert max(item.tiles for item in items) == encoder.rule.graph_config().max_frames_per_video == 17  # type: ignore[attr-defined]


def test_videos_and_sizes_without_pixels_are_refused() -> None:
    rule = source().rule()
    with pytest.raises(InputError, match=r"640x480x8.*images only"):
        rule.geometry(640, 480, 8)
    with pytest.raises(InputError, match="640x0x1"):
        rule.geometry(640, 0)


def test_tiles_that_do_not_merge_are_refused() -> None:
    with pytest.raises(ModelError, match=r"126 pixels.*multiple of 28"):
        source(vision_config={"image_size": 126}).rule()


def test_eager_equals_stock(encoder: VisionEncoder) -> None:
    checks.assert_eager_equals_stock(encoder, MIXED)


@torch.inference_mode()
def test_half_precision_keeps_the_complex_rotary_table(encoder: VisionEncoder) -> None:
    half = checks.build(source(), dtype=torch.bfloat16)
    table, exact_table = (
        dict(built.modules.named_buffers())["visual.rotary_embedding.freqs_ci"] for built in (half, encoder)
    )
    assert table.dtype == torch.complex64 and torch.equal(table, exact_table)
    exact = encoder.encoder_eager_forward(checks.inputs_of(encoder, MIXED))
    inputs = checks.inputs_of(encoder, MIXED)
    rounded = half.make_inputs(MIXED, {"pixel_values": inputs.pixels["pixel_values"].bfloat16()})
    assert checks.relative_error(half.encoder_eager_forward(rounded), exact) < 0.03


@pytest.mark.parametrize("budget", [26 * 16, 27 * 16, 40 * 16 + 9])
def test_padded_equals_eager(encoder: VisionEncoder, budget: int) -> None:
    checks.assert_padded_equals_eager(encoder, MIXED, GraphKey("default", budget, budget // 16))


def test_replayed_equals_eager(encoder: VisionEncoder) -> None:
    checks.assert_manager_equals_eager(encoder, MIXED, [16, 64, 128, 288], max_items=2)


def test_operations_are_those_that_torch_counts(encoder: VisionEncoder) -> None:
    checks.assert_flops_are_counted(encoder, (TileGeometry(IMAGE, 1), TileGeometry(IMAGE, 5)))


@pytest.mark.parametrize("prefix", ["", "model."])
def test_published_checkpoint_loads(tmp_path: Path, prefix: str) -> None:
    expected = checks.build(source())
    names = {"visual": f"{prefix}vision_model", "projector": f"{prefix}multi_modal_projector"}
    tensors = checks.published(
        expected.modules.state_dict(), lambda key: ".".join([names[key.split(".")[0]], *key.split(".")[1:]])
    )
    checks.write_checkpoint(tmp_path, {}, tensors)
    checks.assert_same_weights(checks.load_folder(tmp_path, source()), expected)


def test_published_config_is_read() -> None:
    vision = {"hidden_size": 1408, "image_size": 336, "rope_theta": 10000, "vision_output_dim": 4096}
    config = {
        "vision_config": {**vision, "model_type": "llama4_vision_model", "torch_dtype": "bfloat16"},
        "text_config": {"hidden_size": 5120},
    }
    assert Llama4Encoder.read_model_config(config) == (vision, {"text_hidden_size": 5120})
    published = {"max_patches": 12, "resize_to_max_canvas": True, "size": {"height": 336, "width": 336}}
    assert Llama4Encoder.read_processor_config(published) == {"max_patches": 12, "resize_to_max_canvas": True}
