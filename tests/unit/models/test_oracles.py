"""Rows that transformers has: a checkpoint that it saved, loaded with `auto`, gives its features and its counts."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.unit.models.encoder_checks import CPU, plain_backend, random_image, random_sizes, relative_error
from vitgraph.errors import InputError
from vitgraph.graphs.manager import EncoderCudaGraphManager
from vitgraph.models.base import EncoderInputs
from vitgraph.models.encoder import VisionEncoder
from vitgraph.models.geometry import GridGeometry
from vitgraph.models.loading import load_encoder
from vitgraph.models.registry import resolve_model, resolve_preset
from vitgraph.planning.budgets import plan_budgets, resolve_budget_settings

pytestmark = pytest.mark.slow

TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "head_dim": 16,
}
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Oracle:
    """One family: what of it transformers needs beside the preset.

    Attributes:
        preset: Its debug-size preset, whose vision config and processor settings are taken.
        model: transformers' model class, in `module:class`.
        text: Fields of the text config, beside or instead of `TEXT`.
        config: Further fields of the config.
        vision: Fields of the vision config instead of the preset's.
        features: From the model, the processed batch and the product's encoder to rows; the default takes grids.
    """

    preset: str
    model: str
    text: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    vision: Mapping[str, Any] = field(default_factory=dict)
    features: Callable[[Any, Mapping[str, Any]], torch.Tensor] | None = None


def rows_of(output: Any) -> torch.Tensor:
    rows = output.pooler_output
    rows = torch.cat(list(rows)) if isinstance(rows, list | tuple) else rows
    levels = [torch.cat(list(level)) if isinstance(level, tuple) else level for level in deepstack(output)]
    return torch.cat([rows.flatten(0, -2), *levels], dim=-1)


def deepstack(output: Any) -> list[torch.Tensor]:
    return list(getattr(output, "deepstack_features", None) or [])


def tile_features(model: Any, batch: Mapping[str, Any]) -> torch.Tensor:
    return rows_of(model.get_image_features(pixel_values=batch["pixel_values"]))


def gemma4_features(model: Any, batch: Mapping[str, Any]) -> torch.Tensor:
    names = ("pixel_values", "image_position_ids")
    return rows_of(model.get_image_features(**{name: batch[name] for name in names}))


MROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [3, 3, 2], "rope_theta": 1e6}}
EXAONE = {"model_type": "exaone4", "layer_types": ["full_attention"]}
EXPERTS = {"moe_num_experts": 4, "moe_intermediate_size": [16, 16], "moe_k": 2}
QWEN2 = {"model_type": "qwen2"}
ORACLES = (
    Oracle("qwen2-vl-debug", "qwen2_vl:Qwen2VLForConditionalGeneration", MROPE),
    Oracle("qwen2.5-vl-debug", "qwen2_5_vl:Qwen2_5_VLForConditionalGeneration", MROPE),
    Oracle("qwen3-vl-debug", "qwen3_vl:Qwen3VLForConditionalGeneration"),
    Oracle("qwen3.5-debug", "qwen3_5:Qwen3_5ForConditionalGeneration", {"layer_types": ["full_attention"]}),
    Oracle("glm-4v-debug", "glm4v:Glm4vForConditionalGeneration"),
    Oracle(
        "internvl-debug", "internvl:InternVLForConditionalGeneration", {"model_type": "qwen2"}, features=tile_features
    ),
    Oracle("gemma3-debug", "gemma3:Gemma3ForConditionalGeneration", features=tile_features),
    Oracle("gemma-4-debug", "gemma4:Gemma4ForConditionalGeneration", features=gemma4_features),
    Oracle("ernie4.5-vl-debug", "ernie4_5_vl_moe:Ernie4_5_VLMoeForConditionalGeneration", {**MROPE, **EXPERTS}),
    Oracle("qwen3.5-moe-debug", "qwen3_5_moe:Qwen3_5MoeForConditionalGeneration", {"layer_types": ["full_attention"]}),
    Oracle("exaone-4.5-debug", "exaone4_5:Exaone4_5_ForConditionalGeneration", EXAONE),
    Oracle("glm-ocr-debug", "glm_ocr:GlmOcrForConditionalGeneration"),
)


@dataclass(frozen=True)
class Checkpoint:
    """A folder that transformers saved, its own model and image processor, and the product's encoder from it."""

    oracle: Oracle
    model: Any
    processor: Any
    encoder: VisionEncoder

    def features(self, batch: Mapping[str, Any]) -> torch.Tensor:
        if self.oracle.features is not None:
            return self.oracle.features(self.model, batch)
        return rows_of(
            self.model.get_image_features(pixel_values=batch["pixel_values"], image_grid_thw=batch["image_grid_thw"])
        )


def saved_checkpoint(oracle: Oracle, folder: Path) -> Checkpoint:
    """The family's random model, saved by transformers and loaded by the product."""
    source = resolve_preset(oracle.preset)
    assert source is not None
    module, name = oracle.model.split(":")
    model_class = getattr(importlib.import_module(f"transformers.models.{module}.modeling_{module}"), name)
    facts = {fact: value for fact, value in source.extra.items() if fact in ("mm_tokens_per_image", "downsample_ratio")}
    text = {**TEXT, **({"hidden_size": source.extra["text_hidden_size"]} if "text_hidden_size" in source.extra else {})}
    vision = {**source.vision_config, **oracle.vision}
    config = model_class.config_class(
        vision_config=vision, text_config={**text, **oracle.text}, **facts, **oracle.config
    )
    model = model_class(config).float().eval()
    draw_weights(model)
    model.save_pretrained(folder)
    encoder_class = source.row.encoder_class()
    processor_class = encoder_class.image_processor_class()
    assert processor_class is not None
    settings = {
        name: value for name, value in source.processor.items() if name in processor_class.valid_kwargs.__annotations__
    }
    if "size" in settings:
        area = (int(vision["patch_size"]) * 2) ** 2
        settings["size"] = {"shortest_edge": 4 * area, "longest_edge": 60 * area}
    elif "image_size" in vision:
        side = vision["image_size"]
        side = side if isinstance(side, int) else side[0]
        settings["size"] = {"height": side, "width": side}
    if "internvl" in oracle.preset:
        settings |= {"crop_to_patches": True, "max_patches": 4}
    processor = processor_class(**settings)
    processor.save_pretrained(folder)
    encoder = load_encoder(resolve_model(str(folder)), plain_backend(), device=CPU, dtype=torch.float32)
    return Checkpoint(oracle, model, processor, encoder)


def draw_weights(model: torch.nn.Module) -> None:
    """Seeded weights of a trained network's scale; some rows of the language models have empty ones."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim > 1:
                weight.copy_(0.7 * noise * max(1, weight[0].numel()) ** -0.5)
            elif weight.numel():
                weight.copy_(0.05 * noise if name.endswith("bias") else 1 + 0.1 * noise)


@pytest.fixture(scope="module", params=ORACLES, ids=lambda oracle: oracle.preset)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return saved_checkpoint(request.param, tmp_path_factory.mktemp("oracle"))


def replayed(encoder: VisionEncoder, inputs: EncoderInputs) -> torch.Tensor:
    """The rows of the call by graphs, all of its items replayed."""
    config = encoder.get_encoder_cudagraph_config()
    tokens = sum(item.output_tokens for item in encoder.get_encoder_cudagraph_item_specs(inputs))
    settings = resolve_budget_settings(
        encoder.get_encoder_cudagraph_budget_range(2 * tokens),
        (2 * tokens,),
        8,
        max_frames_per_video=max(config.max_frames_per_video, 8),
    )
    plan = plan_budgets(
        settings,
        min_tokens_per_segment=config.min_tokens_per_segment,
        axes=config.axes,
        segment_free_paths=frozenset(path for path, policy in config.paths.items() if not policy.has_segments),
    )
    manager = EncoderCudaGraphManager(encoder, plan)
    manager.capture()
    assert all(batch.is_hit for batch in manager.plan_call(inputs).batches)
    return torch.cat(manager.execute(inputs))


@torch.inference_mode()
def test_images_have_the_features_that_transformers_gives(checkpoint: Checkpoint) -> None:
    encoder = checkpoint.encoder
    images = [random_image(90, 61), random_image(57, 120, 1), random_image(64, 64, 2)]
    wanted = checkpoint.features(checkpoint.processor(images=images, return_tensors="pt"))
    inputs = encoder.make_inputs(*encoder.preprocess(images))
    assert relative_error(encoder.encoder_eager_forward(inputs), wanted) <= TOLERANCE
    assert relative_error(replayed(encoder, inputs), wanted) <= TOLERANCE


def frames_of(checkpoint: Checkpoint, side: int) -> list[Image.Image]:
    return [random_image(2 * side, side, seed) for seed in range(4)]


@torch.inference_mode()
def test_videos_have_the_features_that_transformers_gives(checkpoint: Checkpoint) -> None:
    encoder = checkpoint.encoder
    rule: Any = encoder.rule
    if "video" not in rule.modalities:
        pytest.skip("takes images only")
    if not hasattr(rule, "factor") or checkpoint.oracle.features is not None:
        # Frames of these are images of a video; transformers encodes them with the same function.
        pytest.skip("frames are encoded as images")
    frames = frames_of(checkpoint, 4 * rule.factor)
    batch = checkpoint.processor(images=frames, return_tensors="np")
    # The processor repeats an image for every step of a temporal patch; a video has its own frames there.
    steps = int(rule.vision_config.get("temporal_patch_size", 1))
    rows = batch["pixel_values"].reshape(len(frames), -1, 3, checkpoint.processor.temporal_patch_size, rule.patch**2)
    rows = rows[:, :, :, 0].reshape(len(frames) // steps, steps, -1, 3, rule.patch**2)
    pixels = torch.from_numpy(np.ascontiguousarray(rows.transpose(0, 2, 3, 1, 4))).flatten(0, 1).flatten(1)
    grid = GridGeometry("video", len(frames) // steps, *(int(side) for side in batch["image_grid_thw"][0][1:]))
    wanted = rows_of(
        checkpoint.model.get_video_features(
            pixel_values_videos=pixels, video_grid_thw=torch.tensor([[grid.t, grid.h, grid.w]])
        )
    )
    inputs = encoder.make_inputs(
        [grid], {"pixel_values": pixels.view(len(pixels), *encoder.pixel_row_shape("pixel_values"))}
    )
    assert relative_error(encoder.encoder_eager_forward(inputs), wanted) <= TOLERANCE
    assert relative_error(replayed(encoder, inputs), wanted) <= TOLERANCE


def test_sizes_have_the_counts_that_transformers_gives(checkpoint: Checkpoint) -> None:
    rule, processor = checkpoint.encoder.rule, checkpoint.processor
    per_patch = 1 / getattr(rule, "merge", 1) ** 2
    for width, height in random_sizes(300, 900):
        try:
            mine: int | None = rule.final_tokens(rule.geometry(width, height))
        except InputError:
            mine = None
        assert mine == counted(checkpoint, processor, width, height, per_patch), (width, height)


def counted(checkpoint: Checkpoint, processor: Any, width: int, height: int, per_patch: float) -> int | None:
    """Tokens of an image of that size by the real processor; None where it refuses it."""
    rule: Any = checkpoint.encoder.rule
    try:
        if hasattr(processor, "max_soft_tokens"):
            batch = processor(images=[Image.new("RGB", (width, height))], return_tensors="np")
            return int(np.asarray(batch["num_soft_tokens_per_image"]).sum())
        if not hasattr(processor, "get_number_of_image_patches"):
            return int(rule.tokens_per_tile)
        patches = processor.get_number_of_image_patches(height, width, {})
    except ValueError:
        return None
    return int(patches * rule.tokens_per_tile) if hasattr(rule, "tokens_per_tile") else round(patches * per_patch)
