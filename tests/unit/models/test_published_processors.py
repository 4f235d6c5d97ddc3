"""Processor files in the form in which models are published resolve to what their presets say, without a complaint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.drills.damaged_files import config_of
from tests.unit.models.test_processors import resolve
from vitgraph.models.processor_classes import transformers_class
from vitgraph.models.registry import resolve_preset

CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
EVERY = {"do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True, "rescale_factor": 1 / 255}
UNSET = dict.fromkeys(
    [
        "crop_size",
        "device",
        "disable_grouping",
        "do_center_crop",
        "do_pad",
        "input_data_format",
        "pad_size",
        "return_tensors",
    ]
)
SAVED = {**EVERY, **UNSET, "data_format": "channels_first", "default_to_square": True}
QWEN2 = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2, **CLIP}
QWEN3 = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2, **HALF}


def size(least: int, most: int) -> dict[str, Any]:
    return {"size": {"shortest_edge": least, "longest_edge": most}}


def square(side: int) -> dict[str, Any]:
    return {"size": {"height": side, "width": side}}


PUBLISHED: dict[str, dict[str, Any]] = {
    "qwen2-vl-7b": {
        "preprocessor_config": {
            "min_pixels": 3136, "max_pixels": 12845056, **QWEN2, "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": "Qwen2VLProcessor",
        }
    },
    "qwen2.5-vl-7b": {
        "preprocessor_config": {
            **SAVED, **QWEN2, "min_pixels": 3136, "max_pixels": 12845056, **size(3136, 12845056), "resample": 3,
            "image_processor_type": "Qwen2VLImageProcessorFast",
        }
    },
    "qwen3-vl-30b-a3b": {
        "preprocessor_config": {**QWEN3, **size(65536, 16777216), "image_processor_type": "Qwen2VLImageProcessorFast"},
        "video_preprocessor_config": {
            **SAVED, **QWEN3, **size(4096, 25165824), "video_processor_type": "Qwen3VLVideoProcessor", "fps": 2,
            "max_frames": 768, "min_frames": 4, "num_frames": None, "return_metadata": False, "video_metadata": None,
            "do_sample_frames": True, "resample": 3,
        },
    },
    "glm-4.1v-9b": {
        "preprocessor_config": {**QWEN2, **size(12544, 9633792), "image_processor_type": "Glm4vImageProcessor"},
        "video_preprocessor_config": {
            **QWEN2, **size(12544, 47040000), "video_processor_type": "Glm4vVideoProcessor", "do_rescale": True,
        },
    },
    "internvl3.5-8b": {
        "preprocessor_config": {
            **SAVED, **IMAGENET, **square(448), "crop_to_patches": False, "max_patches": 12, "min_patches": 1,
            "resample": 3, "image_processor_type": "GotOcr2ImageProcessorFast", "processor_class": "InternVLProcessor",
        },
        "video_preprocessor_config": {
            **SAVED, **IMAGENET, **square(448), "initial_shift": True, "num_frames": 32,
            "video_processor_type": "InternVLVideoProcessor",
        },
    },
    "gemma-3-4b": {
        "preprocessor_config": {
            **EVERY, **HALF, **square(896), "do_convert_rgb": None, "do_pan_and_scan": None, "image_seq_length": 256,
            "pan_and_scan_max_num_crops": None, "pan_and_scan_min_crop_size": None, "resample": 2,
            "pan_and_scan_min_ratio_to_activate": None, "image_processor_type": "Gemma3ImageProcessor",
        }
    },
    "llama-4-scout": {
        "preprocessor_config": {
            **SAVED, **HALF, **square(336), "max_patches": 16, "resample": 2, "resize_to_max_canvas": False,
            "image_processor_type": "Llama4ImageProcessorFast",
        }
    },
    "gemma-4-26b-a4b": {
        "processor_config": {
            "image_seq_length": 280,
            "processor_class": "Gemma4Processor",
            "image_processor": {
                **EVERY, "do_normalize": False, "image_mean": [0.0] * 3, "image_std": [1.0] * 3, "max_soft_tokens": 280,
                "patch_size": 16, "pooling_kernel_size": 3, "resample": 3, "image_seq_length": 280, **square(224),
                "image_processor_type": "Gemma4ImageProcessor",
            },
            "video_processor": {
                **EVERY, "max_soft_tokens": 70, "num_frames": 32, "patch_size": 16, "pooling_kernel_size": 3,
                "do_sample_frames": True, "video_processor_type": "Gemma4VideoProcessor",
            },
        }
    },
    "ernie-4.5-vl-28b-a3b": {
        "processor_config": {
            "image_processor": {
                **SAVED, **CLIP, "patch_size": 14, "merge_size": 2, "temporal_patch_size": 1, **size(3136, 4842768),
                "resample": 3, "image_processor_type": "Ernie4_5_VLMoeImageProcessor",
            },
            "video_processor": {
                **SAVED, **CLIP, "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2, **size(234416, 937664),
                "min_frames": 16, "max_frames": 180, "draw_on_frames": True, "font": "Roboto-Regular.ttf",
                "video_processor_type": "Ernie4_5_VLMoeVideoProcessor",
            },
        }
    },
}  # fmt: skip

SIZES = ((640, 480), (1920, 1080), (300, 2000), (64, 64))


@pytest.mark.parametrize("preset", PUBLISHED)
def test_published_files_are_taken_whole(preset: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    known = resolve_preset(preset)
    assert known is not None
    rule = resolve(tmp_path, config_of(preset), **PUBLISHED[preset]).rule()
    assert caplog.text == ""
    for width, height in SIZES:
        assert rule.geometry(width, height) == known.rule().geometry(width, height)
    if "video" in rule.modalities:
        for frames, fps in ((8, None), (240, 30.0)):
            assert rule.geometry(1280, 720, frames, fps) == known.rule().geometry(1280, 720, frames, fps)


@pytest.mark.parametrize("preset", ["qwen2.5-omni-7b", "qwen3-omni-30b-a3b"])
def test_videos_of_omni_models_have_the_bounds_of_each_call(preset: str, tmp_path: Path) -> None:
    """The whole model's processor passes a size to its video processor, so the file's bounds are those of images."""
    known = resolve_preset(preset)
    assert known is not None
    name = known.row.encoder_class().whole_processor
    assert name is not None
    bounds = transformers_class(name).videos_kwargs["size"]
    published = {"min_pixels": 3136, "max_pixels": 12845056, "image_processor_type": "Qwen2VLImageProcessor"}
    found = resolve(tmp_path, config_of(preset), preprocessor_config=published)
    for source in (known, found):
        assert {edge: source.processor["video"][edge] for edge in bounds} == bounds
        assert source.processor["size"] == {"shortest_edge": 3136, "longest_edge": 12845056}


def test_the_originals_of_internvl_keep_clips_file(tmp_path: Path) -> None:
    known = resolve_preset("internvl3.5-8b")
    assert known is not None
    config = {**config_of("internvl3.5-8b"), "architectures": ["InternVLChatModel"]}
    clip = {
        "crop_size": 448,
        "do_center_crop": True,
        "do_normalize": True,
        "do_resize": True,
        "resample": 3,
        "size": 448,
    }
    settings = {**clip, **IMAGENET, "feature_extractor_type": "CLIPFeatureExtractor"}
    rule = resolve(tmp_path, config, preprocessor_config=settings).rule()
    for width, height in SIZES:
        assert rule.geometry(width, height) == known.rule().geometry(width, height)


@pytest.mark.parametrize(
    ("preset", "settings"),
    [
        (
            "kimi-vl-a3b",
            {"in_token_limit": 4096, "patch_size": 14, "num_pooled_tokens": 1024, "pad_input": True, **HALF},
        ),
        (
            "minicpm-v-2.6",
            {"max_slice_nums": 9, "scale_resolution": 448, "patch_size": 14, "use_image_id": True, "slice_mode": True},
        ),
    ],
)
def test_files_of_remote_code_are_taken(preset: str, settings: dict[str, Any], tmp_path: Path) -> None:
    known = resolve_preset(preset)
    assert known is not None
    config = {**config_of(preset), "version": "2.6"}
    rule = resolve(tmp_path, config, preprocessor_config={**settings, "auto_map": {"A": "b"}}).rule()
    for width, height in SIZES:
        assert rule.geometry(width, height) == known.rule().geometry(width, height)
