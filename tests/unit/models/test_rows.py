"""Names of config.json: which row takes them, what their configs and tensors are called, what refusals say."""

import subprocess
import sys
from typing import Any

import pytest
import torch

from vitgraph.errors import InputError, ModelError
from vitgraph.models.registry import (
    NOT_YET,
    ROWS,
    ModelRow,
    ModelSource,
    preset_of,
    resolve_model,
    row_of_config,
    row_presets,
)

VISION = {"hidden_size": 64, "depth": 2}


@pytest.mark.parametrize(
    ("config", "row"),
    [
        ({"architectures": ["MiniCPMO"]}, "minicpmv_2_6_4_0"),
        ({"architectures": ["MiniCPMO"], "version": 4.5}, "minicpmv_4_5"),
        ({"architectures": ["MiniCPMV"], "version": 4.5}, "minicpmv_4_5"),
        ({"architectures": ["MiniCPMV"], "version": "4.0"}, "minicpmv_2_6_4_0"),
        ({"architectures": ["Cosmos3OmniForConditionalGeneration"]}, "qwen3_vl"),
        ({"architectures": ["Step5ForConditionalGeneration"]}, "step3_vl"),
    ],
)
def test_a_name_belongs_to_the_row_of_its_tower(config: dict[str, Any], row: str) -> None:
    assert row_of_config(config).name == row


@pytest.mark.parametrize("name", NOT_YET)
def test_a_relative_with_another_tower_is_refused_with_the_difference(name: str) -> None:
    assert all(name not in row.architectures for row in ROWS)
    with pytest.raises(ModelError, match="no vision-encoder adapter yet: ") as error:
        row_of_config({"architectures": [name]})
    assert NOT_YET[name] in str(error.value)


def test_another_name_of_a_known_model_type_is_refused_with_the_usual_one() -> None:
    """As `AutoModel` saves it, or with another head."""
    config = {"architectures": ["Qwen2_5_VLModel"], "model_type": "qwen2_5_vl"}
    with pytest.raises(ModelError, match=r"is Qwen2_5_VLForConditionalGeneration's: .* name that in architectures"):
        row_of_config(config)


@pytest.mark.parametrize("name", [name for row in ROWS for name in row.images_only])
def test_names_without_videos_take_images_only(name: str) -> None:
    (row,) = [row for row in ROWS if name in row.architectures]
    preset = preset_of(row, name)
    source = ModelSource(row, name, preset["vision_config"], preset["processor"], preset["extra"], None, name, "folder")
    assert source.rule().graph_config().modalities == ("image",)
    with pytest.raises(InputError, match="images only"):
        source.rule().geometry(640, 480, 4)


def test_the_part_that_sees_is_found_inside_a_larger_model() -> None:
    row = row_of_config({"architectures": ["Qwen3OmniMoeForConditionalGeneration"]})
    part = {"vision_config": VISION, "text_config": {"hidden_size": 96}}
    assert row.encoder_class().read_model_config({"thinker_config": part}) == (VISION, {"text_hidden_size": 96})


@pytest.mark.parametrize(
    ("row", "published", "module"),
    [
        ("qwen3_omni", "thinker.visual.merger_list.2.ln_q.weight", "visual.merger_list.2.ln_q.weight"),
        ("kimi_k25", "mm_projector.proj.0.weight", "projector.in_proj.weight"),
        ("kimi_k3", "vision_tower.encoder.blocks.0.norm1.weight", "visual.layers.0.norm2.weight"),
        ("qwen3_vl", "vlm.model.visual.pos_embed.weight", "visual.pos_embed.weight"),
        ("qwen3_vl", "blocks.3.attn.qkv.weight", "visual.blocks.3.attn.qkv.weight"),
        ("qwen2_5_vl", "vision_tower.patch_embed.proj.weight", "visual.patch_embed.proj.weight"),
        ("qwen3_vl", "thinker.audio_tower.conv2d1.weight", None),
        ("qwen3_vl", "layers.3.self_attn.to_q.weight", None),
    ],
)
def test_published_tensors_of_relatives_are_named(row: str, published: str, module: str | None) -> None:
    (found,) = [entry for entry in ROWS if entry.name == row]
    assert found.encoder_class().map_checkpoint_key(published) == module


def test_a_variants_own_preset_says_what_its_files_leave_open() -> None:
    row = row_of_config({"architectures": ["UnlimitedOCRForCausalLM"]})
    assert preset_of(row, "UnlimitedOCRForCausalLM")["processor"]["max_crops"] == 32
    assert preset_of(row, "DeepseekOCRForCausalLM")["processor"]["max_crops"] == 6
    assert preset_of(row, "UnlimitedOcrForConditionalGeneration")["processor"]["max_crops"] == 32


@pytest.mark.parametrize(
    ("preset", "smallest"),
    [
        ("qwen2.5-vl-7b", 64),
        ("minimax-m3", 64),
        ("gemma-4-26b-a4b", 70),
        ("llama-4-scout", 144),
        ("deepseek-ocr", 272),
        ("deepseek-vl2", 392),
    ],
)
def test_smallest_budgets_are_one_item_of_the_model(preset: str, smallest: int) -> None:
    rule = resolve_model(preset).rule()
    assert rule.budget_range(8192)[0] == smallest
    if preset == "minimax-m3":
        rule.processor["size"] = {"shortest_edge": 28 * 28 * 100, "longest_edge": 28 * 28 * 1000}
        assert rule.budget_range(8192)[0] > 64


def test_no_family_imports_torch() -> None:
    """Sizes, tokens and plans are computed where torch is not used."""
    code = (
        "import sys; from vitgraph.models.registry import ROWS, resolve_model\n"
        "for row in ROWS:\n"
        "    row.encoder_class(); rule = resolve_model(row.debug_preset).rule(); item = rule.geometry(640, 480)\n"
        "    rule.item_spec(item), rule.flops(item), rule.graph_config()\n"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_modules_are_made_where_they_will_run(row: ModelRow) -> None:
    preset = row_presets(row.name)[row.debug_preset]
    meta = torch.device("meta")
    modules = row.encoder_class().build_modules(preset["vision_config"], preset["extra"], torch.bfloat16, meta)
    assert {tensor.device for tensor in (*modules.parameters(), *modules.buffers())} == {meta}
