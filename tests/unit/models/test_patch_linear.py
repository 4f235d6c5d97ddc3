"""Patch embeddings as products: the same sums as transformers' convolutions, on the same parameters, in every mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from encoder_checks import debug_encoder
from torch import nn

from vitgraph.models.registry import ROWS
from vitgraph.models.replaced_modules import PatchProduct, is_product, stock_modules, use_patch_products

CPU = torch.device("cpu")
CUT = ("qwen3_vl", "qwen2_vl", "qwen2_5_vl", "qwen3_5", "qwen3_5_moe", "glm4v", "kimi_vl", "minimax_m3")
"""Rows whose transformers tower convolves pixels that are cut into patches already."""

CONVOLVED = (
    *CUT,
    "pixtral",
    "internvl",
    "gemma3",
    "llava_onevision",
    "ovis2",
    "idefics3",
    "deepseek_vl2",
    "deepseek_ocr",
    "step3_vl",
)
"""Those, and the rows that convolve whole tiles."""

RELATIVES = (
    *("qwen3_omni", "cohere_compass", "qwen2_5_omni", "exaone4_5"),
    *("glm_ocr", "glm5_next", "kimi_k25", "kimi_k3"),
)
"""Rows that inherit the convolution of another one."""


def product_of(row_name: str) -> PatchProduct:
    (name,) = debug_encoder(row_name).patch_convolutions
    product = debug_encoder(row_name).modules.get_submodule(name)
    assert isinstance(product, PatchProduct)
    return product


def both_ways(row_name: str, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the tower's own module makes of patches as a product, and as a convolution."""
    encoder, product = debug_encoder(row_name), product_of(row_name)
    with torch.inference_mode():
        as_product = product(pixels)
        with stock_modules(encoder):
            return as_product, product(pixels)


@pytest.mark.parametrize("row_name", CONVOLVED)
def test_the_product_is_the_convolution(row_name: str) -> None:
    weight = product_of(row_name).weight
    pixels = torch.randn(60, *weight.shape[1:], generator=torch.Generator().manual_seed(3))
    product, convolution = both_ways(row_name, pixels)
    assert product.shape == convolution.shape
    assert float((product - convolution).norm() / convolution.norm()) <= 1e-6


@pytest.mark.parametrize("row_name", CONVOLVED)
def test_each_pixel_meets_its_own_weight_bit_for_bit(row_name: str) -> None:
    """One pixel of one and the rest zero: both must give that pixel's column of the kernel, plus the bias, exactly."""
    weight = product_of(row_name).weight
    every_pixel = torch.eye(weight[0].numel()).view(-1, *weight.shape[1:])
    product, convolution = both_ways(row_name, every_pixel)
    assert torch.equal(product, convolution)


@pytest.mark.parametrize("row_name", CONVOLVED)
def test_the_parameters_are_the_towers_own_under_their_names(row_name: str) -> None:
    encoder, product = debug_encoder(row_name), product_of(row_name)
    (name,) = encoder.patch_convolutions
    parameters = dict(encoder.modules.named_parameters())
    assert parameters[f"{name}.weight"] is product.weight
    assert product.weight.ndim == 2 + len(product.kernel_size)
    assert (f"{name}.bias" in parameters) == (product.bias is not None)
    assert set(encoder.modules.state_dict()) >= {f"{name}.weight"}


def test_every_row_that_convolves_patches_is_covered() -> None:
    found = []
    for row in ROWS:
        encoder = debug_encoder(row.name)
        modules = [encoder.modules.get_submodule(name) for name in encoder.patch_convolutions]
        found += [row.name for module in modules if isinstance(module, PatchProduct)]
    assert sorted(found) == sorted((*CONVOLVED, *RELATIVES))


@pytest.mark.parametrize("row_name", CUT)
def test_only_the_stock_forward_convolves(row_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = debug_encoder(row_name)
    side = encoder.rule.vision_config["patch_size"] * 4
    items = [encoder.rule.image_geometry(4 * side, 4 * side)]
    inputs = encoder.make_inputs(items, encoder.random_pixels(encoder.rule.pixel_rows(items[0]), 1))
    used: list[bool] = []
    real = PatchProduct.forward

    def noted(self: PatchProduct, pixels: torch.Tensor) -> torch.Tensor:
        used.append(not self.is_stock)
        return real(self, pixels)

    monkeypatch.setattr(PatchProduct, "forward", noted)
    with torch.inference_mode():
        eager = encoder.encoder_eager_forward(inputs)
        stock = encoder.stock_forward(inputs)
        encoder.encoder_eager_forward(inputs)
    assert used == [True, False, True]
    assert float((eager - stock).norm() / stock.norm()) <= 1e-5


def test_a_stock_forward_that_fails_leaves_the_product_behind() -> None:
    with pytest.raises(RuntimeError, match="stop"), stock_modules(debug_encoder("qwen3_vl")):
        raise RuntimeError("stop")
    assert not product_of("qwen3_vl").is_stock


@pytest.mark.parametrize(
    ("convolution", "extents"),
    [
        (nn.Conv2d(3, 8, 4, stride=4), (8, 12)),
        (nn.Conv2d(3, 8, (4, 2), stride=(4, 2)), (4, 6)),
        (nn.Conv3d(3, 8, (2, 4, 4), stride=(2, 4, 4)), (6, 8, 12)),
    ],
    ids=["square", "oblong", "video"],
)
def test_a_whole_image_is_cut_into_its_patches(convolution: nn.Conv2d | nn.Conv3d, extents: tuple[int, ...]) -> None:
    image = torch.randn(2, 3, *extents)
    with torch.inference_mode():
        product, expected = PatchProduct(convolution)(image), convolution(image)
    assert product.shape == expected.shape
    assert float((product - expected).norm() / expected.norm()) <= 1e-6


def test_what_patches_do_not_fill_is_convolved_as_before() -> None:
    convolution = nn.Conv2d(3, 8, 4, stride=4)
    image = torch.randn(2, 3, 8, 14)
    with torch.inference_mode():
        assert torch.equal(PatchProduct(convolution)(image), convolution(image))


@pytest.mark.parametrize(
    ("module", "is_one"),
    [
        (nn.Linear(4, 4), False),
        (nn.Conv2d(3, 8, 4, stride=2), False),
        (nn.Conv2d(3, 8, 4, stride=4, padding=1), False),
        (nn.Conv2d(3, 8, 1, padding="same"), False),
        (nn.Conv2d(3, 8, 4, stride=4, padding="valid"), True),
        (nn.Conv2d(3, 8, 4, stride=4, dilation=2), False),
        (nn.Conv2d(4, 8, 4, stride=4, groups=2), False),
        (nn.Conv2d(3, 8, 4, stride=4).to(memory_format=torch.channels_last), False),
        (nn.Conv3d(3, 8, (2, 4, 4), stride=(2, 4, 4)), True),
    ],
)
def test_what_is_not_the_same_sum_is_left_alone(module: nn.Module, is_one: bool) -> None:
    assert is_product(module) == is_one


class Embedding(nn.Module):
    def __init__(self, proj: nn.Module) -> None:
        super().__init__()
        self.proj = proj


class Stub:
    """An encoder as far as the replacement knows one."""

    def __init__(self, proj: nn.Module) -> None:
        self.modules = nn.ModuleDict({"embed": Embedding(proj)})
        self.patch_convolutions = ("embed.proj",)


def test_a_refused_convolution_stays_in_its_place() -> None:
    proj = nn.Conv2d(3, 8, 4, stride=2)
    stub: Any = Stub(proj)
    assert use_patch_products(stub) == []
    assert stub.modules.get_submodule("embed.proj") is proj
    with stock_modules(stub):
        pass
