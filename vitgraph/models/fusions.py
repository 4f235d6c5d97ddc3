"""What compiled blocks get beyond torch's own choices: norms that read their rows once, gelu in a product's epilogue or
in fewer instructions, and the sum at a block's end in the kernel of the next one's norm.

All are in force while a block is compiled and nowhere else in the process.

A block ends by adding its MLP's output to the residual stream, and the next one begins by reading the sum for its norm.
Compiled apart, they write the sum and read it again; where the next block adds, its norm's kernel has both in
registers. Where a block scales its branch, the next one scales it too, or the scaled branch would be written for
nothing. The blocks themselves are the tower's own, and any of them may be followed by a reader of the whole sum.

In torch's erf form of gelu the arithmetic takes twice the memory's time. With the tail of the normal distribution
written out, gelu(x) = max(x, 0) - |x| / 2 * erfc(|x| / sqrt(2)), and erfc is a polynomial in 1 / (1 + p x) times
exp(-x^2), to within 1.5e-7: formula 7.1.26 of Abramowitz and Stegun,
https://personal.math.ubc.ca/~cbm/aands/page_299.htm. Half precision rounds to 4e-3 (bfloat16) and 5e-4 (float16) of a
value, so the difference is seen only where a rounding tips over.

Shape legend: N rows (or tiles and rows), K width of a row.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
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


MOST_PERSISTENT = 4096
"""Widest row that a reduction holds in registers. torch stops at 1024 and reads wider rows twice, as of layer norms of
1152; its own configurations of such kernels reach this far."""

EPILOGUE_DEVICES = ("cuda",)
"""Where the epilogue of `_addmm_activation` is gelu's tanh form; on the CPU it is the erf form."""

EPILOGUE_MULTIPLE = 8
"""Widths that cuBLASLt takes aligned to 16 bytes, in elements of two."""

ARGUMENT_FACTOR = 0.3275911
COEFFICIENTS = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)

FARTHEST = 16.0
"""Beyond it the tail is zero in float32; infinite values must not meet it."""

HALF_PRECISION = (torch.bfloat16, torch.float16)


@dataclass(eq=False)
class FusingCompiler:
    """Inductor for the blocks of one tower, as a backend of `torch.compile`; its fields are for the record.

    Attributes:
        persistent_reductions: Norms of up to `MOST_PERSISTENT` wide rows read them once, in what was compiled for CUDA.
        gelu_epilogues: Products of one block that took over a gelu; the most, where blocks differ.
        erf_gelus: Gelus of one block in the form of `erf_gelu`; the most, where blocks differ.
        open_sums: The last sum of a block is left to the next; see `vitgraph.models.fusions`.
    """

    persistent_reductions: bool = False
    gelu_epilogues: int = 0
    erf_gelus: int = 0
    open_sums: bool = False

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        from torch._inductor.compile_fx import compile_fx

        # Before anything of Inductor's, so that its caches see the graph as it is then, and hits are counted too.
        self.gelu_epilogues = max(self.gelu_epilogues, replace_gelus(module, join_product))
        self.erf_gelus = max(self.erf_gelus, replace_gelus(module, inline_erf_gelu))
        self.open_sums |= open_last_sum(module)
        if not any(isinstance(value, torch.Tensor) and value.device.type == "cuda" for value in inputs):
            return compile_fx(module, inputs)
        with persistent_reductions() as are_persistent:
            self.persistent_reductions |= are_persistent
            return compile_fx(module, inputs)


@contextmanager
def persistent_reductions() -> Iterator[bool]:
    """Lets Inductor keep rows of up to `MOST_PERSISTENT` in registers; code made so has cache entries of its own.

    Yields whether it does; False where this torch has no such hook, or where someone else uses it.
    """
    try:
        from torch._inductor import config
        from torch._inductor.choices import InductorChoices
        from torch._inductor.virtualized import V

        from vitgraph.models.persistent_norms import PersistentChoices

        is_free = type(V.choices) is InductorChoices and config.inductor_choices_class is None
    except (ImportError, AttributeError):
        is_free = False
    if not is_free:
        yield False
        return
    choices = partial(PersistentChoices, MOST_PERSISTENT)
    # The handler decides, and the setting is what is part of the key of torch's caches. The handler comes first, since
    # torch keeps what it makes from the setting when it finds no handler.
    with V.set_choices_handler(choices()), config.patch(inductor_choices_class=choices):
        yield True


def replace_gelus(module: fx.GraphModule, replace: Callable[[fx.Node, fx.Node], bool]) -> int:
    """Offers each gelu of a graph, with its input, to `replace`, which does so in place or says no; returns how many
    were replaced. Nodes carry `example_value`, as Dynamo traces them."""
    replaced = 0
    for gelu in module.graph.find_nodes(op="call_function", target=torch._C._nn.gelu):
        x = gelu.args[0] if gelu.args else None
        replaced += isinstance(x, fx.Node) and replace(gelu, x)
    if replaced:
        module.recompile()
    return replaced


def join_product(gelu: fx.Node, product: fx.Node) -> bool:
    """Turns a linear layer that only a gelu (tanh form) reads into one operator with it; whether the two were such a
    pair.

    The operator is `aten::_addmm_activation`, whose kernel applies gelu to the product before it leaves the chip.
    Others stay: gelu's erf form, layers without a bias or with other users, single precision, and other devices.
    """
    if gelu.kwargs.get("approximate") != "tanh" or not _takes_epilogue(product):
        return False
    _put_in_place(gelu, _product_with_gelu, *product.args)
    gelu.graph.erase_node(product)
    return True


def _takes_epilogue(product: fx.Node) -> bool:
    examples = [argument.meta.get("example_value") for argument in product.args if isinstance(argument, fx.Node)]
    operands = [example for example in examples if isinstance(example, torch.Tensor)]
    if product.target is not torch._C._nn.linear or len(product.users) != 1 or len(operands) != 3:
        return False
    x, weight, bias = operands
    return (
        x.device.type in EPILOGUE_DEVICES
        and x.dtype in HALF_PRECISION
        and x.dtype == weight.dtype == bias.dtype
        and x.ndim >= 2
        and all(width % EPILOGUE_MULTIPLE == 0 for width in weight.shape)
    )


def _product_with_gelu(x: Any, weight: Any, bias: Any) -> Any:
    """The operator takes `[N, K]`, so other inputs `[..., K]` are flattened."""
    axes = x.node.meta["example_value"].ndim - 1
    rows = x.flatten(0, -2) if axes > 1 else x
    fused = torch.ops.aten._addmm_activation.default(bias, rows, weight.t(), use_gelu=True)
    return fused.view(*(x.size(axis) for axis in range(axes)), -1) if axes > 1 else fused


def inline_erf_gelu(gelu: fx.Node, x: fx.Node) -> bool:
    """Puts the operations of `erf_gelu` in place of a gelu of `x`, where it is the erf form in half precision; whether
    it was.

    In the graph itself, and not as a decomposition for Inductor, whose caches do not take code made with such a table.
    """
    if gelu.kwargs.get("approximate", "none") != "none" or x.meta["example_value"].dtype not in HALF_PRECISION:
        return False
    _put_in_place(gelu, erf_gelu, x)
    return True


def erf_gelu(x: Any) -> Any:
    """gelu's erf form of a tensor in half precision, of any shape, or of what stands for one in a graph; in float32."""
    wide = x.float()
    size = wide.abs().clamp(max=FARTHEST)
    denominator = 1.0 + (ARGUMENT_FACTOR * 0.5**0.5) * size
    # A GPU has one instruction for this and one for powers of two; divisions and exp are several each.
    inverse = torch.rsqrt(denominator * denominator)
    polynomial: Any = 0.5 * COEFFICIENTS[-1]
    for coefficient in reversed(COEFFICIENTS[:-1]):
        polynomial = polynomial * inverse + 0.5 * coefficient
    tail = size * (polynomial * inverse) * torch.exp2((-0.5 / math.log(2)) * size * size)
    return (wide.relu() - tail).type_as(x)


def _put_in_place(gelu: fx.Node, compute: Callable[..., Any], *inputs: Any) -> None:
    """Puts what `compute` makes of the inputs, which are nodes, in place of a gelu."""
    known, tracer = set(gelu.graph.nodes), fx.proxy.GraphAppendingTracer(gelu.graph)
    with gelu.graph.inserting_before(gelu):
        result = compute(*(fx.Proxy(node, tracer) for node in inputs)).node
    for node in gelu.graph.nodes:
        if node not in known:
            # Later nodes and torch's cache of traced graphs look for the example.
            example = gelu.meta["example_value"] if node is result else _example_of(node)
            node.meta = {**gelu.meta, "example_value": example}
    gelu.replace_all_uses_with(result)
    gelu.graph.erase_node(gelu)


def _example_of(node: fx.Node) -> Any:
    """What a node gives for the examples of its arguments."""
    arguments, options = fx.node.map_arg((node.args, dict(node.kwargs)), lambda part: part.meta["example_value"])
    if node.op == "call_method":
        return getattr(arguments[0], str(node.target))(*arguments[1:], **options)
    assert callable(node.target)
    return node.target(*arguments, **options)
