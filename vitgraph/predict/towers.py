"""Which models have the same tower: what decides its times, whatever the model is called."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from vitgraph.models.registry import ModelSource, all_presets, resolve_preset
from vitgraph.models.rows import ROWS, ModelRow

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


def presets_like(source: ModelSource) -> list[str]:
    """The presets whose towers a profile of this model stands for, its own among them."""
    shape = tower_shape(source)
    found = []
    for name, row in all_presets().items():
        preset = resolve_preset(name) if is_same_network(row.name, source.row) else None
        if preset is not None and is_same_tower(tower_shape(preset), shape):
            found.append(name)
    return found
