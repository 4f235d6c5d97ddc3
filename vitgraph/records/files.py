"""Writing and reading the files of a result folder: never replaced unasked, whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from vitgraph.errors import UsageError, VitgraphError


class RecordFileError(VitgraphError):
    """A result file that could not be written; the message says what is saved and what is not."""


def refuse_to_replace(path: Path) -> None:
    """Raises UsageError when `path` exists: results are never replaced unasked."""
    if path.exists():
        raise UsageError(f"{path} exists; results are not replaced. Use --overwrite or another --output-dir")


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file so that a reader, or a crash, sees the old content or the new one and nothing between.

    Raises:
        OSError: The file could not be written; what was there before is untouched.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_text(path: Path) -> str:
    """Reads a UTF-8 file of a result folder.

    Raises:
        UsageError: The file cannot be read or is no UTF-8 text.
    """
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {os_reason(error)}; give the folder of a saved run") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text ({error.reason}); give the folder of a saved run") from error


def os_reason(error: OSError) -> str:
    """The system's own words for an error, without number and path."""
    return error.strerror or str(error)
