"""What is known of each model row, for `vitgraph models` and the README: facts from code, verification from records.

Needs no torch.
"""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any

from vitgraph.models.registry import resolve_preset, row_presets
from vitgraph.models.rows import ROWS
from vitgraph.planning.items import IMAGE, VIDEO


@cache
def verifications() -> dict[str, list[dict[str, Any]]]:
    """Committed verifications by row name."""
    text = (resources.files("vitgraph.models") / "verified.json").read_text(encoding="utf-8")
    return json.loads(text)["rows"]


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
