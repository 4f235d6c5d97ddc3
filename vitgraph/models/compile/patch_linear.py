"""Patch embeddings as one matrix product: the same sum, another kernel.

A convolution whose kernel equals its stride is a product of the flattened patches with the flattened kernel. Both are
laid out alike: channels, then time, rows and columns. Pixels that are cut into patches already are multiplied as they
are; whole images are cut first, a copy, and still take a tenth of the time of cuDNN's convolution in bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from torch.nn import functional

from vitgraph.models.compile.replaced_modules import StockSwitch

if TYPE_CHECKING:
    from vitgraph.models.encoder import VisionEncoder

Convolution = nn.Conv2d | nn.Conv3d


class PatchProduct(StockSwitch):
    """Takes a convolution's place with its very parameters, under their names.

    Args:
        convolution: Kernel equal to stride, without padding, dilation or groups; see `product_refusal`.

    Attributes:
        weight: The convolution's own parameter, `[D, C, (T,) P, P]`.
        bias: Its bias `[D]`, or None.
        is_stock: See `StockSwitch`.
    """

    def __init__(self, convolution: Convolution) -> None:
        super().__init__()
        self.weight = convolution.weight
        self.bias: nn.Parameter | None
        self.register_parameter("bias", cast("nn.Parameter | None", convolution.bias))
        self.kernel_size = tuple(convolution.kernel_size)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """`[N, C, (T,) H, W]` to `[N, D, (T / P,) H / P, W / P]`; extents that patches do not fill are convolved."""
        cuts = [divmod(extent, side) for extent, side in zip(pixels.shape[2:], self.kernel_size, strict=True)]
        if not self.is_stock and not any(rest for _, rest in cuts):
            counts = [count for count, _ in cuts]
            # A view of the kernel, so the product reads the memory that the checkpoint was loaded into.
            kernel = self.weight.view(self.weight.shape[0], -1)
            rows = functional.linear(self._patches(pixels, counts), kernel, self.bias)
            return rows.view(-1, *counts, rows.shape[-1]).movedim(-1, 1)
        convolve = functional.conv2d if len(self.kernel_size) == 2 else functional.conv3d
        return convolve(pixels, self.weight, self.bias, stride=self.kernel_size)

    def _patches(self, pixels: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Flattened patches `[N * patches, C * (T *) P * P]` in raster order; a view where each input is one patch."""
        pairs = [part for pair in zip(counts, self.kernel_size, strict=True) for part in pair]
        cut = pixels.reshape(*pixels.shape[:2], *pairs)
        axes = range(len(counts))
        order = [0, *(2 + 2 * axis for axis in axes), 1, *(3 + 2 * axis for axis in axes)]
        return cut.permute(order).reshape(-1, self.weight[0].numel())

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, bias={self.bias is not None}"


def product_refusal(module: nn.Module) -> str | None:
    """Why `module` is no convolution that a product can replace; None where it is one."""
    if not isinstance(module, Convolution):
        return f"{type(module).__name__} is no convolution of two or three dimensions"
    if tuple(module.kernel_size) != tuple(module.stride):
        return f"its kernel {tuple(module.kernel_size)} is not its stride {tuple(module.stride)}, so patches overlap"
    padding = (0,) * len(module.kernel_size) if module.padding == "valid" else module.padding
    if isinstance(padding, str) or any(padding) or any(step != 1 for step in module.dilation) or module.groups != 1:
        return f"it has padding {module.padding}, dilation {tuple(module.dilation)} and {module.groups} groups"
    if not module.weight.is_contiguous():
        return f"its kernel has strides {module.weight.stride()}, and flattening it would copy it"
    return None


def use_patch_products(encoder: VisionEncoder) -> list[str]:
    """Replaces the convolutions that `encoder.patch_convolutions` names, in every mode alike.

    Returns:
        Names of the modules that were replaced; those that are something else already, or no such convolution, stay.
    """
    replaced = []
    for name in encoder.patch_convolutions:
        convolution = encoder.modules.get_submodule(name)
        if isinstance(convolution, Convolution) and product_refusal(convolution) is None:
            parent, _, attribute = name.rpartition(".")
            setattr(encoder.modules.get_submodule(parent), attribute, PatchProduct(convolution))
            replaced.append(name)
    return replaced
