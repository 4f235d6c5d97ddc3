"""The model families, a line each: which architectures belong to one, its adapter, its presets.

Nothing here imports torch or a family file until an adapter is asked for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module, resources
from typing import TYPE_CHECKING

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
    """

    name: str
    tower: str
    models: str
    encoder: str
    architectures: tuple[str, ...]
    full_preset: str
    debug_preset: str

    def encoder_class(self) -> type[VisionEncoder]:
        """The adapter class; its module is imported here, torch is not."""
        module, class_name = self.encoder.split(":")
        return getattr(import_module(f"{FAMILIES}.{module}"), class_name)


def _declared_rows() -> tuple[ModelRow, ...]:
    declared = json.loads((resources.files("vitgraph.models") / "rows.json").read_text(encoding="utf-8"))
    return tuple(ModelRow(**{**row, "architectures": tuple(row["architectures"])}) for row in declared)


ROWS = _declared_rows()
"""The rows that `rows.json` declares; those with one kind of tower stand together."""

IMAGES_ONLY = frozenset(
    {
        "CohereCompassForConditionalGeneration",
        "JinaVLForRanking",
        "OpenCUAForConditionalGeneration",
        "QianfanOCRForConditionalGeneration",
    }
)
"""Names that take images alone, of families that take videos too."""

NOT_YET: Mapping[str, str] = {
    "Alpamayo2Super": "Qwen3-VL's tower, but its config.json sets the images' pixel range",
    "H2OVLChatModel": "InternVL's tower, but its images are tiled at two scales",
    "NVLM_D": "InternViT-6B with heads that are padding, and a projector of its own",
    "Cosmos3EdgeForConditionalGeneration": "a SigLIP 2 tower with a merger of its own",
    "MiniCPMV4_6ForConditionalGeneration": "its tower merges windows half way, and has no resampler",
    "MiniCPMV4_7ForConditionalGeneration": "its tower merges windows half way, and has no resampler",
    "DeepseekOCR2ForCausalLM": "a language model encodes its images after SAM",
    "LLaVAOneVision1_5_ForConditionalGeneration": "RICE-ViT, which is in no release of transformers",
    "LlavaOnevision2ForConditionalGeneration": "a tower that is in no release of transformers",
    "MolmoForCausalLM": "the first Molmo: CLIP on padded crops, which transformers lacks",
    "Ovis": "published with code of its own; give a checkpoint in transformers' format (Ovis2-1B-hf)",
    "Ovis2_5": "SigLIP 2 with windows and rotary positions, which transformers lacks",
    "PixtralForConditionalGeneration": "files in Mistral's own format; give the checkpoint in transformers' format",
    "Gemma4UnifiedForConditionalGeneration": "it has no tower: patches are projected, and nothing attends",
}
"""Names whose relatives have an adapter, and what is different in them."""
