"""One path for two: the same embeddings as the two-path encoder, whatever crops an item has, at the price of all."""

from __future__ import annotations

from itertools import pairwise

import encoder_checks as checks
import numpy as np
import pytest
import torch
import two_path_checks
from two_path_checks import MIXED, UNTILED

from vitgraph.errors import ModelError
from vitgraph.models.two_path import CropGeometry, MonolithicEncoder, MonolithicRule, TwoPathEncoder
from vitgraph.planning.budgets import IMAGE, GraphKey
from vitgraph.verify.probes import encode_eagerly

ENCODERS = ("deepseek-ocr-debug", "step3-vl-debug")


@pytest.fixture(scope="module", params=ENCODERS)
def inner(request: pytest.FixtureRequest) -> TwoPathEncoder:
    return two_path_checks.build(checks.preset_source(request.param))


def rows_of(encoder: MonolithicEncoder, crops: int) -> int:
    tokens = encoder.inner.rule.path_tokens
    return tokens["global"] + crops * tokens["local"]


def test_every_item_takes_the_rows_of_all_crops(inner: TwoPathEncoder) -> None:
    rule = MonolithicEncoder(inner, 6).rule
    unit = rule.item_tokens
    specs = [rule.item_spec(item) for item in MIXED]
    assert [(spec.output_tokens, spec.segments, spec.path_output_tokens) for spec in specs] == [(unit, 1, {})] * 5
    assert [spec.input_size for spec in specs] == [1, 7, 1, 3, 3]
    assert [rule.useful_tokens(item) for item in MIXED] == [inner.rule.item_spec(item).output_tokens for item in MIXED]
    assert rule.budget_range(10 * unit) == (unit, 10 * unit)
    assert [rule.image_geometry(*size) for size in ((300, 200), (64, 64))] == [
        inner.rule.image_geometry(*size) for size in ((300, 200), (64, 64))
    ]
    assert [rule.flops(item) for item in MIXED] == [inner.rule.flops(item) for item in MIXED]


@torch.inference_mode()
def test_embeddings_are_those_of_two_paths(inner: TwoPathEncoder) -> None:
    encoder = MonolithicEncoder(inner, 6)
    inputs = checks.inputs_of(encoder, MIXED)
    wanted = encode_eagerly(inner, inputs)
    assert torch.equal(encoder.stock_forward(inputs), inner.stock_forward(inputs))
    manager = two_path_checks.capture(encoder, [rows_of(encoder, 6) * places for places in (1, 3, 5)], max_items=5)
    for name, found in (("eager", encode_eagerly(encoder, inputs)), ("graph", manager.execute(inputs))):
        for actual, expected in zip(found, wanted, strict=True):
            assert checks.relative_error(actual, expected) <= 1e-5, name


def test_a_graph_computes_all_crops_of_all_its_items(inner: TwoPathEncoder) -> None:
    encoder = MonolithicEncoder(inner, 6)
    unit = rows_of(encoder, 6)
    for budget, places in ((3 * unit, 3), (4 * unit - 1, 3)):
        wanted = encoder.prepare_encoder_cudagraph_capture_inputs(GraphKey("default", budget, 3, (6,)))
        assert {name: field.rows for name, field in wanted.pixels.items()} == {
            "pixel_values": places,
            inner.rule.local_pixels: 6 * places,
        }
        assert wanted.metadata["crop_index"].shape == wanted.dummy["crop_index"].shape == (6 * places,)


def test_crops_come_to_the_places_of_their_items(inner: TwoPathEncoder) -> None:
    encoder = MonolithicEncoder(inner, 3)
    items = [UNTILED, CropGeometry(IMAGE, 2, 1), CropGeometry(IMAGE, 3, 1)]
    index = encoder.compute_metadata(items)["crop_index"]
    assert index.dtype == np.int32
    assert index.tolist() == [0, 0, 0, 0, 1, 0, 2, 3, 4]


def test_replays_equal_eager_in_every_order(inner: TwoPathEncoder) -> None:
    encoder = MonolithicEncoder(inner, 6)
    manager = two_path_checks.capture(encoder, [rows_of(encoder, 6) * places for places in (1, 2)], max_items=2)
    calls = [[UNTILED], [MIXED[1]], [UNTILED, UNTILED], list(MIXED), [UNTILED], list(reversed(MIXED))]
    for seed, (call, following) in enumerate(pairwise([*calls, calls[0]])):
        plan = two_path_checks.assert_manager_equals_eager(manager, call, seed)
        assert all(batch.is_hit for batch in plan.batches)
        two_path_checks.assert_manager_equals_eager(manager, following, seed + 100)


def test_items_with_too_many_crops_go_eager(inner: TwoPathEncoder) -> None:
    encoder = MonolithicEncoder(inner, 2)
    manager = two_path_checks.capture(encoder, [rows_of(encoder, 2), rows_of(encoder, 6)], max_items=1)
    plan = two_path_checks.assert_manager_equals_eager(manager, MIXED, 0)
    reasons = {batch.items: batch.miss_reason for batch in plan.batches}
    assert reasons == {(0,): None, (1,): "axis_not_captured", (2,): None, (3,): None, (4,): None}


def test_what_cannot_be_monolithic_is_refused(inner: TwoPathEncoder) -> None:
    single = checks.build(checks.preset_source("internvl-debug"))
    with pytest.raises(ModelError, match="InternVLRule has one path"):
        MonolithicEncoder(single, 6)
    with pytest.raises(ModelError, match=r"0 crops.*at least 1"):
        MonolithicRule(inner.rule, 0)
