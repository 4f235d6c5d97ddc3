"""Blocks run one after the other on a residual stream, whose last addition may wait for the block that follows.

A block ends by adding its MLP's output to the stream, and the next one begins by reading the sum for its norm. Compiled
apart, they write the sum and read it again; where the next block does the adding, its norm's kernel has both in
registers. The blocks themselves are the tower's own, and any of them may be followed by a reader of the whole sum.

Shape legend: N rows (or tiles and rows), K width.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

ADDITIONS = (operator.add, operator.iadd, torch.add)


@dataclass(frozen=True, slots=True)
class ResidualStream:
    """The hidden state between two blocks, as one tensor or as a sum that nobody has computed yet.

    Attributes:
        hidden: `[N, K]`.
        addend: `[N, K]` still to be added to it, or None.
    """

    hidden: torch.Tensor
    addend: torch.Tensor | None = None

    def whole(self) -> torch.Tensor:
        """The hidden state, `[N, K]`."""
        return self.hidden if self.addend is None else self.hidden + self.addend


BlockRunner = Callable[..., ResidualStream]
"""`(block, stream, **arguments) -> ResidualStream`: a block applied to a stream, with the block's own arguments."""


def run_block(block: nn.Module, stream: ResidualStream, **arguments: Any) -> ResidualStream:
    """The block as it is."""
    return ResidualStream(block(stream.whole(), **arguments))


class CompiledBlockRunner:
    """Blocks compiled so that the addition at the end of each is left open.

    Args:
        backend: Compiler for `torch.compile`; it must apply `open_last_sum`, or nothing is gained.
    """

    def __init__(self, backend: Callable[..., Any]) -> None:
        self._step = torch.compile(_closed_step, backend=backend, dynamic=True)

    def __call__(self, block: nn.Module, stream: ResidualStream, **arguments: Any) -> ResidualStream:
        # One shape of call for every layer, or the first one would be compiled apart.
        addend = torch.zeros_like(stream.hidden) if stream.addend is None else stream.addend
        return ResidualStream(*self._step(block, stream.hidden, addend, arguments))


def _closed_step(
    block: nn.Module, hidden: torch.Tensor, addend: torch.Tensor, arguments: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors whose sum is the block's output. `open_last_sum` finds the pair and takes the block's last sum apart.

    The forward is called as it stands, since the block may be set to compile by itself for other callers.
    """
    whole = block.forward(hidden + addend, **arguments)
    return whole, torch.zeros_like(whole)


def open_last_sum(module: fx.GraphModule) -> bool:
    """Makes a graph that returns `(a + b, 0)` return `(a, b)`, in place.

    Args:
        module: As Dynamo traced it; nodes carry `example_value`.

    Returns:
        Whether it was such a graph. The two must have the sum's shape and dtype, and nothing else may read the sum.
    """
    (output,) = module.graph.find_nodes(op="output")
    returned = output.args[0]
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        return False
    total, zeros = returned
    if not all(isinstance(node, fx.Node) for node in (total, zeros)):
        return False
    if zeros.target is not torch.zeros_like or zeros.args[:1] != (total,) or total.target not in ADDITIONS:
        return False
    terms = total.args
    if len(terms) != 2 or total.kwargs or set(total.users) != {zeros, output} or set(zeros.users) != {output}:
        return False
    if not all(isinstance(term, fx.Node) and _is_alike(term, total) for term in terms):
        return False
    output.args = (tuple(terms),)
    module.graph.erase_node(zeros)
    module.graph.erase_node(total)
    module.recompile()
    return True


def _is_alike(term: fx.Node, total: fx.Node) -> bool:
    one, other = term.meta.get("example_value"), total.meta.get("example_value")
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    return term.op != "placeholder" and one.shape == other.shape and one.dtype == other.dtype
