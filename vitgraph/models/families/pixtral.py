"""Pixtral: a tower over patch grids of any size, rotary on both axes; under Mistral 3 and LightOnOCR too."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from vitgraph.models import functional, nn, torch
from vitgraph.models.base import EncoderInputs, Tensors
from vitgraph.models.family import CHANNELS, Tower, modeling_class
from vitgraph.models.geometry import GridGeometry, ItemGeometry, MergedGridRule
from vitgraph.models.grid_encoder import GridTowerEncoder, block_ranks
from vitgraph.models.resizing import cut_patches
from vitgraph.planning.budgets import IMAGE

PROJECTOR_FIELDS = ("spatial_merge_size", "projector_hidden_act", "multimodal_projector_bias")
"""Fields at the top of config.json that the projector reads; without a merge size it is the LLaVA models'."""


class PixtralRule(MergedGridRule):
    """Images are shrunk until both sides are within a limit, never enlarged, and stretched to whole output tokens."""

    modalities = (IMAGE,)
    mlp_matrices = 3

    def image_geometry(self, width: int, height: int) -> GridGeometry:
        def resized() -> tuple[int, int]:
            ratio = max(1.0, max(width, height) / int(self.processor["longest_edge"]))
            # A side that the shrinking leaves nothing of is refused as the processor refuses it.
            sides = (math.floor(side / ratio) if ratio > 1 else side for side in (height, width))
            rows, columns = (-(-side // self.factor) for side in sides)
            return rows * self.factor, columns * self.factor

        return self.checked_grid(self.sized_grid(IMAGE, 1, width, height, resized))

    @property
    def projector_widths(self) -> Sequence[int]:
        merging = (self.merged_width,) if "spatial_merge_size" in self.extra else ()
        return *merging, self.tower_shape.width, self.output_width, self.output_width


class PixtralEncoder(GridTowerEncoder):
    """`PixtralVisionModel` and the projector of Mistral 3 or LLaVA; `[N, 3, P, P]` patches in merge-block order."""

    rule_class = PixtralRule
    image_processor = "pixtral.image_processing_pil_pixtral:PixtralImageProcessorPil"
    checkpoint_keys = (
        (r"(?:vision_tower|vision_encoder)\.", "visual."),
        (r"(?:multi_modal_projector|vision_projection)\.", "projector."),
    )
    patch_convolutions = ("visual.patch_conv",)
    blocks = "visual.transformer.layers"
    image_settings = ("do_resize", *CHANNELS, ("size.longest_edge", "longest_edge"))
    sized_by_pixels = False
    vision_fields = ("head_dim",)
    extra_fields = (*PROJECTOR_FIELDS, ("text_config.rms_norm_eps", "rms_norm_eps"))
    fixed: ClassVar[Mapping[str, Any]] = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}

    tower = Tower("pixtral", "PixtralVisionConfig", "PixtralVisionModel")

    @classmethod
    def following_modules(cls, config: Any, extra: Mapping[str, Any]) -> dict[str, nn.Module]:
        from transformers.models.mistral3 import Mistral3Config

        text = {"hidden_size": extra["text_hidden_size"], "rms_norm_eps": extra.get("rms_norm_eps", 1e-5)}
        fields = {name: extra[name] for name in PROJECTOR_FIELDS if name in extra}
        full = Mistral3Config(vision_config=config, text_config={"model_type": "mistral", **text}, **fields)
        merges = "spatial_merge_size" in extra
        projector = "mistral3:Mistral3MultiModalProjector" if merges else "llava:LlavaMultiModalProjector"
        return {"projector": modeling_class(projector)(full)}

    @classmethod
    def accepts_model_config(cls, config: Mapping[str, Any]) -> bool:
        """LLaVA's other towers have the same architecture."""
        return (config.get("vision_config") or {}).get("model_type", "pixtral") == "pixtral"

    def pixel_row_shape(self, name: str) -> tuple[int, ...]:
        return (self.rule.channels, self.rule.patch, self.rule.patch)

    def forward_packed(self, inputs: Tensors, scalars: Mapping[str, int], path: str) -> Sequence[torch.Tensor]:
        hidden = self.visual.ln_pre(self.visual.patch_conv(inputs["pixel_values"]).flatten(1))[None]
        offsets, longest = inputs["cu_seqlens"], scalars["max_seqlen"]
        hidden = self.visual.transformer(
            hidden,
            position_embeddings=self.visual.patch_positional_embedding(hidden, inputs["position_ids"]),
            cu_seq_lens_q=offsets,
            cu_seq_lens_k=offsets,
            max_length_q=longest,
            max_length_k=longest,
        ).last_hidden_state[0]
        projector = self.modules["projector"]
        if hasattr(projector, "patch_merger"):
            # transformers unfolds the patches: channels slowest.
            squares = projector.norm(hidden).unflatten(0, (-1, self.rule.merge**2)).transpose(1, 2)
            hidden = projector.patch_merger.merging_layer(squares.flatten(1))
        return [projector.linear_2(projector.act(projector.linear_1(hidden)))]

    def stock_rows(self, mm_kwargs: EncoderInputs) -> torch.Tensor:
        """transformers' own forward on images padded to one size."""
        grids, patch = self.grids(mm_kwargs.chosen), self.rule.patch
        parts = mm_kwargs.rows("pixel_values").materialize().split([grid.patches for grid in grids])
        tall, wide = max(grid.h for grid in grids), max(grid.w for grid in grids)
        images = []
        for grid, part in zip(grids, parts, strict=True):
            rank = torch.from_numpy(block_ranks(grid.h, grid.w, self.rule.merge)).to(self.device)
            image = part[rank].unflatten(0, (grid.h, grid.w)).permute(2, 0, 3, 1, 4).flatten(3).flatten(1, 2)
            images.append(functional.pad(image, (0, (wide - grid.w) * patch, 0, (tall - grid.h) * patch)))
        sizes = torch.tensor([[grid.h * patch, grid.w * patch] for grid in grids])
        hidden = self.visual(torch.stack(images), image_sizes=sizes.tolist()).last_hidden_state[0]
        projector = self.modules["projector"]
        return projector(hidden, sizes) if hasattr(projector, "patch_merger") else projector(hidden)

    def processor_settings(self) -> dict[str, Any]:
        side = self.rule.factor
        return {**super().processor_settings(), "patch_size": {"height": side, "width": side}}

    def image_rows(self, image: Any, item: ItemGeometry) -> Tensors:
        pixels = self.processed(image)["pixel_values"][0]
        return {"pixel_values": cut_patches(pixels, self.rule.patch, self.rule.merge)}
