"""transformers' processor classes by name, those too whose modules import torchvision where it is not installed."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _Absent(types.ModuleType):
    """A module of torchvision that is not there: any name of it is a class that nothing calls."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


@contextmanager
def torchvision_names() -> Iterator[None]:
    """Empty torchvision modules where it is not installed: the video processors import it, settings never call it."""
    import transformers.video_processing_utils  # noqa: F401 (remembers that torchvision is absent)

    names = ["", ".io", ".ops", ".transforms", ".transforms.functional", ".transforms.v2", ".transforms.v2.functional"]
    missing = [f"torchvision{name}" for name in names] if importlib.util.find_spec("torchvision") is None else []
    for name in missing:
        sys.modules[name] = _Absent(name)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, sys.modules[name])
    try:
        yield
    finally:
        for name in missing:
            del sys.modules[name]


def transformers_class(name: str) -> type[Any]:
    """A processor class of transformers by `module:class` under `transformers.models`; needs no torchvision."""
    module, class_name = name.split(":")
    with torchvision_names():
        return getattr(importlib.import_module(f"transformers.models.{module}"), class_name)
