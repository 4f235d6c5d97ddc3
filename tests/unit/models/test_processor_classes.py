"""What stands in for torchvision: its functions on tensors, by their definitions."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch
from PIL import Image

from tests.unit.models.encoder_checks import random_image
from vitgraph.models.processor_classes import FILTERS, FUNCTIONS, transformers_class

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torchvision") is not None, reason="torchvision is installed")


@pytest.mark.parametrize("number", FILTERS)
@pytest.mark.parametrize("size", [(40, 90), (150, 31), (7, 200)])
def test_resize_is_pillows_within_roundings(number: int, size: tuple[int, int]) -> None:
    image = random_image(61, 83)
    wanted = np.asarray(image.resize(size[::-1], Image.Resampling(number)), dtype=int)
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]
    for interpolation in (number, FILTERS[number]):
        found = FUNCTIONS.resize(pixels, size, interpolation=interpolation, antialias=True)[0].permute(1, 2, 0)
        assert found.dtype == torch.uint8
        differences = np.abs(found.numpy().astype(int) - wanted)
        # Noise overshoots with the wider filters, and the two clamp between their passes over rows and columns.
        assert differences.mean() <= 1 and (differences > 1).mean() <= 0.1
    assert FUNCTIONS.resize(pixels, (83, 61), interpolation=number, antialias=True) is pixels


def test_normalize_pad_and_grey_are_by_channel() -> None:
    image = torch.arange(24, dtype=torch.float32).view(1, 3, 2, 4)
    mean, std = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0, 6.0])
    wanted = (image - mean.view(3, 1, 1)) / std.view(3, 1, 1)
    assert torch.equal(FUNCTIONS.normalize(image, mean.tolist(), std.tolist()), wanted)
    padded = FUNCTIONS.pad(image.byte(), [1, 0, 2, 3], fill=[7, 8, 9])
    assert padded.shape == (1, 3, 5, 7) and padded.dtype == torch.uint8
    assert torch.equal(padded[..., :2, 1:5], image.byte())
    assert padded[0, :, 4, 0].tolist() == padded[0, :, 0, 6].tolist() == [7, 8, 9]
    assert FUNCTIONS.pad(image, [0, 0, 0, 1]).sum() == image.sum()
    grey = FUNCTIONS.grayscale_to_rgb(image[:, :1])
    assert grey.shape == image.shape and torch.equal(grey[:, 0], grey[:, 2])


def test_a_class_that_needs_torchvision_processes_an_image() -> None:
    processor = transformers_class("llama4.image_processing_llama4:Llama4ImageProcessor")(
        size={"height": 56, "width": 56}
    )
    tiles = processor(images=[random_image(112, 56)], return_tensors="pt")["pixel_values"]
    assert tiles.shape == (3, 3, 56, 56)
    assert importlib.util.find_spec("torchvision") is None
