"""The calibration profile: what `calibrate` measured of one encoder on one device, as a file that loads anywhere."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitgraph.errors import UsageError
from vitgraph.planning.budgets import BudgetPlan, CaptureAxis
from vitgraph.planning.items import EncoderItemSpec
from vitgraph.predict.measurements import (
    CallPoint,
    CapturePoint,
    CopyPoint,
    EagerPoint,
    EncoderFacts,
    HoldoutPoint,
    MemoryPoint,
    ReplayPoint,
    Specs,
    Timing,
)
from vitgraph.records.files import os_reason, refuse_to_replace, write_atomically

if TYPE_CHECKING:
    from vitgraph.specs import ModelSpec

SCHEMA_VERSION = 1
PROFILE_KIND = "calibration"


class ProfileError(UsageError):
    """A calibration file that cannot be read, or that does not hold what a cost model needs."""


@dataclass(slots=True)
class CalibrationProfile:
    """Everything that `calibrate` measured.

    Attributes:
        model: Name, row, attention backend, dtype and the like, as a run record has them.
        environment: Device, driver and libraries.
        encoder: What planning needs to know.
        max_tokens: Most tokens of a call that was measured.
        replays, eager, calls, copies, captures, memory, holdout: The measurements.
        holdout_plans: The graphs that the holdout calls met.
        notes: What was left out or adjusted, in words.
        is_synthetic: True for made-up numbers, which serve tests only.
        created_at: When, as ISO 8601.
        elapsed_s: How long the measuring took.
    """

    model: dict[str, Any]
    environment: dict[str, Any]
    encoder: EncoderFacts
    max_tokens: int
    replays: list[ReplayPoint] = field(default_factory=list)
    eager: list[EagerPoint] = field(default_factory=list)
    calls: list[CallPoint] = field(default_factory=list)
    copies: list[CopyPoint] = field(default_factory=list)
    captures: list[CapturePoint] = field(default_factory=list)
    memory: list[MemoryPoint] = field(default_factory=list)
    holdout: list[HoldoutPoint] = field(default_factory=list)
    holdout_plans: list[BudgetPlan] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    is_synthetic: bool = False
    created_at: str = ""
    elapsed_s: float = 0.0

    @property
    def is_cpu(self) -> bool:
        """True where replays were stood in for on a CPU: they save no launches."""
        return self.environment.get("device_type") != "cuda"

    @property
    def is_compiled(self) -> bool:
        """True where the blocks of the tower that was measured were compiled."""
        return bool(self.model.get("compiled_blocks"))

    def measured_spec(self, spec: ModelSpec, unavailable: Collection[str]) -> ModelSpec:
        """How to run the tower so that what is measured is what was calibrated.

        Args:
            spec: What was asked for; a backend and a dtype that were asked for stay.
            unavailable: Attention backends that cannot run here.
        """
        backend, dtype = self.model.get("attn_backend"), self.model.get("dtype")
        changes: dict[str, Any] = {"compile": self.is_compiled}
        if spec.attn_backend == "auto" and backend and backend not in unavailable:
            changes["attn_backend"] = backend
        if spec.dtype == "auto" and dtype:
            changes["dtype"] = dtype
        return replace(spec, **changes)

    def differences(self, environment: Mapping[str, Any]) -> list[str]:
        """Why predictions may not hold for a run, in words; empty where it is what was calibrated.

        Args:
            environment: Of the run's record, the facts of its encoder included.
        """
        found = []
        for name, theirs, own in (
            ("the device", self.environment.get("device"), environment.get("device")),
            ("the attention backend", self.model.get("attn_backend"), environment.get("attn_backend")),
            ("the dtype", self.model.get("dtype"), environment.get("dtype")),
        ):
            if theirs is not None and own is not None and theirs != own:
                found.append(f"{name} was {theirs} when the profile was calibrated, and is {own} here")
        if bool(environment.get("compiled_blocks")) != self.is_compiled:
            was, advice = ("compiled", "") if self.is_compiled else ("not compiled", " --compile")
            found.append(
                f"the tower's blocks were {was} when the profile was calibrated, unlike here, so its times are not "
                f"this tower's; run `vitgraph calibrate{advice}` and pass its file with --calibration"
            )
        return found

    @property
    def label(self) -> str:
        """Model, device and backend in a few words."""
        parts = [self.model.get("name"), self.environment.get("device"), self.model.get("attn_backend")]
        kind = "synthetic" if self.is_synthetic else "replays stood in for on a CPU" if self.is_cpu else None
        return ", ".join(str(part) for part in (*parts, kind) if part)

    def as_dict(self) -> dict[str, Any]:
        """The profile as JSON has it."""
        return {
            "schema_version": SCHEMA_VERSION,
            "kind": PROFILE_KIND,
            "is_synthetic": self.is_synthetic,
            "created_at": self.created_at,
            "elapsed_s": self.elapsed_s,
            "model": self.model,
            "environment": self.environment,
            "encoder": asdict(self.encoder),
            "max_tokens": self.max_tokens,
            **{
                name: [_point_dict(point) for point in getattr(self, name)]
                for name in ("replays", "eager", "calls", "copies", "captures", "memory", "holdout")
            },
            "holdout_plans": [_plan_dict(plan) for plan in self.holdout_plans],
            "notes": self.notes,
        }

    def save(self, path: Path, *, overwrite: bool = False) -> None:
        """Writes the profile as JSON.

        Raises:
            UsageError: The file exists and `overwrite` is off, or it cannot be written.
        """
        if not overwrite:
            refuse_to_replace(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, (json.dumps(self.as_dict(), indent=1) + "\n").encode())
        except OSError as error:
            raise ProfileError(f"cannot write {path}: {os_reason(error)}") from error


def load_profile(path: Path) -> CalibrationProfile:
    """Reads and checks a profile; needs neither a GPU nor torch.

    Raises:
        ProfileError: The file cannot be read, is no profile, is of a newer version, or lacks what a cost model needs.
    """
    try:
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise ProfileError(f"cannot read {path}: {os_reason(error)}; give a file that `calibrate` wrote") from error
    except ValueError as error:
        raise ProfileError(f"{path} is not JSON ({error}); give a file that `calibrate` wrote") from error
    try:
        return profile_from_dict(data)
    except ProfileError as error:
        raise ProfileError(f"{path}: {error}") from error


def profile_from_dict(data: Any) -> CalibrationProfile:
    """A profile from its JSON form.

    Raises:
        ProfileError: A field is missing, of the wrong kind, or there are too few points for a cost model.
    """
    if not isinstance(data, dict) or data.get("kind") != PROFILE_KIND:
        raise ProfileError("not a calibration profile; `vitgraph calibrate` writes one")
    version = data.get("schema_version")
    if version != SCHEMA_VERSION:
        raise ProfileError(f"schema version {version!r}; this vitgraph reads {SCHEMA_VERSION}. Calibrate again")
    try:
        encoder = data["encoder"]
        profile = CalibrationProfile(
            model=dict(data["model"]),
            environment=dict(data["environment"]),
            encoder=EncoderFacts(
                path_minimums={path: int(low) for path, low in encoder["path_minimums"].items()},
                segment_free_paths=tuple(encoder["segment_free_paths"]),
                modalities=tuple(encoder["modalities"]),
                min_tokens_per_segment=int(encoder["min_tokens_per_segment"]),
                max_frames_per_video=int(encoder["max_frames_per_video"]),
                axes=_axes(encoder["axes"]),
            ),
            max_tokens=int(data["max_tokens"]),
            copies=[CopyPoint(**point) for point in data["copies"]],
            captures=[CapturePoint(**point) for point in data["captures"]],
            memory=[MemoryPoint(**point) for point in data["memory"]],
            holdout_plans=[_plan(plan) for plan in data["holdout_plans"]],
            notes=list(data["notes"]),
            is_synthetic=bool(data["is_synthetic"]),
            created_at=str(data["created_at"]),
            elapsed_s=float(data["elapsed_s"]),
        )
        profile.replays = _points(ReplayPoint, data["replays"])
        profile.eager = _points(EagerPoint, data["eager"])
        profile.calls = _points(CallPoint, data["calls"])
        profile.holdout = _points(HoldoutPoint, data["holdout"])
    except KeyError as error:
        raise ProfileError(f"field {error} is missing; calibrate again") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise ProfileError(f"a field is not what it should be ({error}); calibrate again") from error
    check_profile(profile)
    return profile


def check_profile(profile: CalibrationProfile) -> None:
    """Refuses a profile that no cost model can be made of.

    Raises:
        ProfileError: Too few points, or a time that is not positive.
    """
    for path in profile.encoder.path_minimums:
        budgets = {point.token_budget for point in profile.replays if point.path == path}
        if len(budgets) < 2:
            raise ProfileError(
                f"path {path!r} has replays of {len(budgets)} budget(s); 2 are needed. Calibrate with more time"
            )
    if len(profile.eager) < 2:
        raise ProfileError(f"{len(profile.eager)} eager call(s); at least 2 are needed. Calibrate with more time")
    timed: list[ReplayPoint | EagerPoint | CallPoint] = [*profile.replays, *profile.eager, *profile.calls]
    for point in timed:
        if not point.time.ms > 0:
            raise ProfileError(f"a measured time is {point.time.ms} ms; times are positive. Calibrate again")


# -- JSON forms --------------------------------------------------------------------------------------------------------


def _point_dict(point: Any) -> dict[str, Any]:
    values = {name: getattr(point, name) for name in point.__dataclass_fields__}
    for name, value in values.items():
        if name == "items":
            values[name] = _items_list(value)
        elif isinstance(value, Timing):
            values[name] = asdict(value)
    return values


def _items_list(items: Sequence[EncoderItemSpec]) -> list[dict[str, Any]]:
    """Equal neighbours in one entry, since calls of many equal items are common."""
    entries = []
    for spec, run in groupby(items):
        entry: dict[str, Any] = {
            "count": len(list(run)),
            "modality": spec.modality,
            "input_size": spec.input_size,
            "output_tokens": spec.output_tokens,
            "segments": spec.segments,
        }
        if spec.path_output_tokens:
            entry["path_output_tokens"] = dict(spec.path_output_tokens)
        if spec.axis_sizes:
            entry["axis_sizes"] = {name: list(sizes) for name, sizes in spec.axis_sizes.items()}
        entries.append(entry)
    return entries


def _items(entries: Iterable[Mapping[str, Any]]) -> Specs:
    items: list[EncoderItemSpec] = []
    for entry in entries:
        values = dict(entry)
        count = int(values.pop("count"))
        values["axis_sizes"] = {name: tuple(sizes) for name, sizes in values.get("axis_sizes", {}).items()}
        items.extend([EncoderItemSpec(**values)] * count)
    return tuple(items)


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "items": _items,
    "axis_key": tuple,
    "time": lambda value: Timing(**value),
    "graph": lambda value: Timing(**value),
    "eager": lambda value: Timing(**value),
}


def _points(kind: Callable[..., Any], entries: Iterable[Mapping[str, Any]]) -> list[Any]:
    return [
        kind(**{name: _DECODERS.get(name, lambda value: value)(value) for name, value in entry.items()})
        for entry in entries
    ]


def _axes(entries: Iterable[Mapping[str, Any]]) -> tuple[CaptureAxis, ...]:
    return tuple(CaptureAxis(entry["name"], tuple(tuple(key) for key in entry["keys"])) for entry in entries)


def _plan_dict(plan: BudgetPlan) -> dict[str, Any]:
    return {
        "path_budgets": {path: list(budgets) for path, budgets in plan.path_budgets.items()},
        "max_items": plan.max_items,
        "max_frames": plan.max_frames,
        "slot_tiers": [[path, budget, list(tiers)] for (path, budget), tiers in plan.slot_tiers.items()],
        "axes": [asdict(axis) for axis in plan.axes],
        "segment_free_paths": sorted(plan.segment_free_paths),
    }


def _plan(entry: Mapping[str, Any]) -> BudgetPlan:
    return BudgetPlan(
        path_budgets={path: tuple(budgets) for path, budgets in entry["path_budgets"].items()},
        max_items=entry["max_items"],
        max_frames=entry["max_frames"],
        slot_tiers={(path, budget): tuple(tiers) for path, budget, tiers in entry["slot_tiers"]},
        axes=_axes(entry["axes"]),
        segment_free_paths=frozenset(entry["segment_free_paths"]),
    )
