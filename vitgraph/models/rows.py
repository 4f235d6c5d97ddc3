"""The model families, a line each: which architectures belong to one, its adapter, its presets.

Nothing here imports torch or a family file until an adapter is asked for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module, resources
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitgraph.models.encoder import VisionEncoder

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


_DECLARED: dict[str, Any] = json.loads((resources.files("vitgraph.models") / "rows.json").read_text(encoding="utf-8"))

_LISTS = ("architectures", "images_only")

ROWS = tuple(ModelRow(**row | {name: tuple(row.get(name, ())) for name in _LISTS}) for row in _DECLARED["rows"])
"""The rows that `rows.json` declares; those with one kind of tower stand together."""

NOT_YET: Mapping[str, str] = _DECLARED["not_yet"]
"""Names whose relatives have an adapter, and what is different in them."""
