"""Pixels of images by the published processors' rules, for families whose processor transformers does not have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vitgraph.models.lazy_torch import torch


def normalized(image: Any, mean: Sequence[float], std: Sequence[float]) -> torch.Tensor:
    """An RGB PIL image as `[3, height, width]` float32, scaled to 0..1 and normalised."""
    import numpy as np

    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).to(torch.float32) / 255
    return (pixels - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)


def cut_patches(image: torch.Tensor, patch: int, merge: int = 1) -> torch.Tensor:
    """Patches `[N, C, P, P]` of an image `[C, H, W]` in merge-block order; `merge` 1 is raster order."""
    sides = (merge, patch)
    cut = image.unflatten(2, (-1, *sides)).unflatten(1, (-1, *sides))
    return cut.permute(1, 4, 2, 5, 0, 3, 6).flatten(0, 3)
