"""Modules that compute the same sum in other kernels, and how transformers' own forward gets its own way back.

**Patch embeddings** as one matrix product. A convolution whose kernel equals its stride is a product of the flattened
patches with the flattened kernel. Both are laid out alike: channels, then time, rows and columns. Pixels that are cut
into patches already are multiplied as they are; whole images are cut first, a copy, and still take a tenth of the time
of cuDNN's convolution in bfloat16.

**MLPs** of a width that tensor cores read slowly, widened with zeros. A product whose rows are no multiple of 16 bytes
runs in cuBLAS's kernels for unaligned operands, which take several times as long: Qwen2.5-VL's MLP is 3420 wide. Rows
that begin inside a cache line of 128 bytes cost a part of that: the MLPs of SigLIP's size and of all towers that took
it over are 4304 wide. A hidden unit whose weights are zero adds nothing to the result as long as its activation of zero
is finite times zero, or zero, so units of that kind may be appended up to a width that is aligned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeGuard, cast

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from vitgraph.models.encoder import VisionEncoder

Convolution = nn.Conv2d | nn.Conv3d

WIDTH_MULTIPLE = 64
"""128 bytes of two-byte elements. Also one K tile, so the last is no more work than the cut one was."""

GATED = (("gate_proj", "up_proj"), "down_proj")
PLAIN = ((("linear_fc1",), "linear_fc2"), (("fc1",), "fc2"), (("lin1",), "lin2"))
"""Names, in a module, of the layers that make the hidden units and of the one that reads them."""

ACTIVATIONS = ("act_fn", "activation_fn", "act")
"""Names of the function between the layers."""


class StockSwitch(nn.Module):
    """Base of modules that take a module's place with its very parameters; `is_stock` while transformers' own forward
    runs, which must compute as it does without them."""

    def __init__(self) -> None:
        super().__init__()
        self.is_stock = False


@contextmanager
def stock_modules(encoder: VisionEncoder) -> Iterator[None]:
    """Lets every replaced module of the encoder compute as the one that it replaced."""
    switches = [module for module in encoder.modules.modules() if isinstance(module, StockSwitch)]
    for switch in switches:
        switch.is_stock = True
    try:
        yield
    finally:
        for switch in switches:
            switch.is_stock = False


class PatchProduct(StockSwitch):
    """Takes the place of a convolution that `is_product`, with its very parameters `[D, C, (T,) P, P]`
    and `[D]` under their names."""

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


def is_product(module: nn.Module) -> TypeGuard[Convolution]:
    """Whether a product can replace `module`: a convolution of two or three dimensions whose patches lie side by side,
    and whose kernel can be flattened without a copy."""
    return (
        isinstance(module, Convolution)
        and tuple(module.kernel_size) == tuple(module.stride)
        and (module.padding == "valid" or set(module.padding) == {0})
        and all(step == 1 for step in module.dilation)
        and module.groups == 1
        and module.weight.is_contiguous()
    )


def use_patch_products(encoder: VisionEncoder) -> list[str]:
    """Replaces the convolutions that `encoder.patch_convolutions` names, in every mode alike; returns the names of
    those.

    Modules that are something else already, or no such convolution, stay.
    """
    replaced = []
    for name in encoder.patch_convolutions:
        convolution = encoder.modules.get_submodule(name)
        if is_product(convolution):
            parent, _, attribute = name.rpartition(".")
            setattr(encoder.modules.get_submodule(parent), attribute, PatchProduct(convolution))
            replaced.append(name)
    return replaced


class WidenedLinear(StockSwitch):
    """A linear layer `[D, K]` with zeros appended to its weight, to `outputs` rows or `inputs` columns; the first D
    rows and K columns are the layer's."""

    def __init__(self, linear: nn.Linear, outputs: int, inputs: int) -> None:
        super().__init__()
        self.stock_shape = (linear.out_features, linear.in_features)
        self.out_features, self.in_features = outputs, inputs
        below, right = outputs - linear.out_features, inputs - linear.in_features
        self.weight = nn.Parameter(functional.pad(linear.weight.detach(), (0, right, 0, below)), requires_grad=False)
        self.bias: nn.Parameter | None = None
        if linear.bias is not None:
            self.bias = nn.Parameter(functional.pad(linear.bias.detach(), (0, below)), requires_grad=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """`[..., inputs]` to `[..., outputs]`; `[..., K]` to `[..., D]` while `is_stock`."""
        if self.is_stock:
            outputs, inputs = self.stock_shape
            bias = None if self.bias is None else self.bias[:outputs]
            return functional.linear(rows, self.weight[:outputs, :inputs], bias)
        return functional.linear(rows, self.weight, self.bias)

    def added(self) -> int:
        """Zeros that were appended to the weight and the bias."""
        outputs, inputs = self.stock_shape
        return self.weight.numel() - outputs * inputs + (0 if self.bias is None else self.out_features - outputs)


def use_aligned_mlps(encoder: VisionEncoder) -> int:
    """Widens the MLPs of `encoder` whose width is not aligned, in every mode alike; returns how many."""
    widened = 0
    for module in list(encoder.modules.modules()):
        for makers, reader in (GATED, *PLAIN):
            layers = [getattr(module, name, None) for name in (*makers, reader)]
            if all(isinstance(layer, nn.Linear) for layer in layers):
                is_harmless = makers == GATED[0] or _keeps_zero(module)
                widened += is_harmless and _widen(module, makers, reader)
    return widened


def parameter_count(modules: nn.Module) -> int:
    """Parameters of the published network: those of `modules` without the zeros of widened layers."""
    zeros = sum(module.added() for module in modules.modules() if isinstance(module, WidenedLinear))
    return sum(parameter.numel() for parameter in modules.parameters()) - zeros


def _keeps_zero(module: nn.Module) -> bool:
    """Whether the activation of `module` maps zero to zero; False where it is not found."""
    for name in ACTIVATIONS:
        activation = getattr(module, name, None)
        if callable(activation):
            return bool(activation(torch.zeros(1)) == 0)
    return False


def _widen(module: nn.Module, makers: Sequence[str], reader: str) -> bool:
    """Replaces the layers by wider ones; returns whether they were not aligned."""
    down: nn.Linear = getattr(module, reader)
    ups: list[nn.Linear] = [getattr(module, name) for name in makers]
    width = down.in_features
    if width % WIDTH_MULTIPLE == 0 or any(up.out_features != width for up in ups):
        return False
    aligned = -(-width // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
    for name, up in zip(makers, ups, strict=True):
        setattr(module, name, WidenedLinear(up, aligned, up.in_features))
    setattr(module, reader, WidenedLinear(down, down.out_features, aligned))
    return True
