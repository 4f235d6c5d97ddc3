"""transformers' processor classes by name, usable where torchvision is not installed.

Many of them import torchvision for a few functions on tensors. Where it is absent, these here take their place: each is
the torch operation that torchvision itself calls, so sizes, tiles and pixels are the processor's own.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any

from vitgraph.models import functional, torch


class InterpolationMode(Enum):
    """Filters by torch's names, in Pillow's numbers' order from 1."""

    LANCZOS = "lanczos"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"


FILTERS = dict(enumerate(InterpolationMode, start=1))


def resize(
    image: torch.Tensor, size: Sequence[int], interpolation: InterpolationMode | int, antialias: bool
) -> torch.Tensor:
    """`[..., C, H, W]` to `[..., C, *size]`; bytes stay bytes."""
    if tuple(size) == tuple(image.shape[-2:]):
        return image
    flat = image.reshape(-1, *image.shape[-3:])
    mode = (interpolation if isinstance(interpolation, InterpolationMode) else FILTERS[interpolation]).value
    resized = functional.interpolate(flat, size=list(size), mode=mode, align_corners=False, antialias=antialias)
    return resized.reshape(*image.shape[:-2], *size)


def normalize(image: torch.Tensor, mean: Any, std: Any, inplace: bool = False) -> torch.Tensor:
    """`(image - mean) / std` by channel, in the image's dtype."""
    mean, std = (image.new_tensor(tuple(value)).view(-1, 1, 1) for value in (mean, std))
    return image.sub(mean).div_(std)


def pad(image: torch.Tensor, padding: Sequence[int], fill: Any = 0, padding_mode: str = "constant") -> torch.Tensor:
    """`[..., C, H, W]` with borders left, top, right and bottom of `fill`, one value or one a channel."""
    left, top, right, bottom = padding
    *outer, height, width = image.shape
    border = image.new_tensor(fill or 0).view(-1, 1, 1)
    padded = border.expand(*outer, top + height + bottom, left + width + right).clone()
    padded[..., top : top + height, left : left + width] = image
    return padded


def grayscale_to_rgb(image: torch.Tensor) -> torch.Tensor:
    """`[..., 1, H, W]` to three equal channels; others as they are."""
    return image.expand(*image.shape[:-3], 3, *image.shape[-2:]) if image.shape[-3] == 1 else image


FUNCTIONS = types.SimpleNamespace(
    InterpolationMode=InterpolationMode, resize=resize, normalize=normalize, pad=pad, grayscale_to_rgb=grayscale_to_rgb
)


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
    """Modules of torchvision that can be imported, and transformers' word that they are there."""
    import transformers.utils as asked

    names = ["", ".io", ".ops", ".transforms", ".transforms.functional", ".transforms.v2", ".transforms.v2.functional"]
    answers = {name: vars(asked)[name] for name in ("is_torchvision_available", "is_torchvision_v2_available")}
    for name in names:
        sys.modules[f"torchvision{name}"] = _Absent(f"torchvision{name}")
        parent, _, child = f"torchvision{name}".rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, sys.modules[f"torchvision{name}"])
    for name in answers:
        setattr(asked, name, lambda: True)
    try:
        yield
    finally:
        for name, answer in answers.items():
            setattr(asked, name, answer)
        for name in names:
            del sys.modules[f"torchvision{name}"]


def transformers_class(name: str) -> type[Any]:
    """A processor class of transformers by `module:class` under `transformers.models`; needs no torchvision."""
    path, class_name = name.split(":")
    path = f"transformers.models.{path}"
    if importlib.util.find_spec("torchvision") is not None:
        return getattr(importlib.import_module(path), class_name)
    # These remember that torchvision is absent.
    from transformers import image_processing_backends, video_processing_utils

    with torchvision_names():
        module = importlib.import_module(path)
    for user in (module, image_processing_backends, video_processing_utils):
        vars(user)["tvF"] = FUNCTIONS
    vars(image_processing_backends)["pil_torch_interpolation_mapping"] = FILTERS
    return getattr(module, class_name)
