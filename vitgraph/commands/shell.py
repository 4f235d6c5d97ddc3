"""What every command does around its work: errors to one line and an exit status, stops, JSON or tables, progress."""

from __future__ import annotations

import errno
import json
import math
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer
from pydantic_core import to_jsonable_python

from vitgraph.commands import process
from vitgraph.errors import EXIT_INTERRUPTED, EXIT_UNEXPECTED, RankFailedError, UsageError, VitgraphError
from vitgraph.records.record import Record
from vitgraph.records.store import RecordFileError, ResultFolder
from vitgraph.specs.fields import Spec, as_options
from vitgraph.specs.parts import ModelSpec

if TYPE_CHECKING:
    from rich.console import Console

    from vitgraph.measure.progress import Progress
    from vitgraph.models.registry import ModelSource
    from vitgraph.report.document import Document

NO_NAME_OF_A_FILE = (errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL)
"""What the system says of a path that no file can have, so that whoever gave it has to give another."""
LONGEST_REASON = 500


@dataclass(frozen=True, slots=True)
class Shown:
    """What the command line shows of a finished command.

    Attributes:
        view: Its document, or what prints it.
        folder: Where the record is; None where there is none.
        is_interrupted: The user stopped the run; what was measured is saved and shown.
        failure: What the command must end with after showing it all; None where it went well.
    """

    data: Any
    view: Document | Callable[[Console], None]
    folder: Path | None = None
    kept_as: str = "record"
    is_interrupted: bool = False
    failure: VitgraphError | None = None


def shown_record(
    record: Record, folder: Path | None, failure: VitgraphError | None = None, document: Document | None = None
) -> Shown:
    """What is shown of a record.

    Args:
        failure: What the command must end with, unless the run was stopped.
        document: Its report, where it says more than the record alone.
    """
    from vitgraph.report.documents import document_of

    is_interrupted = record.status == "interrupted"
    data = record.model_dump(mode="json")
    return Shown(data, document or document_of(record), folder, is_interrupted=is_interrupted, failure=failure)


def show(shown: Shown, *, as_json: bool) -> None:
    """Prints what a command found, and ends it as that asks for."""
    try:
        _print(shown, as_json=as_json)
    except BrokenPipeError:
        raise
    except OSError as error:
        saved = f"; the {shown.kept_as} is saved: {shown.folder}" if shown.folder is not None else ""
        raise VitgraphError(f"cannot print the result: {error.strerror or error}{saved}") from error
    # That nothing could be saved counts for more than that the user stopped it, and any other failure for less.
    if shown.failure is not None and (not shown.is_interrupted or isinstance(shown.failure, RecordFileError)):
        raise shown.failure
    if shown.is_interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)


def _print(shown: Shown, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(_strict(shown.data), indent=1))
    else:
        from rich.console import Console

        from vitgraph.report.say import clean
        from vitgraph.report.to_terminal import render

        shown.view(Console()) if callable(shown.view) else render(shown.view, Console())
        if shown.folder is not None:
            print(clean(f"{shown.kept_as}: {shown.folder}"))
            if shown.kept_as == "record":
                print(clean(f"its page, tables and plots: vitgraph export {shlex.quote(str(shown.folder))}"))
    sys.stdout.flush()


def _strict(value: Any) -> Any:
    """A value as strict JSON holds it; numbers that are not finite are strings, as in records."""

    def strict(found: Any) -> Any:
        if isinstance(found, dict):
            return {name: strict(entry) for name, entry in found.items()}
        if isinstance(found, list):
            return [strict(entry) for entry in found]
        return str(found) if isinstance(found, float) and not math.isfinite(found) else found

    return strict(to_jsonable_python(value, fallback=lambda scalar: scalar.item()))


@contextmanager
def reported_errors(*, debug: bool = False) -> Iterator[None]:
    """Turns whatever ends a command into one message on stderr and an exit status."""
    process.be_stoppable()
    for stream in (sys.stdout, sys.stderr):
        # A terminal that lacks a character shows another one for it instead of ending the command.
        if getattr(stream, "errors", None) == "strict" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        yield
    except VitgraphError as error:
        _tell(f"error: {error}", error)
        raise typer.Exit(error.exit_status) from error
    except KeyboardInterrupt:
        _end_stopped()
    except BrokenPipeError:
        # Who reads the output has enough of it. Python would complain once more when it closes the stream.
        sys.stdout = None  # type: ignore[assignment]
        raise typer.Exit(EXIT_UNEXPECTED) from None
    except OSError as error:
        if debug:
            raise
        named = VitgraphError if error.errno not in NO_NAME_OF_A_FILE else UsageError
        found = named(f"cannot use {error.filename or 'a file'}: {error.strerror or error}")
        _tell(f"error: {str(found)[:LONGEST_REASON]}", found)
        raise typer.Exit(found.exit_status) from error
    except Exception as error:
        if debug or type(error).__module__.startswith(("click", "typer")):
            raise
        if process.has_just_stopped():
            # Code in C that was calling Python, as a plot's does, makes an error of its own of the stop.
            _end_stopped()
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = " ".join(str(error).split())[:LONGEST_REASON] or "no reason given"
        message = (
            f"unexpected {type(error).__name__} in {Path(where.filename).name}:{where.lineno}: {text}. Please "
            "report it with the command line; --debug shows the traceback"
        )
        _tell(f"error: {message}", VitgraphError(message))
        raise typer.Exit(EXIT_UNEXPECTED) from error


def _end_stopped() -> NoReturn:
    from vitgraph.ranks.launch import tells_of_stops

    if tells_of_stops():
        tell("stopped")
    raise typer.Exit(EXIT_INTERRUPTED) from None


def tell(text: str) -> None:
    """Prints one line to standard error, with nothing in it that a terminal would obey."""
    from vitgraph.report.say import clean

    print(clean(text), file=sys.stderr)


def _tell(text: str, error: VitgraphError | None = None) -> None:
    """Prints why a command ended. Of several ranks only the first does; the others leave word for the launcher."""
    from vitgraph.ranks.launch import is_follower, leave_word

    if not is_follower():
        tell(text)
    if error is not None and not isinstance(error, RankFailedError):
        leave_word(error)


@contextmanager
def told(*, quiet: bool) -> Iterator[Progress]:
    """Tells of a command's work on standard error; a rank other than the first is silent."""
    from vitgraph.measure.progress import SilentProgress
    from vitgraph.ranks.launch import is_follower
    from vitgraph.report.progress import ConsoleProgress

    if is_follower():
        yield SilentProgress()
        return
    with ConsoleProgress(enabled=not quiet) as progress:
        yield progress


def is_on_gpu(device: str) -> bool:
    """Whether `--device` means a GPU here."""
    from vitgraph.measure.setup import resolve_device

    return resolve_device(device).type == "cuda"


# -- what a run refuses before it starts; a dry run asks the same, so that it refuses the same in the same words ------


def check_run(model: ModelSpec, source: ModelSource | None, folder: Path | None, *, overwrite: bool) -> None:
    """Refuses a run that could not start or could not save; leaves nothing behind.

    Args:
        source: The model; None where it is checked already.
        folder: Where the record goes; None where none is kept.
    """
    from vitgraph.ranks.launch import is_follower

    if source is not None:
        from vitgraph.measure.setup import check_model
        from vitgraph.models.loading import check_weights

        check_model(source, model)
        check_weights(source, model.load_format)
    if folder is not None and not is_follower():
        with ResultFolder(folder, overwrite):
            pass


def dry_run(spec: Spec, does: str) -> Shown:
    """What `--dry-run` shows of a command without a plan: that it would run, and with which settings."""
    settings = as_options(spec)

    def render(console: Console) -> None:
        for name, value in settings.items():
            console.print(f"{name}: {value}", markup=False, highlight=False)
        console.print(f"{does}; nothing was run", markup=False, highlight=False)

    return Shown({"settings": spec.as_dict()}, render)


FIRST_LOOK_GPU: Mapping[str, Any] = {"model": "qwen3-vl-30b-a3b", "load_format": "dummy", "num_prompts": 400}
FIRST_LOOK_CPU: Mapping[str, Any] = {
    "model": "qwen3-vl-debug",
    "load_format": "dummy",
    "num_prompts": 100,
    # A CPU would spend minutes in the attention of a few photos.
    "mm_processor_kwargs": {"max_pixels": 500000},
    "token_budgets": "64,96,128,192,256,384,512",
}
"""Defaults of a command without a model."""


def first_look(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Without a model, an embedded one with random weights and a short run, for this machine's device."""
    if given.get("model"):
        return {}
    return FIRST_LOOK_GPU if is_on_gpu(given.get("device", "auto")) else FIRST_LOOK_CPU
