"""What config.json, the processor's files and --mm-processor-kwargs say is what runs, or is refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.drills.damaged_files import config_of
from vitgraph.errors import InputError, ModelError, UsageError
from vitgraph.measure.setup import resolve_source
from vitgraph.models.family import Tower
from vitgraph.models.processors import IMAGE_FILE, PROCESSOR_FILE, VIDEO_FILE
from vitgraph.models.registry import ROWS, ModelRow, ModelSource, resolve_model, resolve_preset
from vitgraph.specs.parts import ModelSpec

QWEN = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "hidden_size": 64,
    "vision_config": {"depth": 2, "hidden_size": 96, "num_heads": 4, "intermediate_size": 156, "out_hidden_size": 64},
}
INTERN = config_of("internvl-debug")
IMAGE, VIDEO = {"image_processor_type": "Qwen2VLImageProcessor"}, {"video_processor_type": "Qwen2VLVideoProcessor"}


def folder(path: Path, config: Mapping[str, Any] = QWEN, **files: Mapping[str, Any]) -> Path:
    """A checkpoint's small files; `files` by their names without `.json`."""
    for file, content in {"config": config, **files}.items():
        (path / f"{file}.json").write_text(json.dumps(content))
    return path


def resolve(path: Path, config: Mapping[str, Any] = QWEN, **files: Mapping[str, Any]) -> ModelSource:
    return resolve_model(str(folder(path, config, **files)))


def bounds(most: int) -> dict[str, Any]:
    return {"size": {"shortest_edge": 3136, "longest_edge": 784 * most}}


@pytest.mark.parametrize(
    ("files", "grid"),
    [
        ({IMAGE_FILE: {**IMAGE, "min_pixels": 3136, "max_pixels": 12845056}}, [3, 52, 92]),
        ({IMAGE_FILE: {**IMAGE, "max_pixels": 78400}}, [3, 14, 26]),
        ({IMAGE_FILE: IMAGE, VIDEO_FILE: {**VIDEO, **bounds(100)}}, [3, 14, 26]),
        ({IMAGE_FILE: {**IMAGE, **bounds(400)}, VIDEO_FILE: {**VIDEO, "max_pixels": 78400}}, [3, 14, 26]),
        ({VIDEO_FILE: {**VIDEO, **bounds(400)}, PROCESSOR_FILE: {"video_processor": bounds(100)}}, [3, 14, 26]),
        ({PROCESSOR_FILE: {"image_processor": bounds(400)}, VIDEO_FILE: bounds(100)}, [3, 14, 26]),
        ({IMAGE_FILE: {**IMAGE, "do_resize": False}}, [3, 52, 92]),
    ],
    ids=["one file", "one bound in one file", "own file", "flat in own file", "nested first", "apart", "not resized"],
)
def test_bounds_of_videos_come_from_where_transformers_takes_them(
    files: dict[str, Any], grid: list[int], tmp_path: Path
) -> None:
    source = resolve(tmp_path, **{file.removesuffix(".json"): content for file, content in files.items()})
    size = (1288, 728) if "not resized" in str(files) or "do_resize" in str(files) else (1280, 720)
    found: Any = source.rule().geometry(*size, 5)
    assert [found.t, found.h, found.w] == grid


def test_bounds_of_images_come_from_where_transformers_takes_them(tmp_path: Path) -> None:
    def tokens(**files: Any) -> int:
        for file in (IMAGE_FILE, PROCESSOR_FILE):
            (tmp_path / file).unlink(missing_ok=True)
        rule = resolve(tmp_path, **files).rule()
        return rule.final_tokens(rule.geometry(4000, 3000))

    own, nested = {"preprocessor_config": bounds(100)}, {"processor_config": {"image_processor": bounds(400)}}
    assert tokens(**own) == 88
    assert tokens(**nested) == tokens(**own, **nested) == 391
    # Without a file, the class says: 1280 tokens at most.
    assert tokens() == 1230


def test_a_folder_without_a_processor_file_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    resolve(tmp_path)
    assert "has no preprocessor_config.json: the defaults of Qwen2VLImageProcessorPil are used" in caplog.text
    resolve(tmp_path, config_of("kimi-vl-debug"))
    assert "the published model's settings are used" in caplog.text


@pytest.mark.parametrize(
    ("preset", "settings", "words"),
    [
        (None, {"do_center_crop": True, "crop_size": 224}, "crop"),
        (None, {"do_pad": True}, "do_pad"),
        (None, {"size": {"longest_edge": "large", "shortest_edge": 1}}, "size|longest"),
        (None, {"size": {"height": 256, "width": 256}}, "longest_edge and shortest_edge"),
        ("step3-vl-debug", {"size": 728}, "size to 728; it must have height"),
        ("kimi-k2.5-debug", {"size": {"height": 20, "width": 20}}, "it must have max_height"),
        (None, {"rescale_factor": "x"}, "rescale_factor to 'x'; it must be a positive number"),
        (None, {"max_pixels": float("inf")}, "max_pixels to inf; it must be a finite number"),
        (None, {"size": {"shortest_edge": 3136, "longest_edge": float("inf")}}, "convert float infinity to integer"),
        (None, {"image_std": [0, 0, 0]}, "image_std .* none of them 0"),
        (None, {"image_mean": None}, "image_mean"),
        ("gemma3-debug", {"do_resize": False}, "do_resize"),
        ("gemma3-debug", {"size": {"height": 10, "width": 10}}, "size"),
        ("internvl-debug", {"do_resize": False}, "do_resize"),
        ("gemma-4-debug", {"do_resize": False}, "do_resize"),
        ("kimi-vl-debug", {"do_normalize": False}, "do_normalize"),
        ("kimi-vl-debug", {"do_rescale": False}, "do_rescale"),
        ("minicpm-v-2.5-debug", {"rescale_factor": 1.0}, "rescale_factor"),
        (
            "llava-onevision-debug",
            {"image_grid_pinpoints": [[384, 384]]},
            "not all multiples of the tower's tiles of 60",
        ),
        ("deepseek-vl2-debug", {"candidate_resolutions": [[384, 384]]}, "not all multiples of the tower's tiles of 72"),
        ("minicpm-v-2.5-debug", {"slice_mode": False}, "slice_mode to False; only True"),
        ("minicpm-v-2.5-debug", {"patch_size": 16}, "patch_size of 16, its tower one of 14"),
        ("kimi-vl-debug", {"merge_kernel_size": [1, 1]}, "merge_kernel_size of .1, 1., its tower one of .2, 2."),
        ("deepseek-ocr-debug", {"crop_to_patches": None}, "crop_to_patches to null"),
        ("kimi-k2.5-debug", {"size": {"max_height": 20, "max_width": 40}}, "only squares"),
        ("step3-vl-debug", {"size": {"height": 168, "width": 112}}, "only squares"),
        ("deepseek-ocr-debug", {"candidate_resolutions": [[256, 512]]}, r"candidate_resolutions is \[256, 512\]; only"),
        ("molmo2-debug", {"pooling_size": [2, 3]}, r"pooling_size is \[2, 3\]; only squares"),
    ],
)
def test_settings_that_no_rule_follows_are_refused_by_name(
    preset: str | None, settings: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=words):
        resolve(tmp_path, config_of(preset) if preset else QWEN, preprocessor_config=settings)


def test_null_switches_are_off_and_one_value_stands_for_three_channels(tmp_path: Path) -> None:
    processor = resolve(tmp_path, preprocessor_config={"do_resize": None, "image_mean": 0.5, "crop_size": 64}).processor
    assert (processor["do_resize"], processor["image_mean"]) == (False, [0.5] * 3)
    ovis = resolve(tmp_path, config_of("ovis2-debug"), preprocessor_config={"crop_to_patches": None}).processor
    assert ovis["crop_to_patches"] is False


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vision_config": {"depth": -3}}, "depth -3; it must be a positive integer"),
        ({"vision_config": {"depth": 10**9}}, "depth 1000000000; it must be a positive integer"),
        ({"vision_config": {"patch_size": 0}}, "patch_size 0; it must be a positive integer"),
        ({"vision_config": {"hidden_size": 96, "num_heads": 5}}, "width of 96, which its 5 attention heads"),
        ({"vision_config": [1]}, r"vision_config of config.json is \[1\], not an object"),
        ({"architectures": ["MiniCPMV"], "version": 4.6}, r"MiniCPM-V 2.5; .*version 4.6\) is of none of them"),
        ({"architectures": ["Qwen2_5OmniModel"], "thinker_config": [1], "vision_config": None}, "vision_config"),
        # Several rows share these names, and each looks whether the config is its own.
        ({"architectures": ["LlavaForConditionalGeneration"], "vision_config": 0.5}, "config.json cannot be used"),
        ({"architectures": ["DeepseekVLV2ForCausalLM"], "projector_config": [1]}, "config.json cannot be used"),
        ({**INTERN, "max_dynamic_patch": "12"}, "max_dynamic_patch '12'; it must be a positive integer"),
        ({**INTERN, "force_image_size": 224}, "force_image_size is 224, the tower's image_size"),
        ({**INTERN, "downsample_ratio": 0.4}, "downsample_ratio is 0.4; only one over a whole number"),
    ],
)
def test_configs_that_no_tower_has_are_refused_by_the_field(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=words):
        resolve(tmp_path, {**QWEN, **changes})


def test_deepstack_levels_of_layers_that_are_not_there_give_no_columns(tmp_path: Path) -> None:
    config = config_of("qwen3-vl-debug")
    width = config["vision_config"]["out_hidden_size"]
    for indexes, levels in (([0, 1], 2), ([0, 40], 1), ([], 0)):
        config["vision_config"] = {**config["vision_config"], "deepstack_visual_indexes": indexes, "depth": 2}
        assert resolve(tmp_path, config, preprocessor_config={}).rule().output_width == width * (1 + levels)


def test_a_broken_package_is_not_taken_for_a_wrong_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(tower: Tower) -> None:
        raise ImportError("Could not import module") from RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr(Tower, "config_class", broken)
    with pytest.raises(ModelError, match=r"cannot be imported \(operator torchvision::nms does not exist\); mend"):
        resolve(tmp_path, QWEN)


def test_settings_without_meaning_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    resolve(tmp_path, preprocessor_config={**IMAGE, "max_pixel": 4, "do_convert_rgb": True, "processor_class": "X"})
    assert "settings of its processor that no size rule reads: max_pixel\n" in caplog.text


def test_a_null_takes_the_place_of_a_video_processors_value(tmp_path: Path) -> None:
    def frames(preset: str = "qwen3-vl-debug", count: int = 300, **video: Any) -> int:
        rule = resolve(tmp_path, config_of(preset), preprocessor_config={}, video_preprocessor_config=video).rule()
        found: Any = rule.geometry(64, 64, count, 30.0)
        return int(found.t)

    assert (frames(), frames(fps=None), frames(fps=None, count=2), frames(fps=None, max_frames=10)) == (10, 150, 2, 5)
    # Qwen2-VL's class has no rate: its frames come from a loader that has one.
    assert frames("qwen2-vl-debug", fps=None) == frames("qwen2-vl-debug") == 10
    for preset, setting in (("qwen3-vl-debug", "max_frames"), ("gemma-4-debug", "num_frames")):
        with pytest.raises(ModelError, match=f"{setting} to null; remove the setting"):
            frames(preset, **{setting: None})


def test_videos_whose_processor_does_not_sample_keep_every_frame(tmp_path: Path) -> None:
    for preset, every in (("qwen3-vl-debug", 150), ("glm-4v-debug", 150), ("qwen2-vl-debug", 10)):
        video = {"do_sample_frames": False}
        rule = resolve(tmp_path, config_of(preset), preprocessor_config={}, video_preprocessor_config=video).rule()
        found: Any = rule.geometry(64, 64, 300, 30.0)
        assert found.t == every


def test_settings_of_sound_and_of_a_file_that_videos_share_are_said_once_or_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sound = {"feature_extractor_type": "WhisperFeatureExtractor", "n_fft": 400, "hop_length": 160, "dither": 0.0}
    resolve(tmp_path, config_of("qwen2.5-omni-debug"), preprocessor_config={**IMAGE, **sound, "max_pixel": 4})
    assert caplog.text.count("no size rule reads: max_pixel\n") == caplog.text.count("no size rule reads") == 1


def test_pixels_per_frame_are_capped_where_the_video_file_asks_for_it(tmp_path: Path) -> None:
    config = config_of("qwen3-vl-debug")
    size = {"size": {"shortest_edge": 4096, "longest_edge": 25165824}}

    def tokens(**video: Any) -> int:
        source = resolve(tmp_path, config, video_preprocessor_config={**size, **video})
        return source.rule().final_tokens(source.rule().geometry(1920, 1080, 4))

    assert tokens() == 4080
    assert tokens(cap_pixels_per_frame=True) == 1440
    assert tokens(cap_pixels_per_frame=True, max_video_tokens=100) < 200


@pytest.mark.parametrize("preset", ["internvl-debug", "gemma-4-debug"])
def test_a_file_with_too_few_frames_is_refused_as_by_transformers(preset: str) -> None:
    rule = resolve_model(preset).rule()
    assert rule.geometry(640, 480, 20) is not None  # frames that already are sampled
    with pytest.raises(InputError, match=r"20 frames.*num_frames"):
        rule.geometry(640, 480, 20, 30.0)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_row_has_its_processors_without_torchvision(row: ModelRow) -> None:
    encoder = row.encoder_class()
    for found in (encoder.image_processor_class(), encoder.video_processor_class()):
        assert found is None or found() is not None


# -- config.json ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**QWEN, "vision_config": None}, "vision_config"),
        ({name: value for name, value in QWEN.items() if name != "vision_config"}, "vision_config"),
        ({**QWEN, "vision_config": [1]}, "vision_config"),
        ({**QWEN, "vision_config": {"depth": "many"}}, "depth"),
        ({"hidden_size": 3}, "architectures"),
        ({"architectures": "Qwen", "model_type": 3}, "architectures"),
        ({"architectures": ["BertModel"]}, "BertModel"),
        ({**config_of("gemma3-debug"), "text_config": {}}, r"text_config\.hidden_size"),
        ({**config_of("internvl-debug"), "text_config": None}, r"text_config\.hidden_size"),
        ({"architectures": ["MiniCPMV"], "version": 9.9, "vision_config": {}}, "MiniCPMV"),
        ({"architectures": ["MiniCPMV"], "version": "2.6", "vision_config": {}}, "hidden_size"),
    ],
)
def test_a_config_that_says_too_little_is_refused_by_its_field(
    config: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=words):
        resolve(tmp_path, config, preprocessor_config={})


@pytest.mark.parametrize("preset", ["qwen2.5-vl-debug", "qwen3-vl-debug", "glm-4v-debug", "llama4-debug"])
def test_fields_that_are_left_out_have_transformers_defaults(preset: str, tmp_path: Path) -> None:
    config = config_of(preset)
    config["vision_config"] = {}
    source = resolve_preset(preset)
    assert source is not None
    tower = source.row.encoder_class().tower
    assert tower is not None
    defaults = tower.config_class()
    found = resolve(tmp_path, config, preprocessor_config={}).vision_config
    patch = getattr(defaults(), "patch_size")  # noqa: B009 (a field of any class)
    assert found["patch_size"] == patch


def test_fields_beside_the_tower_that_are_left_out_have_transformers_defaults(tmp_path: Path) -> None:
    """transformers writes no field of a text config, or of the whole, that is as its class has it."""
    gemma = {**config_of("gemma3-debug"), "text_config": {"model_type": "llama"}}
    assert resolve(tmp_path, gemma, preprocessor_config={}).extra["text_hidden_size"] == 4096
    smol = {**config_of("idefics3-debug"), "model_type": "smolvlm", "scale_factor": None}
    processor = {"max_image_size": {"longest_edge": 64}}
    assert resolve(tmp_path, smol, preprocessor_config=processor).extra["scale_factor"] == 2
    llava = {**config_of("pixtral-debug"), "architectures": ["LlavaForConditionalGeneration"], "model_type": "llava"}
    with pytest.raises(ModelError, match="vision_feature_layer is -2; only -1"):
        resolve(tmp_path, llava)
    with pytest.raises(ModelError, match="vision_feature_select_strategy is 'default'; only 'full'"):
        resolve(tmp_path, {**llava, "vision_feature_layer": -1})


def test_a_pointer_in_place_of_a_small_file_is_said_to_be_one(tmp_path: Path) -> None:
    (folder(tmp_path) / IMAGE_FILE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(ModelError, match=rf"{IMAGE_FILE}: it is a Git LFS pointer"):
        resolve_model(str(tmp_path))


def test_an_adapter_alone_is_said_to_be_one(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "Qwen/Qwen2.5-VL-7B-Instruct"}')
    with pytest.raises(ModelError, match=r"is an adapter of Qwen/Qwen2\.5-VL-7B-Instruct; give that model"):
        resolve_model(str(tmp_path))


def test_an_omni_model_and_one_without_architectures_resolve(tmp_path: Path) -> None:
    config = config_of("qwen3-vl-debug")
    omni = {"architectures": ["Qwen3OmniMoeForConditionalGeneration"], "thinker_config": config}
    assert "qwen3" in resolve(tmp_path, omni, preprocessor_config={}).row.name
    unnamed = {**QWEN, "architectures": None, "model_type": "qwen2_5_vl"}
    assert resolve(tmp_path, unnamed, preprocessor_config={}).row.name == "qwen2_5_vl"


# -- overrides -----------------------------------------------------------------------------------------------------


def tokens_with(model: str, kwargs: Mapping[str, Any], *size: int) -> int:
    rule = resolve_source(ModelSpec(model, mm_processor_kwargs=kwargs)).rule()
    return rule.final_tokens(rule.geometry(*size))


@pytest.mark.parametrize(
    ("model", "kwargs", "size", "tokens"),
    [
        # A bound that is given leaves the other as the checkpoint has it: small images still are enlarged.
        ("qwen3-vl-30b-a3b", {"max_pixels": 1003520}, (200, 200), 64),
        ("qwen3-vl-30b-a3b", {"size": {"longest_edge": 1003520}}, (200, 200), 64),
        ("qwen2.5-vl-7b", {"max_pixels": 100352}, (1280, 720, 8), 480),
        ("qwen2.5-vl-7b", {"videos_kwargs": {"max_pixels": 100352}}, (1280, 720, 8), 480),
        ("qwen2.5-vl-7b", {"images_kwargs": {"max_pixels": 100352}}, (1280, 720), 120),
        # Qwen3-VL's video processor takes no plain bounds.
        ("qwen3-vl-30b-a3b", {"max_pixels": 100352}, (1280, 720, 8), 3520),
        ("internvl3.5-8b", {"max_dynamic_patch": 4}, (1600, 1200), 1280),
        ("internvl3.5-8b", {"max_patches": 4}, (1600, 1200), 1280),
        ("internvl3.5-8b", {"dynamic_image_size": False}, (1600, 1200), 256),
        ("internvl3.5-8b", {"use_thumbnail": False}, (1600, 1200), 3072),
        ("gemma-4-26b-a4b", {"max_soft_tokens": 70}, (1600, 1200), 63),
        ("minicpm-v-2.6", {"max_slice_nums": 1}, (1600, 1200), 64),
    ],
)
def test_overrides_change_what_the_processor_would(
    model: str, kwargs: dict[str, Any], size: tuple[int, ...], tokens: int
) -> None:
    assert tokens_with(model, kwargs, *size) == tokens


def test_a_rate_changes_how_many_frames_of_a_file_are_taken() -> None:
    def frames(kwargs: dict[str, Any]) -> int:
        rule = resolve_source(ModelSpec("qwen3-vl-30b-a3b", mm_processor_kwargs=kwargs)).rule()
        found: Any = rule.geometry(640, 480, 300, 30.0)
        return int(found.t) * 2

    assert (frames({}), frames({"fps": 1.0}), frames({"videos_kwargs": {"fps": 4}})) == (20, 10, 40)


@pytest.mark.parametrize(
    ("model", "kwargs", "words"),
    [
        ("qwen2.5-vl-7b", {"max_pixels": 100352, "mx_pixels": 3}, "'mx_pixels'.*did you mean 'max_pixels'"),
        ("qwen2.5-vl-7b", {"max_pixels": -5}, "max_pixels to -5; it must be a positive integer"),
        ("qwen2.5-vl-7b", {"max_pixels": 0}, "positive integer"),
        ("qwen2.5-vl-7b", {"max_pixels": "1003520"}, "positive integer"),
        ("qwen2.5-vl-7b", {"max_pixels": 1e6}, "positive integer"),
        ("qwen2.5-vl-7b", {"max_pixels": True}, "positive integer"),
        ("qwen2.5-vl-7b", {"max_pixels": 100}, "shortest_edge is 3136, above longest_edge, which is 100"),
        ("qwen3-vl-8b", {"fps": 1e-320}, "positive number, from 0.0001"),
        ("qwen3-vl-8b", {"images_kwargs": 5}, "images_kwargs to 5; it must be an object"),
        ("qwen3-vl-8b", {"patch_size": 14}, "patch_size to 14; the tower of qwen3-vl-8b has 16"),
        ("qwen3-vl-8b", {"videos_kwargs": {"min_frames": 9, "max_frames": 8}}, "min_frames is 9, above max_frames"),
        ("internvl3.5-8b", {"max_dynamic_patch": 10**9}, "max_dynamic_patch is 1000000000.*256 tiles"),
        ("internvl3.5-8b", {"min_dynamic_patch": 9, "max_dynamic_patch": 4}, "min_dynamic_patch is 9, above"),
        ("lfm2-vl-450m", {"min_tiles": 20}, "min_tiles is 20, above max_tiles, which is 10"),
        ("qwen2.5-vl-7b", {"size": {"longest": 5}}, "object of positive integers"),
        ("qwen2.5-vl-7b", {"size": 448}, "object of positive integers"),
        (
            "qwen2.5-vl-7b",
            {"size": {"height": 448, "width": 448}},
            "of it the rule of qwen2.5-vl-7b reads shortest_edge",
        ),
        ("mistral-small-3.1-24b", {"size": {"height": 448, "width": 448}}, "reads longest_edge"),
        ("kimi-k2.5", {"media_proc_cfg": 5}, "reads patch_size"),
        ("deepseek-v4.1-flash", {"max_pixels": 100352}, "'max_pixels'"),
        ("deepseek-ocr", {"candidate_resolutions": 7}, "candidate_resolutions.* cannot be read"),
        ("gemma-4-26b-a4b", {"pooling_kernel_size": 2}, "the tower of gemma-4-26b-a4b has 3"),
        ("qwen2.5-vl-7b", {"fps": -1}, "positive number"),
        ("qwen2.5-vl-7b", {"do_resize": "no"}, "true or false"),
        ("qwen2.5-vl-7b", {"num_frames": 8}, "num_frames, which the size rule of qwen2.5-vl-7b does not follow"),
        ("qwen2.5-vl-7b", {"max_dynamic_patch": 4}, "'max_dynamic_patch'"),
        ("internvl3.5-8b", {"size": {"height": 224, "width": 224}}, "size, which the size rule"),
        ("internvl3.5-8b", {"max_dynamic_pach": 4}, "did you mean 'max_dynamic_patch'"),
        ("gemma-3-4b", {"fps": 2}, "'fps'"),
        ("kimi-vl-a3b", {"do_resize": False}, "do_resize, which the size rule"),
        ("kimi-vl-a3b", {"in_token_limt": 5}, "did you mean 'in_token_limit'"),
    ],
)
def test_overrides_that_no_processor_takes_are_refused(model: str, kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        tokens_with(model, kwargs, 640, 480)
