"""A two-path encoder as one path: its graph always computes the global view and the most crops of every item.

This is what two paths are compared with. Weights, pixels and results are the two-path encoder's; only the captured
work differs: an item without crops costs a replay as much as one with all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from vitgraph.errors import ModelError
from vitgraph.models.base import EncoderInputs, MetadataField, PathRows, PixelField, Tensors
from vitgraph.models.encoder import VisionEncoder
from vitgraph.models.geometry import GeometryRule, ItemGeometry
from vitgraph.models.lazy_torch import nn, torch
from vitgraph.models.two_path import GLOBAL, GLOBAL_PIXELS, LOCAL, CropGeometry, TwoPathEncoder, TwoPathRule
from vitgraph.planning.budgets import CaptureAxis, GraphKey
from vitgraph.planning.items import DEFAULT_PATH, IMAGE, EncoderItemSpec

CROPS_AXIS = "crops"


class MonolithicRule(GeometryRule):
    """Every item takes the rows of a global view and of `max_crops` crops, whichever it has.

    Items with more crops than that fit no graph: the capture axis has one key, which does not cover them.

    Raises:
        ModelError: `inner` has one path, or `max_crops` is below 1.
    """

    modalities: tuple[str, ...] = (IMAGE,)
    has_segments: ClassVar[bool] = False

    def __init__(self, inner: GeometryRule, max_crops: int) -> None:
        if not isinstance(inner, TwoPathRule):
            raise ModelError(f"{type(inner).__name__} has one path; only a two-path model can be made monolithic")
        if max_crops < 1:
            raise ModelError(f"a monolithic graph of {max_crops} crops was asked for; it needs at least 1")
        super().__init__(inner.vision_config, inner.processor, inner.extra)
        self.inner = inner
        self.max_crops = max_crops
        self.item_tokens = self._rows(max_crops)

    def _rows(self, crops: int) -> int:
        tokens = self.inner.path_tokens
        return tokens[GLOBAL] + max(crops, self.max_crops) * tokens[LOCAL]

    @property
    def output_width(self) -> int:
        return self.inner.output_width

    def image_geometry(self, width: int, height: int) -> CropGeometry:
        return self.inner.image_geometry(width, height)

    def item_spec(self, geometry: ItemGeometry) -> EncoderItemSpec:
        crops = self.inner.checked_crops(geometry).crops
        return EncoderItemSpec(geometry.modality, 1 + crops, self._rows(crops), 1, axis_sizes={CROPS_AXIS: (crops,)})

    def useful_tokens(self, geometry: ItemGeometry) -> int:
        """Output rows that the item really has; the rest of its rows is waste, beside that of empty places."""
        return self.inner.item_spec(geometry).output_tokens

    def final_tokens(self, geometry: ItemGeometry) -> int:
        return self.inner.final_tokens(geometry)

    def pixel_rows(self, geometry: ItemGeometry) -> dict[str, int]:
        return self.inner.pixel_rows(geometry)

    def min_token_budget(self) -> int:
        return self.item_tokens

    @property
    def axes(self) -> tuple[CaptureAxis, ...]:
        return (CaptureAxis(CROPS_AXIS, ((self.max_crops,),)),)

    def min_tokens_per_segment(self) -> int:
        return self.item_tokens

    def budget_range(self, max_call_tokens: int) -> tuple[int, int]:
        """Whole items: the rows that a budget has beyond them no graph computes, and they would count as waste."""
        return self.item_tokens, max_call_tokens - max_call_tokens % self.item_tokens

    def flops(self, geometry: ItemGeometry) -> float:
        return self.inner.flops(geometry)


class MonolithicEncoder(VisionEncoder):
    """Wraps a built two-path encoder, computing `max_crops` crops for each item; it has no weights, preset or
    checkpoint of its own.

    A graph's crop buffer holds the crops of all items one after the other; `crop_index` brings them into the items'
    places. An eager call is unpadded, as that of the two-path encoder.
    """

    calls_varlen: ClassVar[bool] = False
    rule: MonolithicRule

    def __init__(self, inner: VisionEncoder, max_crops: int) -> None:
        super().__init__(inner.modules, MonolithicRule(inner.rule, max_crops), inner.attention)
        assert isinstance(inner, TwoPathEncoder)
        self.inner = inner

    def path_pixels(self, path: str) -> tuple[str, ...]:
        return (GLOBAL_PIXELS, self.inner.rule.local_pixels)

    def pixel_row_shape(self, name: str) -> tuple[int, ...]:
        return self.inner.pixel_row_shape(name)

    def buffer_rows(self, capacity: GraphKey) -> int:
        """Whole items that the budget holds."""
        return capacity.token_budget // self.rule.item_tokens

    def pixel_fields(self, capacity: GraphKey) -> dict[str, PixelField]:
        places = self.buffer_rows(capacity)
        rows = {GLOBAL_PIXELS: places, self.inner.rule.local_pixels: places * self.rule.max_crops}
        return {name: PixelField(count, self.pixel_row_shape(name)) for name, count in rows.items()}

    def metadata_fields(self, capacity: GraphKey) -> dict[str, MetadataField]:
        return {"crop_index": MetadataField((self.buffer_rows(capacity) * self.rule.max_crops,), "int32")}

    def compute_metadata(self, items: Sequence[ItemGeometry]) -> dict[str, np.ndarray]:
        """For every item its crops' numbers in the buffer. Places without a crop read crop 0, and nobody reads them."""
        crops = np.array([self.inner.rule.checked_crops(item).crops for item in items], dtype=np.int32)
        index = np.zeros((len(items), max(self.rule.max_crops, int(crops.max(initial=0)))), dtype=np.int32)
        used = np.arange(index.shape[1]) < crops[:, None]
        index[used] = np.arange(crops.sum(), dtype=np.int32)
        return {"crop_index": index.reshape(-1)}

    def dummy_items(self, capacity: GraphKey) -> list[ItemGeometry]:
        return [CropGeometry(IMAGE, self.rule.max_crops, 1)] * self.buffer_rows(capacity)

    def forward_packed(self, inputs: Tensors, scalars: Mapping[str, int], path: str) -> Sequence[torch.Tensor]:
        wholes, crops = (self.inner.forward_packed(inputs, {}, part)[0] for part in (GLOBAL, LOCAL))
        tokens = self.inner.rule.path_tokens
        placed = crops.unflatten(0, (-1, tokens[LOCAL])).index_select(0, inputs["crop_index"])
        places = len(wholes) // tokens[GLOBAL]
        rows = [wholes.unflatten(0, (places, -1)), placed.flatten(0, 1).unflatten(0, (places, -1))]
        return [torch.cat(rows, dim=1).flatten(0, 1)]

    def encoder_eager_forward(self, mm_kwargs: EncoderInputs, path: str = DEFAULT_PATH) -> torch.Tensor:
        tokens = self.inner.rule.path_tokens
        crops = [self.inner.rule.checked_crops(item).crops for item in mm_kwargs.chosen]
        wholes = self.inner.encoder_eager_forward(mm_kwargs, GLOBAL)
        local = self.inner.encoder_eager_forward(mm_kwargs, LOCAL) if any(crops) else wholes[:0]
        parts = []
        for whole, piece, count in zip(
            wholes.split(tokens[GLOBAL]), local.split([count * tokens[LOCAL] for count in crops]), crops, strict=True
        ):
            missing = max(self.rule.max_crops - count, 0) * tokens[LOCAL]
            parts += [whole, piece, whole.new_zeros(missing, whole.shape[1])]
        return torch.cat(parts)

    def postprocess_encoder_output(self, mm_kwargs: EncoderInputs, outputs: PathRows) -> list[torch.Tensor]:
        tokens = self.inner.rule.path_tokens
        parts: dict[str, list[torch.Tensor | None]] = {GLOBAL: [], LOCAL: []}
        for item, rows in zip(mm_kwargs.chosen, outputs[DEFAULT_PATH], strict=True):
            assert rows is not None
            end = self.rule.useful_tokens(item)
            parts[GLOBAL].append(rows[: tokens[GLOBAL]])
            parts[LOCAL].append(rows[tokens[GLOBAL] : end] if end > tokens[GLOBAL] else None)
        return self.inner.postprocess_encoder_output(mm_kwargs, parts)

    def stock_rows(self, mm_kwargs: EncoderInputs) -> torch.Tensor:
        return self.inner.stock_rows(mm_kwargs)

    def repeated_blocks(self) -> list[nn.Module]:
        return self.inner.repeated_blocks()

    def image_rows(self, image: Any, item: ItemGeometry) -> Tensors:
        return self.inner.image_rows(image, item)
