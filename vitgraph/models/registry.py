"""The families that `rows.json` declares, what is known of each, and how a `--model` argument becomes one of them.

Nothing here imports torch, nor a family file until one is resolved.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module, resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitgraph.errors import ModelError
from vitgraph.planning.budgets import IMAGE, VIDEO
from vitgraph.reading import is_folder

if TYPE_CHECKING:
    from vitgraph.models.encoder import VisionEncoder
    from vitgraph.models.geometry import GeometryRule

FAMILIES = "vitgraph.models.families"


@dataclass(frozen=True, slots=True)
class ModelRow:
    """One row of the compatibility matrix.

    Attributes:
        name: Row name; also the name of its presets file.
        tower: The kind of tower; rows of one kind are shown together.
        models: The published models, for people.
        encoder: `module:class` of the adapter, the module among the families.
        architectures: Values of `architectures` in config.json that belong to the row.
        full_preset: Full-size preset that stands for the row in measurements.
        debug_preset: Small preset for tests and CPUs.
        images_only: Those of `architectures` that take images alone, of a family that takes videos too.
    """

    name: str
    tower: str
    models: str
    encoder: str
    architectures: tuple[str, ...]
    full_preset: str
    debug_preset: str
    images_only: tuple[str, ...] = ()

    def encoder_class(self) -> type[VisionEncoder]:
        """The adapter class; its module is imported here, torch is not."""
        module, class_name = self.encoder.split(":")
        return getattr(import_module(f"{FAMILIES}.{module}"), class_name)


def _packaged(name: str) -> dict[str, Any]:
    return json.loads((resources.files("vitgraph.models") / name).read_text(encoding="utf-8"))


_DECLARED = _packaged("rows.json")

_LISTS = ("architectures", "images_only")

ROWS = tuple(ModelRow(**row | {name: tuple(row.get(name, ())) for name in _LISTS}) for row in _DECLARED["rows"])
"""The rows that `rows.json` declares; those with one kind of tower stand together."""

NOT_YET: Mapping[str, str] = _DECLARED["not_yet"]
"""Names whose relatives have an adapter, and what is different in them."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A resolved model: its family, its config, and where its weights are.

    Attributes:
        row: The family.
        name: What the user gave.
        processor: Processor settings in the shape of the presets.
        extra: Facts outside the vision config that the encoder needs.
        weights: Hub id or local folder with the safetensors files, or None (presets without a published model).
        config_source: `preset`, `folder` or `hub`.
    """

    row: ModelRow
    name: str
    vision_config: Mapping[str, Any]
    processor: Mapping[str, Any]
    extra: Mapping[str, Any]
    weights: str | None
    architecture: str
    config_source: str
    revision: str | None = None

    def rule(self) -> GeometryRule:
        """The family's rule for this config; needs no torch."""
        rule = self.row.encoder_class().rule_class(self.vision_config, self.processor, self.extra)
        if self.architecture in self.row.images_only:
            rule.modalities = (IMAGE,)
        return rule


@cache
def row_presets(row_name: str) -> dict[str, dict[str, Any]]:
    """Presets of one row by name."""
    return _packaged(f"presets/{row_name}.json")


def preset_of(row: ModelRow, architecture: str) -> dict[str, Any]:
    """The preset that documents an architecture: the row's first one of that name, or else its full-size one."""
    presets = row_presets(row.name)
    full = presets[row.full_preset]
    for preset in (full, *presets.values()):
        if preset["hub_id"] and architecture in (preset["architecture"], *preset.get("also", ())):
            return preset
    return full


def all_presets() -> dict[str, ModelRow]:
    """Preset name to row, in registry order."""
    return {preset: row for row in ROWS for preset in row_presets(row.name)}


def architecture_of(config: Mapping[str, Any]) -> str:
    """The architecture that a config.json names, or the one that transformers has for its `model_type`.

    Raises:
        ModelError: It names neither.
    """
    named = config.get("architectures")
    if isinstance(named, list) and named and isinstance(named[0], str):
        return named[0]
    found = _architecture_of_type(config)
    if found is None:
        raise ModelError(
            f"config.json names no model: architectures is {named!r} and model_type {config.get('model_type')!r}; give "
            "the config of a vision-language checkpoint"
        )
    return found


def _architecture_of_type(config: Mapping[str, Any]) -> str | None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    model_type = config.get("model_type")
    if any(model_type in row.architectures for row in ROWS):
        return str(model_type)
    found = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(model_type if isinstance(model_type, str) else "")
    return found if isinstance(found, str) else None


def row_of_config(config: Mapping[str, Any]) -> ModelRow:
    """The row that a config.json belongs to, by its architecture and, where rows share one, by the row's own test.

    Raises:
        ModelError: No row takes it.
    """
    architecture = architecture_of(config)
    sharing = [row for row in ROWS if architecture in row.architectures]
    for row in sharing:
        if row.encoder_class().accepts_model_config(config):
            return row
    if sharing:
        raise ModelError(
            f"architecture {architecture!r} has an adapter for {'; '.join(row.models for row in sharing)}, and this "
            f"config.json (version {config.get('version')!r}) is of none of them: not yet"
        )
    if architecture in NOT_YET:
        raise ModelError(f"architecture {architecture!r} has no vision-encoder adapter yet: {NOT_YET[architecture]}")
    known = sorted({name for row in ROWS for name in row.architectures})
    none = f"architecture {architecture!r} has no vision-encoder adapter here"
    if (usual := _architecture_of_type(config)) in known:
        raise ModelError(
            f"{none}; its model_type is {usual}'s: where the vision encoder is too, name that in architectures"
        )
    raise ModelError(f"{none}; known: {', '.join(known)}")


def resolve_preset(name: str) -> ModelSource | None:
    """The preset called `name` (or the preset of that hub id), or None where there is none."""
    for row in ROWS:
        for preset_name, preset in row_presets(row.name).items():
            if name == preset_name or name == preset["hub_id"]:
                facts = {fact: preset[fact] for fact in ("vision_config", "processor", "extra", "architecture")}
                return ModelSource(row, name, weights=preset["hub_id"], config_source="preset", **facts)
    return None


def resolve_model(name: str, *, revision: str | None = None) -> ModelSource:
    """Resolves `--model`: a preset name, a local folder, or a hub id.

    A hub id that a preset describes uses the preset's config, so that no network is needed to plan or to run with
    random weights.

    Raises:
        ModelError: Nothing of that name is known or reachable; the message lists the presets.
    """
    from vitgraph.models.checkpoints import source_of

    folder = Path(name)
    if is_folder(folder):
        return source_of(name, folder)
    preset = resolve_preset(name)
    if preset is not None:
        return preset
    if "/" in name and not name.startswith((".", "/", "~")):
        return source_of(name, revision=revision)
    raise ModelError(f"model {name!r} is neither a preset, a local folder nor a hub id; {_near_presets(name)}")


def _near_presets(name: str) -> str:
    """The few presets that are like a name, also where it says more or less than they do."""
    plain = {re.sub(r"[^a-z0-9]", "", preset.lower()): preset for preset in all_presets()}
    wanted = re.sub(r"[^a-z0-9]", "", name.lower())
    close = [preset for text, preset in plain.items() if len(wanted) > 2 and (text in wanted or wanted in text)]
    close += [plain[text] for text in difflib.get_close_matches(wanted, plain, n=3, cutoff=0.6)]
    few = list(dict.fromkeys(close))[:4]
    listed = "`vitgraph models` lists the presets"
    return f"did you mean {', '.join(few)}? {listed}" if few else listed


@cache
def verifications() -> dict[str, list[dict[str, Any]]]:
    """Committed verifications by row name."""
    return _packaged("verified.json")["rows"]


def catalog() -> list[dict[str, Any]]:
    """Facts of every row for `vitgraph models --json`, in registry order: budgets by path, keys by capture axis."""
    entries = []
    for row in ROWS:
        source = resolve_preset(row.full_preset)
        assert source is not None, f"{row.name}: preset {row.full_preset} is missing"
        config = source.rule().graph_config()
        entries.append(
            {
                "row": row.name,
                "tower": row.tower,
                "models": row.models,
                "architectures": list(row.architectures),
                "encoder": row.encoder,
                "presets": list(row_presets(row.name)),
                "full_preset": row.full_preset,
                "debug_preset": row.debug_preset,
                "image": IMAGE in config.modalities,
                "video": VIDEO in config.modalities,
                "paths": {path: policy.min_token_budget for path, policy in config.paths.items()},
                "axes": {axis.name: len(axis.keys) for axis in config.axes},
                "verified": verifications().get(row.name, []),
            }
        )
    return entries
