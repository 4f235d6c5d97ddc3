"""Calibration profiles by file, by shipped name, or by what a model's tower is; and the packing cost of one."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from vitgraph.errors import UsageError
from vitgraph.models.registry import ModelSource, resolve_preset
from vitgraph.predict.cost_model import CostModel
from vitgraph.predict.profile import CalibrationProfile, load_profile
from vitgraph.predict.targets import DOUBT, TargetCost, target_named
from vitgraph.predict.towers import is_same_network, is_same_tower, tower_shape

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
    shape = profile.tower or _shape_of_preset(profile.name)
    return None if not shape else is_same_tower(shape, tower_shape(source))


def _shape_of_preset(name: str) -> dict[str, Any] | None:
    preset = resolve_preset(name)
    return None if preset is None else tower_shape(preset)


def _agreement(profile: CalibrationProfile, wanted: Mapping[str, Any]) -> int:
    found = {
        "device": profile.environment.device,
        "attn_backend": profile.backend,
        "dtype": getattr(profile.ran, "dtype", None),
        "compile": profile.is_compiled,
    }
    return sum(wanted.get(name) is not None and found[name] == wanted[name] for name in ASKED)


def packing_cost(calibration: str | None, source: ModelSource) -> TargetCost:
    """Predicted times of vitgraph's own manager under a profile, for the packing policy `optimal`."""
    return TargetCost(CostModel(find_profile(calibration, source)), target_named("vitgraph"), DOUBT)
