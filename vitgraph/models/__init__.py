"""Vision encoders: the protocol, the registry, one file a model family.

Sizes, tokens and plans are computed without torch, which is imported when a name of it is first looked up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = ["functional", "nn", "torch"]

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.nn import functional
else:
    from importlib import import_module
    from types import ModuleType

    class LazyModule(ModuleType):
        """Stands for the module of its name."""

        def __getattr__(self, name: str) -> object:
            return getattr(import_module(self.__name__), name)

    torch, nn, functional = map(LazyModule, ("torch", "torch.nn", "torch.nn.functional"))
