"""MiniCPM-V 2.5, 2.6 and 4.0: images cut into slices, a packed SigLIP tower, and a resampler to fixed tokens a slice.

transformers has the tower (as part of MiniCPM-V 4.6) but neither these models nor their resampler. A slice gives the
same number of tokens whatever its size, so tokens do not bound patches: the capture axis `patch_grid` does. Its keys
are patch grids that cover every slice of a batch; since the processor aims every slice at one area, a graph's patches
for a slice are the most that its slices can have within the key's grid, which is far below the grid's own area.

Shape legend: S slices, L keys of a slice, Q queries, W width (the language model's), N packed patches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from vitgraph.models import functional, nn, torch
from vitgraph.models.base import PAD_REPEAT_LAST, EncoderInputs, MetadataField, Tensors
from vitgraph.models.encoder import VisionEncoder
from vitgraph.models.families.minicpmv_slices import MiniCPMV25Rule, MiniCPMVImageRule, MiniCPMVRule, SliceGeometry
from vitgraph.models.family import Tower, own_fields
from vitgraph.models.geometry import ItemGeometry
from vitgraph.models.grid_encoder import block_positions, offsets_of
from vitgraph.models.resizing import cut_patches, normalized
from vitgraph.planning.budgets import IMAGE, GraphKey

if TYPE_CHECKING:
    from vitgraph.attention.base import AttentionBackend


NORM_EPS = 1e-6
TABLE_ROWS = 512
"""Positions kept ready on an axis; longer slices (aspect ratios above about 250) make their own table, in eager."""

KEY_ALIGNMENT = 8
"""Keys of a dense slice are padded to a multiple of this, which fused attention asks of a mask's last dimension."""


def sine_table(rows: int, width: int) -> torch.Tensor:
    """Sine and cosine of positions 0 to `rows - 1` on one axis: `[rows, width]` float32, sines first.

    The published two-dimensional table is this table of the column followed by this table of the row.
    """
    frequencies = np.arange(width // 2, dtype=np.float32) / np.float32(width / 2)
    frequencies = np.float32(1.0) / np.power(np.float32(10000.0), frequencies)
    angles = np.arange(rows, dtype=np.float32)[:, None] * frequencies
    return torch.from_numpy(np.concatenate([np.sin(angles), np.cos(angles)], axis=1))


@lru_cache(maxsize=1024)
def nearest_positions(rows: int, columns: int, side: int) -> np.ndarray:
    """Cell of a `side x side` position table nearest to each patch of a slice, raster order, `[rows * columns]` int32.

    The arithmetic is float32, as in transformers: at some sizes a patch lies on a cell's edge, and rounding decides.
    """
    edges = np.arange(1 / side, 1.0, 1 / side).astype(np.float32)
    row_cells, column_cells = (
        np.searchsorted(edges, np.arange(size, dtype=np.float32) / np.float32(size), side="right")
        for size in (rows, columns)
    )
    return (row_cells[:, None] * side + column_cells).reshape(-1).astype(np.int32)


def build_resampler(queries: int, width: int, heads: int, kv_width: int) -> nn.Module:
    """Learned queries that turn every slice into Q rows of the language model's width from rows of `kv_width`; that
    width is a multiple of 4 and of `heads`.

    transformers has no class for it; parameter names follow the published checkpoints, with norms spelled out.
    """
    module: Any = nn.Module()
    module.query = nn.Parameter(torch.empty(queries, width))
    module.kv_proj = nn.Linear(kv_width, width, bias=False) if kv_width != width else nn.Identity()
    module.attn = nn.MultiheadAttention(width, heads, batch_first=True)
    module.query_norm, module.kv_norm, module.post_norm = (nn.LayerNorm(width, eps=NORM_EPS) for _ in range(3))
    module.proj = nn.Parameter(torch.empty(width, width))
    nn.init.normal_(module.query, std=0.02)
    nn.init.normal_(module.proj, std=width**-0.5)
    module.register_buffer("axis_table", sine_table(TABLE_ROWS, width // 2), persistent=False)
    return module


def axis_table(resampler: Any, largest_side: int) -> torch.Tensor:
    """`[>= largest_side, W / 2]` positions of one axis, in the parameters' dtype."""
    if largest_side <= len(resampler.axis_table):
        return resampler.axis_table
    # Only eager calls come here (a graph's key bounds the side), so making a table may wait for the device.
    return sine_table(largest_side, resampler.axis_table.shape[1]).to(resampler.axis_table)


def resampled(
    resampler: Any,
    hidden: torch.Tensor,
    cu_seqlens: torch.Tensor,
    grid_positions: torch.Tensor,
    max_seqlen: int,
    largest_side: int,
    attention: AttentionBackend,
) -> torch.Tensor:
    """Resamples packed slices; every shape follows from the shapes and host integers given.

    Args:
        hidden: `[N, kv_width]` tower output. Rows past `cu_seqlens[-1]` may hold anything and are not read.
        cu_seqlens: `[S + 1]` offsets of the slices; empty slices at the end give unspecified, finite rows.
        grid_positions: `[N, 2]` column and row of each patch within its slice.
        max_seqlen: Upper bound of a slice's patches.
        largest_side: Upper bound of a slice's columns and rows.
        attention: Backend of the dense cross attention.

    Returns:
        `[S * Q, W]`.
    """
    length = -(-max_seqlen // KEY_ALIGNMENT) * KEY_ALIGNMENT
    rows, is_key = _dense_keys(cu_seqlens, length)
    values = resampler.kv_norm(resampler.kv_proj(hidden.index_select(0, rows))).unflatten(0, (-1, length))
    places = grid_positions.index_select(0, rows)
    # [S * L, 2] columns and rows to [S * L, 2, W / 2]: the two halves of the published table, side by side.
    keys = values + functional.embedding(places, axis_table(resampler, largest_side)).view_as(values)
    # With the weights of `nn.MultiheadAttention`.
    attn, query = resampler.attn, resampler.query_norm(resampler.query).unsqueeze(0)
    parts = zip((query, keys, values), attn.in_proj_weight.chunk(3), attn.in_proj_bias.chunk(3), strict=True)
    query, key, value = (functional.linear(*part).unflatten(-1, (attn.num_heads, -1)).transpose(1, 2) for part in parts)
    scale = query.shape[-1] ** -0.5
    attended = attention.dense(query.expand(len(keys), -1, -1, -1), key, value, is_key[:, None, None, :], scale)
    return resampler.post_norm(attn.out_proj(attended.reshape(-1, keys.shape[-1]))) @ resampler.proj


def resampled_padded(
    resampler: Any, features: Sequence[torch.Tensor], grids: Sequence[tuple[int, int]]
) -> torch.Tensor:
    """The published form, `[S * Q, W]`: slices padded to the longest, padding masked; the reference of the packed form.

    Args:
        features: `[h * w, kv_width]` tower output of each slice.
        grids: Patch rows and columns of each slice.
    """
    table = axis_table(resampler, max(max(grid) for grid in grids))
    padded = nn.utils.rnn.pad_sequence(list(features), batch_first=True)
    values = resampler.kv_norm(resampler.kv_proj(padded))
    sines = nn.utils.rnn.pad_sequence([_grid_sines(table, h, w) for h, w in grids], batch_first=True)
    lengths = torch.tensor([h * w for h, w in grids], device=values.device)
    is_padding = torch.arange(values.shape[1], device=values.device) >= lengths[:, None]
    query = resampler.query_norm(resampler.query).expand(len(grids), -1, -1)
    attended, _ = resampler.attn(query, values + sines, values, key_padding_mask=is_padding, need_weights=False)
    return (resampler.post_norm(attended) @ resampler.proj).flatten(0, 1)


def _dense_keys(cu_seqlens: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed row of every dense key (`[S * length]`), and which dense keys count (`[S, length]` bool).

    A missing key repeats its slice's last one, and an empty slice takes the last real row: padded rows of the packed
    tensor may hold NaN, which no mask removes. Every slice, empty ones too, keeps one key, so no softmax is empty.
    """
    starts, lengths = cu_seqlens[:-1], cu_seqlens.diff()
    offsets = torch.arange(length, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    present = lengths.clamp(min=1)[:, None]
    rows = starts[:, None] + torch.minimum(offsets, present - 1)
    return torch.minimum(rows, cu_seqlens[-1:] - 1).flatten(), offsets < present


def _grid_sines(table: torch.Tensor, h: int, w: int) -> torch.Tensor:
    """`[h * w, W]`: the table of the column, then that of the row."""
    columns = table[:w].unsqueeze(0).expand(h, -1, -1)
    rows = table[:h].unsqueeze(1).expand(-1, w, -1)
    return torch.cat([columns, rows], dim=-1).flatten(0, 1)


PACKED_TOWER = Tower("minicpmv4_6", "MiniCPMV4_6VisionConfig", "MiniCPMV4_6VisionModel")


def packed_siglip(vision_config: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """MiniCPM-V 4.6's tower without its merger: SigLIP's layers with attention segments over packed patches."""
    # A window of one patch keeps the merger small until it is dropped.
    tower = PACKED_TOWER.build({**vision_config, "window_kernel_size": (1, 1)}, dtype)
    del tower.vit_merger
    return tower


class MiniCPMVEncoder(VisionEncoder):
    """`MiniCPMV4_6VisionModel` without its merger, and the resampler; pixels `[N, 588]` as (channel, y, x)."""

    rule_class = MiniCPMVRule
    rule: MiniCPMVRule
    versions: ClassVar[tuple[str, ...]] = ("2.6", "4.0")
    blocks = "visual.encoder.layers"

    image_settings = ("patch_size", "scale_resolution", "max_slice_nums", "norm_mean", "norm_std")
    video_settings = ("fps", "max_frames")
    # Without slices the published processor does not resize the image either.
    fixed_settings: ClassVar[Mapping[str, Any]] = {"slice_mode": True}
    checkpoint_keys = (
        (r"vpm\.", "visual."),
        (r"resampler\.ln_q\.", "resampler.query_norm."),
        (r"resampler\.ln_(kv|post)\.", r"resampler.\1_norm."),
        # A stored position table is made anew.
        (r"resampler\.(?!pos_embed$)", "resampler."),
    )

    @classmethod
    def build_tower(cls, vision_config: Mapping[str, Any], extra: Mapping[str, Any], dtype: torch.dtype) -> Any:
        return packed_siglip(vision_config, dtype)

    @classmethod
    def following_modules(cls, config: Any, extra: Mapping[str, Any]) -> dict[str, nn.Module]:
        sizes = (extra["query_num"], extra["text_hidden_size"], extra["resampler_heads"], config.hidden_size)
        return {"resampler": build_resampler(*sizes)}

    @classmethod
    def accepts_model_config(cls, config: Mapping[str, Any]) -> bool:
        """True for the config.json of this row; the versions share one architecture name."""
        return model_version(config) in cls.versions

    @classmethod
    def read_model_config(cls, config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        from transformers.models.siglip import SiglipVisionConfig

        # The published code reads its file with this class, whose defaults hold for what is left out.
        published = {**SiglipVisionConfig().to_dict(), **config["vision_config"]}
        vision_config = {name: published[name] for name in own_fields(SiglipVisionConfig) if name != "vision_use_head"}
        if config.get("drop_vision_last_layer"):
            vision_config["num_hidden_layers"] -= 1
        width = config["hidden_size"]
        extra = {"text_hidden_size": width, "query_num": config["query_num"], "resampler_heads": width // 128}
        return vision_config, extra

    def pixel_row_shape(self, name: str) -> tuple[int, ...]:
        return (self.rule.channels * self.rule.patch**2,)

    def _slices(self, capacity: GraphKey) -> int:
        """Slices of a graph; a budget that is no multiple of a slice's tokens is rounded up to whole slices."""
        return max(capacity.segment_slots, -(-capacity.token_budget // self.rule.queries))

    def buffer_rows(self, capacity: GraphKey) -> int:
        return self._slices(capacity) * self.rule.slice_capacity(capacity.axis_key)

    def metadata_fields(self, capacity: GraphKey) -> dict[str, MetadataField]:
        patches = self.buffer_rows(capacity)
        return {
            "cu_seqlens": MetadataField((self._slices(capacity) + 1,), "int32", PAD_REPEAT_LAST),
            "position_ids": MetadataField((patches,), "int32"),
            "grid_positions": MetadataField((patches, 2), "int32"),
        }

    def compute_metadata(self, items: Sequence[ItemGeometry]) -> dict[str, np.ndarray]:
        grids = [grid for item in items for grid in self.rule.checked_slices(item).grids]
        side = int(self.rule.vision_config["image_size"]) // self.rule.patch
        return {
            "cu_seqlens": offsets_of([rows * columns for rows, columns in grids]),
            "position_ids": np.concatenate([nearest_positions(*self.rule.tower_grid(grid), side) for grid in grids]),
            # The resampler's table takes the column first.
            "grid_positions": np.concatenate([block_positions(*grid, 1) for grid in grids])[:, ::-1],
            # Read on the host only: a graph's key bounds it.
            "largest_side": np.array([max(map(max, grids))], dtype=np.int32),
        }

    def compute_scalars(self, metadata: Mapping[str, np.ndarray]) -> dict[str, int]:
        return {**super().compute_scalars(metadata), "largest_side": int(metadata["largest_side"][0])}

    def capture_scalars(self, capacity: GraphKey) -> dict[str, int]:
        # A batch of this graph has no slice outside the key's grid, nor one above the capacity proven for that grid.
        return {"max_seqlen": self.rule.slice_capacity(capacity.axis_key), "largest_side": max(capacity.axis_key)}

    def dummy_items(self, capacity: GraphKey) -> list[ItemGeometry]:
        slices = max(1, capacity.token_budget // self.rule.queries)
        return [SliceGeometry(IMAGE, (self.rule.largest_grid(capacity.axis_key),) * slices)]

    def forward_packed(self, inputs: Tensors, scalars: Mapping[str, int], path: str) -> Sequence[torch.Tensor]:
        # A convolution whose kernel is its stride is a product with the flattened kernel.
        kernel = self.visual.embeddings.patch_embedding
        hidden = functional.linear(inputs["pixel_values"], kernel.weight.flatten(1), kernel.bias)
        hidden = hidden + self.visual.embeddings.position_embedding(inputs["position_ids"])
        hidden = self.visual.encoder(
            inputs_embeds=hidden.unsqueeze(0), cu_seqlens=inputs["cu_seqlens"], max_seqlen=scalars["max_seqlen"]
        ).last_hidden_state
        return [
            resampled(
                self.modules["resampler"],
                self.visual.post_layernorm(hidden)[0],
                inputs["cu_seqlens"],
                inputs["grid_positions"],
                scalars["max_seqlen"],
                scalars["largest_side"],
                self.attention,
            )
        ]

    def stock_rows(self, mm_kwargs: EncoderInputs) -> torch.Tensor:
        """transformers' tower on strips of patches, then the published padded resampler, over all slices at once."""
        grids = [grid for item in mm_kwargs.chosen for grid in self.rule.checked_slices(item).grids]
        patch = self.rule.patch
        pixels = mm_kwargs.rows("pixel_values").materialize()
        strip = (
            pixels.view(len(pixels), -1, patch, patch).permute(1, 2, 0, 3).reshape(1, -1, patch, len(pixels) * patch)
        )
        # The processor hands sizes over on the host, where the tower loops over them.
        sizes = torch.tensor([self.rule.tower_grid(grid) for grid in grids], dtype=torch.int32)
        hidden = self.visual(strip, target_sizes=sizes, use_vit_merger=False).last_hidden_state[0]
        parts = hidden.split([rows * columns for rows, columns in grids])
        return resampled_padded(self.modules["resampler"], parts, grids)

    def image_rows(self, image: Any, item: ItemGeometry) -> Tensors:
        """Patches of the overview and of each cut; transformers has no processor for these models."""
        from PIL.Image import Resampling

        rule, image = self.rule, image.convert("RGB")
        cuts = rule.cut_grid(*image.size)
        slices = [image.resize(rule.slice_size(*image.size, upscale=cuts is None), Resampling.BICUBIC)]
        if cuts is not None:
            width, height = rule.cut_size(image.width, image.height, cuts)
            refined = image.resize((width * cuts[0], height * cuts[1]), Resampling.BICUBIC)
            slices += [
                refined.crop((column * width, row * height, (column + 1) * width, (row + 1) * height))
                for row in range(cuts[1])
                for column in range(cuts[0])
            ]
        mean, std = rule.processor["norm_mean"], rule.processor["norm_std"]
        patches = [cut_patches(normalized(part, mean, std), rule.patch).flatten(1) for part in slices]
        return {"pixel_values": torch.cat(patches)}


class MiniCPMV25Encoder(MiniCPMVEncoder):
    """MiniCPM-V 2.5: the same modules; only the tower's positions differ."""

    rule_class = MiniCPMV25Rule
    versions: ClassVar[tuple[str, ...]] = ("2.5",)


class MiniCPMV45Encoder(MiniCPMVEncoder):
    """MiniCPM-V 4.5 and MiniCPM-o 4.5, images: the same modules."""

    rule_class = MiniCPMVImageRule
    versions = ("4.5",)


def model_version(config: Mapping[str, Any]) -> str:
    """Version in a published config.json; the oldest ones do not name theirs."""
    version = config.get("version")
    if version is not None:
        return str(float(version)) if isinstance(version, int) else str(version)
    if "MiniCPMO" in config.get("architectures", ()):
        return "2.6"
    return "2.0" if (config.get("hidden_size"), config.get("query_num")) == (2304, 64) else "2.5"
