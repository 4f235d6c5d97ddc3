"""Profiles are found by what a tower is: fine-tunes, hub ids and folders of the same shapes share one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vitgraph.errors import UsageError
from vitgraph.models.registry import all_presets, resolve_model
from vitgraph.predict.profile import find_profile, stands_for, tower_shape


@pytest.mark.parametrize(
    ("model", "others"),
    [
        ("qwen2.5-vl-7b", {"qwen2.5-vl-3b"}),
        ("qwen3.5-9b", {"qwen3.5-27b", "qwen3.5-35b-a3b"}),
        ("qwen3-vl-30b-a3b", {"qwen3-vl-8b", "qwen3-vl-32b", "qwen3-vl-235b-a22b"}),
    ],
)
def test_presets_that_share_a_tower(model: str, others: set[str]) -> None:
    profile = find_profile(None, resolve_model(model))
    known = {name for name in all_presets() if stands_for(profile, resolve_model(name))}
    assert known >= {model, *(others & all_presets().keys())}


def test_a_fine_tune_finds_the_profile_of_its_tower_under_any_name() -> None:
    preset = resolve_model("qwen2.5-vl-7b")
    folder_config = {
        **preset.vision_config,
        "model_type": "qwen2_5_vl",
        "initializer_range": 0.02,
        "out_hidden_size": 2048,
    }
    tuned = replace(preset, name="my/fine-tune", vision_config=folder_config, config_source="folder")
    assert find_profile(None, tuned).name == "qwen2.5-vl-7b"
    assert find_profile(None, resolve_model("Qwen/Qwen2.5-VL-7B-Instruct")).name == "qwen2.5-vl-7b"


def test_rows_that_differ_in_other_parts_than_the_network_share_a_profile() -> None:
    profile = find_profile(None, resolve_model("qwen3-vl-30b-a3b"))
    profile.row, profile.name = "qwen3_5", "qwen3.5-9b"
    profile.tower = tower_shape(resolve_model("qwen3.5-9b"))
    assert stands_for(profile, resolve_model("qwen3.5-35b-a3b")) is True
    # Of the same shapes, but it computes deepstack features too.
    assert stands_for(profile, resolve_model("qwen3-vl-8b")) is False


def test_another_depth_is_another_tower() -> None:
    preset = resolve_model("qwen2.5-vl-7b")
    other = replace(preset, name="my/shallow", vision_config={**preset.vision_config, "depth": 16})
    assert stands_for(find_profile(None, preset), other) is False
    with pytest.raises(UsageError, match="none comes with vitgraph for the tower of my/shallow"):
        find_profile(None, other)
