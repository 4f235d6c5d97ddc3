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
from typing import Any

import numpy as np

from vitgraph.errors import InputError, ModelError
from vitgraph.models import nn, torch
from vitgraph.models.base import EncoderInputs, MetadataField, Tensors
from vitgraph.models.family import Tower, modeling_class
from vitgraph.models.geometry import GridGeometry, ItemGeometry, MergedGridRule
from vitgraph.models.grid_encoder import GridTowerEncoder, block_order, block_positions
from vitgraph.models.resizing import fixed_frames
from vitgraph.planning.budgets import IMAGE, VIDEO, GraphKey


def fit_to_patches(height: int, width: int, factor: int, max_tokens: int) -> tuple[int, int]:
    """Gemma 4's resize rule: the aspect ratio is kept, and at most `max_tokens` cells of `factor` pixels result.

    Returns:
        `(height, width)` in pixels, multiples of `factor`. A side that rounds to zero becomes one cell.

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

    mlp_matrices = 3
    merge_field = "pooling_kernel_size"

    def prepare(self) -> None:
        supported = self.processor["supported_soft_tokens"]
        for modality in (IMAGE, VIDEO):
            if self.row_tokens(modality) not in supported:
                raise ModelError(
                    f"max_soft_tokens is {self.row_tokens(modality)} for a row of {modality}, which the processor "
                    f"does not take; use one of {', '.join(map(str, supported))}"
                )

    def row_tokens(self, modality: str) -> int:
        """Most soft tokens of one row (an image, or a frame of a video)."""
        settings = self.video if modality == VIDEO else self.processor
        return int(settings["max_soft_tokens"])

    def image_geometry(self, width: int, height: int) -> GridGeometry:
        return self._row_geometry(IMAGE, width, height, 1)

    def video_geometry(self, width: int, height: int, frames: int, fps: float | None) -> GridGeometry:
        # The loader spreads a fixed number of frames over a file of any rate.
        kept = frames if fps is None else fixed_frames(frames, int(self.video["num_frames"]))
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

    def min_token_budget(self) -> int:
        return min(self.row_tokens(IMAGE), self.row_tokens(VIDEO))

    def most_segments(self) -> int:
        return int(self.video["num_frames"])

    def min_tokens_per_segment(self) -> int:
        # The worst rounding is one cell by half of the tokens: the short side drops from just below two cells to one.
        # Longer short sides lose less. One token is left for floating-point rounding of the long side.
        return max(1, self.min_token_budget() // 2 - 1)

    @property
    def projector_widths(self) -> Sequence[int]:
        return self.tower_shape.width, self.output_width


class Gemma4Encoder(GridTowerEncoder):
    """`Gemma4VisionModel` and `Gemma4MultimodalEmbedder`.

    Pixels are `[N, 768]`, (y, x, channel) in 0 to 1, and patches come in pooling-block order.
    """

    tower = Tower("gemma4", "Gemma4VisionConfig", "Gemma4VisionModel")
    rule_class = Gemma4Rule
    rule: Gemma4Rule
    image_processor = "gemma4.image_processing_pil_gemma4:Gemma4ImageProcessorPil"
    image_settings = ("patch_size", "pooling_kernel_size", "max_soft_tokens")
    video_processor = "gemma4.video_processing_gemma4:Gemma4VideoProcessor"
    video_settings = ("max_soft_tokens", "num_frames", "patch_size", "pooling_kernel_size")
    sized_by_pixels = False
    patch_convolutions = ()
    checkpoint_keys = ((r"vision_tower\.", "visual."), (r"embed_vision\.", "projector."))
    blocks = "visual.encoder.layers"

    @classmethod
    def following_modules(cls, config: Any, extra: Mapping[str, Any]) -> dict[str, nn.Module]:
        # The embedder reads nothing but the width of the text config.
        text = SimpleNamespace(hidden_size=extra["text_hidden_size"])
        return {"projector": modeling_class("gemma4:Gemma4MultimodalEmbedder")(config, text)}

    @classmethod
    def read_processor_config(cls, processor: Mapping[str, Any]) -> dict[str, Any]:
        processor.get("size")  # has no effect, whatever it is
        return super().read_processor_config(processor)

    def metadata_fields(self, capacity: GraphKey) -> dict[str, MetadataField]:
        # As in transformers, -1 marks padding.
        positions = MetadataField((self.buffer_rows(capacity), 2), "int32", padding=-1)
        return {**super().metadata_fields(capacity), "position_ids": positions}

    def compute_metadata(self, items: Sequence[ItemGeometry]) -> dict[str, np.ndarray]:
        found = super().compute_metadata(items)
        # The tower's positions are (x, y).
        return {**found, "position_ids": found["position_ids"][:, ::-1]}

    def capture_scalars(self, capacity: GraphKey) -> dict[str, int]:
        # A row never has more tokens than the processor's limit, which `checked_grid` enforces, nor than the budget.
        most = max(self.rule.row_tokens(IMAGE), self.rule.row_tokens(VIDEO))
        return {"max_seqlen": min(capacity.token_budget, most) * self.rule.merge**2}

    def dummy_items(self, capacity: GraphKey) -> list[ItemGeometry]:
        merge = self.rule.merge
        tokens = min(capacity.token_budget, self.rule.row_tokens(IMAGE))
        return [GridGeometry(IMAGE, 1, merge, merge * tokens)]

    def forward_packed(self, inputs: Tensors, scalars: Mapping[str, int], path: str) -> Sequence[torch.Tensor]:
        positions = inputs["position_ids"].unsqueeze(0)
        hidden = self.visual.patch_embedder(inputs["pixel_values"].unsqueeze(0), positions, positions[..., 0] < 0)
        rotary = self.visual.encoder.rotary_emb(hidden, positions)
        # The encoder's own forward would build a mask, which packed rows do without.
        for layer in self.visual.encoder.layers:
            hidden = layer(
                hidden,
                position_embeddings=rotary,
                position_ids=positions,
                cu_seq_lens_q=inputs["cu_seqlens"],
                max_length_q=scalars["max_seqlen"],
            )
        return [self.modules["projector"](self._pool(hidden[0]))]

    def _pool(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[N, width]` patches to `[M, width]` soft tokens, rounded where the stock pooler rounds."""
        cells = hidden.view(-1, self.rule.merge**2, hidden.shape[-1])
        pooled = cells.mean(dim=1, dtype=torch.float32).to(hidden.dtype).float() * self.visual.pooler.root_hidden_size
        if self.visual.config.standardize:
            pooled = (pooled - self.visual.std_bias.float()) * self.visual.std_scale.float()
        return pooled.to(hidden.dtype)

    def stock_rows(self, mm_kwargs: EncoderInputs) -> torch.Tensor:
        """transformers' padded rows, images and frames apart as `get_image_features` and `get_video_features` do."""
        grids = self.grids(mm_kwargs.chosen)
        pixels = mm_kwargs.rows("pixel_values").materialize().split([grid.patches for grid in grids])
        outputs: list[torch.Tensor | None] = [None] * len(grids)
        for modality in (IMAGE, VIDEO):
            chosen = [index for index, grid in enumerate(grids) if grid.modality == modality]
            if not chosen:
                continue
            rows, positions = self._padded_rows([(grids[index], pixels[index]) for index in chosen], modality)
            features = self.visual(rows, positions).last_hidden_state
            projected = self.modules["projector"](features)
            tokens = [self.rule.item_spec(grids[index]).output_tokens for index in chosen]
            for index, part in zip(chosen, projected.split(tokens), strict=True):
                outputs[index] = part
        return torch.cat([output for output in outputs if output is not None])

    def _padded_rows(
        self, items: Sequence[tuple[GridGeometry, torch.Tensor]], modality: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`[rows, P, 768]` pixels and `[rows, P, 2]` positions, padded with zeros and -1 to the processor's width."""
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

    def image_rows(self, image: Any, item: ItemGeometry) -> Tensors:
        (padded,), grid = self.processed(image)["pixel_values"], self.rule.checked_grid(item)
        # Real patches of the padded raster row, in pooling-block order.
        return {"pixel_values": padded[block_order(grid.h, grid.w, self.rule.merge)]}
