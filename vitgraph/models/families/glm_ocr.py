"""GLM-OCR and GLM-5.3-Flash: GLM-V's tower without a position table, queries and keys normalised."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from vitgraph.models.families.glm4v import Glm4vEncoder, Glm4vRule
from vitgraph.models.geometry import GeometryRule, TowerShape, tower_shape
from vitgraph.models.grid_metadata import PositionTable

if TYPE_CHECKING:
    import torch


class GlmOcrRule(Glm4vRule):
    """Sizes as in GLM-4.1V; the blocks' MLP has `intermediate_size`, the merger's three times the output's width."""

    @property
    def tower_shape(self) -> TowerShape:
        return tower_shape(self.vision_config, mlp_matrices=3)

    @property
    def merger_width(self) -> int:
        return self.output_width * int(self.vision_config["in_channels"])


class GlmOcrEncoder(Glm4vEncoder):
    """The modules of `GlmOcrVisionModel`; output `[M, D]`."""

    rule_class: ClassVar[type[GeometryRule]] = GlmOcrRule
    table: ClassVar[PositionTable | None] = None
    vision_defaults: ClassVar[Mapping[str, Any]] = {
        **Glm4vEncoder.vision_defaults,
        "attention_bias": True,
        "hidden_size": 1024,
        "depth": 24,
        "num_heads": 16,
        "out_hidden_size": 1536,
        "intermediate_size": 4096,
    }

    @classmethod
    def tower_class(cls) -> tuple[type[Any], type[Any]]:
        from transformers.models.glm_ocr.configuration_glm_ocr import GlmOcrVisionConfig
        from transformers.models.glm_ocr.modeling_glm_ocr import GlmOcrVisionModel

        return GlmOcrVisionConfig, GlmOcrVisionModel

    def embedded_patches(self, tower: Any, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return tower.patch_embed(inputs["pixel_values"])


class Glm5NextRule(GlmOcrRule):
    """As in GLM-OCR; the merger's inner width is a field of its own."""

    @property
    def merger_width(self) -> int:
        return int(self.vision_config["projection_intermediate_size"])


class Glm5NextEncoder(GlmOcrEncoder):
    """The modules of `Glm5NextVisionModel`, whose gated MLPs are clamped.

    vLLM norms with 1e-6 whatever the checkpoint says; here, as in transformers, the checkpoint's `rms_norm_eps` holds.
    """

    rule_class: ClassVar[type[GeometryRule]] = Glm5NextRule
    vision_defaults: ClassVar[Mapping[str, Any]] = {
        **GlmOcrEncoder.vision_defaults,
        "projection_intermediate_size": 10240,
        "swiglu_limit": 10.0,
    }

    @classmethod
    def tower_class(cls) -> tuple[type[Any], type[Any]]:
        from transformers.models.glm5_next.configuration_glm5_next import Glm5NextVisionConfig
        from transformers.models.glm5_next.modeling_glm5_next import Glm5NextVisionModel

        return Glm5NextVisionConfig, Glm5NextVisionModel
