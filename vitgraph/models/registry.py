"""The model families: one line each, and how a `--model` argument becomes a family, a config and weights.

Nothing here imports torch or a family file until one is resolved.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module, resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitgraph.errors import ModelError

if TYPE_CHECKING:
    from vitgraph.models.encoder import VisionEncoder
    from vitgraph.models.geometry import GeometryRule


@dataclass(frozen=True, slots=True)
class ModelRow:
    """One row of the compatibility matrix.

    Attributes:
        name: Row name; also the name of its presets file.
        models: The published models, for people.
        encoder: `module:class` of the adapter.
        architectures: Values of `architectures` in config.json that belong to the row.
        full_preset: Full-size preset that stands for the row in measurements.
        debug_preset: Small preset for tests and CPUs.
    """

    name: str
    models: str
    encoder: str
    architectures: tuple[str, ...]
    full_preset: str
    debug_preset: str

    def encoder_class(self) -> type[VisionEncoder]:
        """The adapter class; its module is imported here, torch is not."""
        module, class_name = self.encoder.split(":")
        return getattr(import_module(module), class_name)


ROWS: tuple[ModelRow, ...] = (
    ModelRow(
        "qwen3_vl",
        "Qwen3-VL, Qwen3-VL-MoE",
        "vitgraph.models.families.qwen3_vl:Qwen3VLEncoder",
        ("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"),
        "qwen3-vl-30b-a3b",
        "qwen3-vl-debug",
    ),
    ModelRow(
        "qwen2_vl",
        "Qwen2-VL",
        "vitgraph.models.families.qwen2_vl:Qwen2VLEncoder",
        ("Qwen2VLForConditionalGeneration",),
        "qwen2-vl-7b",
        "qwen2-vl-debug",
    ),
    ModelRow(
        "qwen2_5_vl",
        "Qwen2.5-VL",
        "vitgraph.models.families.qwen2_5_vl:Qwen2_5VLEncoder",
        ("Qwen2_5_VLForConditionalGeneration",),
        "qwen2.5-vl-7b",
        "qwen2.5-vl-debug",
    ),
    ModelRow(
        "qwen3_5",
        "Qwen3.5, Qwen3.6",
        "vitgraph.models.families.qwen3_5:Qwen3_5Encoder",
        ("Qwen3_5ForConditionalGeneration",),
        "qwen3.5-9b",
        "qwen3.5-debug",
    ),
    ModelRow(
        "qwen3_5_moe",
        "Qwen3.5-MoE, Qwen3.6-MoE",
        "vitgraph.models.families.qwen3_5:Qwen3_5MoeEncoder",
        ("Qwen3_5MoeForConditionalGeneration",),
        "qwen3.5-35b-a3b",
        "qwen3.5-moe-debug",
    ),
    ModelRow(
        "glm4v",
        "GLM-4.1V, GLM-4.6V-Flash",
        "vitgraph.models.families.glm4v:Glm4vEncoder",
        ("Glm4vForConditionalGeneration", "Glm46VForConditionalGeneration"),
        "glm-4.1v-9b",
        "glm-4v-debug",
    ),
    ModelRow(
        "internvl",
        "InternVL 2, 2.5, 3, 3.5",
        "vitgraph.models.families.internvl:InternVLEncoder",
        ("InternVLChatModel", "InternVLForConditionalGeneration"),
        "internvl3.5-8b",
        "internvl-debug",
    ),
    ModelRow(
        "gemma3",
        "Gemma 3",
        "vitgraph.models.families.gemma3:Gemma3Encoder",
        ("Gemma3ForConditionalGeneration",),
        "gemma-3-4b",
        "gemma3-debug",
    ),
    ModelRow(
        "ernie4_5_vl",
        "ERNIE-4.5-VL",
        "vitgraph.models.families.ernie4_5_vl:Ernie45VLEncoder",
        ("Ernie4_5_VLMoeForConditionalGeneration", "Ernie4_5_VL_MoeForConditionalGeneration"),
        "ernie-4.5-vl-28b-a3b",
        "ernie4.5-vl-debug",
    ),
    ModelRow(
        "kimi_vl",
        "Kimi-VL",
        "vitgraph.models.families.kimi_vl:KimiVLEncoder",
        ("KimiVLForConditionalGeneration",),
        "kimi-vl-a3b",
        "kimi-vl-debug",
    ),
    ModelRow(
        "llama4",
        "Llama 4",
        "vitgraph.models.families.llama4:Llama4Encoder",
        ("Llama4ForConditionalGeneration",),
        "llama-4-scout",
        "llama4-debug",
    ),
    ModelRow(
        "gemma4",
        "Gemma 4",
        "vitgraph.models.families.gemma4:Gemma4Encoder",
        ("Gemma4ForConditionalGeneration",),
        "gemma-4-26b-a4b",
        "gemma-4-debug",
    ),
    ModelRow(
        "minicpmv_2_5",
        "MiniCPM-V 2.5",
        "vitgraph.models.families.minicpmv:MiniCPMV25Encoder",
        ("MiniCPMV",),
        "minicpm-v-2.5",
        "minicpm-v-2.5-debug",
    ),
    ModelRow(
        "minicpmv_2_6_4_0",
        "MiniCPM-V 2.6, MiniCPM-V 4.0",
        "vitgraph.models.families.minicpmv:MiniCPMVEncoder",
        ("MiniCPMV",),
        "minicpm-v-2.6",
        "minicpm-v-2.6-debug",
    ),
    ModelRow(
        "deepseek_ocr",
        "DeepSeek-OCR",
        "vitgraph.models.families.deepseek_ocr:DeepseekOCREncoder",
        ("DeepseekOCRForCausalLM",),
        "deepseek-ocr",
        "deepseek-ocr-debug",
    ),
    ModelRow(
        "step3_vl",
        "Step3-VL-10B, Step3",
        "vitgraph.models.families.step3_vl:Step3VLEncoder",
        ("StepVLForConditionalGeneration", "Step3VLForConditionalGeneration"),
        "step3-vl-10b",
        "step3-vl-debug",
    ),
)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A resolved model: its family, its config, and where its weights are.

    Attributes:
        row: The family.
        name: What the user gave.
        vision_config: `vision_config` of config.json, as a dict.
        processor: Processor settings in the shape of the presets.
        extra: Facts outside the vision config that the encoder needs.
        weights: Hub id or local folder with the safetensors files, or None (presets without a published model).
        architecture: The architecture name.
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
    revision: str | None = field(default=None)

    def rule(self) -> GeometryRule:
        """The family's rule for this config; needs no torch."""
        return self.row.encoder_class().rule_class(self.vision_config, self.processor, self.extra)


@cache
def row_presets(row_name: str) -> dict[str, dict[str, Any]]:
    """Presets of one row by name."""
    text = (resources.files("vitgraph.models") / "presets" / f"{row_name}.json").read_text(encoding="utf-8")
    return json.loads(text)


def all_presets() -> dict[str, ModelRow]:
    """Preset name to row, in registry order."""
    return {preset: row for row in ROWS for preset in row_presets(row.name)}


def row_of_config(config: Mapping[str, Any]) -> ModelRow:
    """The row that a config.json belongs to, by its architecture and, where rows share one, by the row's own test.

    Raises:
        ModelError: No row takes it.
    """
    architecture = (config.get("architectures") or ["(none)"])[0]
    for row in ROWS:
        if architecture in row.architectures and row.encoder_class().accepts_model_config(config):
            return row
    known = ", ".join(sorted({name for row in ROWS for name in row.architectures}))
    raise ModelError(f"architecture {architecture!r} has no vision-encoder adapter here; known: {known}")


def resolve_preset(name: str) -> ModelSource | None:
    """The preset called `name` (or the preset of that hub id), or None where there is none."""
    for row in ROWS:
        for preset_name, preset in row_presets(row.name).items():
            if name == preset_name or name == preset["hub_id"]:
                return ModelSource(
                    row=row,
                    name=name,
                    vision_config=preset["vision_config"],
                    processor=preset["processor"],
                    extra=preset["extra"],
                    weights=preset["hub_id"],
                    architecture=preset["architecture"],
                    config_source="preset",
                )
    return None


def resolve_model(name: str, *, revision: str | None = None) -> ModelSource:
    """Resolves `--model`: a preset name, a local folder, or a hub id.

    A hub id that a preset describes uses the preset's config, so that no network is needed to plan or to run with
    random weights.

    Raises:
        ModelError: Nothing of that name is known or reachable; the message lists the presets.
    """
    folder = Path(name)
    if folder.is_dir():
        from vitgraph.models.checkpoints import source_from_folder

        return source_from_folder(folder, name)
    preset = resolve_preset(name)
    if preset is not None:
        return preset
    if "/" in name and not name.startswith((".", "/", "~")):
        from vitgraph.models.checkpoints import source_from_hub

        return source_from_hub(name, revision)
    raise ModelError(
        f"model {name!r} is neither a preset, a local folder nor a hub id. Presets: {', '.join(all_presets())}"
    )
