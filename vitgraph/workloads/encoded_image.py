"""Images kept as the bytes of their file, decoded only when their pixels are needed."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image, ImageOps

from vitgraph.errors import InputError
from vitgraph.workloads.base import shrink_size

_EXIF_ORIENTATION = 0x0112


class UnreadableImageError(InputError):
    """An image that is missing, truncated, of no size, or in no format that PIL decodes."""


@dataclass(frozen=True)
class EncodedImage:
    """The bytes of an image file, a hundredth of the memory of its pixels.

    The EXIF orientation is applied, as a server does with an uploaded photo. (`vllm bench` encodes the images of a
    data set again before it sends them, which drops the flag: a photo that carries one is measured there as it is
    stored, with width and height swapped.)

    Attributes:
        data: The file.
        max_pixels: Larger images are shrunk in proportion when opened.
    """

    data: bytes = field(repr=False)
    max_pixels: int | None = None

    def open(self) -> Image.Image:
        """Decodes the image.

        Returns:
            An RGB image, upright, of at most `max_pixels` pixels.

        Raises:
            UnreadableImageError: If PIL cannot decode it.
        """
        image = decode_image(self.data)
        size = shrink_size(*image.size, self.max_pixels)
        return image if size == image.size else image.resize(size, Image.Resampling.LANCZOS)


def decode_image(data: bytes) -> Image.Image:
    """Decodes the bytes of an image file as a whole, upright and in RGB.

    Args:
        data: The file; of an animation the first frame is taken.

    Returns:
        The image.

    Raises:
        UnreadableImageError: If it is empty, truncated or in no format that PIL decodes.
    """
    if not data:
        raise UnreadableImageError("the image has no bytes")
    try:
        with Image.open(io.BytesIO(data)) as image:
            return convert_to_rgb(ImageOps.exif_transpose(image))
    except UnreadableImageError:
        raise
    except Exception as error:
        # PIL's decoders raise nearly any class on damaged files; each becomes the reason of one skipped item.
        raise UnreadableImageError(f"PIL cannot decode the image ({describe(error)})") from error


def convert_to_rgb(image: Image.Image) -> Image.Image:
    """The image in RGB, without its alpha channel.

    Raises:
        UnreadableImageError: If a side is 0.
    """
    if 0 in image.size:
        raise UnreadableImageError(f"the image is {image.width}x{image.height}; both sides must be positive")
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # a palette with transparency loses colours on the direct way
    return image.convert("RGB")


def encode_pixels(image: Image.Image) -> bytes:
    """The file of an image that is already decoded, without loss.

    Raises:
        UnreadableImageError: If it cannot be read or a side is 0.
    """
    try:
        rgb = convert_to_rgb(ImageOps.exif_transpose(image))
        file = io.BytesIO()
        rgb.save(file, "PNG", compress_level=1, exif=b"")
        return file.getvalue()
    except UnreadableImageError:
        raise
    except Exception as error:
        raise UnreadableImageError(f"PIL cannot read the image ({describe(error)})") from error


def read_upright_size(path: Path) -> tuple[int, int]:
    """Width and height of an image file as it is shown, from its header alone.

    Raises:
        UnreadableImageError: If PIL does not know the format or the header is damaged.
    """
    try:
        with Image.open(path) as image:
            width, height = image.size
            # The method of the base class, since that of PNG decodes the pixels to look for a flag behind them.
            is_turned = Image.Image.getexif(image).get(_EXIF_ORIENTATION, 1) in (5, 6, 7, 8)
    except Exception as error:
        raise UnreadableImageError(f"PIL cannot read the header ({describe(error)})") from error
    return (height, width) if is_turned else (width, height)


def describe(error: BaseException) -> str:
    """Class and first line of an error, for use as a reason."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
