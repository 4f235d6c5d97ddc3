"""MiniMax-M3: a CLIP-like tower over packed patches with rotary positions on three axes, and a two-step projector.

Images only, as vLLM 0.33 captures them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vitgraph.models import nn, torch
from vitgraph.models.base import MetadataField
from vitgraph.models.family import Tower
from vitgraph.models.geometry import GridGeometry, ItemGeometry, MergedGridRule, linear_flops
from vitgraph.models.grid_encoder import GridTowerEncoder
from vitgraph.planning.budgets import IMAGE, GraphKey


class MiniMaxM3Rule(MergedGridRule):
    """Images: 28-pixel tokens within the processor's pixel range."""

    modalities = (IMAGE,)

    def merger_flops(self, grid: GridGeometry) -> float:
        inner, out = int(self.extra["projector_hidden_size"]), self.output_width
        each = linear_flops(grid.patches, self.tower_shape.width, inner, out)
        return each + linear_flops(grid.patches // self.merge**2, self.merge**2 * out, inner, out)


class MiniMaxM3Encoder(GridTowerEncoder):
    """`MiniMaxM3VLVisionModel` and `MiniMaxM3VLMultiModalProjector`."""

    tower = Tower("minimax_m3_vl", "MiniMaxM3VLVisionConfig", "MiniMaxM3VLVisionModel")
    rule_class = MiniMaxM3Rule
    image_processor = "minimax_m3_vl.image_processing_minimax_m3_vl:MiniMaxM3VLImageProcessor"
    patch_convolutions = ("visual.embeddings.proj",)
    blocks = "visual.layers"
    checkpoint_keys = (
        (r"vision_tower\.vision_model\.embeddings\.patch_embedding\.", "visual.embeddings.proj."),
        (r"vision_tower\.vision_model\.(?:encoder\.)?(layers|pre_layrnorm)\.", r"visual.\1."),
        (r"patch_merge_mlp\.(linear_[12])\.", r"projector.merge_\1."),
        (r"multi_modal_projector\.", "projector."),
        (r"vision_tower\.", "visual."),
    )
    projector = "minimax_m3_vl:MiniMaxM3VLMultiModalProjector"
    projector_fields = ("projector_hidden_size",)
    extra_fields = projector_fields

    @classmethod
    def build_projector(cls, config: Any, extra: Mapping[str, Any], **fields: Any) -> nn.Module:
        merged = extra["text_hidden_size"] * config.spatial_merge_size**2
        return super().build_projector(config, extra, merged_hidden_size=merged, **fields)

    def metadata_fields(self, capacity: GraphKey) -> dict[str, MetadataField]:
        positions = MetadataField((self.buffer_rows(capacity), 3), "int32")
        return {**super().metadata_fields(capacity), "position_ids": positions}

    def compute_metadata(self, items: Sequence[ItemGeometry]) -> dict[str, np.ndarray]:
        found = super().compute_metadata(items)
        # An image is the first temporal step.
        return {**found, "position_ids": np.pad(found["position_ids"], ((0, 0), (1, 0)))}

    def projected(self, output: Any) -> torch.Tensor:
        return self.modules["projector"](output.last_hidden_state[0])
