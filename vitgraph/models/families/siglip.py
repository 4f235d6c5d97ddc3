"""What the families share that run `SiglipVisionModel`, without its head, on square tiles."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from vitgraph.models.tiles import TileEncoder

if TYPE_CHECKING:
    import torch
    from torch import nn


class SiglipTileEncoder(TileEncoder):
    """The tower and the modules that a family puts after it."""

    patch_convolutions: ClassVar[Sequence[str]] = ("visual.embeddings.patch_embedding",)
    blocks: ClassVar[str | None] = "visual.encoder.layers"
    checkpoint_keys: ClassVar[Sequence[tuple[str, str]]] = (
        (r"^(?:model\.)?vision_tower\.(?:vision_model\.)?", "visual."),
        (r"^(?:model\.)?multi_modal_projector\.", "projector."),
        (r"^(?:model\.)?image_newline$", "tokens.image_newline"),
    )

    @classmethod
    def vision_config_class(cls) -> type[Any] | None:
        from transformers.models.siglip import SiglipVisionConfig

        return SiglipVisionConfig

    @classmethod
    @abstractmethod
    def following_modules(cls, config: Any, extra: Mapping[str, Any]) -> dict[str, nn.Module]:
        """What follows the tower of that config, by name."""

    @classmethod
    def build_modules(
        cls, vision_config: Mapping[str, Any], extra: Mapping[str, Any], dtype: torch.dtype, device: torch.device
    ) -> nn.ModuleDict:
        from torch import nn
        from transformers.models.siglip import SiglipVisionConfig, SiglipVisionModel

        config = SiglipVisionConfig(**{**vision_config, "vision_use_head": False})
        with device:
            tower = SiglipVisionModel._from_config(config, attn_implementation="sdpa", dtype=dtype)
            following = {name: module.to(dtype) for name, module in cls.following_modules(config, extra).items()}
        return nn.ModuleDict({"visual": tower, **following})
