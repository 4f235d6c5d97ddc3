"""Rows that vLLM does not capture: values, padding, operations; `test_oracles.py` has their checkpoints and sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import encoder_checks as checks
import pytest
import torch

from vitgraph.errors import ModelError
from vitgraph.measure.series import encode_eagerly
from vitgraph.models.encoder import VisionEncoder
from vitgraph.models.families.llava_onevision import AnyresGeometry
from vitgraph.models.geometry import GridGeometry, ItemGeometry, TileGeometry
from vitgraph.models.registry import row_of_config
from vitgraph.models.two_path import CropGeometry
from vitgraph.planning.budgets import IMAGE, VIDEO, GraphKey


@dataclass(frozen=True)
class Case:
    """One family: its debug-size preset, geometries of one call, and tokens and segments of a graph that holds them."""

    preset: str
    items: Sequence[ItemGeometry]
    capacity: tuple[int, int]


GRIDS = (GridGeometry(IMAGE, 1, 4, 6), GridGeometry(IMAGE, 1, 2, 10), GridGeometry(IMAGE, 1, 8, 4))
CASES = (
    Case("pixtral-debug", GRIDS, (80, 8)),
    Case("pixtral-llava-debug", GRIDS, (120, 8)),
    Case(
        "llava-onevision-debug",
        (AnyresGeometry(IMAGE, 7, 100, 151), TileGeometry(VIDEO, 3), AnyresGeometry(IMAGE, 2, 40, 31)),
        (14 * 16, 1),
    ),
    Case("molmo2-debug", tuple(CropGeometry(IMAGE, *grid) for grid in ((1, 1), (2, 2), (3, 1))), (200, 1)),
    Case("ovis2-debug", (TileGeometry(IMAGE, 1), TileGeometry(IMAGE, 5), TileGeometry(IMAGE, 2)), (10 * 4, 1)),
)
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.preset)


@cache
def built(preset: str) -> VisionEncoder:
    return checks.build(checks.preset_source(preset))


@each_case
@torch.inference_mode()
def test_eager_equals_stock(case: Case) -> None:
    encoder = built(case.preset)
    inputs = checks.inputs_of(encoder, case.items)
    eager = encode_eagerly(encoder, inputs)
    assert [len(rows) for rows in eager] == [encoder.rule.final_tokens(item) for item in case.items]
    with checks.transformers_attention(encoder):
        assert checks.relative_error(torch.cat(eager), encoder.stock_forward(inputs)) <= 1e-6


@each_case
def test_padding_and_graphs_equal_eager(case: Case) -> None:
    encoder, (tokens, segments) = built(case.preset), case.capacity
    checks.assert_padded_equals_eager(encoder, case.items, GraphKey("default", tokens, segments))
    smallest = encoder.rule.budget_range(tokens)[0]
    checks.assert_manager_equals_eager(encoder, case.items, [min(smallest, tokens // 2), tokens], max_items=3)


@each_case
def test_operations_are_counted(case: Case) -> None:
    checks.assert_flops_are_counted(built(case.preset), case.items)


def test_llava_with_another_tower_is_refused() -> None:
    config = {"architectures": ["LlavaForConditionalGeneration"], "vision_config": {"model_type": "clip_vision_model"}}
    with pytest.raises(ModelError, match="LlavaForConditionalGeneration"):
        row_of_config(config)
    pixtral = {**config, "vision_config": {"model_type": "pixtral"}, "vision_feature_layer": -2}
    with pytest.raises(ModelError, match="only -1"):
        row_of_config(pixtral).encoder_class().read_model_config(pixtral)
