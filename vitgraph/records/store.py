"""The one place that writes and opens result folders: checked before anything is measured, locked, whole or not at all.

Every error of the system becomes one line that says what is saved and what is not: RecordFileError where something
could not be written, UsageError where a path will not do.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from pydantic import ValidationError

from vitgraph import reading
from vitgraph.errors import UsageError, VitgraphError
from vitgraph.records.record import RECORDS, Record, Status, check_file_name, refusal

RUN_FILE = "run.json"
SAMPLES_FILE = "samples.csv"
RESULT_FILES = (RUN_FILE, SAMPLES_FILE)
DEFAULT_ROOT = Path("runs")
LEAST_FREE_BYTES = 16 * 2**20
"""Room that a result folder must have before anything is measured."""
LARGEST_RECORD_BYTES = 256 * 2**20
"""Larger files are no records; they are refused before they are read."""


class RecordFileError(VitgraphError):
    """A result file that could not be written; the message says what is saved and what is not."""


class ResultFolder:
    """A folder that one command writes its result into, from before it measures until its record is saved.

    A folder that was made for it and that nothing was saved in is removed again, so that a refused run leaves nothing.

    Attributes:
        samples_saved: Samples that are in the samples file.
        failure: Why the newest state of the record is not saved; None where it is.
    """

    def __init__(self, path: Path, overwrite: bool = False) -> None:
        """Checks that results can be saved in `path`, makes it, and locks it.

        Raises:
            UsageError: It holds a result and `overwrite` is off, is no folder, cannot be made or written, has no room,
                or another process writes into it.
        """
        self.path, self.overwrite = path, overwrite
        self.samples_saved = 0
        self.failure: RecordFileError | None = None
        self._made: list[Path] = []
        self._lock: int | None = None
        self._is_saved = False
        refuse_no_folder(path)
        if not overwrite:
            refuse_to_replace(path, *RESULT_FILES)
        try:
            self._made = [folder for folder in (path, *path.parents) if not folder.exists()]
            path.mkdir(parents=True, exist_ok=True)
            self._lock = _lock(path)
            _try_to_write(path)
        except OSError as error:
            self.close()
            raise UsageError(
                f"cannot write into {path}: {os_reason(error)}; nothing is measured yet. Give another --output-dir"
            ) from error
        except VitgraphError:
            self.close()
            raise

    def save(self, record: Record) -> Path:
        """Writes the record as `run.json`, over an earlier state of it that this run saved."""
        path = self._write(RUN_FILE, f"{record.model_dump_json(indent=1)}\n".encode(), "settings and results")
        self.failure = None
        return path

    def write(self, name: str, content: bytes) -> Path:
        """Writes a further file of the run, for example a trace; `name` may lie in a folder of its own."""
        return self._write(name, content, name, makes_folder=True)

    def _write(self, name: str, content: bytes, not_saved: str, makes_folder: bool = False) -> Path:
        try:
            path = write_file(self.path / name, content, not_saved, self._what_is_saved, makes_folder)
        except RecordFileError as error:
            self.failure = error
            raise
        self._is_saved = True
        return path

    def begin(self, name: str) -> Path:
        """Path of a file that is written row by row; an older record goes first, so that it is not taken for the new
        rows' own.
        """
        try:
            (self.path / RUN_FILE).unlink(missing_ok=True)
        except OSError as error:
            raise RecordFileError(
                f"cannot replace {self.path / RUN_FILE}: {os_reason(error)}; nothing has been measured yet"
            ) from error
        self._is_saved = True
        return self.path / name

    def _what_is_saved(self) -> str:
        samples = self.path / SAMPLES_FILE
        parts = [f"{self.samples_saved} samples in {samples}"] if self.samples_saved and samples.exists() else []
        if (self.path / RUN_FILE).exists():
            parts.append(f"an earlier state in {self.path / RUN_FILE}")
        return " and ".join(parts) or "nothing"

    def close(self) -> None:
        """Lets go of the folder, and removes what was made for nothing; may be called twice."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        for folder in () if self._is_saved else self._made:
            with contextlib.suppress(OSError):
                folder.rmdir()
        self._made = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def new_folder(kind: str, model: str) -> Path:
    """A path under `DEFAULT_ROOT` that says what was run and when, and that no other run has, even of one moment."""
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    return DEFAULT_ROOT / f"{kind}_{Path(model).name.lower()}_{stamp}-{secrets.token_hex(3)}"


def read_record(path: Path, *kinds: str) -> Record:
    """Reads and checks a record.

    Args:
        kinds: The kinds that will do; any where none is named.

    Raises:
        UsageError: The file is missing, is no record, breaks a rule of the format, or is of another format or kind.
    """
    file = record_file(path)
    content = read_bytes(file)
    kind = _kind_of(content, file)
    if kind not in RECORDS or (kinds and kind not in kinds):
        wanted = ", ".join(kinds or RECORDS)
        raise UsageError(f"{file} is of kind {kind!r}; what is read here is {wanted}. Give the folder of such a run")
    try:
        record = RECORDS[kind].model_validate_json(content, strict=True)
    except ValidationError as error:
        raise refusal(error, str(file)) from None
    return record


def record_kind(path: Path) -> str | None:
    """The kind of a saved record; None where there is none to read, which is for `read_record` to say."""
    try:
        return _kind_of(read_bytes(record_file(path)), path)
    except UsageError:
        return None


def record_file(path: Path) -> Path:
    """The file of a record that is given by its folder or by that file."""
    return (path / RUN_FILE if reading.is_folder(path) else path).resolve()


def beside(file: Path, name: str) -> Path:
    """A file of the record's own folder."""
    try:
        check_file_name(name)
    except ValueError as error:
        raise UsageError(f"{file}: {error}") from None
    return file.parent / name


def _kind_of(content: bytes, file: Path) -> str:
    from pydantic_core import from_json

    try:
        data = from_json(content, allow_inf_nan=True, cache_strings="none")
    except ValueError as error:
        raise UsageError(f"{file} is not valid JSON ({error}); give the folder of a saved run") from None
    if not isinstance(data, dict) or not isinstance(data.get("kind"), str):
        raise UsageError(f"{file} has no kind, so it is no vitgraph record; give the folder of a saved run")
    if data.get("format") != 2:
        raise UsageError(
            f"{file} is of format {data.get('format', data.get('schema_version'))!r}, and this vitgraph reads 2; "
            "measure it again with this vitgraph"
        )
    return str(data["kind"])


# -- files -------------------------------------------------------------------------------------------------------------


def refuse_to_replace(folder: Path, *names: str) -> None:
    """Raises UsageError where one of the files exists: results are never replaced unasked."""
    for path in [folder / name for name in names] or [folder]:
        if path.exists():
            raise UsageError(f"{path} exists; results are not replaced. Use --overwrite or another --output-dir")


def refuse_no_folder(path: Path) -> None:
    """Raises UsageError where a file stands at the path of a folder, or of one that it would lie in."""
    for place in (path, *path.parents):
        with contextlib.suppress(OSError):
            if place.exists():
                if not place.is_dir():
                    raise UsageError(f"{place} is a file, so no results can be saved in {path}; give another folder")
                return


def check_file(path: Path, overwrite: bool = False) -> None:
    """Checks, before anything is done, that a single file can be written.

    Raises:
        UsageError: It exists and `overwrite` is off, is a folder, or its folder cannot be made or written.
    """
    if path.is_dir():
        raise UsageError(f"{path} is a folder; give the path of a file")
    if not overwrite:
        refuse_to_replace(path)
    with ResultFolder(path.parent, overwrite=True):
        pass


def write_file(
    path: Path,
    content: bytes,
    not_saved: str = "its content",
    saved: Callable[[], str] | None = None,
    makes_folder: bool = True,
) -> Path:
    """Writes a file, whole or not at all.

    Args:
        not_saved: What that is, in words.
        saved: Says what is saved of the same result all the same.

    Raises:
        RecordFileError: It could not be written.
    """
    try:
        if makes_folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
    except OSError as error:
        there = f" Saved: {saved()}." if saved is not None else ""
        raise RecordFileError(f"cannot write {path}: {os_reason(error)}.{there} Not saved: {not_saved}") from error
    return path


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
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def read_bytes(path: Path) -> bytes:
    """Reads a file of a result folder.

    Raises:
        UsageError: It cannot be read, or is far too large.
    """

    def failure(text: str) -> UsageError:
        missing = f", but {SAMPLES_FILE} is there: the run ended before its record was saved"
        hint = missing if path.name == RUN_FILE and (path.parent / SAMPLES_FILE).exists() else ""
        return UsageError(f"{text}{hint}; give the folder of a saved run")

    return reading.read_bytes(path, most=LARGEST_RECORD_BYTES, failure=failure)


def os_reason(error: OSError) -> str:
    """The system's own words for an error, without number and path."""
    return error.strerror or str(error)


def _lock(folder: Path) -> int | None:
    """Locks a folder against other processes that write results; None where its file system has no locks."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise UsageError(f"another vitgraph is writing its results into {folder}; give another --output-dir") from None
    except OSError:
        os.close(handle)
        return None
    return handle


def _try_to_write(folder: Path) -> None:
    """Makes and removes a file, and looks for room."""
    probe = folder / f".vitgraph.{os.getpid()}.tmp"
    try:
        probe.write_bytes(b"vitgraph")
    finally:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)
    free = shutil.disk_usage(folder).free
    if free < LEAST_FREE_BYTES:
        raise UsageError(
            f"{folder} has {free >> 20} MiB free, and a result wants {LEAST_FREE_BYTES >> 20}; nothing is measured. "
            "Free some or give another --output-dir"
        )


def iter_records(root: Path) -> list[Path]:
    """The files of all records below a folder, in order."""
    return sorted(root.rglob(RUN_FILE))


Kind = TypeVar("Kind", bound=Record)


class Draft(Generic[Kind]):
    """What is known of a run so far; saved whatever ends it.

    Args:
        record: What is known before anything is measured.

    Attributes:
        record: What is known by now.
    """

    def __init__(self, record: Kind) -> None:
        self.record = record

    def note(self, **changes: Any) -> None:
        """Puts fields into the record."""
        self.record = self.record.but(**changes)

    def note_result(self, **changes: Any) -> None:
        """Puts fields into its result."""
        self.note(result=self.record.result.but(**changes))

    def note_environment(self, **changes: Any) -> None:
        """Puts fields into its environment, which is known by now."""
        assert self.record.environment is not None
        self.note(environment=self.record.environment.but(**changes))

    def end(self, status: Status, reason: str | None = None) -> None:
        """Notes how the run ended."""
        self.note(status=status, status_reason=reason)

    @contextmanager
    def saved_in(self, folder: Path, overwrite: bool, stopped: Callable[[], str]) -> Iterator[ResultFolder]:
        """Gives the result folder to the block, and saves the record in it however that ends; raises what ended it.

        Args:
            stopped: Says what the run had come to where the user stops it.

        Raises:
            UsageError: Results cannot be saved there; the block was not begun.
            RecordFileError: The record cannot be written.
        """
        with ResultFolder(folder, overwrite) as results:
            try:
                yield results
            except KeyboardInterrupt:
                self.end("interrupted", stopped())
                raise
            except Exception as error:
                self.end(
                    "error", str(error) if isinstance(error, VitgraphError) else f"{type(error).__name__}: {error}"
                )
                raise
            finally:
                results.save(self.record)
