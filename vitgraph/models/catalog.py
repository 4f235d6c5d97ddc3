"""What is known of each model row, for `vitgraph models` and the README: facts from code, verification from records.

Needs no torch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from vitgraph.models.registry import resolve_preset, row_presets
from vitgraph.models.rows import ROWS, ModelRow
from vitgraph.planning.items import IMAGE, VIDEO


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """One row of the model table.

    Attributes:
        row: The registry's row.
        has_image: Takes images.
        has_video: Takes videos.
        paths: Encoder paths, with the smallest budget of each.
        axes: Capture axes, with the number of keys of each.
        verified: Verifications of the full-size preset, from the committed records.
    """

    row: ModelRow
    has_image: bool
    has_video: bool
    paths: dict[str, int]
    axes: dict[str, int]
    verified: list[dict[str, Any]]

    @property
    def presets(self) -> list[str]:
        return list(row_presets(self.row.name))

    def as_dict(self) -> dict[str, Any]:
        """The entry for `vitgraph models --json`."""
        return {
            "row": self.row.name,
            "tower": self.row.tower,
            "models": self.row.models,
            "architectures": list(self.row.architectures),
            "encoder": self.row.encoder,
            "presets": self.presets,
            "full_preset": self.row.full_preset,
            "debug_preset": self.row.debug_preset,
            "image": self.has_image,
            "video": self.has_video,
            "paths": self.paths,
            "axes": self.axes,
            "verified": self.verified,
        }


@cache
def verifications() -> dict[str, list[dict[str, Any]]]:
    """Committed verifications by row name."""
    text = (resources.files("vitgraph.models") / "verified.json").read_text(encoding="utf-8")
    return json.loads(text)["rows"]


def catalog() -> list[CatalogEntry]:
    """Every row, in registry order."""
    entries = []
    for row in ROWS:
        source = resolve_preset(row.full_preset)
        assert source is not None, f"{row.name}: preset {row.full_preset} is missing"
        config = source.rule().graph_config()
        entries.append(
            CatalogEntry(
                row=row,
                has_image=IMAGE in config.modalities,
                has_video=VIDEO in config.modalities,
                paths={path: policy.min_token_budget for path, policy in config.paths.items()},
                axes={axis.name: len(axis.keys) for axis in config.axes},
                verified=verifications().get(row.name, []),
            )
        )
    return entries
