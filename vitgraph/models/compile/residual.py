"""Blocks run one after the other on a residual stream, whose last addition may wait for the block that follows.

A block ends by adding its MLP's output to the stream, and the next one begins by reading the sum for its norm. Compiled
apart, they write the sum and read it again; where the next block does the adding, its norm's kernel has both in
registers. Where a block scales its branch, the next one scales it too, or the scaled branch would be written for
nothing. The blocks themselves are the tower's own, and any of them may be followed by a reader of the whole sum.

Shape legend: N rows (or tiles and rows), K width.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

ADDITIONS = (operator.add, operator.iadd, torch.add)
PRODUCTS = (operator.mul, operator.imul, torch.mul)


@dataclass(frozen=True, slots=True)
class ResidualStream:
    """The hidden state `[N, K]` between two blocks, as one tensor or as a sum that nobody has computed yet: with an
    `addend` `[N, K]`, which is multiplied by a `scale` `[K]` before where there is one."""

    hidden: torch.Tensor
    addend: torch.Tensor | None = None
    scale: torch.Tensor | None = None

    def whole(self) -> torch.Tensor:
        """The hidden state, `[N, K]`."""
        return self.hidden if self.addend is None else self.hidden + _scaled(self.addend, self.scale)


def _scaled(addend: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    return addend if scale is None else addend * scale


BlockRunner = Callable[..., ResidualStream]
"""`(block, stream, **arguments) -> ResidualStream`: a block applied to a stream, with the block's own arguments."""


def run_block(block: nn.Module, stream: ResidualStream, **arguments: Any) -> ResidualStream:
    """The block as it is."""
    return ResidualStream(block(stream.whole(), **arguments))


class CompiledBlockRunner:
    """Blocks compiled so that the addition at the end of each is left open.

    Args:
        backend: Compiler for `torch.compile`; it must apply `open_last_sum`, or nothing is gained.
        blocks: Blocks that will be run, where they scale their last branch.
        scale_name: The attribute of a block that holds the factor `[K]`; None where there is none.
    """

    def __init__(
        self, backend: Callable[..., Any], blocks: Iterable[nn.Module] = (), scale_name: str | None = None
    ) -> None:
        self._step = torch.compile(_closed_step, backend=backend, dynamic=True)
        self._scale_name = scale_name
        # Detached once, so that the factors of all blocks and `_one` are alike to the compiler.
        self._scales = {block: getattr(block, scale_name).detach() for block in blocks} if scale_name else {}
        self._one = next((torch.ones_like(scale) for scale in self._scales.values()), None)

    def __call__(self, block: nn.Module, stream: ResidualStream, **arguments: Any) -> ResidualStream:
        # One shape of call for every layer, or the first one would be compiled apart.
        addend = torch.zeros_like(stream.hidden) if stream.addend is None else stream.addend
        before = self._one if stream.scale is None else stream.scale
        parts = self._step(block, stream.hidden, addend, before, self._scale_name, arguments)
        return ResidualStream(*parts, self._scales.get(block))


def _closed_step(
    block: nn.Module,
    hidden: torch.Tensor,
    addend: torch.Tensor,
    scale: torch.Tensor | None,
    scale_name: str | None,
    arguments: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors whose sum, the second one scaled, is the block's output: `open_last_sum` finds the pair and takes the
    block's last sum apart.

    The forward is called as it stands, since the block may be set to compile by itself for other callers.
    """
    whole = block.forward(hidden + _scaled(addend, scale), **arguments)
    zeros = torch.zeros_like(whole)
    return whole, zeros if scale_name is None else zeros * getattr(block, scale_name)


def open_last_sum(module: fx.GraphModule) -> bool:
    """Makes a graph that returns `(a + b, 0)` return `(a, b)`, and one that returns `(a + s * b, 0 * s)` too, in place;
    whether it was such a graph. The two must have the sum's shape and dtype, and nothing else may read the sum."""
    (output,) = module.graph.find_nodes(op="output")
    returned: Any = output.args[0]
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        return False
    total, rest = returned
    if not all(isinstance(node, fx.Node) for node in (total, rest)):
        return False
    zeros, scale = (rest, None) if rest.target is torch.zeros_like else _zeros_and_scale(rest)
    if zeros is None or zeros.target is not torch.zeros_like or zeros.args[:1] != (total,):
        return False
    if set(total.users) != {zeros, output} or set(rest.users) != {output} or len(zeros.users) != 1:
        return False
    terms = _terms(total, scale)
    if terms is None or not all(isinstance(term, fx.Node) and _is_alike(term, total) for term in terms):
        return False
    output.args = (tuple(terms),)
    for node in dict.fromkeys((rest, zeros, total, *total.args)):
        if not node.users:
            module.graph.erase_node(node)
    module.recompile()
    return True


def _zeros_and_scale(product: fx.Node) -> tuple[fx.Node | None, fx.Node | None]:
    """The factors of `zeros * scale` as `_closed_step` writes it; `(None, None)` for anything else."""
    if product.target is not operator.mul or product.kwargs:
        return None, None
    zeros, scale = product.args
    return (zeros, scale) if isinstance(zeros, fx.Node) and isinstance(scale, fx.Node) else (None, None)


def _terms(total: fx.Node, scale: fx.Node | None) -> list[Any] | None:
    """What `total` is the sum of, the branch without its scale last; None where it is no such sum."""
    if total.target not in ADDITIONS or len(total.args) != 2 or total.kwargs:
        return None
    terms: list[Any] = list(total.args)
    if scale is None:
        return terms
    for index, term in enumerate(terms):
        is_product = isinstance(term, fx.Node) and term.target in PRODUCTS and len(term.args) == 2 and not term.kwargs
        if is_product and scale in term.args and set(term.users) == {total}:
            return [terms[1 - index], term.args[1 - term.args.index(scale)]]
    return None


def _is_alike(term: fx.Node, total: fx.Node) -> bool:
    one, other = term.meta.get("example_value"), total.meta.get("example_value")
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    return term.op != "placeholder" and one.shape == other.shape and one.dtype == other.dtype
