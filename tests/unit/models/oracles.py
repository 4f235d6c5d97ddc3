"""Which rows transformers has a class for, and a tiny checkpoint that it saves of each."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.unit.models.encoder_checks import CPU, plain_backend
from vitgraph.models.encoder import VisionEncoder
from vitgraph.models.grid_encoder import block_positions
from vitgraph.models.loading import load_encoder
from vitgraph.models.processor_classes import transformers_class
from vitgraph.models.registry import ROWS, ModelSource, resolve_model
from vitgraph.planning.budgets import VIDEO

TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "head_dim": 16,
    "pad_token_id": 0,
}

Features = Callable[[Any, Mapping[str, Any]], torch.Tensor]


def rows_of(output: Any) -> torch.Tensor:
    """The rows of what `get_image_features` gives: items one after the other, deepstack levels beside."""
    rows = output.pooler_output
    rows = torch.cat(list(rows)) if isinstance(rows, list | tuple) else rows
    levels = list(getattr(output, "deepstack_features", None) or [])
    levels = [torch.cat(list(level)) if isinstance(level, tuple) else level for level in levels]
    return torch.cat([rows.flatten(0, -2), *levels], dim=-1)


def features(kind: str, *names: str) -> Features:
    """Rows of `get_image_features` or `get_video_features` from the processor's outputs of those names."""

    def rows(model: Any, batch: Mapping[str, Any]) -> torch.Tensor:
        function = f"get_{kind}_features"
        owner = model if hasattr(model, function) else model.model
        return rows_of(getattr(owner, function)(**{name: batch[name] for name in names if name in batch}))

    return rows


def llama4_features(model: Any, batch: Mapping[str, Any]) -> torch.Tensor:
    """transformers' function stops before the projector, which its forward applies."""
    hidden = model.get_image_features(batch["pixel_values"].float()).last_hidden_state
    return model.multi_modal_projector(hidden.flatten(0, 1))


def two_view_features(model: Any, batch: Mapping[str, Any]) -> torch.Tensor:
    names = ("pixel_values", "pixel_values_local", "num_local_patches", "patches_grid")
    given = {name: batch[name] for name in names if name in batch}
    for name in ("num_local_patches", "patches_grid"):
        if name in given:
            given[name] = torch.as_tensor(given[name]).tolist()
    return rows_of(model.get_image_features(**given))


def frame_features(model: Any, batch: Mapping[str, Any]) -> torch.Tensor:
    """Frames that the model encodes as the tiles of an image."""
    return rows_of(model.get_image_features(pixel_values=batch["pixel_values_videos"].flatten(0, 1)))


def gemma4_frames(batch: Mapping[str, Any], grid: Any) -> torch.Tensor:
    """The real patches of padded frames, each frame's from raster into pooling-block order."""
    is_real = (batch["video_position_ids"] >= 0).all(-1)
    order = block_positions(grid.h, grid.w, 3) @ np.array([grid.w, 1])
    return torch.cat([frame[mask][order] for frame, mask in zip(batch["pixel_values_videos"], is_real, strict=True)])


def onevision_tokens(rule: Any, width: int, height: int) -> int:
    processor_class = transformers_class("llava_onevision.processing_llava_onevision:LlavaOnevisionProcessor")
    processor = processor_class.__new__(processor_class)
    processor.num_image_tokens, processor.vision_aspect_ratio = rule.tokens_per_tile, "anyres_max_9"
    processor.image_processor = SimpleNamespace(**rule.processor)
    return int(processor._get_number_of_features(height, width, rule.tile_side, rule.tile_side))


GRIDS = features("image", "pixel_values", "image_grid_thw")
GRID_VIDEOS = features("video", "pixel_values_videos", "video_grid_thw")
TILES = features("image", "pixel_values")


@dataclass(frozen=True)
class Oracle:
    """One row: what of it transformers needs beside the preset.

    Attributes:
        model: transformers' model class, in `module:class`.
        text: Fields of the text config, beside or instead of `TEXT`.
        config: Further fields of the config.
        settings: Settings of the image processor.
        call: What transformers' processor of the whole model passes to its image processor.
        image_processor: transformers' image processor, where it is not the one that the family names.
        video_settings: Settings of the video processor.
        images: From the model and a processed batch of images to rows.
        videos: The same for videos.
        video_rows: From a processed batch of one video and its grid to the product's pixel rows.
        image_tokens: From the product's rule, width and height to the tokens that transformers counts, where its image
            processor does not tell.
        frame_tokens: The tokens of a video frame and of the end of a video, where the processor does not tell.
    """

    model: str
    text: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    call: Mapping[str, Any] = field(default_factory=dict)
    image_processor: str | None = None
    video_settings: Mapping[str, Any] = field(default_factory=dict)
    images: Features = GRIDS
    videos: Features = GRID_VIDEOS
    video_rows: Callable[[Mapping[str, Any], Any], torch.Tensor] = lambda batch, _: batch["pixel_values_videos"]
    image_tokens: Callable[[Any, int, int], int] | None = None
    frame_tokens: Callable[[Any], tuple[int, int]] = lambda rule: (rule.tokens_per_tile, 0)


FACTS = (
    "mm_tokens_per_image",
    "downsample_ratio",
    "scale_factor",
    "downsample_factor",
    "projector_hidden_size",
    "spatial_merge_size",
    "image_grid_pinpoints",
    "adapter_config",
)
"""Fields of presets that stand at the top of config.json."""

MROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [3, 3, 2], "rope_theta": 1e6}}
FULL = {"layer_types": ["full_attention"]}
QWEN2 = {"model_type": "qwen2"}
QWEN_AUDIO = {
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "d_model": 16,
    "output_dim": 64,
    "downsample_hidden_size": 8,
}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
ERNIE = {"moe_num_experts": 4, "moe_intermediate_size": [16, 16], "moe_k": 2}
MLA = {
    "model_type": "deepseek_v3",
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}

GLM5 = {**MLA, "model_type": "glm5_next_text", "num_key_value_heads": 4, "qk_rope_head_dim": 0, "n_routed_experts": 2}

ORACLES: Mapping[str, Oracle] = {
    "qwen2_vl": Oracle("qwen2_vl:Qwen2VLForConditionalGeneration", MROPE),
    "qwen2_5_vl": Oracle("qwen2_5_vl:Qwen2_5_VLForConditionalGeneration", MROPE),
    "qwen2_5_omni": Oracle(
        "qwen2_5_omni:Qwen2_5OmniThinkerForConditionalGeneration", MROPE, {"audio_config": QWEN_AUDIO}
    ),
    "qwen3_vl": Oracle("qwen3_vl:Qwen3VLForConditionalGeneration"),
    "qwen3_omni": Oracle(
        "qwen3_omni_moe:Qwen3OmniMoeThinkerForConditionalGeneration", EXPERTS, {"audio_config": QWEN_AUDIO}
    ),
    "cohere_compass": Oracle(
        "cohere_compass:CohereCompassForConditionalGeneration",
        {**FULL, "rope_parameters": {"full_attention": MROPE["rope_parameters"]}},
    ),
    "qwen3_5": Oracle("qwen3_5:Qwen3_5ForConditionalGeneration", FULL),
    "qwen3_5_moe": Oracle("qwen3_5_moe:Qwen3_5MoeForConditionalGeneration", {**FULL, **EXPERTS}),
    "exaone4_5": Oracle("exaone4_5:Exaone4_5_ForConditionalGeneration", {"model_type": "exaone4", **FULL}),
    "glm4v": Oracle("glm4v:Glm4vForConditionalGeneration"),
    "glm_ocr": Oracle("glm_ocr:GlmOcrForConditionalGeneration"),
    "glm5_next": Oracle("glm5_next:Glm5NextForConditionalGeneration", GLM5),
    "internvl": Oracle(
        "internvl:InternVLForConditionalGeneration",
        QWEN2,
        settings={"crop_to_patches": True, "max_patches": 4},
        images=TILES,
        videos=frame_features,
        video_rows=lambda batch, _: batch["pixel_values_videos"].flatten(0, 1),
    ),
    "gemma3": Oracle("gemma3:Gemma3ForConditionalGeneration", images=TILES),
    "gemma4": Oracle(
        "gemma4:Gemma4ForConditionalGeneration",
        images=features("image", "pixel_values", "image_position_ids"),
        videos=features("video", "pixel_values_videos", "video_position_ids", "num_frames_per_video"),
        video_rows=gemma4_frames,
    ),
    "ernie4_5_vl": Oracle(
        "ernie4_5_vl_moe:Ernie4_5_VLMoeForConditionalGeneration",
        {**MROPE, **ERNIE},
        video_settings={"draw_on_frames": False},
    ),
    "idefics3": Oracle(
        "idefics3:Idefics3ForConditionalGeneration",
        settings={"size": {"longest_edge": 256}, "max_image_size": {"longest_edge": 64}},
        images=TILES,
    ),
    "lfm2_vl": Oracle(
        "lfm2_vl:Lfm2VlForConditionalGeneration",
        {"model_type": "lfm2", **FULL},
        images=features("image", "pixel_values", "spatial_shapes", "pixel_attention_mask"),
    ),
    "kimi_k25": Oracle(
        "kimi_k25:Kimi_K25ForConditionalGeneration",
        MLA,
        {"projection_hidden_size": 48},
        settings={"max_patches": 64, "size": {"max_height": 20, "max_width": 20}},
        image_processor="kimi_k25.image_processing_kimi_k25:Kimi_K25ImageProcessor",
    ),
    "deepseek_ocr": Oracle(
        "unlimited_ocr:UnlimitedOcrForConditionalGeneration",
        settings={"tile_size": 128, "max_patches": 6, "size": {"height": 256, "width": 256}},
        image_processor="unlimited_ocr.image_processing_unlimited_ocr:UnlimitedOcrImageProcessor",
        images=two_view_features,
    ),
    "step3_vl": Oracle(
        "step3p7:Step3p7ForConditionalGeneration",
        settings={"patch_size": 112, "max_image_size": 672},
        image_processor="step3p7.image_processing_step3p7:Step3p7ImageProcessor",
        images=two_view_features,
    ),
    "llama4": Oracle(
        "llama4:Llama4ForConditionalGeneration",
        images=llama4_features,
    ),
    "pixtral": Oracle(
        "mistral3:Mistral3ForConditionalGeneration",
        {"model_type": "mistral"},
        settings={"size": {"longest_edge": 224}, "patch_size": {"height": 14, "width": 14}},
        call={"patch_size": {"height": 28, "width": 28}},
        images=features("image", "pixel_values", "image_sizes"),
    ),
    "llava_onevision": Oracle(
        "llava_onevision:LlavaOnevisionForConditionalGeneration",
        QWEN2,
        images=features("image", "pixel_values", "image_sizes"),
        videos=features("video", "pixel_values_videos"),
        video_rows=lambda batch, _: batch["pixel_values_videos"].flatten(0, 1),
        image_tokens=onevision_tokens,
        frame_tokens=lambda rule: (math.ceil(rule.patches_per_side / 2) ** 2, 1),
    ),
    "molmo2": Oracle(
        "molmo2:Molmo2ForConditionalGeneration",
        images=features("image", "pixel_values", "image_token_pooling", "image_grids"),
    ),
    "ovis2": Oracle("ovis2:Ovis2ForConditionalGeneration", QWEN2, {"hidden_size": 64, "vocab_size": 512}, images=TILES),
    "minimax_m3": Oracle("minimax_m3_vl:MiniMaxM3SparseForConditionalGeneration"),
}

NO_CLASS: Mapping[str, str] = {
    "deepseek_vl2": "transformers 5.24 has DeepSeek-VL, whose tower and tiling are others",
    "deepseek_v41": "transformers 5.24 has no class",
    "kimi_vl": "transformers 5.24 has no class",
    "kimi_k3": "transformers 5.24 has no class",
    "minicpmv_2_5": "transformers 5.24 has MiniCPM-V from 4.6 on, which has no resampler",
    "minicpmv_2_6_4_0": "transformers 5.24 has MiniCPM-V from 4.6 on, which has no resampler",
    "minicpmv_4_5": "transformers 5.24 has MiniCPM-V from 4.6 on, which has no resampler",
}
"""Rows that transformers has no class for; their families' own tests compare with the parts that it has."""


@dataclass(frozen=True)
class Checkpoint:
    """A folder that transformers saved, its own model and processors, and the product's encoder from it."""

    oracle: Oracle
    model: Any
    processor: Any
    video_processor: Any
    encoder: VisionEncoder


def saved_checkpoint(row: str, folder: Path) -> Checkpoint:
    """The row's random model and processors, saved by transformers; the model loaded by the product."""
    oracle = ORACLES[row]
    (family,) = (known for known in ROWS if known.name == row)
    source = resolve_model(family.debug_preset)
    encoder_class = source.row.encoder_class()
    model = _model(oracle, source)
    model.save_pretrained(folder)
    image_processor = _processor(oracle.image_processor or encoder_class.image_processor, source, oracle.settings)
    image_processor.save_pretrained(folder)
    video_processor = None
    if VIDEO in source.rule().modalities:
        video = {**source.processor["video"], **oracle.video_settings}
        if "longest_edge" in video:
            video["size"] = {edge: video[edge] for edge in ("shortest_edge", "longest_edge")}
        video_processor = _processor(encoder_class.video_processor, source, video)
        video_processor.save_pretrained(folder)
    encoder = load_encoder(resolve_model(str(folder)), plain_backend(), device=CPU, dtype=torch.float32)
    return Checkpoint(oracle, model, image_processor, video_processor, encoder)


def _model(oracle: Oracle, source: ModelSource) -> Any:
    module, name = oracle.model.split(":")
    model_class = getattr(importlib.import_module(f"transformers.models.{module}.modeling_{module}"), name)
    facts = {fact: value for fact, value in {**source.processor, **source.extra}.items() if fact in FACTS}
    text = {**TEXT, **oracle.text}
    text["hidden_size"] = source.extra.get("text_hidden_size", text["hidden_size"])
    config = model_class.config_class(
        vision_config=dict(source.vision_config), text_config=text, **facts, **oracle.config
    )
    model = model_class(config).float().eval()
    draw_weights(model)
    return model


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


def _processor(name: str | None, source: ModelSource, settings: Mapping[str, Any]) -> Any:
    """transformers' processor with the preset's settings, its sizes small ones."""
    assert name is not None
    processor_class = transformers_class(name)
    vision = source.vision_config
    known = {setting: source.processor[setting] for setting in source.processor.keys() - {"size"}}
    side, factor = vision.get("image_size"), 2 * int(source.processor.get("patch_size", 14))
    if "size" in source.processor:
        known["size"] = {"shortest_edge": 4 * factor**2, "longest_edge": 60 * factor**2}
    elif side is not None:
        side = side if isinstance(side, int) else side[0]
        known["size"] = {"height": side, "width": side}
    known |= settings
    return processor_class(**{n: v for n, v in known.items() if n in processor_class.valid_kwargs.__annotations__})
