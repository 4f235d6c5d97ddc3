"""The part of `SupportsEncoderCudaGraph` that every family shares: caching, selection, eager and replay values.

A family file adds what is its own: fields and values of its metadata, and its forward over fixed-shape tensors. Torch
is imported inside the methods that touch tensors, here and in the family files, so that sizes, tokens and plans can be
computed where torch is not used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from vitgraph.errors import InputError
from vitgraph.models.base import (
    EncoderCudaGraphCaptureInputs,
    EncoderCudaGraphReplayBuffers,
    EncoderInputs,
    MetadataField,
    PixelField,
)
from vitgraph.models.checkpoints import rename_key
from vitgraph.models.geometry import EncoderCudaGraphConfig, GeometryRule, ItemGeometry
from vitgraph.models.metadata import MetadataCache, to_device
from vitgraph.planning.budgets import GraphKey
from vitgraph.planning.items import DEFAULT_PATH, EncoderItemSpec

if TYPE_CHECKING:
    import torch
    from torch import nn

    from vitgraph.attention.base import AttentionBackend
    from vitgraph.models.compile.residual import BlockRunner


SEGMENT_OFFSETS = {"cu_seqlens": "max_seqlen", "cu_window_seqlens": "max_window_seqlen"}
"""Metadata fields that hold offsets of attention segments, and the scalar that bounds each one's lengths."""


VISION_LANGUAGE_PARTS = ("thinker_config", "vlm_config")
"""Fields of config.json in which models that also speak or act keep the part that sees."""


def vision_language_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that has `vision_config`: all of it, or the one inside a larger model."""
    return next((config[name] for name in VISION_LANGUAGE_PARTS if isinstance(config.get(name), Mapping)), config)


def pixel_range(settings: Mapping[str, Any]) -> dict[str, int]:
    """Pixel bounds of a processor as `shortest_edge` and `longest_edge`; a plain `min_pixels` or `max_pixels` wins."""
    size = settings.get("size") or {}
    edges = {"shortest_edge": "min_pixels", "longest_edge": "max_pixels"}
    found = {edge: settings.get(plain) or size.get(edge) or size.get(plain) for edge, plain in edges.items()}
    return {edge: int(bound) for edge, bound in found.items() if bound}


class VisionEncoder(ABC):
    """Base of the family adapters; implements `SupportsEncoderCudaGraph`.

    Args:
        modules: The tower and what follows it (merger, projector), already on `device` in `dtype`.
        rule: Sizes to geometry to tokens.
        attention: The backend whose function the tower calls.

    Attributes:
        device: Where the encoder runs.
        dtype: Its computing dtype.
        run_block: Applies a block to the residual stream, for towers whose loop over blocks is the adapter's.
    """

    rule_class: ClassVar[type[GeometryRule]]
    calls_varlen: ClassVar[bool] = True
    """The forward attends within segments of a list; False where it only attends within equal tiles."""
    compiled_functions: ClassVar[Sequence[str]] = ()
    """Attributes that hold functions of tensors which regional compilation compiles beside the blocks."""
    image_processor: ClassVar[str | None] = None
    """transformers' image processor of the family, `module:class` under `transformers.models`; without torchvision."""
    video_processor: ClassVar[str | None] = None
    """transformers' video processor of the family."""
    whole_processor: ClassVar[str | None] = None
    """transformers' processor of the whole model, where its calls give videos a size whatever the files say."""
    resize_switch: ClassVar[tuple[str, ...]] = ()
    """The setting that turns resizing off, where the rule follows it."""
    resample: ClassVar[int] = 3
    """PIL's number of the filter that `preprocess` resizes with, where transformers has no processor for it."""
    follows_pixels: ClassVar[bool] = False
    """`preprocess` gives the rule's `pixels` settings to transformers' image processor."""
    spellings: ClassVar[Mapping[str, str]] = {}
    """Arguments of the processor's call that are another name of a setting that the rule reads."""
    processor_names: ClassVar[Sequence[str]] = ()
    """Further image and video processors of transformers whose settings mean the same as those of the family's own."""
    checkpoint_keys: ClassVar[Sequence[tuple[str, str]]] = ()
    """Published keys as regular expressions, each with the name in `modules`; the first match holds."""
    fused: ClassVar[Mapping[str, Sequence[str]]] = {}
    """Parts of names that stand for several tensors joined along the first dimension, with a part for each of them."""
    patch_convolutions: ClassVar[Sequence[str]] = ()
    """Names in `modules` of convolutions that embed patches; see `vitgraph.models.compile.replaced_modules`."""
    blocks: ClassVar[str | None] = None
    """Name in `modules` of the list of blocks that the tower repeats."""
    block_scale: ClassVar[str | None] = None
    """Attribute of the repeated block that holds the factor `[K]` of its last branch, where `run_block` is used."""

    def __init__(self, modules: nn.ModuleDict, rule: GeometryRule, attention: AttentionBackend) -> None:
        from vitgraph.models.compile.residual import run_block

        self.modules = modules
        self.rule = rule
        self.attention = attention
        parameter = next(modules.parameters())
        self.device = parameter.device
        self.dtype = parameter.dtype
        self.run_block: BlockRunner = run_block
        self._config = rule.graph_config()
        self._cache = MetadataCache()
        self._specs = lru_cache(maxsize=65536)(rule.item_spec)

    # -- what a family gives ---------------------------------------------------------------------------------------

    @classmethod
    @abstractmethod
    def build_modules(
        cls, vision_config: Mapping[str, Any], extra: Mapping[str, Any], dtype: torch.dtype, device: torch.device
    ) -> nn.ModuleDict:
        """Modules with uninitialised or default weights, from the preset's or checkpoint's config.

        Args:
            vision_config: `vision_config` of config.json.
            extra: Facts outside it that the modules need (text width, projector settings).
            dtype: Dtype of the parameters; float32 buffers such as rotary frequencies stay float32.
            device: Where the modules are made.
        """

    @classmethod
    def map_checkpoint_key(cls, key: str) -> str | None:
        """Name in `modules` of a published checkpoint's tensor, or None where it is not the encoder's."""
        return rename_key(key, cls.checkpoint_keys)

    @classmethod
    def owns_checkpoint_key(cls, key: str) -> bool:
        """True for the checkpoint's tensors that `convert_tensor` takes."""
        return cls.map_checkpoint_key(key) is not None

    @classmethod
    def convert_tensor(cls, key: str, tensor: torch.Tensor, modules: nn.ModuleDict) -> dict[str, torch.Tensor]:
        """Named tensors of `modules` that one checkpoint tensor holds; overridden for permuted weights."""
        name = cls.map_checkpoint_key(key)
        if name is None:
            return {}
        for fused, parts in cls.fused.items():
            if fused in name:
                pieces = zip(parts, tensor.chunk(len(parts)), strict=True)
                return {name.replace(fused, part): piece for part, piece in pieces}
        return {name: tensor}

    @classmethod
    def vision_config_class(cls) -> type[Any] | None:
        """transformers' config class of the tower, whose defaults fill what `vision_config` leaves out."""
        return None

    @classmethod
    def read_model_config(cls, config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """`vision_config` and the facts outside it (`extra`) of a config.json."""
        config = vision_language_part(config)
        text = config.get("text_config") or config
        extra = {"text_hidden_size": text["hidden_size"]} if "hidden_size" in text else {}
        return dict(config["vision_config"]), extra

    @classmethod
    def accepts_model_config(cls, config: Mapping[str, Any]) -> bool:
        """Whether a config.json of one of the row's architectures is this family's; for rows that share one."""
        return True

    @classmethod
    def image_processor_class(cls) -> type[Any] | None:
        """The class that `image_processor` names."""
        from vitgraph.models.processor_classes import transformers_class

        return transformers_class(cls.image_processor) if cls.image_processor else None

    @classmethod
    def video_processor_class(cls) -> type[Any] | None:
        """The class that `video_processor` names."""
        from vitgraph.models.processor_classes import transformers_class

        return transformers_class(cls.video_processor) if cls.video_processor else None

    @classmethod
    def read_processor_config(cls, processor: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of an image processor that the family's rule reads, in the presets' shape."""
        names = ("patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std", *cls.resize_switch)
        found = {name: processor[name] for name in names if processor.get(name) is not None}
        return {**found, **({"size": size} if (size := pixel_range(processor)) else {})}

    @classmethod
    def read_video_processor_config(cls, processor: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of a video processor that the family's rule reads, in the presets' shape."""
        names = ("fps", "min_frames", "max_frames", *cls.resize_switch, "cap_pixels_per_frame", "max_video_tokens")
        found = {name: processor[name] for name in names if processor.get(name) is not None}
        return {**found, **pixel_range(processor)}

    @classmethod
    def head_width(cls, vision_config: Mapping[str, Any]) -> int:
        """Width of one attention head."""
        if vision_config.get("head_dim"):
            return int(vision_config["head_dim"])
        width = vision_config.get("embed_dim") or vision_config["hidden_size"]
        heads = vision_config.get("num_heads") or vision_config["num_attention_heads"]
        return int(width) // int(heads)

    @classmethod
    def head_count(cls, vision_config: Mapping[str, Any]) -> int | None:
        """Attention heads of a layer; None where the tower has several kinds."""
        return vision_config.get("num_heads") or vision_config.get("num_attention_heads")

    @abstractmethod
    def pixel_fields(self, capacity: GraphKey) -> dict[str, PixelField]:
        """Pixel buffers of a graph of that capacity."""

    @abstractmethod
    def metadata_fields(self, capacity: GraphKey) -> dict[str, MetadataField]:
        """Metadata buffers of a graph of that capacity."""

    @abstractmethod
    def compute_metadata(
        self, items: Sequence[ItemGeometry], path: str, axis_key: tuple[int, ...]
    ) -> dict[str, np.ndarray]:
        """Unpadded metadata of a batch; the one function that eager, capture and replay share.

        `axis_key` is empty in eager calls; families with axes then use the batch's own extent.
        """

    def compute_scalars(self, metadata: Mapping[str, np.ndarray]) -> dict[str, int]:
        """Host integers of a batch, from its metadata: `max_seqlen` of the offsets where the family has them."""
        return {
            scalar: int(np.diff(metadata[offsets]).max(initial=0))
            for offsets, scalar in SEGMENT_OFFSETS.items()
            if offsets in metadata
        }

    @abstractmethod
    def capture_scalars(self, capacity: GraphKey) -> dict[str, int]:
        """Upper bounds of `compute_scalars` over every batch that fits the capacity."""

    @abstractmethod
    def dummy_items(self, capacity: GraphKey) -> list[ItemGeometry]:
        """A valid batch within the capacity; a graph is captured with it."""

    @abstractmethod
    def forward_packed(
        self, inputs: Mapping[str, torch.Tensor], scalars: Mapping[str, int], path: str
    ) -> Sequence[torch.Tensor]:
        """The encoder on packed tensors: parts `[M, D_i]` of the output, joined along the width by the caller."""

    @abstractmethod
    def stock_rows(self, mm_kwargs: EncoderInputs) -> torch.Tensor:
        """What `stock_forward` gives, computed while every replaced module computes as the one that it replaced."""

    def stock_forward(self, mm_kwargs: EncoderInputs) -> torch.Tensor:
        """transformers' own forward with nothing precomputed, `[M, D]`: the `hf` baseline and the tests' reference."""
        from vitgraph.models.compile.replaced_modules import stock_modules

        with stock_modules(self):
            return self.stock_rows(mm_kwargs)

    def repeated_blocks(self) -> list[nn.Module]:
        """The blocks that the tower repeats; regional compilation compiles these."""
        return list(self.modules.get_submodule(self.blocks).children()) if self.blocks else []

    def preprocess(self, images: Sequence[Any]) -> tuple[list[ItemGeometry], dict[str, torch.Tensor]]:
        """Geometries and packed pixels `[rows, ...]` of PIL images, by the model's real image processor."""
        raise InputError(f"{type(self).__name__} has no image processor for real pixels; use random pixels")

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
        self.attention.reserve_padding_safe_output(rows)

    def release_capture(self) -> None:
        self.attention.release_padding_safe_output()

    def get_encoder_cudagraph_config(self) -> EncoderCudaGraphConfig:
        return self._config

    def get_encoder_cudagraph_budget_range(self, max_call_tokens: int) -> tuple[int, int]:
        return self.rule.budget_range(max_call_tokens)

    def get_encoder_cudagraph_item_specs(self, mm_kwargs: EncoderInputs) -> list[EncoderItemSpec]:
        return [self._specs(item) for item in mm_kwargs.chosen]

    def select_encoder_cudagraph_items(self, mm_kwargs: EncoderInputs, indices: Sequence[int]) -> EncoderInputs:
        return EncoderInputs(
            mm_kwargs.items,
            mm_kwargs.pixels,
            mm_kwargs.row_offsets,
            tuple(mm_kwargs.indices[index] for index in indices),
        )

    def prepare_encoder_cudagraph_capture_inputs(self, capacity: GraphKey) -> EncoderCudaGraphCaptureInputs:
        items = self.dummy_items(capacity)
        return EncoderCudaGraphCaptureInputs(
            pixels=self.pixel_fields(capacity),
            metadata=self.metadata_fields(capacity),
            dummy=self.compute_metadata(items, capacity.path, capacity.axis_key),
            scalars=self.capture_scalars(capacity),
        )

    def prepare_encoder_cudagraph_replay_buffers(
        self, mm_kwargs: EncoderInputs, capacity: GraphKey
    ) -> EncoderCudaGraphReplayBuffers:
        items = mm_kwargs.chosen
        metadata = self._cache.get(
            (items, capacity.path, capacity.axis_key),
            lambda: self.compute_metadata(items, capacity.path, capacity.axis_key),
        )
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
        metadata = self._cache.get((items, path, ()), lambda: self.compute_metadata(items, path, ()))
        inputs = to_device(metadata, self.device)
        for name in self.path_pixels(path):
            inputs[name] = mm_kwargs.rows(name).materialize()
        with self.attention.one_forward():
            parts = self.forward_packed(inputs, self.compute_scalars(metadata), path)
        if len(parts) == 1:
            return parts[0]
        import torch

        return torch.cat(list(parts), dim=-1)

    def postprocess_encoder_output(
        self, mm_kwargs: EncoderInputs, outputs: Mapping[str, Sequence[torch.Tensor | None]]
    ) -> list[torch.Tensor]:
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
        import torch

        generator = torch.Generator(device=self.device).manual_seed(seed)
        return {
            name: torch.randn(
                (max(count, 1), *self.pixel_row_shape(name)), generator=generator, device=self.device, dtype=self.dtype
            )
            for name, count in rows.items()
        }

    @abstractmethod
    def pixel_row_shape(self, name: str) -> tuple[int, ...]:
        """Shape of one row of pixel buffer `name`."""
