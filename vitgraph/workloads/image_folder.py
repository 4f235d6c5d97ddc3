"""Image files of a folder: their names, and their sizes without their pixels."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from vitgraph.errors import InputError
from vitgraph.reading import is_file, is_folder, names_below
from vitgraph.workloads.base import MediaItem, SkippedItem
from vitgraph.workloads.encoded_image import read_upright_size


def image_files(folder: Path) -> tuple[str, ...]:
    """Paths in the folder of what is named as an image, in their order; hidden ones are passed over."""
    endings = Image.registered_extensions()
    return tuple(name for name in _names(folder) if Path(name).suffix.lower() in endings)


def convert_folder(folder: str | Path) -> tuple[list[MediaItem], list[SkippedItem]]:
    """Sizes of the image files of a folder and its subfolders, in the order of their paths.

    Headers alone are read, so a file whose pixels are damaged still counts. Sizes are as shown, with the EXIF
    orientation applied. Files and folders whose name starts with a dot are passed over.

    Args:
        folder: The folder.

    Returns:
        One item for each image, without pixels, and the files that PIL could not read.

    Raises:
        InputError: If it is no folder, holds no readable image, or more files than are looked through.
    """
    root = Path(folder)
    if not is_folder(root):
        raise InputError(f"{root} is no folder; name a folder of image files")
    items: list[MediaItem] = []
    skipped: list[SkippedItem] = []
    for name in _names(root):
        try:
            width, height = read_upright_size(root / name)
            items.append(MediaItem(width, height, source=name))
        except InputError as error:
            skipped.append(SkippedItem(name, str(error)))
    if not items:
        tried = f"{len(skipped)} files, first {skipped[0].source} ({skipped[0].reason})" if skipped else "no files"
        raise InputError(f"{root} holds no image that PIL can read: {tried}; name a folder of image files")
    return items, skipped


def _names(root: Path) -> list[str]:
    return sorted(name for name in names_below(root, failure=InputError) if is_file(root / name))
