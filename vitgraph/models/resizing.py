"""What processors make of sizes and frames, and of pixels where transformers has none: rules that families share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from vitgraph.errors import InputError
from vitgraph.models import torch

MAX_ASPECT_RATIO = 200


def smart_resize(height: int, width: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Height and width in pixels by the Qwen2-VL family's image rule: both sides become multiples of `factor`, the area
    stays in the range.

    Raises:
        InputError: One side is more than 200 times the other.
    """
    _check_aspect(height, width)
    new_height, new_width = _fitted(height, width, factor, 1, 1, min_pixels, max_pixels)
    if new_height < factor or new_width < factor:
        raise InputError(
            f"image of {width}x{height} rounds to {new_width}x{new_height} pixels; a side must keep at least {factor}. "
            "Enlarge the image or raise the processor's min_pixels"
        )
    return new_height, new_width


def smart_resize_video(
    frames: int, height: int, width: int, temporal_factor: int, factor: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """Height and width in pixels of every frame by the Qwen3-VL family's video rule: as `smart_resize`, with the area
    counted over all frames.

    Raises:
        InputError: Fewer frames than `temporal_factor`, or one side more than 200 times the other.
    """
    if frames < temporal_factor:
        raise InputError(f"a video needs at least {temporal_factor} frames, got {frames}")
    scaled_height, scaled_width = height, width
    _check_aspect(height, width)
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        scaled_height, scaled_width = int(height * scale), int(width * scale)
    # Rounding the scaled sides can push a ratio that just passed over the bound.
    _check_aspect(scaled_height, scaled_width)
    even_frames = round(frames / temporal_factor) * temporal_factor
    return _fitted(scaled_height, scaled_width, factor, frames, even_frames, min_pixels, max_pixels)


def _fitted(
    height: int, width: int, factor: int, frames: int, even_frames: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """Sides rounded to multiples of `factor`, and scaled where the area of all frames is outside the range."""
    new_height = round(height / factor) * factor
    new_width = round(width / factor) * factor
    area, volume = even_frames * new_height * new_width, frames * height * width
    if area > max_pixels:
        scale = math.sqrt(volume / max_pixels)
        new_height = max(factor, math.floor(height / scale / factor) * factor)
        new_width = max(factor, math.floor(width / scale / factor) * factor)
    elif area < min_pixels:
        scale = math.sqrt(min_pixels / volume)
        new_height = math.ceil(height * scale / factor) * factor
        new_width = math.ceil(width * scale / factor) * factor
    return new_height, new_width


def _check_aspect(height: int, width: int) -> None:
    if max(height, width) / min(height, width) > MAX_ASPECT_RATIO:
        raise InputError(
            f"image of {width}x{height} has an aspect ratio above {MAX_ASPECT_RATIO}, which the processor refuses; "
            "crop it or leave it out"
        )


def sampled_frames(frames: int, file_fps: float | None, fps: float | None, min_frames: int, max_frames: int) -> int:
    """Frames that a loader sampling at `fps` passes on, as many as the file has where that is None, some of them twice
    below the minimum; all of them where `file_fps` is None (already sampled)."""
    if file_fps is None:
        return frames
    if fps is None:
        return min(max(frames, min_frames), max_frames)
    wanted = int(frames / file_fps * fps)
    return max(1, min(max(wanted, min_frames), max_frames, frames))


def fixed_frames(frames: int, wanted: int) -> int:
    """Frames that a processor takes which spreads a fixed number of them over a file.

    Raises:
        InputError: The file has fewer; transformers' processors refuse it too.
    """
    if frames < wanted:
        raise InputError(
            f"a video file of {frames} frames cannot be sampled: the processor's num_frames is {wanted}; give "
            "frames that already are sampled (no fps), or lower num_frames"
        )
    return wanted


def normalized(image: Any, mean: Sequence[float], std: Sequence[float]) -> torch.Tensor:
    """An RGB PIL image as `[3, height, width]` float32, scaled to 0..1 and normalised."""
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).to(torch.float32) / 255
    return (pixels - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)


def cut_patches(image: torch.Tensor, patch: int, merge: int = 1) -> torch.Tensor:
    """Patches `[N, C, P, P]` of an image `[C, H, W]` in merge-block order; `merge` 1 is raster order."""
    sides = (merge, patch)
    cut = image.unflatten(2, (-1, *sides)).unflatten(1, (-1, *sides))
    return cut.permute(1, 4, 2, 5, 0, 3, 6).flatten(0, 3)
