"""Rows that transformers has: a checkpoint that it saved, loaded with `auto`, gives its features and its counts.

Processors run as transformers has them. Two rows prepare pixels as their published code does, with Pillow, where
transformers' class has torch resize: they are compared on its pixels, and their own may differ by two levels of 255.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.unit.models.encoder_checks import random_image, random_sizes, relative_error
from tests.unit.models.oracles import NO_CLASS, ORACLES, Checkpoint, saved_checkpoint
from vitgraph.errors import InputError
from vitgraph.graphs.manager import EncoderCudaGraphManager
from vitgraph.library import encode_eagerly
from vitgraph.measure.setup import plan_graphs
from vitgraph.models.base import EncoderInputs
from vitgraph.models.registry import ROWS
from vitgraph.models.two_path import GLOBAL_PIXELS, TwoPathEncoder
from vitgraph.planning.budgets import VIDEO
from vitgraph.specs.parts import GraphSpec

TOLERANCE = 1e-5
TWO_LEVELS = 2 / 255 / 0.26


def test_each_row_has_an_oracle_or_a_reason() -> None:
    assert sorted([*ORACLES, *NO_CLASS]) == sorted(row.name for row in ROWS)


@pytest.fixture(scope="module", params=ORACLES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return saved_checkpoint(request.param, tmp_path_factory.mktemp("oracle"))


def assert_rows(checkpoint: Checkpoint, inputs: EncoderInputs, wanted: torch.Tensor) -> None:
    """The call's embeddings are those rows, run eagerly and by graphs, every batch of it replayed."""
    encoder = checkpoint.encoder
    assert relative_error(torch.cat(encode_eagerly(encoder, inputs)), wanted) <= TOLERANCE
    specs = encoder.get_encoder_cudagraph_item_specs(inputs)
    budget = 2 * sum(item.output_tokens for item in specs)
    spec = GraphSpec(token_budgets=(budget,), max_vision_items_per_batch=8)
    manager = EncoderCudaGraphManager(encoder, plan_graphs(encoder.rule, spec, specs))
    manager.capture()
    assert all(batch.is_hit for batch in manager.plan_call(inputs).batches)
    assert relative_error(torch.cat(manager.execute(inputs)), wanted) <= TOLERANCE


@pytest.mark.slow
@torch.inference_mode()
def test_images_have_the_features_that_transformers_gives(checkpoint: Checkpoint) -> None:
    encoder = checkpoint.encoder
    images = [random_image(90, 61), random_image(57, 120, 1), random_image(64, 64, 2), random_image(300, 230, 3)]
    batch = checkpoint.processor(images=images, return_tensors="pt", **checkpoint.oracle.call)
    items, pixels = encoder.preprocess(images)
    if isinstance(encoder, TwoPathEncoder):
        theirs = {GLOBAL_PIXELS: batch["pixel_values"], encoder.rule.local_pixels: batch["pixel_values_local"]}
        for name, views in theirs.items():
            theirs[name] = views if isinstance(views, torch.Tensor) else torch.stack(list(views))
            assert (pixels[name] - theirs[name]).abs().max() <= TWO_LEVELS
        pixels = theirs
    assert_rows(checkpoint, encoder.make_inputs(items, pixels), checkpoint.oracle.images(checkpoint.model, batch))


def video_batch(checkpoint: Checkpoint, frames: np.ndarray) -> Mapping[str, Any]:
    return checkpoint.video_processor(
        videos=[frames], do_sample_frames=False, input_data_format="channels_last", return_tensors="pt"
    )


@pytest.mark.slow
@torch.inference_mode()
def test_videos_have_the_features_that_transformers_gives(checkpoint: Checkpoint) -> None:
    encoder = checkpoint.encoder
    if VIDEO not in encoder.rule.modalities:
        pytest.skip("takes images only")
    frames = np.stack([np.asarray(random_image(150, 110, seed)) for seed in range(4)])
    batch = video_batch(checkpoint, frames)
    grid = encoder.rule.geometry(150, 110, len(frames))
    pixels = {"pixel_values": checkpoint.oracle.video_rows(batch, grid)}
    assert_rows(checkpoint, encoder.make_inputs([grid], pixels), checkpoint.oracle.videos(checkpoint.model, batch))


@pytest.mark.slow
def test_sizes_have_the_counts_that_transformers_gives(checkpoint: Checkpoint) -> None:
    rule = checkpoint.encoder.rule
    for width, height in random_sizes(120, 900):
        try:
            mine: int | None = rule.final_tokens(rule.geometry(width, height))
        except InputError:
            mine = None
        assert mine == counted(checkpoint, width, height) or is_rounded(rule, width, height), (width, height)


def is_rounded(rule: Any, width: int, height: int) -> bool:
    """Whether Step3's published code and transformers' round a side that is a fifth above whole windows differently."""
    window = rule.window(width, height) if hasattr(rule, "window") else 0
    return bool(window) and any(side % window * 5 == window for side in (width, height))


def counted(checkpoint: Checkpoint, width: int, height: int) -> int | None:
    """Tokens of an image of that size by the real processor; None where it refuses it."""
    rule: Any = checkpoint.encoder.rule
    processor = checkpoint.processor
    if checkpoint.oracle.image_tokens is not None:
        return checkpoint.oracle.image_tokens(rule, width, height)
    try:
        if hasattr(processor, "get_number_of_image_patches") and not isinstance(checkpoint.encoder, TwoPathEncoder):
            patches = processor.get_number_of_image_patches(height, width, dict(checkpoint.oracle.call))
            patches = patches[0] if isinstance(patches, tuple) else patches
            return int(patches * getattr(rule, "tokens_per_tile", 1 / getattr(rule, "merge", 1) ** 2))
        batch = processor(images=[Image.new("RGB", (width, height))], return_tensors="pt", **checkpoint.oracle.call)
    except ValueError:
        return None
    if "num_soft_tokens_per_image" in batch:
        return int(np.asarray(batch["num_soft_tokens_per_image"]).sum())
    if "image_sizes" in batch:
        return int((torch.as_tensor(batch["image_sizes"]) // rule.factor).prod(-1).sum())
    if "spatial_shapes" in batch:
        return int((batch["spatial_shapes"] // rule.merge).prod(-1).sum())
    if not isinstance(checkpoint.encoder, TwoPathEncoder):
        return int(len(batch["pixel_values"]) * rule.tokens_per_tile)
    (crops,) = batch["num_local_patches"]
    whole, crop = rule.path_tokens.values()
    if "patches_grid" not in batch:
        return int(whole + crops * crop)
    # The published layout: a newline ends every row of the joined crops, and a separator the image.
    ((columns, rows),) = batch["patches_grid"]
    side = round(crop**0.5)
    return int(whole + 1 + (rows * side * (columns * side + 1) if crops else 0))


@pytest.mark.slow
def test_video_sizes_have_the_counts_that_transformers_gives(checkpoint: Checkpoint) -> None:
    rule = checkpoint.encoder.rule
    if VIDEO not in rule.modalities:
        pytest.skip("takes images only")
    for index, (width, height) in enumerate(random_sizes(60, 300)):
        frames = 2 + index % 5
        try:
            mine: int | None = rule.final_tokens(rule.geometry(width, height, frames))
        except InputError:
            mine = None
        assert mine == counted_frames(checkpoint, width, height, frames), (width, height, frames)


def counted_frames(checkpoint: Checkpoint, width: int, height: int, frames: int) -> int | None:
    """Tokens of a video of that size by the real processor; None where it refuses it."""
    rule: Any = checkpoint.encoder.rule
    try:
        batch = video_batch(checkpoint, np.zeros((frames, height, width, 3), dtype=np.uint8))
    except ValueError:
        return None
    if "num_soft_tokens_per_video" in batch:
        return int(batch["num_soft_tokens_per_video"][0] * frames)
    if "video_grid_thw" not in batch:
        of_frame, of_end = checkpoint.oracle.frame_tokens(rule)
        return int(batch["pixel_values_videos"].shape[1] * of_frame) + of_end
    spec = rule.item_spec(rule.geometry(width, height, frames))
    return int(batch["video_grid_thw"].prod() * spec.output_tokens // spec.input_size)
