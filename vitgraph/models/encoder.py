"""The part of `SupportsEncoderCudaGraph` that every family shares: caching, selection, eager and replay values.

A family file adds what is its own: fields and values of its metadata, and its forward over fixed-shape tensors.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from vitgraph.errors import InputError, ModelError
from vitgraph.models import nn, torch
from vitgraph.models.base import (
    EncoderCudaGraphCaptureInputs,
    EncoderCudaGraphReplayBuffers,
    EncoderInputs,
    MetadataCache,
    MetadataField,
    PathRows,
    PixelField,
    Tensors,
    to_device,
)
from vitgraph.models.family import Family, named_pairs
from vitgraph.models.geometry import EncoderCudaGraphConfig, GeometryRule, ItemGeometry
from vitgraph.models.processor_classes import transformers_class
from vitgraph.planning.budgets import DEFAULT_PATH, EncoderItemSpec, GraphKey

if TYPE_CHECKING:
    from vitgraph.attention.base import AttentionBackend
    from vitgraph.models.fusions import BlockRunner


SEGMENT_OFFSETS = {"cu_seqlens": "max_seqlen", "cu_window_seqlens": "max_window_seqlen"}
"""Metadata fields that hold offsets of attention segments, and the scalar that bounds each one's lengths."""


class VisionEncoder(Family, ABC):
    """Base of the family adapters; implements `SupportsEncoderCudaGraph`.

    Args:
        modules: The tower and what follows it (merger, projector), on their device and in their dtype, which it
            computes in.
        rule: Sizes to geometry to tokens.
        attention: The backend whose function the tower calls.

    Attributes:
        run_block: Applies a block to the residual stream, for towers whose loop over blocks is the adapter's.
    """

    rule_class: ClassVar[type[GeometryRule]]
    calls_varlen: ClassVar[bool] = True
    """The forward attends within segments of a list; False where it only attends within equal tiles."""
    compiled_functions: ClassVar[Sequence[str]] = ()
    """Attributes that hold functions of tensors which regional compilation compiles beside the blocks."""
    patch_convolutions: ClassVar[Sequence[str]] = ()
    """Names in `modules` of convolutions that embed patches; see `vitgraph.models.replaced_modules`."""
    blocks: ClassVar[str | None] = None
    """Name in `modules` of the list of blocks that the tower repeats."""
    block_scale: ClassVar[str | None] = None
    """Attribute of the repeated block that holds the factor `[K]` of its last branch, where `run_block` is used."""

    def __init__(self, modules: nn.ModuleDict, rule: GeometryRule, attention: AttentionBackend) -> None:
        from vitgraph.models.fusions import run_block

        self.modules: Any = modules
        self.rule = rule
        self.attention = attention
        parameter = next(modules.parameters())
        self.device = parameter.device
        self.dtype = parameter.dtype
        self.run_block: BlockRunner = run_block
        self._config = rule.graph_config()
        self._cache = MetadataCache()
        self._specs = lru_cache(maxsize=65536)(rule.item_spec)
        self.prepare()

    def prepare(self) -> None:
        """Makes once what every forward reads."""

    @property
    def visual(self) -> Any:
        """The tower."""
        return self.modules["visual"]

    # -- what a family gives ---------------------------------------------------------------------------------------

    @abstractmethod
    def buffer_rows(self, capacity: GraphKey) -> int:
        """Rows of the pixel buffer of a graph of that capacity."""

    @abstractmethod
    def pixel_row_shape(self, name: str) -> tuple[int, ...]:
        """Shape of one row of pixel buffer `name`."""

    def pixel_fields(self, capacity: GraphKey) -> dict[str, PixelField]:
        """Pixel buffers of a graph of that capacity."""
        rows = self.buffer_rows(capacity)
        return {name: PixelField(rows, self.pixel_row_shape(name)) for name in self.path_pixels(capacity.path)}

    def metadata_fields(self, capacity: GraphKey) -> dict[str, MetadataField]:
        """Metadata buffers of a graph of that capacity; none, where every item is whole equal tiles."""
        return {}

    def compute_metadata(self, items: Sequence[ItemGeometry]) -> dict[str, np.ndarray]:
        """Unpadded metadata of a batch; the one function that eager, capture and replay share."""
        return {}

    def compute_scalars(self, metadata: Mapping[str, np.ndarray]) -> dict[str, int]:
        """Host integers of a batch, from its metadata: `max_seqlen` of the offsets where the family has them."""
        return {
            scalar: int(np.diff(metadata[offsets]).max(initial=0))
            for offsets, scalar in SEGMENT_OFFSETS.items()
            if offsets in metadata
        }

    def capture_scalars(self, capacity: GraphKey) -> dict[str, int]:
        """Upper bounds of `compute_scalars` over every batch that fits the capacity."""
        return {}

    @abstractmethod
    def dummy_items(self, capacity: GraphKey) -> list[ItemGeometry]:
        """A valid batch within the capacity; a graph is captured with it."""

    @abstractmethod
    def forward_packed(self, inputs: Tensors, scalars: Mapping[str, int], path: str) -> Sequence[torch.Tensor]:
        """The encoder on packed tensors: parts `[M, D_i]` of the output, joined along the width by the caller."""

    def run_blocks(self, hidden: torch.Tensor, **arguments: Any) -> torch.Tensor:
        """The residual stream after all of `repeated_blocks`, for towers whose loop over them is the adapter's."""
        from vitgraph.models.fusions import ResidualStream

        stream = ResidualStream(hidden)
        for block in self.repeated_blocks():
            stream = self.run_block(block, stream, **arguments)
        return stream.whole()

    @abstractmethod
    def stock_rows(self, mm_kwargs: EncoderInputs) -> torch.Tensor:
        """What `stock_forward` gives, computed while every replaced module computes as the one that it replaced."""

    def stock_forward(self, mm_kwargs: EncoderInputs) -> torch.Tensor:
        """transformers' own forward with nothing precomputed, `[M, D]`: the `hf` baseline and the tests' reference."""
        from vitgraph.models.replaced_modules import stock_modules

        with stock_modules(self):
            return self.stock_rows(mm_kwargs)

    def repeated_blocks(self) -> list[nn.Module]:
        """The blocks that the tower repeats; regional compilation compiles these."""
        return list(self.modules.get_submodule(self.blocks).children()) if self.blocks else []

    def processor_settings(self) -> dict[str, Any]:
        """Settings of transformers' image processor that makes the pixels, by its own names."""
        found, processor = {}, self.rule.processor
        for theirs, ours in named_pairs((*self.image_settings, *(("size",) if self.sized_by_pixels else ()))):
            if ours in processor:
                name, _, part = theirs.partition(".")
                found[name] = {part: processor[ours]} if part else processor[ours]
        return found

    def processed(self, image: Any) -> Any:
        """What transformers' image processor makes of a PIL image; one alone, since some pad a batch to one size."""
        # The constructors write into `size`.
        settings = copy.deepcopy({**self.processor_settings(), **self.rule.processor.get("pixels", {})})
        name = self.pixel_processor or self.image_processor
        assert name is not None
        return transformers_class(name)(**settings)(images=[image], return_tensors="pt")

    @abstractmethod
    def image_rows(self, image: Any, item: ItemGeometry) -> Tensors:
        """Rows `[rows, ...]` of each pixel buffer for a PIL image, by the model's real image processor."""

    def preprocess(self, images: Sequence[Any]) -> tuple[list[ItemGeometry], dict[str, torch.Tensor]]:
        """Geometries and packed pixels `[rows, ...]` of PIL images.

        Raises:
            InputError: The model's processor does not take an image's size.
            ModelError: transformers' processor makes something else of an image than the rule says.
        """
        items = [self.rule.image_geometry(*image.size) for image in images]
        parts = [self.image_rows(image, item) for image, item in zip(images, items, strict=True)]
        for image, item, part in zip(images, items, parts, strict=True):
            made, wanted = {name: len(rows) for name, rows in part.items()}, self.rule.pixel_rows(item)
            if made != wanted:
                raise ModelError(
                    f"the image processor made {made} rows of an image of {image.size} pixels, the rule of "
                    f"{type(self.rule).__name__} says {wanted}; the processor's settings and the model do not belong "
                    "together, or this version of transformers resizes differently"
                )
        packed = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        return items, {name: rows.to(self.device, self.dtype) for name, rows in packed.items()}

    # -- SupportsEncoderCudaGraph ----------------------------------------------------------------------------------

    def capture_refusal(self) -> str | None:
        if self.device.type == "cpu" or self.attention.is_capture_safe or not self.calls_varlen:
            return None
        return (
            f"attention backend {self.attention.name} reads segment lengths on the host, so this tower cannot be "
            "captured with it; use FLASH_ATTN, or run eager only"
        )

    def graph_path(self) -> AbstractContextManager[None]:
        return self.attention.graph_path()

    def reserve_for_capture(self, rows: int) -> None:
        self.attention.outputs.reserve(rows)

    def release_capture(self) -> None:
        self.attention.outputs.release()

    def get_encoder_cudagraph_config(self) -> EncoderCudaGraphConfig:
        return self._config

    def get_encoder_cudagraph_item_specs(self, mm_kwargs: EncoderInputs) -> list[EncoderItemSpec]:
        return [self._specs(item) for item in mm_kwargs.chosen]

    def select_encoder_cudagraph_items(self, mm_kwargs: EncoderInputs, indices: Sequence[int]) -> EncoderInputs:
        return replace(mm_kwargs, indices=tuple(mm_kwargs.indices[index] for index in indices))

    def prepare_encoder_cudagraph_capture_inputs(self, capacity: GraphKey) -> EncoderCudaGraphCaptureInputs:
        items = self.dummy_items(capacity)
        return EncoderCudaGraphCaptureInputs(
            pixels=self.pixel_fields(capacity),
            metadata=self.metadata_fields(capacity),
            dummy=self.compute_metadata(items),
            scalars=self.capture_scalars(capacity),
        )

    def prepare_encoder_cudagraph_replay_buffers(
        self, mm_kwargs: EncoderInputs, capacity: GraphKey
    ) -> EncoderCudaGraphReplayBuffers:
        items = mm_kwargs.chosen
        metadata = self._cache.get(items, lambda: self.compute_metadata(items))
        return EncoderCudaGraphReplayBuffers(
            pixels={name: mm_kwargs.rows(name) for name in self.pixel_fields(capacity)},
            metadata=metadata,
            scalars=self.compute_scalars(metadata),
        )

    def encoder_cudagraph_forward(
        self, inputs: dict[str, torch.Tensor], scalars: Mapping[str, int], path: str = DEFAULT_PATH
    ) -> Sequence[torch.Tensor]:
        with self.attention.one_forward():
            return self.forward_packed(inputs, scalars, path)

    def encoder_eager_forward(self, mm_kwargs: EncoderInputs, path: str = DEFAULT_PATH) -> torch.Tensor:
        items = mm_kwargs.chosen
        metadata = self._cache.get(items, lambda: self.compute_metadata(items))
        inputs = to_device(metadata, self.device)
        for name in self.path_pixels(path):
            inputs[name] = mm_kwargs.rows(name).materialize()
        with self.attention.one_forward():
            parts = self.forward_packed(inputs, self.compute_scalars(metadata), path)
        return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=-1)

    def postprocess_encoder_output(self, mm_kwargs: EncoderInputs, outputs: PathRows) -> list[torch.Tensor]:
        """Single-path families: the rows of the default path are the embedding."""
        return [rows for rows in outputs[DEFAULT_PATH] if rows is not None]

    # -- making calls ----------------------------------------------------------------------------------------------

    def path_pixels(self, path: str) -> tuple[str, ...]:
        """Names of the pixel buffers that a path reads."""
        return ("pixel_values",)

    def make_inputs(self, items: Sequence[ItemGeometry], pixels: dict[str, torch.Tensor]) -> EncoderInputs:
        """A call of `items` whose packed pixel rows are at the head of `pixels` (device tensors).

        Raises:
            InputError: A pixel tensor has fewer rows than the items need.
        """
        rows = [self.rule.pixel_rows(item) for item in items]
        offsets = {}
        views = {}
        for name, tensor in pixels.items():
            ends = tuple(accumulate((row.get(name, 0) for row in rows), initial=0))
            if ends[-1] > len(tensor):
                raise InputError(f"{name} has {len(tensor)} rows, but the items of the call need {ends[-1]}")
            offsets[name] = ends
            views[name] = tensor[: ends[-1]]
        return EncoderInputs(tuple(items), views, offsets, tuple(range(len(items))))

    def random_pixels(self, rows: Mapping[str, int], seed: int) -> dict[str, torch.Tensor]:
        """Seeded standard-normal pixels in the tower's dtype: `rows[name]` rows for each buffer."""
        generator = torch.Generator(device=self.device).manual_seed(seed)
        return {
            name: torch.randn(
                (max(count, 1), *self.pixel_row_shape(name)), generator=generator, device=self.device, dtype=self.dtype
            )
            for name, count in rows.items()
        }
