"""What the two-path families share: a global view of every image, crops of some, each view of a path its own tile."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from vitgraph.errors import InputError
from vitgraph.models.base import EncoderInputs, PathRows, Tensors
from vitgraph.models.encoder import VisionEncoder
from vitgraph.models.geometry import EncoderCudaGraphPathConfig, GeometryRule, ItemGeometry
from vitgraph.models.lazy_torch import torch
from vitgraph.planning.budgets import GraphKey
from vitgraph.planning.items import IMAGE, EncoderItemSpec

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
