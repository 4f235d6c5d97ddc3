"""A record that is being filled while a command measures, and what it becomes."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from vitgraph.errors import VitgraphError
from vitgraph.records.record import NOTHING_MEASURED, RECORDS, Record, Status
from vitgraph.records.sections import Environment, Resolved
from vitgraph.records.store import ResultFolder

Json = dict[str, Any]

_COMPILED = {
    "compiled_blocks": "blocks",
    "compile_s": "seconds",
    "compilations": "compilations",
    "compile_cache": "cache",
    "compile_cache_dir": "cache_dir",
    "compile_fusions": "fusions",
}
_ENCODER = (
    "dtype",
    "parameters",
    "weight_bytes",
    "attn_backend_requested",
    "attn_backend",
    "attn_implementation",
    "attn_selection",
    "attn_choices",
    "attn_plan_build_ms",
)


class Draft:
    """What is known of a run so far; saved whatever ends it.

    Args:
        kind: Kind of the record.
        command: The command as it was given.
        settings: Its options.
        resolved: What they came to.
        workload: Facts of the workload; None in kinds without.
        samples_file: Name of its samples file; None in kinds without.

    Attributes:
        environment: Facts of the device and the encoder, by name; `environment_of` says which.
        result: The result of the kind, a field a key.
        status: How the run ended.
        status_reason: Why it is incomplete.
    """

    def __init__(
        self,
        kind: str,
        command: Sequence[str],
        settings: Mapping[str, Any],
        *,
        resolved: Resolved | None = None,
        workload: Mapping[str, Any] | None = None,
        samples_file: str | None = None,
    ) -> None:
        self.environment: Json = {}
        self.result: Json = {}
        self.status: Status = "error"
        self.status_reason: str | None = NOTHING_MEASURED
        self._envelope = {
            "kind": kind,
            "created_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": tuple(command),
            "settings": to_jsonable_python(dict(settings), fallback=str),
            "resolved": resolved,
            "workload": workload,
            "samples_file": samples_file,
        }

    @property
    def kind(self) -> str:
        """Kind of the record."""
        return str(self._envelope["kind"])

    def end(self, status: Status, reason: str | None = None) -> None:
        """Notes how the run ended."""
        self.status, self.status_reason = status, reason

    def record(self) -> Record:
        """The record of what is known."""
        environment = environment_of(self.environment) if self.environment else None
        found = {
            **self._envelope,
            "status": self.status,
            "status_reason": self.status_reason,
            "environment": environment,
            "result": self.result or None,
        }
        return RECORDS[self.kind].model_validate(found)

    @contextmanager
    def saved_in(self, folder: ResultFolder, stopped: Callable[[], str]) -> Iterator[None]:
        """Saves the record however the block ends, and raises what ended it.

        Args:
            folder: Where it goes.
            stopped: Says what the run had come to where the user stops it.

        Raises:
            RecordFileError: It cannot be written.
        """
        try:
            yield
        except VitgraphError as error:
            self.end("error", str(error))
            raise
        except KeyboardInterrupt:
            self.end("interrupted", stopped())
            raise
        except Exception as error:
            self.end("error", f"{type(error).__name__}: {error}")
            raise
        finally:
            self.save(folder)

    def save(self, folder: ResultFolder) -> Record:
        """Saves the record of what is known.

        Raises:
            RecordFileError: It cannot be written.
        """
        record = self.record()
        folder.save(record)
        return record


def environment_of(facts: Mapping[str, Any]) -> Json:
    """The environment of a run from the facts of its device and its encoder.

    Args:
        facts: Fields of `Environment`; of its encoder and of what compiled it, those of `_ENCODER` and `_COMPILED`.
    """
    found = dict(facts)
    encoder = {name: found.pop(name) for name in _ENCODER if name in found}
    if (compiled := compiled_of(found)) is not None:
        encoder["compiled"] = compiled
    for name in _COMPILED:
        found.pop(name, None)
    return found | ({"encoder": encoder} if "dtype" in encoder else {})


def compiled_of(facts: Mapping[str, Any]) -> Json | None:
    """What compilation did, from the facts of an encoder; None where nothing was compiled."""
    found = {new: facts[old] for old, new in _COMPILED.items() if old in facts}
    return {"blocks": 0, **found} if found.get("blocks") or "seconds" in found else None


def facts_of(environment: Environment) -> Json:
    """The reverse of `environment_of`: facts of device and encoder by name."""
    found = environment.model_dump(exclude={"encoder", "gpu_states", "ranks"}, exclude_none=True)
    found["gpu_states"] = list(environment.gpu_states)
    if environment.encoder is not None:
        found |= environment.encoder.model_dump(exclude={"compiled"}, exclude_none=True)
        found["compiled_blocks"] = environment.encoder.compiled_blocks
    return found


def encode(value: Any, where: str = "record") -> Any:
    """Turns a value into what strict JSON can hold; numbers that are not finite become strings.

    Raises:
        TypeError: A value has no place in a record; the message names the field.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping):
        return {str(name): encode(entry, f"{where}.{name}") for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [encode(entry, f"{where}[{index}]") for index, entry in enumerate(value)]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        return encode(value.item(), where)
    raise TypeError(f"{where} is a {type(value).__name__}, which a record cannot hold; convert it before saving")
