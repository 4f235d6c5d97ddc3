"""Qwen3-VL: sizes to tokens by the processor's rule, eager against transformers' own forward, checkpoint loading."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from encoder_checks import stock_state
from PIL import Image
from safetensors.torch import save_file
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as reference_video_resize

from vitgraph.attention.registry import create_backend
from vitgraph.errors import HubUnreachableError, InputError, ModelError
from vitgraph.measure.correctness import relative_l2
from vitgraph.models.encoder import VisionEncoder
from vitgraph.models.families.qwen3_vl import Qwen3VLRule
from vitgraph.models.geometry import GridGeometry
from vitgraph.models.loading import load_encoder
from vitgraph.models.registry import resolve_model
from vitgraph.planning.budgets import IMAGE, VIDEO

SIZES = [
    (1, 1),
    (31, 33),
    (224, 224),
    (336, 336),
    (448, 448),
    (640, 480),
    (1024, 768),
    (1920, 1080),
    (333, 77),
    (8000, 200),
]

FULL = resolve_model("qwen3-vl-30b-a3b").rule()


def make_rule(processor: dict[str, object] | None = None) -> Qwen3VLRule:
    source = resolve_model("qwen3-vl-30b-a3b")
    return Qwen3VLRule(source.vision_config, {**source.processor, **(processor or {})})


@pytest.mark.parametrize(
    ("width", "height", "tokens"),
    [
        (224, 224, 64),
        (336, 336, 100),
        (448, 448, 196),
        (560, 560, 324),
        (672, 672, 441),
        (1280, 720, 880),
        (1008, 1008, 1024),
    ],
)
def test_published_sizes_give_the_known_tokens(width: int, height: int, tokens: int) -> None:
    assert FULL.item_spec(FULL.geometry(width, height)).output_tokens == tokens


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_image_grids_equal_the_image_processors(width: int, height: int) -> None:
    size = FULL.processor["size"]
    processor = Qwen2VLImageProcessorPil(patch_size=16, temporal_patch_size=2, merge_size=2, size=size)
    expected = processor(Image.new("RGB", (width, height)), return_tensors="pt")["image_grid_thw"][0].tolist()
    assert FULL.geometry(width, height) == GridGeometry(IMAGE, *expected)


@pytest.mark.parametrize(("width", "height", "frames"), [(640, 480, 2), (640, 480, 3), (20, 700, 5), (1920, 1080, 768)])
def test_video_grids_equal_the_video_processors(width: int, height: int, frames: int) -> None:
    video = FULL.processor["video"]
    even = frames + frames % 2
    expected = reference_video_resize(
        frames, height, width, factor=32, min_pixels=video["shortest_edge"], max_pixels=video["longest_edge"]
    )
    grid = FULL.geometry(width, height, frames)
    assert grid == GridGeometry(VIDEO, even // 2, expected[0] // 16, expected[1] // 16)


def test_file_frames_are_sampled_as_the_loader_does() -> None:
    # 16 frames at 30 fps last half a second: two frames a second would be 1, the floor is 4, in 2 temporal steps.
    assert FULL.geometry(1280, 720, 16, fps=30.0).t == 2
    assert FULL.geometry(1280, 720, 240, fps=30.0).t == 8
    assert FULL.geometry(1280, 720, 16).t == 8


@pytest.mark.parametrize(("width", "height"), [(8000, 20), (1, 500)])
def test_extreme_aspect_ratios_are_refused_by_name(width: int, height: int) -> None:
    with pytest.raises(InputError, match=f"{width}x{height}.*200"):
        FULL.geometry(width, height)


def test_sizes_must_be_positive() -> None:
    with pytest.raises(InputError, match="0x4"):
        FULL.geometry(0, 4)


def test_the_smallest_budget_follows_the_processor_not_a_table() -> None:
    assert FULL.budget_range(8192) == (64, 8192)
    no_floor = make_rule({"size": {"shortest_edge": 1024, "longest_edge": 16777216}})
    assert no_floor.item_spec(no_floor.geometry(224, 224)).output_tokens == 49
    assert no_floor.budget_range(8192)[0] <= 49


@torch.inference_mode()
@pytest.mark.parametrize(
    ("width", "height", "frames"), [(1, 1, 1), (333, 77, 1), (8000, 200, 1), (300, 200, 2), (64, 96, 9)]
)
def test_predicted_tokens_are_the_rows_of_the_forward(
    tower: VisionEncoder, width: int, height: int, frames: int
) -> None:
    rule = Qwen3VLRule(
        tower.rule.vision_config, {**tower.rule.processor, "size": {"shortest_edge": 1024, "longest_edge": 400_000}}
    )
    item = rule.geometry(width, height, frames)
    rows = rule.pixel_rows(item)
    mm_kwargs = tower.make_inputs([item], tower.random_pixels(rows, 0))
    assert len(tower.stock_forward(mm_kwargs)) == rule.item_spec(item).output_tokens


@torch.inference_mode()
def test_eager_equals_the_stock_forward_on_images_and_videos(tower: VisionEncoder) -> None:
    items = [tower.rule.geometry(336, 336), tower.rule.geometry(64, 96, 9), tower.rule.geometry(300, 520)]
    rows = sum(item.patches for item in items)
    mm_kwargs = tower.make_inputs(items, tower.random_pixels({"pixel_values": rows}, 0))
    eager = tower.encoder_eager_forward(mm_kwargs)
    assert relative_l2(eager, tower.stock_forward(mm_kwargs)) <= 1e-6
    assert eager.shape[1] == tower.get_encoder_cudagraph_config().output_width


@torch.inference_mode()
def test_real_images_go_through_the_image_processor(tower: VisionEncoder) -> None:
    images = [Image.effect_noise((300, 200), 60).convert("RGB"), Image.effect_noise((90, 400), 60).convert("RGB")]
    items, pixels = tower.preprocess(images)
    assert items == [tower.rule.geometry(image.width, image.height) for image in images]
    outputs = tower.encoder_eager_forward(tower.make_inputs(items, pixels))
    assert torch.isfinite(outputs).all()
    assert len(outputs) == sum(tower.rule.item_spec(item).output_tokens for item in items)


def write_checkpoint(folder: Path, tower: VisionEncoder, *, drop: str | None = None) -> None:
    """A sharded checkpoint with the published key names, beside language-model tensors in a damaged shard."""
    vision = {f"model.{key}": value.contiguous() for key, value in stock_state(tower).items() if key != drop}
    names = sorted(vision)
    half = len(names) // 2
    shards = {"model-00001.safetensors": names[:half], "model-00002.safetensors": names[half:]}
    weight_map = {}
    for file, keys in shards.items():
        save_file({key: vision[key] for key in keys}, folder / file)
        weight_map |= dict.fromkeys(keys, file)
    (folder / "model-00003.safetensors").write_bytes(b"not a safetensors file: reading it would fail")
    weight_map["model.language_model.embed_tokens.weight"] = "model-00003.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "vision_config": tower.rule.vision_config,
        "text_config": {"hidden_size": 64},
    }
    (folder / "config.json").write_text(json.dumps(config))
    settings = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2, "size": tower.rule.processor["size"]}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))


def load_folder(folder: Path) -> VisionEncoder:
    device = torch.device("cpu")
    return load_encoder(
        resolve_model(str(folder)), create_backend("TORCH_SDPA", device), device=device, dtype=torch.float32
    )


def test_a_sharded_checkpoint_loads_bit_equal_without_the_language_model(tmp_path: Path, tower: VisionEncoder) -> None:
    write_checkpoint(tmp_path, tower)
    loaded = load_folder(tmp_path)
    expected = tower.modules.state_dict()
    for name, value in loaded.modules.state_dict().items():
        assert torch.equal(value, expected[name]), name


def test_a_checkpoint_without_one_tensor_is_refused_by_its_name(tmp_path: Path, tower: VisionEncoder) -> None:
    write_checkpoint(tmp_path, tower, drop="visual.merger.norm.weight")
    with pytest.raises(ModelError, match=r"lacks 1 tensors.*visual\.merger\.norm\.weight"):
        load_folder(tmp_path)


def test_a_config_of_another_size_is_refused_with_both_shapes(tmp_path: Path, tower: VisionEncoder) -> None:
    write_checkpoint(tmp_path, tower)
    config = json.loads((tmp_path / "config.json").read_text())
    config["vision_config"]["out_hidden_size"] = 32
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"\[64, 384\].*\[32, 384\]|\[64\].*\[32\]"):
        load_folder(tmp_path)


def test_offline_and_uncached_names_dummy_and_presets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(HubUnreachableError, match=r"--load-format dummy with a preset"):
        resolve_model("nobody/never-published-this")


def test_a_misspelt_model_names_the_nearest_presets() -> None:
    with pytest.raises(ModelError, match=r"did you mean .*qwen3-vl-debug"):
        resolve_model("qwen3-vl-debgu")
    with pytest.raises(ModelError, match="neither a preset, a local folder nor a hub id"):
        resolve_model("gpt-17")
