"""MLPs of a width that tensor cores read slowly, widened with zeros: the same sums, in other kernels.

A product whose rows are no multiple of 16 bytes runs in cuBLAS's kernels for unaligned operands, which take several
times as long: Qwen2.5-VL's MLP is 3420 wide. Rows that begin inside a cache line of 128 bytes cost a part of that: the
MLPs of SigLIP's size and of all towers that took it over are 4304 wide. A hidden unit whose weights are zero adds
nothing to the result as long as its activation of zero is finite times zero, or zero, so units of that kind may be
appended up to a width that is aligned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from vitgraph.models.compile.replaced_modules import StockSwitch

if TYPE_CHECKING:
    from vitgraph.models.encoder import VisionEncoder

WIDTH_MULTIPLE = 64
"""128 bytes of two-byte elements. Also one K tile, so the last is no more work than the cut one was."""

GATED = (("gate_proj", "up_proj"), "down_proj")
PLAIN = ((("linear_fc1",), "linear_fc2"), (("fc1",), "fc2"), (("lin1",), "lin2"))
"""Names, in a module, of the layers that make the hidden units and of the one that reads them."""

ACTIVATIONS = ("act_fn", "activation_fn", "act")
"""Names of the function between the layers."""


class WidenedLinear(StockSwitch):
    """A linear layer with zeros appended to its weight, as outputs or as inputs.

    Args:
        linear: The layer, `[D, K]`.
        outputs: Rows of the widened weight, at least D.
        inputs: Its columns, at least K.

    Attributes:
        weight: `[outputs, inputs]`; its first D rows and K columns are the layer's, the rest is zero.
        bias: `[outputs]`, or None.
        is_stock: See `StockSwitch`.
    """

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

    def extra_repr(self) -> str:
        return f"{self.stock_shape} in {tuple(self.weight.shape)}, bias={self.bias is not None}"


def use_aligned_mlps(encoder: VisionEncoder) -> int:
    """Widens the MLPs of `encoder` whose width is not aligned, in every mode alike.

    Returns:
        How many were widened; those of aligned widths, and other modules, stay.
    """
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
