"""A record that is being filled while a command measures."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic_core import to_jsonable_python

from vitgraph.errors import VitgraphError
from vitgraph.records.record import Record, Status
from vitgraph.records.store import ResultFolder

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


def encode(value: Any) -> Any:
    """A value as strict JSON holds it; numbers that are not finite are strings, as in records."""

    def strict(found: Any) -> Any:
        if isinstance(found, dict):
            return {name: strict(entry) for name, entry in found.items()}
        if isinstance(found, list):
            return [strict(entry) for entry in found]
        return str(found) if isinstance(found, float) and not math.isfinite(found) else found

    return strict(to_jsonable_python(value, fallback=lambda scalar: scalar.item()))
