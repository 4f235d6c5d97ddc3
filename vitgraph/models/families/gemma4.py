"""Gemma 4: transformers' own layers over packed patches, pooled 3 x 3 and projected to the language model's width.

transformers (and vLLM, which captures one graph for each row width) encode rows that are padded to a fixed number of
soft tokens. Every operation but attention is local to a patch or to a pooled cell, and attention stays within a row, so
the rows are packed here instead: no padded patch is computed, and no capture axis multiplies the graphs. Patches come
in pooling-block order, so a pooled cell is a run of neighbouring rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from vitgraph.errors import InputError, ModelError
from vitgraph.models.base import PAD_MINUS_ONE, PAD_REPEAT_LAST, EncoderInputs, MetadataField, PixelField
from vitgraph.models.encoder import VisionEncoder
from vitgraph.models.geometry import (
    EncoderCudaGraphConfig,
    EncoderCudaGraphPathConfig,
    GeometryRule,
    GridGeometry,
    ItemGeometry,
    MergedGridRule,
    TowerShape,
    tower_shape,
)
from vitgraph.models.grid_metadata import block_positions, grid_positions, segment_offsets
from vitgraph.models.resizing import fixed_frames
from vitgraph.planning.budgets import CaptureAxis, GraphKey
from vitgraph.planning.items import DEFAULT_PATH, IMAGE, VIDEO, EncoderItemSpec

if TYPE_CHECKING:
    import torch
    from torch import nn

ROW_WIDTH_AXIS = "row_width"
DEFAULT_ROPE_THETA = 100.0


def fit_to_patches(height: int, width: int, factor: int, max_tokens: int) -> tuple[int, int]:
    """Gemma 4's resize rule: the aspect ratio is kept, and at most `max_tokens` cells of `factor` pixels result.

    Args:
        height: Pixels down.
        width: Pixels across.
        factor: Pixels on a side of one soft token; both sides become multiples of it.
        max_tokens: Most soft tokens.

    Returns:
        `(height, width)` in pixels. A side that rounds to zero becomes one cell.

    Raises:
        InputError: Both sides round to zero, or the result has too many tokens.
    """
    scale = math.sqrt(max_tokens * factor**2 / (height * width))
    rows = math.floor(scale * height / factor)
    columns = math.floor(scale * width / factor)
    if rows == 0 and columns == 0:
        raise InputError(
            f"item of {width}x{height} resizes to no token at all with at most {max_tokens} soft tokens; "
            "raise the processor's max_soft_tokens"
        )
    if rows == 0:
        rows, columns = 1, min(width // height, max_tokens)
    elif columns == 0:
        rows, columns = min(height // width, max_tokens), 1
    if rows * columns > max_tokens:
        raise InputError(
            f"item of {width}x{height} resizes to {columns}x{rows} soft tokens, above the {max_tokens} that the "
            "processor allows; raise its max_soft_tokens"
        )
    return rows * factor, columns * factor


class Gemma4Rule(MergedGridRule):
    """One row of at most `max_soft_tokens` tokens for an image, and one for each frame of a video.

    Raises:
        ModelError: The processor's `max_soft_tokens` is not one of its supported values.
    """

    def __init__(
        self, vision_config: Mapping[str, Any], processor: Mapping[str, Any], extra: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(vision_config, processor, extra)
        supported = self.processor["supported_soft_tokens"]
        for modality in (IMAGE, VIDEO):
            if self.row_tokens(modality) not in supported:
                raise ModelError(
                    f"max_soft_tokens is {self.row_tokens(modality)} for a row of {modality}, which the processor "
                    f"does not take; use one of {', '.join(map(str, supported))}"
                )

    @property
    def merge(self) -> int:
        return int(self.vision_config["pooling_kernel_size"])

    def row_tokens(self, modality: str) -> int:
        """Most soft tokens of one row (an image, or a frame of a video)."""
        settings = self.processor["video"] if modality == VIDEO else self.processor
        return int(settings["max_soft_tokens"])

    @property
    def max_row_tokens(self) -> int:
        return max(self.row_tokens(IMAGE), self.row_tokens(VIDEO))

    @property
    def output_width(self) -> int:
        return int(self.extra["text_hidden_size"])

    def image_geometry(self, width: int, height: int) -> GridGeometry:
        return self._row_geometry(IMAGE, width, height, 1)

    def video_geometry(self, width: int, height: int, frames: int, fps: float | None) -> GridGeometry:
        # The loader spreads a fixed number of frames over a file of any rate.
        kept = frames if fps is None else fixed_frames(frames, int(self.processor["video"]["num_frames"]))
        return self._row_geometry(VIDEO, width, height, kept)

    def _row_geometry(self, modality: str, width: int, height: int, rows: int) -> GridGeometry:
        new_height, new_width = fit_to_patches(height, width, self.factor, self.row_tokens(modality))
        return GridGeometry(modality, rows, new_height // self.patch, new_width // self.patch)

    def checked_grid(self, geometry: ItemGeometry) -> GridGeometry:
        """The geometry as a grid that pools evenly and fits a row.

        Raises:
            InputError: A side is not a multiple of the pooling size, or a row has too many tokens.
        """
        grid = super().checked_grid(geometry)
        tokens, most = grid.h * grid.w // self.merge**2, self.row_tokens(grid.modality)
        if tokens > most:
            raise InputError(
                f"grid [{grid.t}, {grid.h}, {grid.w}] (t, h, w in patches) has {tokens} soft tokens a row, above the "
                f"{most} of the processor's max_soft_tokens; resize the item or raise the setting"
            )
        return grid

    def item_spec(self, geometry: ItemGeometry) -> EncoderItemSpec:
        grid = self.checked_grid(geometry)
        return EncoderItemSpec(
            grid.modality,
            grid.patches,
            grid.patches // self.merge**2,
            grid.t,
            axis_sizes={ROW_WIDTH_AXIS: (self.row_tokens(grid.modality),)},
        )

    @property
    def upstream_axes(self) -> tuple[CaptureAxis, ...]:
        """The axis that vLLM 0.33 captures this row with: padded rows of every supported width up to the largest."""
        widths = sorted(width for width in self.processor["supported_soft_tokens"] if width <= self.max_row_tokens)
        return (CaptureAxis(ROW_WIDTH_AXIS, tuple((width,) for width in widths)),)

    @property
    def upstream_smallest_budget(self) -> int:
        return self.budget_range(0)[0]

    def graph_config(self) -> EncoderCudaGraphConfig:
        smallest = min(self.row_tokens(IMAGE), self.row_tokens(VIDEO))
        return EncoderCudaGraphConfig(
            modalities=self.modalities,
            output_width=self.output_width,
            paths={DEFAULT_PATH: EncoderCudaGraphPathConfig(smallest)},
            max_frames_per_video=int(self.processor["video"]["num_frames"]),
            # The worst rounding is one cell by half of the tokens: the short side drops from just below two cells to
            # one. Longer short sides lose less. One token is left for floating-point rounding of the long side.
            min_tokens_per_segment=max(1, smallest // 2 - 1),
        )

    @property
    def tower_shape(self) -> TowerShape:
        return tower_shape(self.vision_config, mlp_matrices=3)

    def merger_flops(self, grid: GridGeometry) -> float:
        return 2.0 * (grid.patches // self.merge**2) * self.tower_shape.width * self.output_width


class Gemma4Encoder(VisionEncoder):
    """`Gemma4VisionModel` and `Gemma4MultimodalEmbedder`.

    Pixels are `[N, 768]`, (y, x, channel) in 0 to 1, and patches come in pooling-block order.
    """

    rule_class: ClassVar[type[GeometryRule]] = Gemma4Rule
    rule: Gemma4Rule
    image_processor: ClassVar[str | None] = "gemma4.image_processing_pil_gemma4:Gemma4ImageProcessorPil"
    video_processor: ClassVar[str | None] = "gemma4.video_processing_gemma4:Gemma4VideoProcessor"
    follows_pixels: ClassVar[bool] = True
    checkpoint_keys: ClassVar[Sequence[tuple[str, str]]] = ((r"^(?:model\.)?(vision_tower|embed_vision)\.", r"\1."),)
    blocks: ClassVar[str | None] = "vision_tower.encoder.layers"

    @classmethod
    def vision_config_class(cls) -> type[Any] | None:
        from transformers.models.gemma4.configuration_gemma4 import Gemma4VisionConfig

        return Gemma4VisionConfig

    @classmethod
    def build_modules(
        cls, vision_config: Mapping[str, Any], extra: Mapping[str, Any], dtype: torch.dtype, device: torch.device
    ) -> nn.ModuleDict:
        from torch import nn
        from transformers.models.gemma4.configuration_gemma4 import Gemma4VisionConfig
        from transformers.models.gemma4.modeling_gemma4 import Gemma4MultimodalEmbedder, Gemma4VisionModel

        # Published files name the rotary type `default`; the class knows it as `axial`.
        rotary = {"rope_type": "axial", "rope_theta": extra.get("rope_theta", DEFAULT_ROPE_THETA)}
        config = Gemma4VisionConfig(**{**vision_config, "rope_parameters": rotary})
        with device:
            tower = Gemma4VisionModel._from_config(config, attn_implementation="sdpa", dtype=dtype)
            # The embedder reads nothing but the width of the text config.
            text_config: Any = SimpleNamespace(hidden_size=extra["text_hidden_size"])
            embedder = Gemma4MultimodalEmbedder(config, text_config)
        return nn.ModuleDict({"vision_tower": tower, "embed_vision": embedder.to(dtype)})

    @classmethod
    def read_model_config(cls, config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        vision_config, extra = super().read_model_config(config)
        rotary = vision_config.pop("rope_parameters", None) or {}
        extra["rope_theta"] = rotary.get("rope_theta", DEFAULT_ROPE_THETA)
        return vision_config, extra

    @classmethod
    def read_processor_config(cls, processor: Mapping[str, Any]) -> dict[str, Any]:
        names = ("patch_size", "pooling_kernel_size", "max_soft_tokens")
        processor.get("size")  # has no effect, whatever it is
        return {name: processor[name] for name in names if processor.get(name) is not None}

    @classmethod
    def read_video_processor_config(cls, processor: Mapping[str, Any]) -> dict[str, Any]:
        names = ("max_soft_tokens", "num_frames", "patch_size", "pooling_kernel_size")
        return {name: processor[name] for name in names if processor.get(name) is not None}

    def pixel_row_shape(self, name: str) -> tuple[int, ...]:
        return (3 * self.rule.patch**2,)

    def _patches(self, capacity: GraphKey) -> int:
        return capacity.token_budget * self.rule.merge**2

    def pixel_fields(self, capacity: GraphKey) -> dict[str, PixelField]:
        return {"pixel_values": PixelField(self._patches(capacity), self.pixel_row_shape("pixel_values"))}

    def metadata_fields(self, capacity: GraphKey) -> dict[str, MetadataField]:
        return {
            "cu_seqlens": MetadataField((capacity.segment_slots + 1,), "int32", PAD_REPEAT_LAST),
            # As in transformers, -1 marks padding.
            "position_ids": MetadataField((self._patches(capacity), 2), "int32", PAD_MINUS_ONE),
        }

    def compute_metadata(
        self, items: Sequence[ItemGeometry], path: str, axis_key: tuple[int, ...]
    ) -> dict[str, np.ndarray]:
        grids = [self.rule.checked_grid(item) for item in items]
        # The tower's positions are (x, y).
        return {"cu_seqlens": segment_offsets(grids), "position_ids": grid_positions(grids, self.rule.merge)[:, ::-1]}

    def capture_scalars(self, capacity: GraphKey) -> dict[str, int]:
        # A row never has more tokens than the processor's limit, which `checked_grid` enforces, nor than the budget.
        return {"max_seqlen": min(capacity.token_budget, self.rule.max_row_tokens) * self.rule.merge**2}

    def dummy_items(self, capacity: GraphKey) -> list[ItemGeometry]:
        merge = self.rule.merge
        tokens = min(capacity.token_budget, self.rule.row_tokens(IMAGE))
        return [GridGeometry(IMAGE, 1, merge, merge * tokens)]

    def forward_packed(
        self, inputs: Mapping[str, torch.Tensor], scalars: Mapping[str, int], path: str
    ) -> Sequence[torch.Tensor]:
        tower: Any = self.modules["vision_tower"]
        positions = inputs["position_ids"].unsqueeze(0)
        hidden = tower.patch_embedder(inputs["pixel_values"].unsqueeze(0), positions, positions[..., 0] < 0)
        rotary = tower.encoder.rotary_emb(hidden, positions)
        # The encoder's own forward would build a mask, which packed rows do without.
        for layer in tower.encoder.layers:
            hidden = layer(
                hidden,
                position_embeddings=rotary,
                position_ids=positions,
                cu_seq_lens_q=inputs["cu_seqlens"],
                max_length_q=scalars["max_seqlen"],
            )
        return [self.modules["embed_vision"](self._pool(hidden[0]))]

    def _pool(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[N, width]` patches to `[M, width]` soft tokens, rounded where the stock pooler rounds."""
        import torch

        tower: Any = self.modules["vision_tower"]
        cells = hidden.view(-1, self.rule.merge**2, hidden.shape[-1])
        pooled = cells.mean(dim=1, dtype=torch.float32).to(hidden.dtype).float() * tower.pooler.root_hidden_size
        if tower.config.standardize:
            pooled = (pooled - tower.std_bias.float()) * tower.std_scale.float()
        return pooled.to(hidden.dtype)

    def stock_rows(self, mm_kwargs: EncoderInputs) -> torch.Tensor:
        """transformers' padded rows, images and frames apart as `get_image_features` and `get_video_features` do."""
        import torch

        grids = [self.rule.checked_grid(item) for item in mm_kwargs.chosen]
        pixels = mm_kwargs.rows("pixel_values").materialize().split([grid.patches for grid in grids])
        outputs: list[torch.Tensor | None] = [None] * len(grids)
        for modality in (IMAGE, VIDEO):
            chosen = [index for index, grid in enumerate(grids) if grid.modality == modality]
            if not chosen:
                continue
            rows, positions = self._padded_rows([(grids[index], pixels[index]) for index in chosen], modality)
            features = self.modules["vision_tower"](rows, positions).last_hidden_state
            projected = self.modules["embed_vision"](features)
            tokens = [self.rule.item_spec(grids[index]).output_tokens for index in chosen]
            for index, part in zip(chosen, projected.split(tokens), strict=True):
                outputs[index] = part
        return torch.cat([output for output in outputs if output is not None])

    def _padded_rows(
        self, items: Sequence[tuple[GridGeometry, torch.Tensor]], modality: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`[rows, P, 768]` pixels and `[rows, P, 2]` positions, padded with zeros and -1 to the processor's width."""
        import torch

        merge = self.rule.merge
        width = self.rule.row_tokens(modality) * merge**2
        frames = sum(grid.t for grid, _ in items)
        rows = torch.zeros(frames, width, *self.pixel_row_shape("pixel_values"), dtype=self.dtype, device=self.device)
        positions = torch.full((frames, width, 2), -1, dtype=torch.int64, device=self.device)
        first = 0
        for grid, pixels in items:
            real = grid.h * grid.w
            rows[first : first + grid.t, :real] = pixels.view(grid.t, real, -1)
            columns_first = np.ascontiguousarray(block_positions(grid.h, grid.w, merge)[:, ::-1])
            positions[first : first + grid.t, :real] = torch.from_numpy(columns_first).to(self.device)
            first += grid.t
        return rows, positions

    def preprocess(self, images: Sequence[Any]) -> tuple[list[ItemGeometry], dict[str, torch.Tensor]]:
        import torch
        from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

        rule = self.rule
        processor = Gemma4ImageProcessorPil(
            max_soft_tokens=rule.row_tokens(IMAGE),
            patch_size=rule.patch,
            pooling_kernel_size=rule.merge,
            **rule.processor.get("pixels", {}),
        )
        items = [rule.image_geometry(*image.size) for image in images]
        rows = processor(list(images), return_tensors="np")["pixel_values"]
        packed = [_block_order(padded, item, rule.merge) for padded, item in zip(rows, items, strict=True)]
        values = torch.from_numpy(np.concatenate(packed))
        return list(items), {"pixel_values": values.to(self.device, self.dtype)}


def _block_order(padded: np.ndarray, grid: GridGeometry, merge: int) -> np.ndarray:
    """Real patches of a padded raster row, in pooling-block order."""
    positions = block_positions(grid.h, grid.w, merge)
    return padded[positions[:, 0] * grid.w + positions[:, 1]]
