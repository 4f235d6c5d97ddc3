"""ERNIE-4.5-VL: sizes as the processors give them, resampler pairs, capacity of mixed batches, padding, loading."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import encoder_checks as checks
import pytest
import torch
from transformers.models.ernie4_5_vl_moe.image_processing_pil_ernie4_5_vl_moe import (
    Ernie4_5_VLMoeImageProcessorPil,
)

from vitgraph.errors import InputError, ModelError
from vitgraph.models.encoder import VisionEncoder
from vitgraph.models.families.ernie4_5_vl import Ernie45VLEncoder
from vitgraph.models.geometry import GridGeometry
from vitgraph.models.registry import ModelSource
from vitgraph.planning.budgets import IMAGE, VIDEO, GraphKey

IMAGES = (GridGeometry(IMAGE, 1, 4, 6), GridGeometry(IMAGE, 1, 2, 2), GridGeometry(IMAGE, 1, 8, 2))
VIDEOS = (GridGeometry(VIDEO, 2, 4, 4), GridGeometry(VIDEO, 6, 2, 6), GridGeometry(VIDEO, 8, 2, 2))
MIXED = (IMAGES[0], VIDEOS[0], IMAGES[1], VIDEOS[1], VIDEOS[2], IMAGES[2])
PROCESSORS = "ernie4_5_vl_moe.video_processing_ernie4_5_vl_moe"
VIDEO_PROCESSOR, _ = checks.transformers_processor(f"{PROCESSORS}:Ernie4_5_VLMoeVideoProcessor")


def source(preset: str = "ernie4.5-vl-debug", **changes: Any) -> ModelSource:
    return checks.preset_source(preset, **changes)


@pytest.fixture(scope="module")
def encoder() -> VisionEncoder:
    return checks.build(source())


def taken_by(processor_takes: Any, *arguments: Any) -> bool:
    try:
        processor_takes(*arguments)
    except ValueError:
        return False
    return True


def test_image_tokens_are_those_of_the_processor() -> None:
    rule = source("ernie-4.5-vl-28b-a3b").rule()
    processor = Ernie4_5_VLMoeImageProcessorPil(size=dict(rule.processor["size"]))
    refused = 0
    for width, height in (*checks.SIZES, *checks.random_sizes(300, 8000)):
        if not taken_by(processor.get_number_of_image_patches, height, width):
            refused += 1
            with pytest.raises(InputError, match=f"{width}x{height}.*200"):
                rule.geometry(width, height)
            continue
        patches = processor.get_number_of_image_patches(height, width)
        spec = rule.item_spec(rule.geometry(width, height))
        assert (spec.input_size, spec.output_tokens, spec.segments) == (patches, patches // 4, 1), (width, height)
        assert spec.output_tokens >= rule.graph_config().min_tokens_per_segment
    assert refused > 0


@pytest.mark.parametrize("frames", [1, 2, 3, 16, 61])
def test_video_tokens_are_those_of_the_processor(frames: int) -> None:
    rule = source("ernie-4.5-vl-28b-a3b").rule()
    video = rule.processor["video"]
    processor = SimpleNamespace(size=video, patch_size=14, merge_size=2, temporal_patch_size=2)
    for width, height in checks.SIZES:
        patches = VIDEO_PROCESSOR.get_num_of_video_patches(processor, frames, height, width)
        spec = rule.item_spec(rule.video_geometry(width, height, frames, None))
        segments = frames + frames % 2
        assert (spec.input_size, spec.output_tokens, spec.segments) == (patches, patches // 8, segments)
        assert spec.output_tokens / segments >= rule.graph_config().min_tokens_per_segment


@pytest.mark.parametrize("fps", [None, 2])
def test_frames_of_a_file_are_sampled_as_the_processor_does(fps: int | None) -> None:
    video = {**source().processor["video"], "fps": fps}
    rule = source(processor={"video": video}).rule()
    processor = SimpleNamespace(num_frames=None, min_frames=16, max_frames=180)
    for frames in (2, 15, 16, 17, 31, 179, 180, 181, 301, 900, 5000):
        for file_fps in (10.0, 23.976, 30.0):
            metadata = SimpleNamespace(total_num_frames=frames, fps=file_fps)
            kept = len(VIDEO_PROCESSOR.sample_frames(processor, metadata, fps=fps))
            grid = rule.video_geometry(320, 240, frames, file_fps)
            assert grid.t == kept + kept % 2, (frames, file_fps)  # type: ignore[attr-defined]
            assert grid.t <= rule.graph_config().max_frames_per_video  # type: ignore[attr-defined]


def test_grids_that_would_lose_tokens_are_refused() -> None:
    rule = source().rule()
    with pytest.raises(InputError, match=r"\[1, 5, 7\].*merge 2"):
        rule.item_spec(GridGeometry(IMAGE, 1, 5, 7))
    with pytest.raises(InputError, match=r"\[3, 4, 4\].*3 frames.*4"):
        rule.item_spec(GridGeometry(VIDEO, 3, 4, 4))
    with pytest.raises(ModelError, match="temporal_merge_size is 4"):
        source(vision_config={"temporal_merge_size": 4}).rule()


@torch.inference_mode()
def test_token_counts_are_the_rows_of_the_forward(encoder: VisionEncoder) -> None:
    sizes = [size for size in checks.SIZES if size != (1, 1)]
    items = [encoder.rule.geometry(*size) for size in ((1, 1), *sizes)]
    items += [encoder.rule.geometry(320, 240, frames) for frames in (1, 2, 9)]
    rows = len(encoder.encoder_eager_forward(checks.inputs_of(encoder, items)))
    assert rows == sum(checks.tokens_of(encoder.rule, items))


def test_eager_equals_stock(encoder: VisionEncoder) -> None:
    for items in (MIXED, IMAGES, VIDEOS):
        checks.assert_eager_equals_stock(encoder, items)


CASES = [
    (IMAGES, (4,), 11, 3),
    (IMAGES, (4,), 40, 8),
    (IMAGES, (8,), 11, 3),
    (VIDEOS, (8,), 17, 16),
    (MIXED, (8,), 28, 19),
    (MIXED, (8,), 64, 30),
]


@pytest.mark.parametrize(("items", "axis_key", "budget", "slots"), CASES)
def test_padded_equals_eager(
    encoder: VisionEncoder, items: tuple[GridGeometry, ...], axis_key: tuple[int, ...], budget: int, slots: int
) -> None:
    checks.assert_padded_equals_eager(encoder, items, GraphKey("default", budget, slots, axis_key))


def test_images_do_not_pay_for_the_patches_of_videos(encoder: VisionEncoder) -> None:
    rows = {
        key: encoder.prepare_encoder_cudagraph_capture_inputs(GraphKey("default", 64, 4, key)) for key in ((4,), (8,))
    }
    assert {key: inputs.pixels["pixel_values"].rows for key, inputs in rows.items()} == {(4,): 256, (8,): 512}
    images = [encoder.rule.geometry(*size) for size in ((56, 56), (200, 90), (30, 300))]
    videos = [encoder.rule.geometry(80, 80, frames) for frames in (2, 5)]
    manager = checks.assert_manager_equals_eager(encoder, [*videos, *images, *videos], [16, 32, 64], max_items=4)
    assert {key.axis_key for key in manager.graphs} == {(4,), (8,)}
    for items, key in ((images, (4,)), (videos[:1], (8,)), ((images[0], videos[0]), (8,))):
        batches = manager.plan_call(checks.inputs_of(encoder, items)).batches
        assert [run.key.axis_key for batch in batches for run in batch.runs.values() if run.key] == [key]


def test_operations_are_those_that_torch_counts(encoder: VisionEncoder) -> None:
    checks.assert_flops_are_counted(encoder, (*IMAGES, *VIDEOS))


def original_name(key: str) -> str:
    """The name in the published checkpoint, whose resampler numbers its layers."""
    part, name = key.split(".", 1)
    if part == "visual":
        return f"vision_model.{name}"
    for ours, number in (("fc1", "0"), ("fc2", "2"), ("ln", "3")):
        for stage in ("spatial_linear", "temporal_linear"):
            name = name.replace(f"{stage}.{ours}.", f"{stage}.{number}.")
    return f"model.resampler_model.{name}"


def transformers_name(key: str) -> str:
    part, name = key.split(".", 1)
    return f"model.{'vision_tower' if part == 'visual' else 'resampler_model'}.{name}"


@pytest.mark.parametrize("rename", [original_name, transformers_name])
def test_published_checkpoint_loads(tmp_path: Path, rename: Any) -> None:
    expected = checks.build(source())
    checks.write_checkpoint(tmp_path, {}, checks.published(expected.modules.state_dict(), rename))
    checks.assert_same_weights(checks.load_folder(tmp_path, source()), expected)


def test_original_config_is_read() -> None:
    vision = {
        "depth": 32,
        "embed_dim": 1280,
        "hidden_size": 1280,
        "hidden_act": "quick_gelu",
        "mlp_ratio": 4,
        "num_heads": 16,
        "in_channels": 3,
        "patch_size": 14,
        "model_type": "DFNRope_vision_transformer",
    }
    config = {
        "vision_config": vision,
        "hidden_size": 2560,
        "rms_norm_eps": 1e-5,
        "spatial_conv_size": 2,
        "temporal_conv_size": 2,
    }
    read, extra = Ernie45VLEncoder.read_model_config(config)
    kept = ("depth", "hidden_size", "hidden_act", "num_heads", "in_channels", "patch_size")
    assert read == {
        **{name: vision[name] for name in kept},
        "intermediate_size": 5120,
        "spatial_merge_size": 2,
        "temporal_merge_size": 2,
    }
    assert extra == {"text_hidden_size": 2560, "text_rms_norm_eps": 1e-5}
    nested = {"vision_config": read, "text_config": {"hidden_size": 2560, "rms_norm_eps": 1e-5}}
    assert Ernie45VLEncoder.read_model_config(nested) == (read, extra)


def test_published_processor_settings_are_read() -> None:
    read = Ernie45VLEncoder.read_processor_config({"min_pixels": 3136, "max_pixels": 4816896, "patch_size": 14})
    assert read["size"] == {"shortest_edge": 3136, "longest_edge": 4816896}
    video = {"size": {"shortest_edge": 1000, "longest_edge": 2000}, "min_frames": 8, "max_frames": 90}
    read_video = Ernie45VLEncoder.read_video_processor_config(video)
    assert read_video == {"shortest_edge": 1000, "longest_edge": 2000, "min_frames": 8, "max_frames": 90}


def test_smallest_budget_is_a_small_image() -> None:
    rule = source("ernie-4.5-vl-28b-a3b").rule()
    assert rule.budget_range(8192) == (64, 8192)
    assert math.ceil(rule.image_pixel_range[0] / 28**2) == rule.graph_config().min_tokens_per_segment == 4  # type: ignore[attr-defined]
