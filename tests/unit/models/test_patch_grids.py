"""Towers on grids of patches, against transformers: values, padding, operations, sizes."""

from typing import Any

import grid_checks as checks
import pytest
import torch
from encoder_checks import transformers_processor

OF_A_KIND = (
    "qwen2-vl-debug",
    "qwen2.5-vl-debug",
    "qwen3.5-debug",
    "glm-4v-debug",
    "kimi-k2.5-debug",
    "minimax-m3-debug",
)
OTHERS = (
    "exaone-4.5-debug",
    "qwen2.5-omni-debug",
    "qwen3-omni-debug",
    "qwen3.5-moe-debug",
    "glm-ocr-debug",
    "glm-5.3-debug",
    "kimi-k3-debug",
    "north-micro-vision-debug",
)
NAMES = (*OF_A_KIND, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_eager_is_the_stock_forward(name: str) -> None:
    # Double precision: float32 rounding alone separates either forward from the exact result by more than 1e-6.
    checks.check_eager_equals_stock(checks.build(name, torch.float64))


@pytest.mark.parametrize("name", OF_A_KIND)
def test_replays_equal_eager(name: str) -> None:
    """`verify` shows the same of every row."""
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
