"""Writes what is derived from saved runs: never over an older file unasked, each file whole or not at all."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vitgraph.records.files import RecordFileError, os_reason, refuse_to_replace, write_atomically


def write_files(files: Mapping[Path, bytes], overwrite: bool = False) -> list[Path]:
    """Writes files and the folders that they need.

    Args:
        files: Contents by path.
        overwrite: Whether files that exist may be replaced.

    Returns:
        The paths.

    Raises:
        UsageError: A file exists and `overwrite` is off; nothing is written then.
        RecordFileError: A file could not be written; the message names those before it.
    """
    for path in () if overwrite else files:
        refuse_to_replace(path)
    written: list[Path] = []
    for path, content in files.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, content)
        except OSError as error:
            done = ", ".join(file.name for file in written) or "nothing"
            raise RecordFileError(
                f"cannot write {path}: {os_reason(error)}. Written before it: {done}. The run itself is unchanged; "
                "`vitgraph export` writes its tables and plots again, with --output-dir to another folder"
            ) from error
        written.append(path)
    return written


def csv_bytes(columns: Sequence[str], rows: Iterable[Mapping[str, Any]], digits: int = 6) -> bytes:
    """A table as CSV in UTF-8.

    Args:
        columns: Names of the columns.
        rows: Values by column; None, and a column without a value, is an empty cell.
        digits: Significant digits of numbers that are not whole.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([_cell(row.get(column), digits) for column in columns] for row in rows)
    return text.getvalue().encode("utf-8")


def _cell(value: Any, digits: int) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return " ".join(map(str, value))
    return f"{value:.{digits}g}" if isinstance(value, float) else str(value)
