"""What the two-path families share: a global view of every image, crops of some, each view of a path its own tile.

Two paths are compared with one path whose graph always computes the global view and the most crops of every item.
Weights, pixels and results are the two-path encoder's; only the captured work differs: an item without crops costs a
replay as much as one with all of them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from vitgraph.errors import InputError, ModelError
from vitgraph.models import nn, torch
from vitgraph.models.base import EncoderInputs, MetadataField, PathRows, PixelField, Tensors
from vitgraph.models.encoder import VisionEncoder
from vitgraph.models.geometry import EncoderCudaGraphPathConfig, GeometryRule, ItemGeometry
from vitgraph.planning.budgets import DEFAULT_PATH, IMAGE, CaptureAxis, EncoderItemSpec, GraphKey

GLOBAL, LOCAL = "global", "local"
GLOBAL_PIXELS = "pixel_values"


@dataclass(frozen=True, slots=True)
class CropGeometry(ItemGeometry):
    """One global view and a grid of crops; 0 x 0 crops where the image is not tiled."""

    columns: int
    rows: int

    @property
    def crops(self) -> int:
        return self.columns * self.rows


class TwoPathRule(GeometryRule):
    """Every image has one view on the global path and any number of crops, also none, on the local path."""

    modalities: tuple[str, ...] = (IMAGE,)
    local_pixels: ClassVar[str]
    """Name of the crops' pixel buffer."""

    @property
    def global_side(self) -> int:
        """Pixels on a side of the global view."""
        return int(self.processor["global_size"])

    @property
    def local_side(self) -> int:
        """Pixels on a side of a crop."""
        return int(self.processor["local_size"])

    @property
    @abstractmethod
    def path_tokens(self) -> Mapping[str, int]:
        """Output rows of one view, by path."""

    @abstractmethod
    def crop_grid(self, width: int, height: int) -> tuple[int, int]:
        """Columns and rows of crops of an image of `width` x `height` pixels; `(0, 0)` where it is not tiled."""

    @abstractmethod
    def view_flops(self, side: int) -> float:
        """Operations of one view of `side` pixels."""

    def side_of(self, path: str) -> int:
        """Pixels on a side of a view of that path."""
        return self.global_side if path == GLOBAL else self.local_side

    def image_geometry(self, width: int, height: int) -> CropGeometry:
        return CropGeometry(IMAGE, *self.crop_grid(width, height))

    def checked_crops(self, geometry: ItemGeometry) -> CropGeometry:
        """The geometry as a global view with a grid of crops.

        Raises:
            InputError: It is something else, or its grid has rows without columns or the other way round.
        """
        if not isinstance(geometry, CropGeometry):
            raise InputError(f"expected a global view with a grid of crops, got {geometry!r}")
        if min(geometry.columns, geometry.rows) < 0 or bool(geometry.columns) != bool(geometry.rows):
            raise InputError(
                f"crop grid {geometry.columns}x{geometry.rows} (columns x rows) must be 0x0 or at least 1x1"
            )
        return geometry

    def item_spec(self, geometry: ItemGeometry) -> EncoderItemSpec:
        crops = self.checked_crops(geometry).crops
        tokens = {GLOBAL: self.path_tokens[GLOBAL], LOCAL: crops * self.path_tokens[LOCAL]}
        # Neither path has a segment list, so the item counts as one whatever its views.
        return EncoderItemSpec(geometry.modality, 1 + crops, sum(tokens.values()), 1, tokens)

    def pixel_rows(self, geometry: ItemGeometry) -> dict[str, int]:
        return {GLOBAL_PIXELS: 1, self.local_pixels: self.checked_crops(geometry).crops}

    def min_token_budget(self) -> int:
        # Every item has a global view, so fewer tokens than that are of no use and it bounds the items of a call.
        return self.path_tokens[GLOBAL]

    @property
    def paths(self) -> Mapping[str, EncoderCudaGraphPathConfig]:
        return {
            GLOBAL: EncoderCudaGraphPathConfig(self.path_tokens[GLOBAL], has_segments=False),
            LOCAL: EncoderCudaGraphPathConfig(self.path_tokens[LOCAL], allow_zero_tokens=True, has_segments=False),
        }

    def budget_range(self, max_call_tokens: int) -> tuple[int, int]:
        return self.min_token_budget(), max_call_tokens

    def flops(self, geometry: ItemGeometry) -> float:
        crops = self.checked_crops(geometry).crops
        return self.view_flops(self.global_side) + crops * self.view_flops(self.local_side)


class TwoPathEncoder(VisionEncoder):
    """One tower over two sizes of square views; a graph of either path is padded with spare views."""

    calls_varlen: ClassVar[bool] = False
    rule: TwoPathRule

    @abstractmethod
    def encode_views(self, pixels: torch.Tensor, path: str) -> torch.Tensor:
        """`[views, 3, side, side]` to `[views, tokens of a view, D]`, with the path's precomputed tables."""

    @abstractmethod
    def assemble(self, item: CropGeometry, global_rows: torch.Tensor, local_rows: torch.Tensor | None) -> torch.Tensor:
        """The item's final embedding `[final tokens, D]` from its rows on both paths (None without crops)."""

    @abstractmethod
    def stock_views(self, pixels: torch.Tensor, path: str) -> torch.Tensor:
        """transformers' own way from views to what `encode_views` gives."""

    @abstractmethod
    def image_views(self, image: Any, item: CropGeometry) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalised pixels of an RGB PIL image: `[3, side, side]` and `[crops, 3, crop side, crop side]`."""

    def path_pixels(self, path: str) -> tuple[str, ...]:
        return (GLOBAL_PIXELS,) if path == GLOBAL else (self.rule.local_pixels,)

    def pixel_row_shape(self, name: str) -> tuple[int, ...]:
        side = self.rule.global_side if name == GLOBAL_PIXELS else self.rule.local_side
        return (3, side, side)

    def buffer_rows(self, capacity: GraphKey) -> int:
        """Whole views that the budget holds."""
        return capacity.token_budget // self.rule.path_tokens[capacity.path]

    def dummy_items(self, capacity: GraphKey) -> list[ItemGeometry]:
        if capacity.path == GLOBAL:
            return [CropGeometry(IMAGE, 0, 0)] * self.buffer_rows(capacity)
        return [CropGeometry(IMAGE, self.buffer_rows(capacity), 1)]

    def forward_packed(self, inputs: Tensors, scalars: Mapping[str, int], path: str) -> Sequence[torch.Tensor]:
        (name,) = self.path_pixels(path)
        return [self.encode_views(inputs[name], path).flatten(0, 1)]

    def postprocess_encoder_output(self, mm_kwargs: EncoderInputs, outputs: PathRows) -> list[torch.Tensor]:
        """Final embedding of each item; the rows given already are the call's own, so one part may be passed on."""
        embeddings = []
        for item, whole, crops in zip(mm_kwargs.chosen, outputs[GLOBAL], outputs[LOCAL], strict=True):
            if whole is None:
                raise InputError(f"{item!r} has no rows on path {GLOBAL!r}; every item of this model has a global view")
            embeddings.append(self.assemble(self.rule.checked_crops(item), whole, crops))
        return embeddings

    def stock_rows(self, mm_kwargs: EncoderInputs) -> torch.Tensor:
        """The items' final embeddings one after the other, `[sum of final tokens, D]`."""
        items = [self.rule.checked_crops(item) for item in mm_kwargs.chosen]
        whole = self.stock_views(mm_kwargs.rows(GLOBAL_PIXELS).materialize(), GLOBAL)
        crops = whole[:0]
        if any(item.crops for item in items):
            crops = self.stock_views(mm_kwargs.rows(self.rule.local_pixels).materialize(), LOCAL)
        triples = zip(items, whole, crops.split([item.crops for item in items]), strict=True)
        return torch.cat([self.assemble(item, w, c.flatten(0, 1) if len(c) else None) for item, w, c in triples])

    def image_rows(self, image: Any, item: ItemGeometry) -> Tensors:
        whole, crops = self.image_views(image.convert("RGB"), self.rule.checked_crops(item))
        return {GLOBAL_PIXELS: whole[None], self.rule.local_pixels: crops}


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
