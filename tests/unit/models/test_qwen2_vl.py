"""Qwen2-VL against transformers: sizes, values, padding, loading."""

from pathlib import Path

import grid_checks as checks
import pytest

from vitgraph.errors import InputError
from vitgraph.models.geometry import GridGeometry
from vitgraph.models.registry import resolve_model
from vitgraph.planning.budgets import VIDEO

DEBUG = "qwen2-vl-debug"


@pytest.mark.parametrize("limits", [(3136, 12845056), (50176, 100352), (784, 3136)])
def test_image_patches_are_the_processors(limits: tuple[int, int]) -> None:
    size = {"shortest_edge": limits[0], "longest_edge": limits[1]}
    rule = checks.rule_of("qwen2-vl-7b", size=size)
    processor = checks.image_processor("qwen2-vl-7b", size)
    for width, height in checks.SIZES:
        spec = rule.item_spec(rule.geometry(width, height))
        assert spec.input_size == processor.get_number_of_image_patches(height, width, {}), (width, height)
        assert spec.output_tokens * 4 == spec.input_size and spec.segments == 1


@pytest.mark.parametrize("frames", [2, 3, 8, 61, 768])
def test_video_patches_are_the_processors(frames: int) -> None:
    rule = checks.rule_of("qwen2-vl-7b")
    video = rule.processor["video"]
    size = {"shortest_edge": video["shortest_edge"], "longest_edge": video["longest_edge"]}
    processor = checks.video_processor("qwen2_vl.video_processing_qwen2_vl", "Qwen2VLVideoProcessor", size=dict(size))
    for width, height in checks.SIZES:
        spec = rule.item_spec(rule.geometry(width, height, frames))
        assert spec.input_size == processor.get_num_of_video_patches(frames, height, width, {}), (width, height)
        assert spec.segments == -(-frames // 2)


def test_a_single_frame_passed_as_video_is_repeated() -> None:
    rule = checks.rule_of(DEBUG)
    assert rule.video_geometry(640, 480, 1, None) == GridGeometry(VIDEO, 1, 34, 46)


@pytest.mark.parametrize("fps", [5.0, 23.976, 25, 29.97, 60.0])
def test_sampled_frames_are_the_processors(fps: float) -> None:
    rule = checks.rule_of("qwen2-vl-7b")
    processor = checks.video_processor("qwen2_vl.video_processing_qwen2_vl", "Qwen2VLVideoProcessor")
    for frames in (2, 3, 4, 5, 7, 30, 101, 230, 237, 359, 367, 1800, 40001):
        sampled = checks.sampled_frames(processor, frames, fps, 2)
        assert rule.geometry(640, 480, frames, fps).t == -(-sampled // 2), frames
    with pytest.raises(InputError, match=r"a video of 1 frame .* multiple of 2"):
        rule.video_geometry(640, 480, 1, fps)


def test_refusals_name_value_and_rule() -> None:
    checks.check_refusals(checks.rule_of(DEBUG))


def test_published_sizes() -> None:
    rule = checks.rule_of("qwen2-vl-7b")
    tokens = [rule.item_spec(rule.geometry(w, h)).output_tokens for w, h in ((224, 224), (336, 336), (1280, 720))]
    assert tokens == [64, 144, 1196]
    assert rule.budget_range(4096) == (64, 4096)
    assert rule.output_width == 3584
    assert rule.graph_config().max_frames_per_video == 384


def test_row_counts_from_sizes() -> None:
    encoder = checks.build(DEBUG)
    rule = checks.rule_of(DEBUG, size={"shortest_edge": 3136, "longest_edge": 28 * 28 * 40})
    items = [rule.geometry(width, height) for width, height in checks.SIZES]
    checks.check_eager_equals_stock(encoder, items)


def test_real_images(monkeypatch: pytest.MonkeyPatch) -> None:
    checks.check_preprocess(DEBUG, monkeypatch)


@pytest.mark.parametrize("prefix", ["visual.", "model.visual."])
def test_published_checkpoint_loads(tmp_path: Path, prefix: str) -> None:
    vision_config = dict(resolve_model(DEBUG).vision_config)
    # As in the published file: `in_chans`, and nothing about the activation.
    for name in ("in_channels", "hidden_act"):
        vision_config.pop(name)
    vision_config.update({"in_chans": 3, "spatial_patch_size": 14, "model_type": "qwen2_vl"})
    preprocessor = {"min_pixels": 6272, "patch_size": 14, "image_mean": [0.1, 0.2, 0.3]}
    state = checks.write_checkpoint(tmp_path, DEBUG, prefix, vision_config, preprocessor)
    (tmp_path / "video_preprocessor_config.json").write_text('{"max_pixels": 301056, "max_frames": 16}')
    source, encoder = checks.load_folder(tmp_path)
    checks.check_loaded(encoder, state)
    assert source.processor["size"] == {"shortest_edge": 6272, "longest_edge": 28 * 28 * 1280}
    assert source.processor["image_mean"] == [0.1, 0.2, 0.3]
    video = {"shortest_edge": 128 * 28 * 28, "longest_edge": 301056, "fps": 2, "min_frames": 4, "max_frames": 16}
    assert video.items() <= source.processor["video"].items()
