"""What compiled blocks get beyond torch's own choices: norms that read their rows once, gelu in a product's epilogue or
in fewer instructions, and the sum at a block's end in the kernel of the next one's norm.

All are in force while a block is compiled and nowhere else in the process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from vitgraph.models.compile.gelus import inline_erf_gelu, join_product, replace_gelus
from vitgraph.models.compile.residual import open_last_sum

MOST_PERSISTENT = 4096
"""Widest row that a reduction holds in registers. torch stops at 1024 and reads wider rows twice, as of layer norms of
1152; its own configurations of such kernels reach this far."""


@dataclass(eq=False)
class FusingCompiler:
    """Inductor for the blocks of one tower, as a backend of `torch.compile`; its fields are for the record.

    Attributes:
        persistent_reductions: Norms of up to `MOST_PERSISTENT` wide rows read them once, in what was compiled for CUDA.
        gelu_epilogues: Products of one block that took over a gelu; the most, where blocks differ.
        erf_gelus: Gelus of one block in the form of `vitgraph.models.compile.gelus`; the most, where blocks differ.
        open_sums: The last sum of a block is left to the next; see `vitgraph.models.compile.residual`.
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
