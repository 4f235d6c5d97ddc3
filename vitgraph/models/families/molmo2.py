"""Molmo 2: a SigLIP-like tower on overlapping crops and the whole image; a token pools up to four patches by attention.

Images only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from vitgraph.errors import InputError
from vitgraph.models import nn, torch
from vitgraph.models.base import EncoderInputs, MetadataField, Tensors
from vitgraph.models.encoder import VisionEncoder
from vitgraph.models.family import CHANNELS, Tower
from vitgraph.models.geometry import GeometryRule, ItemGeometry
from vitgraph.models.tiles import square_side, tile_layouts
from vitgraph.models.two_path import CropGeometry
from vitgraph.planning.budgets import IMAGE, EncoderItemSpec, GraphKey

TOWER, ADAPTER = r"vision_backbone\.image_vit\.", r"vision_backbone\."
BLOCK = TOWER + r"transformer\.resblocks\.(\d+)\."
VISION_FIELDS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "hidden_act", "layer_norm_eps", "image_size", "patch_size", "num_channels", "attention_bias"),
)
ADAPTER_FIELDS = (
    *("vision_feature_layer", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("attention_bias", "hidden_act", "intermediate_size", "text_hidden_size", "mlp_bias"),
)


def pooled(patches: np.ndarray, pool: int) -> np.ndarray:
    """Squares of `pool x pool` of a grid of patch numbers, `[tokens, pool**2]`; -1 where the grid ends before."""
    spare = [-side % pool for side in patches.shape]
    padded = np.pad(patches, [(rest // 2, rest - rest // 2) for rest in spare], constant_values=-1)
    rows, columns = (side // pool for side in padded.shape)
    return padded.reshape(rows, pool, columns, pool).swapaxes(1, 2).reshape(rows * columns, -1)


class Molmo2Rule(GeometryRule):
    """The whole image as one crop, then overlapping crops of it stretched to the best-fitting canvas."""

    modalities = (IMAGE,)
    has_segments = False

    def prepare(self) -> None:
        self.side = square_side(self.vision_config["image_size"], "image_size") // self.patch
        self.left, self.right = (int(margin) for margin in self.processor["overlap_margins"])
        self.pool = square_side(self.processor["pooling_size"], "pooling_size")
        self.item_patches = lru_cache(maxsize=256)(self._item_patches)
        known = [
            CropGeometry(IMAGE, columns, rows) for rows, columns in tile_layouts(1, int(self.processor["max_crops"]))
        ]
        self.known = {item: sum(rows * columns for rows, columns in self.grids(item)) for item in known}

    @property
    def output_width(self) -> int:
        return int(self.extra["adapter_config"]["text_hidden_size"])

    @property
    def window(self) -> int:
        """Patches on a side by which a crop is farther than the one before it."""
        return self.side - self.left - self.right

    def canvas(self, item: CropGeometry) -> tuple[int, int]:
        """Rows and columns of patches of the image that is cut."""
        margins = self.left + self.right
        return item.rows * self.window + margins, item.columns * self.window + margins

    def grids(self, item: CropGeometry) -> list[tuple[int, int]]:
        """Rows and columns of tokens of the whole image and of its crops."""
        sizes = ((self.side, self.side), self.canvas(item))
        return [(-(-rows // self.pool), -(-columns // self.pool)) for rows, columns in sizes]

    def image_geometry(self, width: int, height: int) -> CropGeometry:
        known = list(self.known)
        margins, window = (self.left + self.right) * self.patch, self.window * self.patch
        sides = np.array([(item.rows, item.columns) for item in known], dtype=np.float32) * window
        # The processor compares these quotients in float32; an image within the margins has none that is positive.
        with np.errstate(divide="ignore", invalid="ignore"):
            scales = (sides / np.array([height - margins, width - margins], dtype=np.float32)).min(axis=1)
        if (scales < 1).all():
            return known[int(scales.argmax())]
        return known[int(np.where(scales < 1, np.float32(10e9), scales).argmin())]

    def checked_crops(self, geometry: ItemGeometry) -> CropGeometry:
        """The geometry as a grid of crops.

        Raises:
            InputError: It is something else, or has more crops than the processor cuts.
        """
        if not isinstance(geometry, CropGeometry) or geometry not in self.known:
            raise InputError(f"expected a grid of 1 to {self.processor['max_crops']} crops, got {geometry!r}")
        return geometry

    def _item_patches(self, item: CropGeometry) -> np.ndarray:
        """Patches that each token pools, `[tokens, pool**2]` int32, numbered over the item's crops; -1 for none."""
        side, count = self.side, self.side**2
        crops = np.arange(item.crops * count, dtype=np.int32).reshape(item.rows, item.columns, side, side)
        # Of patches in several crops, the one farther from its crop's edge counts.
        crops[1:, :, : self.left], crops[:, 1:, :, : self.left] = -1, -1
        crops[:-1, :, side - self.right :], crops[:, :-1, :, side - self.right :] = -1, -1
        flat = crops.swapaxes(1, 2).reshape(-1)
        cut = pooled(flat[flat >= 0].reshape(self.canvas(item)), self.pool)
        whole = pooled(np.arange(count, dtype=np.int32).reshape(side, side), self.pool)
        return np.concatenate([whole, np.where(cut >= 0, cut + count, -1)]).astype(np.int32)

    def item_spec(self, geometry: ItemGeometry) -> EncoderItemSpec:
        item = self.checked_crops(geometry)
        return EncoderItemSpec(IMAGE, 1 + item.crops, self.known[item], 1)

    def pixel_rows(self, geometry: ItemGeometry) -> dict[str, int]:
        return {"pixel_values": 1 + self.checked_crops(geometry).crops}

    def min_token_budget(self) -> int:
        return min(self.known.values())

    def most_crops(self, tokens: int) -> int:
        """Crops of any items that have so many tokens together."""
        return max(tokens * (1 + item.crops) // own for item, own in self.known.items())

    def flops(self, geometry: ItemGeometry) -> float:
        spec, adapter = self.item_spec(geometry), self.extra["adapter_config"]
        tower = spec.input_size * (self.embedding_flops(self.side**2) + self.tower_shape.flops(self.side**2))
        inner, width, keys = adapter["num_attention_heads"] * adapter["head_dim"], adapter["hidden_size"], self.pool**2
        levels = len(adapter["vision_feature_layer"])
        pooling = inner * ((1 + 2 * keys) * width * levels + width + 2 * keys)
        mlp = adapter["intermediate_size"] * (2 * width + self.output_width)
        return tower + 2.0 * spec.output_tokens * (pooling + mlp)


class Molmo2Encoder(VisionEncoder):
    """`Molmo2VisionModel` and `Molmo2Adapter`; pixels `[crops, patches, P * P * 3]`, channels fastest."""

    tower = Tower("molmo2", "Molmo2VisionConfig", "Molmo2VisionModel")
    rule_class = Molmo2Rule
    rule: Molmo2Rule
    calls_varlen = False
    image_processor = "molmo2.image_processing_molmo2:Molmo2ImageProcessor"
    checkpoint_keys = (
        (BLOCK + r"attention\.w([qkvo])\.", r"visual.layers.\1.self_attn.\2_proj."),
        (BLOCK + r"feed_forward\.w([12])\.", r"visual.layers.\1.mlp.fc\2."),
        (BLOCK + r"attention_norm\.", r"visual.layers.\1.layer_norm1."),
        (BLOCK + r"ffn_norm\.", r"visual.layers.\1.layer_norm2."),
        (TOWER, "visual."),
        (ADAPTER + r"image_pooling_2d\.w([qkvo])\.", r"adapter.image_pooling_2d.\1_proj."),
        (ADAPTER + r"image_projector\.w1\.", "adapter.image_projector.gate_proj."),
        (ADAPTER + r"image_projector\.w2\.", "adapter.image_projector.down_proj."),
        (ADAPTER + r"image_projector\.w3\.", "adapter.image_projector.up_proj."),
        (r"vision_tower\.", "visual."),
        (r"multi_modal_projector\.", "adapter."),
    )
    blocks = "visual.layers"
    image_settings = ("max_crops", "overlap_margins", "pooling_size", *CHANNELS)

    @classmethod
    def following_modules(cls, config: Any, extra: Mapping[str, Any]) -> dict[str, nn.Module]:
        adapter = Tower("molmo2", "Molmo2AdapterConfig", "Molmo2Adapter")
        return {"adapter": adapter.build(extra["adapter_config"], torch.get_default_dtype())}

    @classmethod
    def read_model_config(cls, config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        from transformers.models.molmo2.configuration_molmo2 import Molmo2Config

        # transformers' class names the original file's fields anew, and leaves out layers that have no weights.
        parts = ("vision_config", "vit_config", "adapter_config")
        given: dict[str, Any] = {name: dict(config[name]) for name in parts if config.get(name)}
        full: Any = Molmo2Config(**given)
        vision = {name: getattr(full.vision_config, name) for name in VISION_FIELDS}
        return vision, {"adapter_config": {name: getattr(full.adapter_config, name) for name in ADAPTER_FIELDS}}

    def pixel_row_shape(self, name: str) -> tuple[int, ...]:
        return (self.rule.side**2, self.rule.channels * self.rule.patch**2)

    def buffer_rows(self, capacity: GraphKey) -> int:
        return self.rule.most_crops(capacity.token_budget)

    def metadata_fields(self, capacity: GraphKey) -> dict[str, MetadataField]:
        return {"patches": MetadataField((capacity.token_budget, self.rule.pool**2), "int32", padding=-1)}

    def compute_metadata(self, items: Sequence[ItemGeometry]) -> dict[str, np.ndarray]:
        parts, first = [], 0
        for item in items:
            own = self.rule.item_patches(self.rule.checked_crops(item))
            parts.append(np.where(own >= 0, own + first, -1).astype(np.int32))
            first += self.rule.item_spec(item).input_size * self.rule.side**2
        return {"patches": np.concatenate(parts)}

    def dummy_items(self, capacity: GraphKey) -> list[ItemGeometry]:
        return [min(self.rule.known, key=lambda item: self.rule.known[item])]

    def forward_packed(self, inputs: Tensors, scalars: Mapping[str, int], path: str) -> Sequence[torch.Tensor]:
        features = self._features(inputs["pixel_values"]).flatten(0, 1)
        patches = inputs["patches"]
        is_there = patches >= 0
        pooled = features[patches.clamp(min=0)] * is_there[..., None].to(features.dtype)
        count = is_there.sum(-1).clamp(min=1)[:, None, None].to(features.dtype)
        query = pooled.sum(-2, keepdim=True) / count
        hidden, _ = self.modules["adapter"].image_pooling_2d(query, pooled, attention_mask=is_there[:, None, None])
        return [self.modules["adapter"].image_projector(hidden.squeeze(1))]

    def _features(self, pixels: torch.Tensor) -> torch.Tensor:
        """What the chosen layers give, side by side: `[crops, patches, levels * K]`."""
        hidden, states = self.visual.patch_embedding(pixels) + self.visual.positional_embedding, []
        for layer in self.visual.layers:
            hidden = layer(hidden, None)
            states.append(hidden)
        return torch.cat([states[level] for level in self.rule.extra["adapter_config"]["vision_feature_layer"]], dim=-1)

    def stock_rows(self, mm_kwargs: EncoderInputs) -> torch.Tensor:
        pixels = mm_kwargs.rows("pixel_values").materialize()
        patches = torch.from_numpy(self.compute_metadata(mm_kwargs.chosen)["patches"]).long()
        levels = self.rule.extra["adapter_config"]["vision_feature_layer"]
        states = self.visual(pixels, output_hidden_states=True).hidden_states
        features = torch.cat([states[level + 1 if level >= 0 else level] for level in levels], dim=-1)
        return self.modules["adapter"](features, patches.to(self.device)).last_hidden_state

    def processor_settings(self) -> dict[str, Any]:
        side, patch = self.rule.side * self.rule.patch, self.rule.patch
        return {**super().processor_settings(), "patch_size": patch, "size": {"height": side, "width": side}}

    def image_rows(self, image: Any, item: ItemGeometry) -> Tensors:
        return {"pixel_values": self.processed(image.convert("RGB"))["pixel_values"]}
