"""The envelope that every record has, and what a record of each kind holds in it."""

from __future__ import annotations

import datetime
import hashlib
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from pydantic import Field, JsonValue, ValidationError

from vitgraph import __version__
from vitgraph.errors import UsageError
from vitgraph.records.calibrate_result import CalibrateResult
from vitgraph.records.results import BenchResult, CompareResult, MicroResult, ProfileResult, VerifyResult
from vitgraph.records.sections import Environment, Resolved, Section, Workload
from vitgraph.records.tune_result import TuneResult

NOTHING_MEASURED = "the run ended before it measured anything"

CompareKind = Literal["compare-backends", "compile-rows"]
Status = Literal["complete", "interrupted", "error"]


@cache
def version_of_code() -> str:
    """The version, `+` a digest of the package's source files: `0.1.0+1a2b3c4d`, which tells two commits apart."""
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    return f"{__version__}+{digest.hexdigest()[:8]}"


class Record(Section):
    """What a command leaves behind: who measured what, when, with what settings and on what, and what came out."""

    kind: str = Field(description="What the record is of.")
    format: Literal[2] = Field(default=2, description="Version of this format; readers refuse any other.")
    status: Status = Field(default="error", description="How the run ended; what was measured until then is kept.")
    status_reason: str | None = Field(default=NOTHING_MEASURED, description="Why it is not complete; null where it is.")
    vitgraph_version: str = Field(
        default_factory=version_of_code, description="Version that measured, `+` a digest of its source files."
    )
    created_at: str = Field(default_factory=lambda: datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"))
    """Start of the run, ISO 8601 in UTC."""
    command: tuple[str, ...] = Field(default_factory=lambda: ("vitgraph", *sys.argv[1:]))
    """The command as it was given, one entry a word."""
    settings: dict[str, JsonValue] = {}
    """The command's options with their defaults, as the page of options describes them."""
    resolved: Resolved | None = Field(default=None, description="What the settings came to; null where rows say it.")
    environment: Environment | None = Field(default=None, description="What was measured on and with; null if unknown.")
    workload: Workload | None = Field(default=None, description="The requests; null in kinds without.")
    samples_file: str | None = Field(default=None, description="Samples file beside the record; null in kinds without.")

    if TYPE_CHECKING:
        result: Any

    def model_post_init(self, context: Any) -> None:
        """Refuses a status without its reason, and a file outside of the record's folder."""
        if (self.status == "complete") == bool(self.status_reason):
            raise ValueError(
                f"status {self.status!r} with reason {self.status_reason!r}; exactly the incomplete have a reason"
            )
        check_file_name(self.samples_file)


class BenchRecord(Record):
    """A run of `vitgraph bench`."""

    kind: Literal["bench"] = "bench"
    result: BenchResult = Field(description="What came out.")

    def model_post_init(self, context: Any) -> None:
        """Refuses a complete run that measured nothing."""
        super().model_post_init(context)
        if self.status == "complete" and not self.result.latency:
            raise ValueError("a complete run has latencies; its status is 'interrupted' or 'error'")


class CompareRecord(Record):
    """A run of `vitgraph compare-backends`."""

    kind: CompareKind = "compare-backends"
    result: CompareResult = Field(description="What came out.")


class MicroRecord(Record):
    """A run of `vitgraph compare-backends --micro`."""

    kind: Literal["compare-backends-micro"] = "compare-backends-micro"
    result: MicroResult = Field(description="What came out.")


class TuneRecord(Record):
    """A run of `vitgraph tune-budgets`."""

    kind: Literal["tune-budgets"] = "tune-budgets"
    result: TuneResult = Field(description="What came out.")


class CalibrateRecord(Record):
    """A run of `vitgraph calibrate`."""

    kind: Literal["calibrate"] = "calibrate"
    result: CalibrateResult = Field(description="What came out.")


class VerifyRecord(Record):
    """A run of `vitgraph verify`."""

    kind: Literal["verify"] = "verify"
    result: VerifyResult = Field(description="What came out.")


class ProfileRecord(Record):
    """A run of `vitgraph profile`."""

    kind: Literal["profile"] = "profile"
    result: ProfileResult | None = Field(description="What came out; null where the run ended before it.")


RECORDS: dict[str, type[Record]] = {
    kind: record for record in Record.__subclasses__() for kind in get_args(record.model_fields["kind"].annotation)
}
"""The record of each kind."""


def check_file_name(name: str | None) -> None:
    """Refuses the name of a file that would not lie in the record's own folder."""
    if name is not None and (name in ("", ".", "..") or any(mark in name for mark in "/\\\0")):
        raise ValueError(f"{name!r} is no file of the record's folder; give a name without a path")


def refusal(error: ValidationError, where: str) -> UsageError:
    """One line that names the file, the first field that is wrong, and what it has to be."""
    first = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in first["loc"]) or "the record"
    others = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    value = first["input"]
    shown = f", got {str(value)[:60]!r}" if isinstance(value, str | int | float | bool) else ""
    return UsageError(f"{where}: {field}: {first['msg'].removeprefix('Value error, ')}{shown}{others}")
