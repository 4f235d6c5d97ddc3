"""Modules that compute the same sum in another way, and how transformers' own forward gets its own way back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from vitgraph.models.encoder import VisionEncoder


class StockSwitch(nn.Module):
    """Base of modules that take a module's place with its very parameters.

    Attributes:
        is_stock: True while transformers' own forward runs, which must compute as it does without them.
    """

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
