"""Calibration profiles by file, by shipped name, or by model; and the packing cost that one of them gives."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from vitgraph.errors import UsageError
from vitgraph.models.registry import resolve_preset
from vitgraph.predict.cost_model import CostModel
from vitgraph.predict.profile import CalibrationProfile, load_profile
from vitgraph.predict.targets import DOUBT, TargetCost, target_named


def shipped_profiles() -> dict[str, Path]:
    """Profiles that come with vitgraph, by name; each was measured on the device that it names."""
    folder = Path(str(resources.files("vitgraph.predict") / "profiles"))
    return {path.stem: path for path in sorted(folder.glob("*.json"))}


def find_profile(calibration: str | None, model: str) -> CalibrationProfile:
    """The profile of a file or of a shipped name; without either, the shipped one of the model.

    Raises:
        UsageError: There is none; the shipped ones are listed.
    """
    shipped = shipped_profiles()
    if calibration is not None:
        return load_profile(shipped.get(calibration, Path(calibration)))
    wanted = resolve_preset(model)
    for path in shipped.values():
        profile = load_profile(path)
        name = str(profile.model.get("name"))
        known = resolve_preset(name)
        if name == model or (wanted and known and wanted.vision_config == known.vision_config):
            return profile
    raise UsageError(
        f"no calibration given, and none comes with vitgraph for {model}; run `vitgraph calibrate --model {model}` on "
        f"the device and pass its file with --calibration. Shipped: {', '.join(shipped) or 'none'}"
    )


def packing_cost(calibration: str, model: str) -> TargetCost:
    """Predicted times of vitgraph's own manager under a profile, for the packing policy `optimal`."""
    return TargetCost(CostModel(find_profile(calibration, model)), target_named("vitgraph"), DOUBT)
