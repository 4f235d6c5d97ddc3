"""MiniMax-M3: a CLIP-like tower over packed patches with rotary positions on three axes, and a two-step projector.

Images only, as vLLM 0.33 captures them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from vitgraph.models.base import EncoderInputs, MetadataField
from vitgraph.models.geometry import GeometryRule, GridGeometry, ItemGeometry, MergedGridRule
from vitgraph.models.grid_encoder import GridTowerEncoder
from vitgraph.planning.budgets import GraphKey
from vitgraph.planning.items import IMAGE

if TYPE_CHECKING:
    import torch
    from torch import nn

CHECKPOINT_KEYS = (
    (r"^vision_tower\.vision_model\.embeddings\.patch_embedding\.", "visual.embeddings.proj."),
    (r"^vision_tower\.vision_model\.(?:encoder\.)?(layers|pre_layrnorm)\.", r"visual.\1."),
    (r"^patch_merge_mlp\.(linear_[12])\.", r"projector.merge_\1."),
    (r"^(?:model\.)?multi_modal_projector\.", "projector."),
    (r"^(?:model\.)?vision_tower\.", "visual."),
)
"""Published key (original or as transformers saves it) to module name; the first match holds."""


class MiniMaxM3Rule(MergedGridRule):
    """Images: 28-pixel tokens within the processor's pixel range."""

    modalities: tuple[str, ...] = (IMAGE,)

    def merger_flops(self, grid: GridGeometry) -> float:
        inner, out = int(self.extra["projector_hidden_size"]), self.output_width
        tokens = grid.patches // self.merge**2
        each = grid.patches * (self.tower_shape.width * inner + inner * out)
        return 2.0 * (each + tokens * (self.merge**2 * out * inner + inner * out))


class MiniMaxM3Encoder(GridTowerEncoder):
    """`MiniMaxM3VLVisionModel` and `MiniMaxM3VLMultiModalProjector`."""

    rule_class: ClassVar[type[GeometryRule]] = MiniMaxM3Rule
    image_processor: ClassVar[str | None] = "minimax_m3_vl.image_processing_minimax_m3_vl:MiniMaxM3VLImageProcessor"
    patch_convolutions: ClassVar[Sequence[str]] = ("visual.embeddings.proj",)
    blocks: ClassVar[str | None] = "visual.layers"
    checkpoint_keys: ClassVar[Sequence[tuple[str, str]]] = CHECKPOINT_KEYS

    @classmethod
    def tower_class(cls) -> tuple[type[Any], type[Any]]:
        from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLVisionConfig
        from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLVisionModel

        return MiniMaxM3VLVisionConfig, MiniMaxM3VLVisionModel

    @classmethod
    def following_modules(cls, config: Any, extra: Mapping[str, Any]) -> dict[str, nn.Module]:
        from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLMultiModalProjector

        text = extra["text_hidden_size"]
        full: Any = SimpleNamespace(
            vision_config=config,
            text_config=SimpleNamespace(hidden_size=text),
            projector_hidden_size=extra["projector_hidden_size"],
            merged_hidden_size=text * config.spatial_merge_size**2,
        )
        return {"projector": MiniMaxM3VLMultiModalProjector(full)}

    @classmethod
    def read_model_config(cls, config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        found, extra = super().read_model_config(config)
        return found, {**extra, "projector_hidden_size": config.get("projector_hidden_size", 6144)}

    def metadata_fields(self, capacity: GraphKey) -> dict[str, MetadataField]:
        positions = MetadataField((self.patch_rows(capacity), 3), "int32")
        return {**super().metadata_fields(capacity), "position_ids": positions}

    def compute_metadata(
        self, items: Sequence[ItemGeometry], path: str, axis_key: tuple[int, ...]
    ) -> dict[str, np.ndarray]:
        found = super().compute_metadata(items, path, axis_key)
        # An image is the first temporal step.
        return {**found, "position_ids": np.pad(found["position_ids"], ((0, 0), (1, 0)))}

    def forward_packed(
        self, inputs: Mapping[str, torch.Tensor], scalars: Mapping[str, int], path: str
    ) -> Sequence[torch.Tensor]:
        hidden = self.modules["visual"](
            inputs["pixel_values"],
            # Everything that the tower would derive from the grid is passed in; it must not look at it.
            grid_thw=None,
            cu_seqlens=inputs["cu_seqlens"],
            max_seqlen=scalars["max_seqlen"],
            position_ids=inputs["position_ids"],
        ).last_hidden_state
        return [self.modules["projector"](hidden[0])]

    def stock_rows(self, mm_kwargs: EncoderInputs) -> torch.Tensor:
        import torch

        rows = [row for item in mm_kwargs.chosen for row in self.grid_rows(self.rule.checked_grid(item))]
        pixels = mm_kwargs.rows("pixel_values").materialize()
        hidden = self.modules["visual"](pixels, grid_thw=torch.tensor(rows, device=self.device)).last_hidden_state
        return self.modules["projector"](hidden[0])
