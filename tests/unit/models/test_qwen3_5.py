"""Qwen3.5 and Qwen3.5-MoE against transformers: sizes, values, padding, loading."""

from pathlib import Path

import grid_checks as checks
import pytest

from vitgraph.errors import InputError
from vitgraph.models.registry import resolve_model

DENSE, MOE = "qwen3.5-debug", "qwen3.5-moe-debug"


@pytest.mark.parametrize("limits", [(65536, 16777216), (1024, 40960)])
def test_image_patches_are_the_processors(limits: tuple[int, int]) -> None:
    size = {"shortest_edge": limits[0], "longest_edge": limits[1]}
    rule = checks.rule_of("qwen3.5-9b", size=size)
    processor = checks.image_processor("qwen2-vl-7b", size, patch_size=16)
    for width, height in checks.SIZES:
        patches = processor.get_number_of_image_patches(height, width, {})
        assert rule.item_spec(rule.geometry(width, height)).input_size == patches, (width, height)


@pytest.mark.parametrize("frames", [2, 3, 5, 8, 61, 768])
def test_video_patches_are_the_processors(frames: int) -> None:
    rule = checks.rule_of("qwen3.5-9b")
    video = rule.processor["video"]
    size = {"shortest_edge": video["shortest_edge"], "longest_edge": video["longest_edge"]}
    processor = checks.video_processor("qwen3_vl.video_processing_qwen3_vl", "Qwen3VLVideoProcessor", size=size)
    for width, height in (*checks.SIZES, (2560, 1440), (1706, 960), (2363, 1330)):
        spec = rule.item_spec(rule.geometry(width, height, frames))
        assert spec.input_size == processor.get_num_of_video_patches(frames, height, width, {}), (width, height)
        assert spec.segments == -(-frames // 2)


@pytest.mark.parametrize("fps", [5.0, 23.976, 30, 60.0])
def test_sampled_frames_are_the_processors(fps: float) -> None:
    rule = checks.rule_of("qwen3.5-9b")
    processor = checks.video_processor("qwen3_vl.video_processing_qwen3_vl", "Qwen3VLVideoProcessor")
    for frames in (2, 3, 5, 30, 101, 227, 1800, 40001):
        sampled = checks.sampled_frames(processor, frames, fps)
        assert rule.geometry(640, 480, frames, fps).t == -(-sampled // 2), frames


def test_refusals_name_value_and_rule() -> None:
    rule = checks.rule_of(DENSE)
    checks.check_refusals(rule)
    for fps in (None, 30.0):
        with pytest.raises(InputError, match="at least 2 frames, got 1"):
            rule.video_geometry(640, 480, 1, fps)


def test_published_sizes() -> None:
    rule = checks.rule_of("qwen3.5-9b")
    tokens = [rule.item_spec(rule.geometry(w, h)).output_tokens for w, h in ((224, 224), (336, 336), (1280, 720))]
    assert tokens == [64, 100, 880]
    assert [checks.rule_of(name).output_width for name in ("qwen3.5-0.8b", "qwen3.5-27b")] == [1024, 5120]


def test_real_images(monkeypatch: pytest.MonkeyPatch) -> None:
    checks.check_preprocess(DENSE, monkeypatch)


@pytest.mark.parametrize("name", [DENSE, MOE])
def test_published_checkpoint_loads(tmp_path: Path, name: str) -> None:
    # Published files carry an empty deepstack list; a filled one must not widen the output either.
    vision_config = {**resolve_model(name).vision_config, "deepstack_visual_indexes": [0]}
    preprocessor = {"size": {"shortest_edge": 65536, "longest_edge": 131072}, "image_mean": [0.5, 0.5, 0.4]}
    state = checks.write_checkpoint(tmp_path, name, "model.visual.", vision_config, preprocessor)
    source, encoder = checks.load_folder(tmp_path)
    checks.check_loaded(encoder, state)
    assert source.row.name == resolve_model(name).row.name
    assert source.processor["size"] == {"shortest_edge": 65536, "longest_edge": 131072}
    assert source.processor["image_mean"] == [0.5, 0.5, 0.4]
    assert encoder.rule.output_width == resolve_model(name).vision_config["out_hidden_size"]
