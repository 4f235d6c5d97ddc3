"""Image files: kept as their bytes and decoded only when pixels are needed; names and sizes of those in a folder."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError
from PIL.TiffImagePlugin import TiffImageFile

from vitgraph.errors import InputError, first_line
from vitgraph.reading import is_file, is_folder, names_below
from vitgraph.workloads.base import MediaItem, Provenance, SkippedItem, Workload, number_requests, shrink_size

FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
"""Formats that images are read in. Others of Pillow's start programs (EPS) or hold no image of a request."""

_UNREAD_ENDINGS = (".heic", ".heif", ".jxl")
"""Of images that Pillow does not read, which a folder is not to lose without a word."""

_ORIENTATION = 0x0112
_LATE_METADATA = (b"eXIf", b"com.adobe.xmp")
"""Names of PNG chunks that may tell the orientation, and that may stand behind the pixels."""

logging.getLogger("PIL").addHandler(logging.NullHandler())


class UnreadableImageError(InputError):
    """An image that is missing, truncated, of no size, or in no format that PIL decodes."""


@dataclass(frozen=True)
class EncodedImage:
    """The bytes of an image file, a hundredth of the memory of its pixels; larger than `max_pixels`, the image is
    shrunk in proportion when opened.

    The EXIF orientation is applied, as a server does with an uploaded photo. (`vllm bench` encodes the images of a data
    set again before it sends them, which drops the flag: a photo that carries one is measured there as it is stored,
    with width and height swapped.)
    """

    data: bytes = field(repr=False)
    max_pixels: int | None = None

    def open(self) -> Image.Image:
        """The image in RGB, upright, of at most `max_pixels` pixels.

        Raises:
            UnreadableImageError: If PIL cannot decode it.
        """
        image = decode_image(self.data)
        size = shrink_size(*image.size, self.max_pixels)
        return image if size == image.size else image.resize(size, Image.Resampling.LANCZOS)


def decode_image(data: bytes) -> Image.Image:
    """Decodes the bytes of an image file as a whole, upright and in RGB; of an animation the first frame.

    Raises:
        UnreadableImageError: If it is empty, truncated or in no format that PIL decodes.
    """
    if not data:
        raise UnreadableImageError("the image has no bytes")
    with _damage_said("decode the image"), opened(io.BytesIO(data)) as image:
        return convert_to_rgb(ImageOps.exif_transpose(image))


@contextmanager
def _damage_said(aim: str) -> Iterator[None]:
    """Says what PIL could not do: its decoders raise nearly any class, each the reason of one skipped item."""
    try:
        yield
    except UnreadableImageError:
        raise
    except UnidentifiedImageError as error:
        raise UnreadableImageError(f"PIL cannot {aim} (it is none of {', '.join(_known_formats())})") from error
    except Exception as error:
        raise UnreadableImageError(f"PIL cannot {aim} ({first_line(error)})") from error


@cache
def _known_formats() -> tuple[str, ...]:
    """Those of `FORMATS` that this build of Pillow reads."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


@contextmanager
def opened(source: Path | io.BytesIO) -> Iterator[Image.Image]:
    """An image whose header has been read, in one of `FORMATS`; what Pillow warns of stays out of the terminal."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Image.open(source, formats=_known_formats()) as image:
            yield image


def convert_to_rgb(image: Image.Image) -> Image.Image:
    """The image in RGB, without its alpha channel.

    Raises:
        UnreadableImageError: If a side is 0.
    """
    if 0 in image.size:
        raise UnreadableImageError(f"the image is {image.width}x{image.height}; both sides must be positive")
    if image.mode.startswith(("I", "F")):
        image = _eight_bits(image)
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # a palette with transparency loses colours on the direct way
    return image.convert("RGB")


def _eight_bits(image: Image.Image) -> Image.Image:
    """A grey image of 16 or more bits in 8 bits, by its high bits: Pillow would cut all values at 255."""
    values = np.asarray(image, dtype=np.float64)
    most = float(values.max(initial=0))
    white = next((white for white in (1.0, 255.0, 65535.0) if most <= white), most)
    if image.mode.startswith("I"):
        white = 65535.0 if image.mode != "I" or 255 < most <= 65535 else max(255.0, most)
    return Image.fromarray((values.clip(0) * (255 / white)).astype(np.uint8))


def encode_pixels(image: Image.Image) -> bytes:
    """The file of an image that is already decoded, without loss.

    Raises:
        UnreadableImageError: If it cannot be read or a side is 0.
    """
    with _damage_said("read the image"):
        file = io.BytesIO()
        convert_to_rgb(ImageOps.exif_transpose(image)).save(file, "PNG", compress_level=1, exif=b"")
        return file.getvalue()


def read_upright_size(source: Path | bytes) -> tuple[int, int]:
    """Width and height of an image file as it is shown, as `decode_image` gives them, from its header where that is
    enough.

    Raises:
        UnreadableImageError: If it is no regular file, PIL does not know the format or the header is damaged.
    """
    if isinstance(source, Path) and not source.is_file():
        raise UnreadableImageError("it is no regular file")
    file = source if isinstance(source, Path) else io.BytesIO(source)
    with _damage_said("read the header"), opened(file) as image:
        width, height = image.size
        return (height, width) if _orientation(image, source) in (5, 6, 7, 8) else (width, height)


def _orientation(image: Image.Image, source: Path | bytes) -> int:
    """The EXIF or XMP orientation that the opened image still is to be turned by."""
    if isinstance(image, TiffImageFile) and _ORIENTATION in image.tag_v2:
        return 1  # its size in the header already is the one that is shown
    if image.format == "PNG":
        data = source.read_bytes() if isinstance(source, Path) else source
        if any(name in data for name in _LATE_METADATA):
            with suppress(Exception):  # damaged pixels leave the header as it is
                return image.getexif().get(_ORIENTATION, 1)
    return Image.Image.getexif(image).get(_ORIENTATION, 1)


def image_files(folder: Path) -> tuple[str, ...]:
    """Paths in the folder of what is named as an image, in their order; hidden ones are passed over."""
    endings = {*Image.registered_extensions(), *_UNREAD_ENDINGS}
    return tuple(name for name in _names(folder) if Path(name).suffix.lower() in endings)


def read_folder(folder: Path) -> Workload:
    """Sizes of the image files of a folder and its subfolders, in the order of their paths: a request each, without
    pixels.

    Headers alone are read, so a file whose pixels are damaged still counts, and one that PIL cannot read is skipped.
    Sizes are as shown, with the EXIF orientation applied. Files and folders whose name starts with a dot are passed
    over.

    Raises:
        InputError: If it is no folder, holds no readable image, or more files than are looked through.
    """
    if not is_folder(folder):
        raise InputError(f"{folder} is no folder; name a folder of image files")
    items: list[MediaItem] = []
    skipped: list[SkippedItem] = []
    for name in _names(folder):
        try:
            items.append(MediaItem(*read_upright_size(folder / name), source=name))
        except InputError as error:
            skipped.append(SkippedItem(name, str(error)))
    if not items:
        tried = f"{len(skipped)} files, first {skipped[0].source} ({skipped[0].reason})" if skipped else "no files"
        raise InputError(f"{folder} holds no image that PIL can read: {tried}; name a folder of image files")
    provenance: Provenance = {"dataset": "folder", "path": str(folder)}
    requests = number_requests((item,) for item in items)
    return Workload(folder.resolve().name, requests, skipped=tuple(skipped), provenance=provenance)


def _names(root: Path) -> list[str]:
    return sorted(name for name in names_below(root, failure=InputError) if is_file(root / name))
