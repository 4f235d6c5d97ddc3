"""The calibration profile: what `calibrate` measured of one encoder on one device, as a file that loads anywhere; found
by its file, by its shipped name, or by what a model's tower is.

What decides a tower's times is its shape, whatever the model is called.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import ConfigDict

from vitgraph.errors import UsageError
from vitgraph.models.registry import ROWS, ModelRow, ModelSource, resolve_preset
from vitgraph.records.calibrate_result import CalibrateResult, CallPoint, EagerPoint, ReplayPoint
from vitgraph.records.record import CalibrateRecord
from vitgraph.records.sections import AUTO, Encoder, Environment, best_alone, costs_ms, for_calls
from vitgraph.records.store import read_record, refuse_to_replace, write_file

if TYPE_CHECKING:
    from vitgraph.specs.parts import ModelSpec


class ProfileError(UsageError):
    """A calibration file that cannot be read, or that does not hold what a cost model needs."""


class CalibrationProfile(CalibrateResult):
    """Everything that `calibrate` measured, while it is measured too."""

    model_config = ConfigDict(frozen=False)

    environment: Environment
    """Device, driver, libraries, and the encoder that ran."""
    created_at: str = ""
    """When, as ISO 8601."""
    stopped: str | None = None
    """Why it is not complete; None where it is."""

    @property
    def is_cpu(self) -> bool:
        """True where replays were stood in for on a CPU: they save no launches."""
        return self.environment.device_type != "cuda"

    @property
    def ran(self) -> Encoder | None:
        """The encoder that was measured; None where the profile does not say."""
        return self.environment.encoder

    @property
    def backend(self) -> str | None:
        """The attention backend that was measured."""
        return self.ran.attn_backend if self.ran is not None else None

    @property
    def is_compiled(self) -> bool:
        """True where the blocks of the tower that was measured were compiled."""
        return self.ran is not None and self.ran.compiled_blocks > 0

    def engine_backend(self, rows: Mapping[int, int]) -> tuple[str | None, float | None]:
        """The one attention backend to give an engine, and how long its attention takes against a backend per graph.

        Args:
            rows: How many calls the engine will have, by their packed rows.

        Returns:
            The backend that was calibrated and None; where that was `auto`, the fastest alone for these calls and how
            many times the attention time of the choices it takes. None for both where nothing is known.
        """
        backend = None if self.is_cpu else self.backend
        if self.ran is None or backend != AUTO:
            return backend, None
        choices = self.ran.attn_choices or ()
        costs = costs_ms(known := for_calls(choices, rows), is_graph=True)
        best = best_alone(known)
        return best, costs[best] / costs[AUTO] if best is not None else None

    def doubts(self, spec: ModelSpec) -> list[str]:
        """Why predictions are not of the tower that is asked for, in words; empty where they are."""
        found = []
        for what, own, asked, option in (
            ("attention backend", self.backend, spec.attn_backend, "--mm-encoder-attn-backend"),
            ("dtype", getattr(self.ran, "dtype", None), spec.dtype, "--dtype"),
        ):
            if own is not None and asked.lower() not in ("auto", own.lower()):
                found.append(
                    f"the {what} was {own} when the profile was calibrated, unlike what is asked for; leave out "
                    f"{option}, or run `vitgraph calibrate {option} {asked}` and pass its file"
                )
        if spec.compile != self.is_compiled:
            was, advice = ("compiled", "with") if self.is_compiled else ("not compiled", "without")
            found.append(
                f"the tower's blocks were {was} when the profile was calibrated, unlike what is asked for; ask "
                f"{advice} --compile, or run `vitgraph calibrate{' --compile' if spec.compile else ''}` and pass "
                "its file"
            )
        return found

    def measured_spec(self, spec: ModelSpec, unavailable: Collection[str], engine: str | None = None) -> ModelSpec:
        """How to run the tower so that what is measured is what was calibrated.

        Args:
            spec: What was asked for; a backend and a dtype that were asked for stay.
            unavailable: Attention backends that cannot run here.
            engine: The one backend of the engine that the settings are for; None takes what was calibrated.
        """
        backend = engine or self.backend
        changes: dict[str, Any] = {"compile": self.is_compiled}
        if spec.attn_backend == "auto" and backend and backend not in unavailable:
            changes["attn_backend"] = backend
        if spec.dtype == "auto" and self.ran is not None:
            changes["dtype"] = self.ran.dtype
        return replace(spec, **changes)

    def differences(self, environment: Environment) -> list[str]:
        """Why predictions may not hold for a run, in words; empty where it is what was calibrated."""
        found, runs = [], environment.encoder
        for name, theirs, own in (
            ("the device", self.environment.device, environment.device),
            ("the attention backend", self.backend, runs.attn_backend if runs is not None else None),
            ("the dtype", getattr(self.ran, "dtype", None), getattr(runs, "dtype", None)),
        ):
            if theirs is not None and own is not None and theirs != own:
                found.append(f"{name} was {theirs} when the profile was calibrated, and is {own} here")
        if runs is not None and bool(runs.compiled_blocks) != self.is_compiled:
            was, advice = ("compiled", "") if self.is_compiled else ("not compiled", " --compile")
            found.append(
                f"the tower's blocks were {was} when the profile was calibrated, unlike here, so its times are not "
                f"this tower's; run `vitgraph calibrate{advice}` and pass its file with --calibration"
            )
        return found

    @property
    def label(self) -> str:
        """Model, device and backend in a few words."""
        parts = [self.name, self.environment.device, self.backend]
        kind = "synthetic" if self.is_synthetic else "replays stood in for on a CPU" if self.is_cpu else None
        return ", ".join(str(part) for part in (*parts, kind) if part)

    def to_record(self) -> CalibrateRecord:
        """The profile as its file has it."""
        record = {
            "status": "complete" if self.stopped is None else "interrupted",
            "status_reason": self.stopped,
            "resolved": {"model": self.name, "row": self.row, "compile": self.is_compiled},
            "environment": self.environment,
            "result": {name: getattr(self, name) for name in CalibrateResult.model_fields},
        }
        return CalibrateRecord.model_validate(record | ({"created_at": self.created_at} if self.created_at else {}))

    def save(self, path: Path, *, overwrite: bool = False) -> None:
        """Writes the profile as JSON.

        Raises:
            UsageError: The file exists and `overwrite` is off.
            RecordFileError: It cannot be written.
        """
        if not overwrite:
            refuse_to_replace(path)
        write_file(path, f"{self.to_record().model_dump_json(indent=1)}\n".encode(), "the calibration")


def load_profile(path: Path) -> CalibrationProfile:
    """Reads and checks a profile; needs neither a GPU nor torch.

    Raises:
        ProfileError: The file cannot be read, is no profile, is of another format, or lacks what a cost model needs.
    """
    try:
        record = read_record(path, "calibrate")
        assert isinstance(record, CalibrateRecord)
        profile = profile_of(record)
        _check_figures(profile)
        return profile
    except ProfileError as error:
        raise ProfileError(f"{path}: {error}") from error
    except UsageError as error:
        raise ProfileError(f"{error}; give a file that `vitgraph calibrate` wrote") from error


def _check_figures(profile: CalibrationProfile) -> None:
    """Makes a model and its predictions once: what no calibration writes is found here, and not in whoever predicts."""
    from vitgraph.predict.cost_model import CostModel  # it is made of profiles
    from vitgraph.predict.doubt import predicted_holdout

    try:
        with np.errstate(divide="raise", over="raise", invalid="raise"):
            predicted_holdout(CostModel(profile))
    except (ArithmeticError, LookupError, ValueError) as error:
        raise ProfileError(
            f"its figures make no cost model ({type(error).__name__}: {error}); calibrate again"
        ) from error


def profile_of(record: CalibrateRecord) -> CalibrationProfile:
    """The profile of a record.

    Raises:
        ProfileError: There are too few points for a cost model.
    """
    if record.environment is None:
        raise ProfileError("it does not say what it was measured on; calibrate again")
    own = {"environment": record.environment, "created_at": record.created_at, "stopped": record.status_reason}
    profile = CalibrationProfile.model_validate(dict(record.result) | own)
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


_NO_SHAPE = frozenset(
    {
        *("attention_dropout", "dropout", "projector_dropout", "layer_norm_eps", "norm_eps", "rms_norm_eps"),
        *("layer_scale_init_value", "initializer_range", "rope_theta", "tokens_per_second"),
        *("vision_feature_select_strategy", "model_type", "dtype", "torch_dtype", "architectures"),
        *("transformers_version", "out_hidden_size", "output_hidden_size"),
    }
)
"""Fields that change no time that matters. The width of an output row is one: it is a side of the last products alone,
0.3 % of the operations between Qwen2.5-VL 3B and 7B."""

_FEWEST_SHARED = 4
"""Fields that two configs must both name to be compared."""

ASKED = ("dtype", "attn_backend", "device", "compile")
"""What else a profile is chosen by, where it is asked for."""


def shipped_profiles() -> dict[str, Path]:
    """Profiles that come with vitgraph, by name; each was measured on the device that it names."""
    folder = Path(str(resources.files("vitgraph.predict") / "profiles"))
    return {path.stem: path for path in sorted(folder.glob("*.json"))}


def find_profile(
    calibration: str | None, source: ModelSource, wanted: Mapping[str, Any] | None = None
) -> CalibrationProfile:
    """The profile of a file or of a shipped name; without either, the shipped one of the model's tower.

    Args:
        calibration: File or shipped name; None looks for one.
        source: The model, by whatever name: its tower's shape decides.
        wanted: Of `ASKED` what was asked for; of several profiles the one that agrees with most of it is taken.

    Raises:
        UsageError: There is none; the shipped ones are listed.
    """
    shipped = shipped_profiles()
    if calibration is not None:
        if calibration not in shipped and not Path(calibration).exists():
            raise UsageError(f"--calibration {calibration}: no such file, nor one of {', '.join(shipped)}")
        return load_profile(shipped.get(calibration, Path(calibration)))
    found = [profile for profile in map(load_profile, shipped.values()) if stands_for(profile, source) is True]
    if found:
        return max(found, key=lambda profile: _agreement(profile, {"compile": False, **(wanted or {})}))
    raise UsageError(
        f"no calibration given, and none comes with vitgraph for the tower of {source.name}; run `vitgraph calibrate "
        f"--model {source.name}` on the device and pass its file with --calibration. Shipped: "
        f"{', '.join(shipped) or 'none'}"
    )


def stands_for(profile: CalibrationProfile, source: ModelSource) -> bool | None:
    """Whether a profile was measured with this model's tower; None where it does not say what it was measured with."""
    if not is_same_network(str(profile.row), source.row):
        return False
    preset = resolve_preset(profile.name)
    shape = profile.tower or (tower_shape(preset) if preset is not None else {})
    return None if not shape else is_same_tower(shape, tower_shape(source))


def _agreement(profile: CalibrationProfile, wanted: Mapping[str, Any]) -> int:
    found = {
        "device": profile.environment.device,
        "attn_backend": profile.backend,
        "dtype": getattr(profile.ran, "dtype", None),
        "compile": profile.is_compiled,
    }
    return sum(wanted.get(name) is not None and found[name] == wanted[name] for name in ASKED)


def tower_shape(source: ModelSource) -> dict[str, Any]:
    """The fields of a model's vision config that decide its tower's times."""
    return {name: value for name, value in source.vision_config.items() if name not in _NO_SHAPE}


def is_same_tower(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two shapes of one family agree in every field that both name.

    A config that names fewer fields leaves the others at its family's defaults, which the published models have too.
    """
    shared = (one.keys() & other.keys()) - _NO_SHAPE
    return len(shared) >= max(1, min(_FEWEST_SHARED, len(one), len(other))) and all(
        _plain(one[name]) == _plain(other[name]) for name in shared
    )


def _plain(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=list)


def is_same_network(row_name: str, row: ModelRow) -> bool:
    """Whether two rows run the same network: they have one rule for the sizes and the config of their towers.

    Qwen3.5 and its mixture of experts, for one, differ in their language models alone.
    """
    named = [other for other in ROWS if other.name == row_name]
    return bool(named) and named[0].encoder_class().rule_class is row.encoder_class().rule_class
