"""GLM-4.1V and GLM-4.6V-Flash against transformers: positions, sizes, values, padding, loading."""

import json
from pathlib import Path
from typing import Any

import grid_checks as checks
import pytest
import torch

from vitgraph.errors import InputError
from vitgraph.models.families.glm4v import sampled_coordinates
from vitgraph.models.geometry import GridGeometry
from vitgraph.models.grid_encoder import cubic_axis, table_taps
from vitgraph.models.registry import preset_of, resolve_model, row_of_config
from vitgraph.planning.budgets import VIDEO

DEBUG = "glm-4v-debug"
CONSTANT = ("glm-4.1v-9b", "glm4v.video_processing_glm4v", "Glm4vVideoProcessor")
FALLING = ("glm-4.6v-flash", "glm46v.video_processing_glm46v", "Glm46VVideoProcessor")


@pytest.mark.parametrize("limits", [(12544, 9633792), (6272, 78400)])
def test_image_patches_are_the_processors(limits: tuple[int, int]) -> None:
    size = {"shortest_edge": limits[0], "longest_edge": limits[1]}
    rule = checks.rule_of("glm-4.1v-9b", size=size)
    processor = checks.image_processor("glm-4.1v-9b", size)
    for width, height in checks.SIZES:
        spec = rule.item_spec(rule.geometry(width, height))
        assert spec.input_size == processor.get_number_of_image_patches(height, width, {}), (width, height)
        assert spec.output_tokens * 4 == spec.input_size and spec.segments == 1


@pytest.mark.parametrize("frames", [2, 3, 5, 8, 61, 640])
@pytest.mark.parametrize("names", [CONSTANT, FALLING])
def test_video_patches_are_the_processors(names: tuple[str, str, str], frames: int) -> None:
    rule = checks.rule_of(names[0])
    video = rule.processor["video"]
    size = {"shortest_edge": video["shortest_edge"], "longest_edge": video["longest_edge"]}
    processor = checks.video_processor(*names[1:], size=size)
    for width, height in checks.SIZES:
        spec = rule.item_spec(rule.geometry(width, height, frames))
        assert spec.input_size == processor.get_num_of_video_patches(frames, height, width), (width, height)
        assert spec.segments == -(-frames // 2)


@pytest.mark.parametrize("fps", [1.0, 3.0, 23.976, 30.0, 60.0])
@pytest.mark.parametrize("names", [CONSTANT, FALLING])
def test_sampled_frames_are_the_processors(names: tuple[str, str, str], fps: float) -> None:
    rule = checks.rule_of(names[0])
    processor = checks.video_processor(*names[1:])
    for frames in (2, 3, 5, 16, 31, 90, 101, 500, 899, 901, 7001, 9100, 30000, 80000):
        sampled = checks.sampled_frames(processor, frames, fps)
        if sampled < 2:
            with pytest.raises(InputError, match=f"at least 2 frames, got {sampled}"):
                rule.geometry(640, 480, frames, fps)
        else:
            assert rule.geometry(640, 480, frames, fps).t == sampled // 2, frames


def test_most_segments_of_a_video() -> None:
    assert checks.rule_of("glm-4.1v-9b").graph_config().max_frames_per_video == 300
    assert checks.rule_of("glm-4.6v-flash").graph_config().max_frames_per_video == 320


def test_refusals_name_value_and_rule() -> None:
    rule = checks.rule_of(DEBUG)
    checks.check_refusals(rule)
    with pytest.raises(InputError, match="at least 2 frames, got 1"):
        rule.video_geometry(640, 480, 1, None)


def test_an_image_counts_two_frames_in_the_pixel_limit() -> None:
    rule = checks.rule_of("glm-4.1v-9b")
    tokens = [rule.item_spec(rule.geometry(w, h)).output_tokens for w, h in ((224, 224), (336, 336), (8000, 6000))]
    assert tokens == [64, 144, 6030]
    assert rule.output_width == 4096


@pytest.mark.parametrize("shape", [(2, 2), (18, 30), (2, 50), (48, 36)])
def test_taps_sample_the_table_as_the_tower_does(shape: tuple[int, int]) -> None:
    from transformers.vision_utils import get_vision_position_ids

    encoder = checks.build(DEBUG)
    tower: Any = encoder.modules["visual"]
    embeddings = tower.embeddings
    h, w = shape
    grid_thw = torch.tensor([[1, h, w]])
    position_ids = get_vision_position_ids(grid_thw, 2)
    zeros = torch.zeros(h * w, embeddings.embed_dim)
    expected = embeddings(zeros, torch.tensor([h * w]), grid_thw, position_ids[:, 0], position_ids[:, 1])
    taps = table_taps(h, w, 2, 8, cubic_axis, sampled_coordinates)
    indices, weights = (torch.from_numpy(array) for array in taps)
    sampled = (embeddings.position_embedding.weight[indices] * weights[:, :, None]).sum(1)
    assert checks.relative_l2(sampled, expected) <= 1e-6


def test_row_counts_from_sizes() -> None:
    rule = checks.rule_of(DEBUG, size={"shortest_edge": 12544, "longest_edge": 28 * 28 * 80})
    items = [rule.geometry(width, height) for width, height in checks.SIZES]
    checks.check_eager_equals_stock(checks.build(DEBUG, torch.float64), items)


def test_real_images(monkeypatch: pytest.MonkeyPatch) -> None:
    checks.check_preprocess(DEBUG, monkeypatch)


@pytest.mark.parametrize("prefix", ["visual.", "model.visual."])
def test_published_checkpoint_loads(tmp_path: Path, prefix: str) -> None:
    vision_config = dict(resolve_model(DEBUG).vision_config)
    for name in ("spatial_merge_size", "temporal_patch_size", "in_channels", "rms_norm_eps", "hidden_act"):
        vision_config.pop(name)
    preprocessor = {"size": {"shortest_edge": 12544, "longest_edge": 9633792}, "image_processor_type": "Glm46V"}
    state = checks.write_checkpoint(tmp_path, DEBUG, prefix, vision_config, preprocessor)
    video = {
        "size": {"shortest_edge": 12544, "longest_edge": 47040000},
        "video_processor_type": "Glm46VVideoProcessor",
        "max_duration": 200,
    }
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(video))
    source, encoder = checks.load_folder(tmp_path)
    checks.check_loaded(encoder, state)
    assert source.processor["video"]["sampling"] == "falling_rate"
    assert source.processor["video"]["max_duration"] == 200
    assert encoder.rule.geometry(640, 480, 300, 10.0) == GridGeometry(VIDEO, 90, 30, 42)


def test_both_architectures_share_the_row() -> None:
    names = ("Glm4vForConditionalGeneration", "Glm46VForConditionalGeneration")
    assert [row_of_config({"architectures": [name]}).name for name in names] == ["glm4v", "glm4v"]
    # Without a video file the architecture says how frames are sampled.
    rates = [
        preset_of(row_of_config({"architectures": [name]}), name)["processor"]["video"]["sampling"] for name in names
    ]
    assert rates == ["constant_rate", "falling_rate"]
    from transformers.models.glm46v.configuration_glm46v import Glm46VConfig

    vision_config: Any = Glm46VConfig().vision_config
    assert vision_config.model_type == "glm4v_vision"
