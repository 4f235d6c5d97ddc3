"""Reading what others wrote: text, JSON and YAML with a bound on size, depth and digits, and every failure in words.

Files that a user names may be anything: a device without an end, a pipe that nobody writes to, brackets a million deep,
an integer of five thousand digits, aliases of aliases.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import stat
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vitgraph.errors import InputError, UsageError, VitgraphError

MOST_BYTES = 256 * 2**20
MOST_DEPTH = 64
MOST_BITS = 64
"""Of an integer; what does not fit is no size, count or seed that anything here could use."""
MOST_FILES = 500_000
"""Of a folder and all below it: a home folder or a whole disk may have no end that is worth waiting for."""

LFS_POINTER = "version https://git-lfs"
"""Begins the text that a clone without Git LFS has in place of a file."""
LFS_WAY_OUT = "it is a Git LFS pointer; fetch the file itself (git lfs pull)"

Failure = Callable[[str], VitgraphError]
"""Makes the error of a reader from its text."""


def is_file(path: Path) -> bool:
    """Whether a regular file is there; a name that no file can have is none."""
    return os.path.isfile(path)  # noqa: PTH113


def is_folder(path: Path) -> bool:
    """Whether a folder is there; a name that no folder can have is none."""
    return os.path.isdir(path)  # noqa: PTH112


def names_below(folder: Path, *, failure: Failure = UsageError) -> list[str]:
    """Names of the files of a folder and its subfolders, relative to it; what is hidden (a dot first) is passed over.

    Links to folders are followed, each folder once, and subfolders that cannot be read have no files.

    Raises:
        VitgraphError: By `failure`; there are more than `MOST_FILES` files and folders.
    """
    found: list[str] = []
    seen = 0
    places: set[Path] = set()
    for place, folders, files in os.walk(folder, followlinks=True):
        if (real := Path(place).resolve()) in places:
            folders.clear()
            continue
        places.add(real)
        folders[:] = [name for name in folders if not name.startswith(".")]
        seen += len(folders) + len(files)
        if seen > MOST_FILES:
            raise failure(
                f"folder {folder} has more than {MOST_FILES:,} files and folders below it, which is the most that is "
                "looked through; name a folder of the data alone"
            )
        inner = Path(place).relative_to(folder)
        found += [(inner / name).as_posix() for name in files if not name.startswith(".")]
    return found


def read_bytes(path: Path, *, most: int = MOST_BYTES, failure: Failure = UsageError) -> bytes:
    """The content of a regular file.

    Raises:
        VitgraphError: By `failure`; there is no such file, it is a folder, a pipe or a device, or it has more bytes.
    """
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with os.fdopen(handle, "rb") as file:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise failure(f"{path} is no regular file; name a file")
            content = file.read(most + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise failure(f"cannot read {path}: {reason}") from error
    if len(content) > most:
        raise failure(f"{path} has more than {most:,} bytes, which is the most that is read of such a file")
    return content


def _unpack_zstd(raw: Any) -> Any:
    import pyarrow  # takes a quarter of a second

    return io.BufferedReader(pyarrow.CompressedInputStream(raw, "zstd"))


_UNPACKERS: Mapping[bytes, Callable[[Any], Any]] = {
    b"\x1f\x8b": lambda raw: gzip.GzipFile(fileobj=raw),
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ": lzma.LZMAFile,
    b"\x28\xb5\x2f\xfd": _unpack_zstd,
}
"""What unpacks a file, by its first bytes."""


@contextmanager
def unpacked(path: Path, what: str) -> Iterator[Any]:
    """The content of a regular file, unpacked where it is compressed (gzip, bzip2, xz, zstd), whatever its name.

    Raises:
        InputError: It is none or an archive of files, or it cannot be read, then or in the context.
    """
    if path.exists() and not path.is_file():
        raise InputError(f"cannot read the {what} {path}: it is no regular file; save it first")
    try:
        with path.open("rb") as raw:
            start = raw.peek(6)
            unpack = next((unpack for mark, unpack in _UNPACKERS.items() if start.startswith(mark)), None)
            file: Any = raw if unpack is None else unpack(raw)
            if start.startswith(b"PK\x03\x04") or file.peek(512)[257:262] == b"ustar":
                raise InputError(
                    f"cannot read the {what} {path}: it is an archive or a workbook; unpack it, or save it as text"
                )
            yield file
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"cannot read the {what} {path}: {reason}; name a file that can be read") from error


def read_text(path: Path, *, most: int = MOST_BYTES, failure: Failure = UsageError) -> str:
    """The text of a regular file in UTF-8, without a byte order mark.

    Raises:
        VitgraphError: By `failure`; see `read_bytes`, or it is not UTF-8.
    """
    try:
        return read_bytes(path, most=most, failure=failure).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise failure(f"{path} is not UTF-8 text ({error.reason})") from error


def read_json(path: Path, *, most: int = MOST_BYTES, failure: Failure = UsageError) -> Any:
    """The JSON value in a regular file.

    Raises:
        VitgraphError: By `failure`; see `read_text` and `parse_json`.
    """
    text = read_text(path, most=most, failure=failure)
    if text.startswith(LFS_POINTER):
        raise failure(f"cannot read {path}: {LFS_WAY_OUT}")
    return parse_json(text, str(path), failure=failure)


def parse_json(text: str, name: str, *, failure: Failure = UsageError) -> Any:
    """A JSON value.

    Args:
        text: What should be JSON.
        name: What it is called in an error: a file or an option.
        failure: Makes the error.

    Raises:
        VitgraphError: By `failure`; it is no JSON, too deep, or has an integer beyond 64 bits.
    """
    return _parse(json.loads, (ValueError,), text, f"{name} is not valid JSON", failure)


def parse_yaml(text: str, name: str, *, failure: Failure = UsageError) -> Any:
    """A YAML value of plain types; see `parse_json`."""
    import yaml

    # Beside its own, the loader lets through what odd scalars, keys and tags do to Python.
    known = (yaml.YAMLError, ValueError, TypeError, AttributeError, KeyError, OverflowError)
    return _parse(yaml.safe_load, known, text, f"{name} is not valid YAML", failure)


def _parse(
    load: Callable[[str], Any], known: tuple[type[Exception], ...], text: str, wrong: str, failure: Failure
) -> Any:
    try:
        value = load(text)
    except RecursionError as error:
        raise failure(f"{wrong}: it is nested too deeply") from error
    except known as error:
        raise failure(f"{wrong}: {' '.join(str(error).split())[:300]}") from error
    reason = _unusable(value)
    if reason is not None:
        raise failure(f"{wrong}: {reason}")
    return value


def _unusable(value: Any) -> str | None:
    """Why a parsed value is refused, or None; an alias is looked at once a level, so many cost no more than one."""
    level = [value]
    for _ in range(MOST_DEPTH):
        for each in level:
            if isinstance(each, int) and each.bit_length() > MOST_BITS:
                return f"it has an integer of {each.bit_length()} bits, and {MOST_BITS} are the most"
        inner = {id(each): each for each in level if isinstance(each, dict | list)}.values()
        level = [child for each in inner for child in (each.values() if isinstance(each, dict) else each)]
        if not level:
            return None
    return f"it is nested more than {MOST_DEPTH} deep"
