"""Gated MLPs of a width that tensor cores read slowly, widened with zeros: the same sums, in other kernels.

A product whose rows are no multiple of 16 bytes runs in cuBLAS's kernels for unaligned operands, which take several
times as long. Qwen2.5-VL's MLP is 3420 wide. A hidden unit whose gate, up and down weights are zero adds
act(0) * 0 * 0 = 0 to the result, so units of that kind may be appended up to a width that is aligned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from vitgraph.models.stock import StockSwitch

if TYPE_CHECKING:
    from vitgraph.models.encoder import VisionEncoder

ALIGNED_ELEMENTS = 8
"""16 bytes of two-byte elements: what tensor-core kernels of cuBLAS ask of a row."""

WIDTH_MULTIPLE = 64
"""Widths are raised to a multiple of this: one K tile, so the last is no more work than the cut one was."""

WIDENED = ("gate_proj", "up_proj")
NARROWED = "down_proj"


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

    def extra_repr(self) -> str:
        return f"{self.stock_shape} in {tuple(self.weight.shape)}, bias={self.bias is not None}"


def use_aligned_mlps(encoder: VisionEncoder) -> int:
    """Widens the gated MLPs of `encoder` whose width is not aligned, in every mode alike.

    Returns:
        How many were widened; those of aligned widths, and other modules, stay.
    """
    widened = 0
    for module in list(encoder.modules.modules()):
        layers = [getattr(module, name, None) for name in (*WIDENED, NARROWED)]
        gate, up, down = layers
        if not (isinstance(gate, nn.Linear) and isinstance(up, nn.Linear) and isinstance(down, nn.Linear)):
            continue
        width = gate.out_features
        if width % ALIGNED_ELEMENTS == 0 or not width == up.out_features == down.in_features:
            continue
        aligned = -(-width // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
        for name, layer in zip(WIDENED, (gate, up), strict=True):
            setattr(module, name, WidenedLinear(layer, aligned, layer.in_features))
        setattr(module, NARROWED, WidenedLinear(down, down.out_features, aligned))
        widened += 1
    return widened
