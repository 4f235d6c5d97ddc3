"""LFM2-VL: images resized or cut into tiles with a thumbnail, SigLIP 2 over all of them packed, four patches a token.

transformers' SigLIP 2 attends in padded batches; the packed layers of MiniCPM-V 4.6's tower are the same network under
the same names. Positions are sampled with antialiasing, so each patch brings its weights over the whole table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from vitgraph.errors import InputError, ModelError
from vitgraph.models import nn, torch
from vitgraph.models.base import EncoderInputs, MetadataField, Tensors
from vitgraph.models.families.minicpmv import packed_siglip
from vitgraph.models.families.minicpmv_slices import SliceGeometry
from vitgraph.models.family import CHANNELS, Tower
from vitgraph.models.geometry import GridGeometry, ItemGeometry, MergedGridRule
from vitgraph.models.grid_encoder import GridTowerEncoder, block_order, block_positions, block_ranks
from vitgraph.models.tiles import nearest_layout
from vitgraph.planning.budgets import IMAGE, EncoderItemSpec, GraphKey


@lru_cache(maxsize=8)
def layouts_of(fewest: int, most: int) -> list[tuple[int, int]]:
    """Layouts `(columns, rows)` in the processor's own order, which decides between layouts of one ratio and size."""
    known = {
        (columns, rows)
        for count in range(fewest, most + 1)
        for columns in range(1, count + 1)
        for rows in range(1, count + 1)
        if fewest <= columns * rows <= most
    }
    return sorted(known, key=lambda layout: layout[0] * layout[1])


@lru_cache(maxsize=1024)
def axis_weights(size: int, side: int) -> np.ndarray:
    """Weight of each of `side` table cells for each of `size` positions, linear with antialiasing: float32."""
    scale = np.float32(side) / np.float32(size)
    centers = (np.arange(size, dtype=np.float32) + np.float32(0.5)) * scale - np.float32(0.5)
    distances = np.abs(np.arange(side, dtype=np.float32) - centers[:, None]) / max(scale, np.float32(1))
    weights = np.clip(1 - distances, 0, None)
    return (weights / weights.sum(-1, keepdims=True)).astype(np.float32)


class Lfm2VLRule(MergedGridRule):
    """An image within the token limits, or tiles of a fixed size and the resized image; every part is a segment."""

    modalities = (IMAGE,)
    merge_field = "downsample_factor"

    def setting(self, name: str) -> int:
        return int(self.processor[name])

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of patches of the image as one part."""
        factor = self.factor
        low, high = (self.setting(name) * factor**2 for name in ("min_image_tokens", "max_image_tokens"))
        rows, columns = (max(1, round(side / factor)) for side in (height, width))
        if rows * columns * factor**2 > high:
            scale = math.sqrt(height * width / high)
            rows, columns = (max(1, math.floor(side / scale / factor)) for side in (height, width))
        elif rows * columns * factor**2 < low:
            scale = math.sqrt(low / (height * width))
            rows, columns = (math.ceil(side * scale / factor) for side in (height, width))
        return rows * self.merge, columns * self.merge

    def is_cut(self, width: int, height: int) -> bool:
        """Whether the image is above the limit by more than the processor tolerates."""
        if not self.processor["do_image_splitting"] or self.setting("min_tiles") == self.setting("max_tiles") == 1:
            return False
        rows, columns = (max(self.patch, round(side / self.factor) * self.factor) for side in (height, width))
        limit = self.setting("max_image_tokens") * self.factor**2 * float(self.processor["max_pixels_tolerance"])
        return rows * columns > limit

    def image_geometry(self, width: int, height: int) -> Any:
        whole = self.resized(width, height)
        if not self.is_cut(width, height):
            return SliceGeometry(IMAGE, (whole,))
        layouts = layouts_of(self.setting("min_tiles"), self.setting("max_tiles"))
        columns, rows = nearest_layout(width, height, self.setting("tile_size"), layouts)
        side = self.setting("tile_size") // self.patch
        has_thumbnail = self.processor["use_thumbnail"] and columns * rows != 1
        most = max(self.setting("max_image_tokens") * self.merge**2, side**2)
        if has_thumbnail and math.prod(whole) > most:
            raise InputError(
                f"image of {width}x{height} is cut, and whole it has {math.prod(whole)} patches, above the {most} that "
                "the processor pads each part to, so it fails; crop the image or leave it out"
            )
        return SliceGeometry(IMAGE, ((side, side),) * (columns * rows) + ((whole,) if has_thumbnail else ()))

    def parts(self, geometry: ItemGeometry) -> list[GridGeometry]:
        """The item's parts as grids that merge evenly.

        Raises:
            InputError: It is something else.
        """
        if not isinstance(geometry, SliceGeometry) or not geometry.grids:
            raise InputError(f"expected an item of at least one part, got {geometry!r}")
        return [self.checked_grid(GridGeometry(IMAGE, 1, rows, columns)) for rows, columns in geometry.grids]

    def item_spec(self, geometry: ItemGeometry) -> EncoderItemSpec:
        patches = sum(part.patches for part in self.parts(geometry))
        return EncoderItemSpec(IMAGE, patches, patches // self.merge**2, len(self.parts(geometry)))

    def pixel_rows(self, geometry: ItemGeometry) -> dict[str, int]:
        return {"pixel_values": sum(part.patches for part in self.parts(geometry))}

    def most_segments(self) -> int:
        return self.setting("max_tiles") + 1

    def min_tokens_per_segment(self) -> int:
        # A part that is shrunk keeps at least half of each side that the limit would leave it.
        fewest = min(self.setting("min_image_tokens"), self.setting("max_image_tokens") // 4)
        return max(1, min(fewest, (self.setting("tile_size") // self.factor) ** 2))

    def embedding_flops(self, patches: int) -> float:
        table = 2.0 * patches * int(self.vision_config["num_patches"]) * self.tower_shape.width
        return super().embedding_flops(patches) + table

    @property
    def projector_widths(self) -> Sequence[int]:
        return self.merged_width, int(self.extra["projector_hidden_size"]), self.output_width

    def flops(self, geometry: ItemGeometry) -> float:
        parts = self.parts(geometry)
        return sum(self.embedding_flops(p.patches) + self.block_flops(p) + self.merger_flops(p) for p in parts)


class Lfm2VLEncoder(GridTowerEncoder):
    """SigLIP 2 and `Lfm2VlMultiModalProjector`; pixels `[N, 768]` as (y, x, channel), patches in merge-block order."""

    tower = Tower("siglip2", "Siglip2VisionConfig", "Siglip2VisionModel")
    projector = "lfm2_vl:Lfm2VlMultiModalProjector"
    projector_fields = (
        *("downsample_factor", "projector_hidden_act", "projector_hidden_size", "projector_bias"),
        "projector_use_layernorm",
    )
    extra_fields = projector_fields
    rule_class = Lfm2VLRule
    rule: Lfm2VLRule
    image_processor = "lfm2_vl.image_processing_lfm2_vl:Lfm2VlImageProcessor"
    processor_names = ("Lfm2VlImageProcessor",)
    image_settings = (
        *("do_image_splitting", "min_tiles", "max_tiles", "use_thumbnail", "min_image_tokens", "max_image_tokens"),
        *("tile_size", "max_pixels_tolerance", *CHANNELS),
    )
    sized_by_pixels = False
    patch_convolutions = ()
    blocks = "visual.encoder.layers"
    checkpoint_keys = (
        (r"vision_tower\.(?!(?:vision_model\.)?head\.)(?:vision_model\.)?", "visual."),
        (r"multi_modal_projector\.", "projector."),
    )

    @classmethod
    def build_tower(cls, vision_config: Mapping[str, Any], extra: Mapping[str, Any], dtype: torch.dtype) -> Any:
        from transformers.models.siglip2.modeling_siglip2 import Siglip2VisionEmbeddings

        tower = packed_siglip(vision_config, dtype)
        config = cls.tower.config_class()(**{**vision_config, "vision_use_head": False})
        tower.embeddings = Siglip2VisionEmbeddings(config).to(dtype)
        return tower

    @property
    def table_side(self) -> int:
        """Rows (and columns) of the learned position table."""
        return math.isqrt(int(self.rule.vision_config["num_patches"]))

    def grids(self, items: Sequence[ItemGeometry]) -> list[GridGeometry]:
        return [part for item in items for part in self.rule.parts(item)]

    def metadata_fields(self, capacity: GraphKey) -> dict[str, MetadataField]:
        found = super().metadata_fields(capacity)
        weights = MetadataField((self.buffer_rows(capacity), self.table_side), "float32")
        return {"cu_seqlens": found["cu_seqlens"], "row_weights": weights, "column_weights": weights}

    def compute_metadata(self, items: Sequence[ItemGeometry]) -> dict[str, np.ndarray]:
        found, side = super().compute_metadata(items), self.table_side
        rows, columns = [], []
        for grid in self.grids(items):
            positions = block_positions(grid.h, grid.w, self.rule.merge)
            rows.append(axis_weights(grid.h, side)[positions[:, 0]])
            columns.append(axis_weights(grid.w, side)[positions[:, 1]])
        weights = {"row_weights": np.concatenate(rows), "column_weights": np.concatenate(columns)}
        return {"cu_seqlens": found["cu_seqlens"], **weights}

    def dummy_items(self, capacity: GraphKey) -> list[ItemGeometry]:
        merge = self.rule.merge
        return [SliceGeometry(IMAGE, ((merge, merge * capacity.token_budget),))]

    def forward_packed(self, inputs: Tensors, scalars: Mapping[str, int], path: str) -> Sequence[torch.Tensor]:
        hidden = self.visual.embeddings.patch_embedding(inputs["pixel_values"])
        table = self.visual.embeddings.position_embedding.weight
        weights = inputs["row_weights"][:, :, None] * inputs["column_weights"][:, None, :]
        hidden = hidden + (weights.flatten(1) @ table.float()).to(table.dtype)
        hidden = self.visual.encoder(
            inputs_embeds=hidden.unsqueeze(0), cu_seqlens=inputs["cu_seqlens"], max_seqlen=scalars["max_seqlen"]
        ).last_hidden_state
        hidden = self.visual.post_layernorm(hidden)[0]
        return [self._projected(hidden.reshape(-1, self.rule.merge**2 * hidden.shape[-1]))]

    def _projected(self, merged: torch.Tensor) -> torch.Tensor:
        projector = self.modules["projector"]
        normed = projector.layer_norm(merged) if projector.use_layer_norm else merged
        return projector.linear_2(projector.act(projector.linear_1(normed)))

    def stock_rows(self, mm_kwargs: EncoderInputs) -> torch.Tensor:
        """transformers' padded tiles through its own class, which takes the tower's parameters."""
        with torch.device("meta"):
            stock = self.tower.build({**self.rule.vision_config, "vision_use_head": False}, self.dtype)
        grids = self.grids(mm_kwargs.chosen)
        pixels = mm_kwargs.rows("pixel_values").materialize().split([grid.patches for grid in grids])
        ranks = [block_ranks(grid.h, grid.w, self.rule.merge) for grid in grids]
        raster = [part[torch.from_numpy(rank).to(self.device)] for part, rank in zip(pixels, ranks, strict=True)]
        shapes = torch.tensor([[grid.h, grid.w] for grid in grids], device=self.device)
        padded = nn.utils.rnn.pad_sequence(raster, batch_first=True)
        mask = (torch.arange(padded.shape[1], device=self.device) < shapes.prod(-1, keepdim=True)).int()
        output = torch.func.functional_call(stock, dict(self.visual.named_parameters()), (padded, mask, shapes))
        projector = self.modules["projector"]
        parts = zip(output.last_hidden_state, grids, strict=True)
        return torch.cat([projector(rows[: g.patches].view(1, g.h, g.w, -1)).flatten(0, 2) for rows, g in parts])

    def processor_settings(self) -> dict[str, Any]:
        sides = {"encoder_patch_size": self.rule.patch, "downsample_factor": self.rule.merge}
        return {**super().processor_settings(), **sides}

    def image_rows(self, image: Any, item: ItemGeometry) -> Tensors:
        grids, merge, batch = self.grids([item]), self.rule.merge, self.processed(image)
        shapes = [[grid.h, grid.w] for grid in grids]
        if batch["spatial_shapes"].tolist() != shapes:
            raise ModelError(
                f"transformers' image processor made parts of {batch['spatial_shapes'].tolist()} patches, the rule "
                f"says {shapes}; this version of transformers cuts differently"
            )
        parts = zip(batch["pixel_values"], grids, strict=True)
        return {"pixel_values": torch.cat([part[block_order(grid.h, grid.w, merge)] for part, grid in parts])}
