"""What compiled blocks get beyond torch's own choices: norms that read their rows once, gelu in a product's epilogue or
in fewer instructions, and the sum at a block's end in the kernel of the next one's norm.

All are in force while a block is compiled and nowhere else in the process.

Shape legend: N rows, K and D inputs and outputs of a linear layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import fx

from vitgraph.models.compile.erf_gelu import HALF_PRECISION, inline_erf_gelu
from vitgraph.models.compile.residual import open_last_sum

MOST_PERSISTENT = 4096
"""Widest row that a reduction holds in registers. torch stops at 1024 and reads wider rows twice, as of layer norms of
1152; its own configurations of such kernels reach this far."""

EPILOGUE_DEVICES = ("cuda",)
"""Where the epilogue of `_addmm_activation` is gelu's tanh form; on the CPU it is the erf form."""

EPILOGUE_MULTIPLE = 8
"""Widths that cuBLASLt takes aligned to 16 bytes, in elements of two."""


class FusingCompiler:
    """Inductor for the blocks of one tower, as a backend of `torch.compile`.

    Attributes:
        persistent_reductions: Norms of up to `MOST_PERSISTENT` wide rows read them once, in what was compiled for CUDA.
        gelu_epilogues: Products of one block that took over a gelu; the most, where blocks differ.
        erf_gelus: Gelus of one block in the form of `vitgraph.models.compile.erf_gelu`; the most, where blocks differ.
        open_sums: The last sum of a block is left to the next; see `vitgraph.models.compile.residual`.
    """

    def __init__(self) -> None:
        self.persistent_reductions = False
        self.gelu_epilogues = 0
        self.erf_gelus = 0
        self.open_sums = False

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

    def facts(self) -> dict[str, Any]:
        """Which fusions were applied, for the record."""
        return {
            "persistent_reductions": self.persistent_reductions,
            "gelu_epilogues": self.gelu_epilogues,
            "erf_gelus": self.erf_gelus,
            "open_sums": self.open_sums,
        }


@contextmanager
def persistent_reductions() -> Iterator[bool]:
    """Lets Inductor keep rows of up to `MOST_PERSISTENT` in registers; code made so has cache entries of its own.

    Yields:
        Whether it does; False where this torch has no such hook, or where someone else uses it.
    """
    try:
        from torch._inductor import config
        from torch._inductor.choices import InductorChoices
        from torch._inductor.virtualized import V

        from vitgraph.models.compile.persistent_norms import PersistentChoices

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
    """Offers each gelu of a graph, with its input, to be replaced in place.

    Args:
        module: As Dynamo traced it; nodes carry `example_value`.
        replace: Replaces the gelu or leaves it, and says which.

    Returns:
        How many were replaced.
    """
    replaced = 0
    for gelu in module.graph.find_nodes(op="call_function", target=torch._C._nn.gelu):
        x = gelu.args[0] if gelu.args else None
        replaced += isinstance(x, fx.Node) and replace(gelu, x)
    if replaced:
        module.recompile()
    return replaced


def join_product(gelu: fx.Node, product: fx.Node) -> bool:
    """Turns a linear layer that only a gelu (tanh form) reads into one operator with it.

    The operator is `aten::_addmm_activation`, whose kernel applies gelu to the product before it leaves the chip.
    Others stay: gelu's erf form, layers without a bias or with other users, single precision, and other devices.

    Returns:
        Whether the two were such a pair.
    """
    if gelu.kwargs.get("approximate") != "tanh" or not _takes_epilogue(product):
        return False
    _replace(gelu, product)
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


def _replace(gelu: fx.Node, product: fx.Node) -> None:
    """Puts the operator in place of both nodes; it takes `[N, K]`, so other inputs `[..., K]` are flattened."""
    x, weight, bias = cast("tuple[fx.Node, ...]", product.args)
    graph, shape = gelu.graph, x.meta["example_value"].shape

    def add(kind: Callable[..., fx.Node], target: Any, *arguments: Any, value: Any, **options: Any) -> fx.Node:
        node = kind(target, arguments, options)
        # Later nodes and torch's cache of traced graphs look for the example.
        node.meta = {**gelu.meta, "example_value": value}
        return node

    with graph.inserting_before(gelu):
        call, method = graph.call_function, graph.call_method
        result = gelu.meta["example_value"]
        rows, flat_result = x, result
        if len(shape) > 2:
            flat_result = result.flatten(0, -2)
            rows = add(method, "flatten", x, 0, -2, value=x.meta["example_value"].flatten(0, -2))
        turned = add(method, "t", weight, value=weight.meta["example_value"].t())
        fused = add(
            call, torch.ops.aten._addmm_activation.default, bias, rows, turned, use_gelu=True, value=flat_result
        )
        if len(shape) > 2:
            sizes = [add(method, "size", x, axis, value=shape[axis]) for axis in range(len(shape) - 1)]
            fused = add(method, "view", fused, *sizes, -1, value=result)
    gelu.replace_all_uses_with(fused)
    graph.erase_node(gelu)
    graph.erase_node(product)
