"""What the families share that run SigLIP towers: without its head on square tiles, or over packed patches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from vitgraph.models.family import Tower
from vitgraph.models.lazy_torch import torch
from vitgraph.models.tiles import TileEncoder

PACKED_TOWER = Tower("minicpmv4_6", "MiniCPMV4_6VisionConfig", "MiniCPMV4_6VisionModel")


def packed_siglip(vision_config: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """MiniCPM-V 4.6's tower without its merger: SigLIP's layers with attention segments over packed patches."""
    # A window of one patch keeps the merger small until it is dropped.
    tower = PACKED_TOWER.build({**vision_config, "window_kernel_size": (1, 1)}, dtype)
    del tower.vit_merger
    return tower


class SiglipTileEncoder(TileEncoder):
    """The tower and the modules that a family puts after it."""

    tower = Tower("siglip", "SiglipVisionConfig", "SiglipVisionModel")
    patch_convolutions = ("visual.embeddings.patch_embedding",)
    blocks = "visual.encoder.layers"
    checkpoint_keys: ClassVar[Sequence[tuple[str, str]]] = (
        (r"vision_tower\.(?:vision_model\.)?", "visual."),
        (r"multi_modal_projector\.", "projector."),
        (r"image_newline$", "tokens.image_newline"),
    )

    @classmethod
    def build_tower(cls, vision_config: Mapping[str, Any], extra: Mapping[str, Any], dtype: torch.dtype) -> Any:
        return super().build_tower({**vision_config, "vision_use_head": False}, extra, dtype)
