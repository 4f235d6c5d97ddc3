"""Qwen3.5 and Qwen3.5-MoE: the Qwen3-VL tower without deepstack features."""

from __future__ import annotations

from typing import Any, ClassVar

from vitgraph.models.families.qwen3_vl import Qwen3VLEncoder, Qwen3VLRule
from vitgraph.models.geometry import GeometryRule


class Qwen3_5Rule(Qwen3VLRule):  # noqa: N801
    """Sizes as in Qwen3-VL; the output has the language model's plain width."""

    @property
    def deepstack_levels(self) -> int:
        # Published files carry the key, and the tower ignores it.
        return 0


class Qwen3_5Encoder(Qwen3VLEncoder):  # noqa: N801
    """`Qwen3_5VisionModel`; output `[M, D]`."""

    rule_class: ClassVar[type[GeometryRule]] = Qwen3_5Rule
    rule: Qwen3_5Rule
    has_deepstack: ClassVar[bool] = False

    @classmethod
    def tower_class(cls) -> tuple[type[Any], type[Any]]:
        from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig
        from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel

        return Qwen3_5VisionConfig, Qwen3_5VisionModel


class Qwen3_5MoeEncoder(Qwen3_5Encoder):  # noqa: N801
    """`Qwen3_5MoeVisionModel`, the same network under another name."""

    @classmethod
    def tower_class(cls) -> tuple[type[Any], type[Any]]:
        from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeVisionConfig
        from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeVisionModel

        return Qwen3_5MoeVisionConfig, Qwen3_5MoeVisionModel
