"""A profile of one call: its items, its graphs without padding, its record, and what is refused before it starts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from vitgraph.errors import InputError, NothingReplayedError, UsageError
from vitgraph.measure.profile_call import (
    PreparedProfile,
    prepare_profile,
    product_flops,
    run_profile,
)
from vitgraph.models.encoder import VisionEncoder
from vitgraph.specs.asked import ProfileSpec
from vitgraph.specs.parts import GraphSpec, ModelSpec
from vitgraph.specs.values import parse_items


class Silent:
    def phase(self, name: str, total: int | None = None) -> None: ...

    def step(self) -> None: ...

    def note(self, text: str) -> None: ...


def prepared(items: str, model: str = "qwen3-vl-debug", **graph: Any) -> PreparedProfile:
    spec = ModelSpec(model, load_format="dummy", device="cpu")
    return prepare_profile(ProfileSpec(spec, GraphSpec(**graph), parse_items(items), repeats=1))


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("336x336", [(336, 336, 1)]),
        ("3*64x96", [(64, 96, 1)] * 3),
        (" 2 * 64x96 , 32x32x8", [(64, 96, 1), (64, 96, 1), (32, 32, 8)]),
    ],
)
def test_items_are_read_as_written(text: str, sizes: list[tuple[int, int, int]]) -> None:
    assert list(parse_items(text)) == sizes


@pytest.mark.parametrize("text", ["", "336", "336x", "0x336", "0*336x336", "336x336;64x64", "ax b", "9999*32x32"])
def test_other_items_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match="--items"):
        parse_items(text)


def test_graphs_are_of_exactly_the_calls_size() -> None:
    found = prepared("3*256x256,320x320")
    assert found.plan.path_budgets == {"default": (found.call.tokens,)}
    assert found.plan.max_items == 4


def test_budgets_that_are_given_stay() -> None:
    assert prepared("256x256", token_budgets=(128, 256)).plan.path_budgets == {"default": (128, 256)}


def test_a_video_gets_as_many_segment_slots_as_it_has() -> None:
    found = prepared("64x96x8,64x96")
    (spec, image) = found.call.specs
    assert max(key.segment_slots for key in found.plan.graph_keys()) == spec.segments + image.segments


def test_both_paths_of_a_model_get_their_own_budget() -> None:
    found = prepared("2*900x700", model="step3-vl-debug")
    for path, budgets in found.plan.path_budgets.items():
        assert sum(spec.tokens_on(path) for spec in found.call.specs) in budgets


def test_an_item_that_the_model_does_not_take_is_refused_before_anything_runs() -> None:
    with pytest.raises(InputError, match="does not take every item"):
        prepared("64x64,2x4000")


def test_repeats_must_be_positive() -> None:
    with pytest.raises(UsageError, match="--repeats is 0"):
        ProfileSpec(ModelSpec("qwen3-vl-debug"), GraphSpec(), parse_items("64x64"), repeats=0)


def test_a_record_says_what_was_traced_and_claims_no_limit_on_a_cpu(tmp_path: Path) -> None:
    result = run_profile(prepared("2*128x128"), tmp_path, Silent()).result
    assert result is not None
    saved = json.loads((tmp_path / "run.json").read_text())
    assert saved["kind"] == "profile"
    assert (saved["result"]["traced"], saved["result"]["speed_of_light"]) == ("CPU operators", None)
    assert saved["result"]["call"]["items"] == [[128, 128, 1]] * 2
    assert [replay["token_budget"] for replay in saved["result"]["call"]["replays"]] == [result.call.tokens]
    for mode in ("eager", "graph"):
        entry = saved["result"]["modes"][mode]
        assert entry["wall_ms"] > 0
        assert entry["kinds"]["product"]["kernels"] > 10
        assert sum(kind["ms"] for kind in entry["kinds"].values()) == pytest.approx(entry["busy_ms"])
    with pytest.raises(UsageError, match="--overwrite"):
        run_profile(prepared("64x64"), tmp_path, Silent())


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
def test_the_limit_is_the_calls_arithmetic_in_parts(
    compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, traced_only: None
) -> None:
    monkeypatch.setattr("vitgraph.measure.profile_call.matrix_rate_flops", lambda device, dtype: 1e12)
    found = prepared("128x128,64x96")
    found = replace(found, spec=replace(found.spec, model=replace(found.spec.model, compile=compiled)))
    result = run_profile(found, tmp_path, Silent()).result
    limit = None if result is None else result.speed_of_light
    assert limit is not None and limit.product_ms is not None and limit.attention_ms is not None
    flops = sum(found.source.rule().flops(item) for item in found.call.items)
    assert limit.total_ms == pytest.approx(flops / 1e9)
    assert limit.product_ms + limit.attention_ms == pytest.approx(limit.total_ms)
    assert 0 < limit.attention_ms < limit.product_ms


def test_a_call_that_no_graph_holds_has_no_replay_to_profile(tmp_path: Path) -> None:
    with pytest.raises(NothingReplayedError, match="leave --token-budgets out"):
        run_profile(prepared("256x256", token_budgets=(67, 131), packing="exact"), tmp_path, Silent())


def test_products_are_counted_apart_from_attention(tower: VisionEncoder) -> None:
    item = tower.rule.image_geometry(256, 256)
    inputs = tower.make_inputs([item], tower.random_pixels(tower.rule.pixel_rows(item), 0))
    config = tower.rule.vision_config
    patches = tower.rule.pixel_rows(item)["pixel_values"]
    attention = 4.0 * patches**2 * config["hidden_size"] * config["depth"]
    assert product_flops(tower, inputs) == tower.rule.flops(item) - attention
    assert not torch.is_inference_mode_enabled()
