"""gelu's erf form in fewer instructions, for compiled blocks: in torch's the arithmetic takes twice the memory's time.

With the tail of the normal distribution written out, gelu(x) = max(x, 0) - |x| / 2 * erfc(|x| / sqrt(2)), and erfc is
a polynomial in 1 / (1 + p x) times exp(-x^2), to within 1.5e-7: formula 7.1.26 of Abramowitz and Stegun,
https://personal.math.ubc.ca/~cbm/aands/page_299.htm. Half precision rounds to 4e-3 (bfloat16) and 5e-4 (float16) of a
value, so the difference is seen only where a rounding tips over.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

GELU = torch.ops.aten.gelu.default

ARGUMENT_FACTOR = 0.3275911
COEFFICIENTS = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)

FARTHEST = 16.0
"""Beyond it the tail is zero in float32; infinite values must not meet it."""

HALF_PRECISION = (torch.bfloat16, torch.float16)

Decompositions = dict[Any, Callable[..., Any]]


def erf_gelu(x: torch.Tensor) -> torch.Tensor:
    """gelu's erf form of half-precision values of any shape, computed in float32."""
    wide = x.float()
    size = wide.abs().clamp(max=FARTHEST)
    denominator = 1.0 + (ARGUMENT_FACTOR * 0.5**0.5) * size
    # A GPU has one instruction for this and one for powers of two; divisions and exp are several each.
    inverse = torch.rsqrt(denominator * denominator)
    polynomial: torch.Tensor | float = 0.5 * COEFFICIENTS[-1]
    for coefficient in reversed(COEFFICIENTS[:-1]):
        polynomial = polynomial * inverse + 0.5 * coefficient
    tail = size * (polynomial * inverse) * torch.exp2((-0.5 / math.log(2)) * size * size)
    return (wide.relu() - tail).to(x.dtype)


def with_erf_gelu() -> Decompositions:
    """Inductor's table of decompositions, with `erf_gelu` for inputs in half precision."""
    from torch._inductor.decomposition import select_decomp_table

    table: Decompositions = dict(select_decomp_table())
    before = table[GELU]

    def decompose(x: torch.Tensor, *, approximate: str = "none") -> Any:
        if approximate == "none" and x.dtype in HALF_PRECISION:
            return erf_gelu(x)
        return before(x, approximate=approximate)

    return table | {GELU: decompose}


def erf_gelus(module: fx.GraphModule) -> int:
    """How many gelus of a graph `with_erf_gelu` decomposes.

    Args:
        module: As Dynamo traced it; nodes carry `example_value`.
    """
    return sum(
        node.kwargs.get("approximate", "none") == "none" and node.meta["example_value"].dtype in HALF_PRECISION
        for node in module.graph.find_nodes(op="call_function", target=torch._C._nn.gelu)
    )
