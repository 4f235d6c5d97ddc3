"""Calibration profiles by file, by shipped name, or by what a model's tower is; and the packing cost of one.

What decides a tower's times is its shape, whatever the model is called.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from vitgraph.errors import UsageError
from vitgraph.models.registry import ROWS, ModelRow, ModelSource, resolve_preset
from vitgraph.predict.cost_model import CostModel
from vitgraph.predict.profile import CalibrationProfile, load_profile
from vitgraph.predict.targets import DOUBT, TargetCost, target_named

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


def packing_cost(calibration: str | None, source: ModelSource) -> TargetCost:
    """Predicted times of vitgraph's own manager under a profile, for the packing policy `optimal`."""
    return TargetCost(CostModel(find_profile(calibration, source)), target_named("vitgraph"), DOUBT)


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
