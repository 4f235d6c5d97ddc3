"""Towers that inherit another family's adapter, against transformers: values, padding, operations, sizes."""

from typing import Any

import grid_checks as checks
import pytest
import torch
from encoder_checks import transformers_processor
from rows_of_a_kind import each_row

from vitgraph.models.registry import ROWS

RELATIVES = {
    "exaone4_5",
    "qwen2_5_omni",
    "qwen3_omni",
    "glm_ocr",
    "glm5_next",
    "kimi_k25",
    "kimi_k3",
    "cohere_compass",
    "minimax_m3",
}
NAMES = each_row(lambda row: row.debug_preset, [row for row in ROWS if row.name in RELATIVES])


@pytest.mark.parametrize("name", NAMES)
def test_eager_is_the_stock_forward(name: str) -> None:
    checks.check_eager_equals_stock(checks.build(name, torch.float64))


@pytest.mark.parametrize("name", [one for one in NAMES if not one.marks])
def test_replays_equal_eager(name: str) -> None:
    """Of one row of each kind; `verify` shows the same of every row."""
    checks.check_graphs_equal_eager(name)


@pytest.mark.parametrize("name", NAMES)
def test_operations_are_counted_as_torch_counts_them(name: str) -> None:
    checks.check_flops(checks.build(name))


@pytest.mark.parametrize(("width", "height"), [*checks.SIZES, (7200, 100), (60, 9000), (5000, 4000)])
def test_kimi_k25_sizes_are_the_processors(width: int, height: int) -> None:
    _, module = transformers_processor("kimi_k25.image_processing_kimi_k25:Kimi_K25ImageProcessor")
    rule: Any = checks.rule_of("kimi-k2.5")
    _, padded = module.navit_resize(height, width, 14, 2, 16384, 512)
    grid = rule.image_geometry(width, height)
    assert (grid.h * 14, grid.w * 14) == padded
