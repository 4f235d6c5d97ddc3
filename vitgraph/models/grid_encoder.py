"""What adapters of patch-grid towers share: modules, keys, pixel buffers, the stock forward and real images."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from vitgraph.errors import ModelError
from vitgraph.models.base import PAD_REPEAT_LAST, EncoderInputs, MetadataField, PixelField
from vitgraph.models.encoder import VisionEncoder
from vitgraph.models.geometry import GeometryRule, GridGeometry, ItemGeometry, MergedGridRule
from vitgraph.models.grid_metadata import PositionTable, grid_positions, segment_offsets, table_taps
from vitgraph.planning.budgets import GraphKey
from vitgraph.planning.items import IMAGE

if TYPE_CHECKING:
    import torch
    from torch import nn

PUBLISHED_KEYS = ((r"^(?:vlm\.|thinker\.|model\.)*(?:visual|vision_tower)\.", "visual."),)
"""What stands before the names of a tower's tensors in published files."""

PROCESSOR_SETTINGS = ("do_resize", "size", "patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std")
"""Settings of a preset's processor that transformers' patch-packing image processors take."""


class GridTowerEncoder(VisionEncoder):
    """A transformers tower over packed patches in merge-block order, with one attention segment a frame.

    A family gives the tower's classes, the config values that published files leave out, and its own metadata.
    """

    rule: MergedGridRule
    vision_defaults: ClassVar[Mapping[str, Any]] = {}
    image_processor: ClassVar[str | None] = "qwen2_vl.image_processing_pil_qwen2_vl:Qwen2VLImageProcessorPil"
    resize_switch: ClassVar[tuple[str, ...]] = ("do_resize",)
    follows_pixels: ClassVar[bool] = True
    table: ClassVar[PositionTable | None] = None
    """The learned position table, which is sampled at each patch; None where the tower has none."""
    position_merge: ClassVar[int | None] = None
    """Side of the blocks in whose order patches come, where it is not the merge."""
    checkpoint_keys: ClassVar[Sequence[tuple[str, str]]] = PUBLISHED_KEYS
    patch_convolutions: ClassVar[Sequence[str]] = ("visual.patch_embed.proj",)
    blocks: ClassVar[str | None] = "visual.blocks"

    @classmethod
    @abstractmethod
    def tower_class(cls) -> tuple[type[Any], type[Any]]:
        """transformers' config and model classes of the tower."""

    @classmethod
    def vision_config_class(cls) -> type[Any] | None:
        return cls.tower_class()[0]

    @classmethod
    def build_modules(
        cls, vision_config: Mapping[str, Any], extra: Mapping[str, Any], dtype: torch.dtype, device: torch.device
    ) -> nn.ModuleDict:
        from torch import nn

        config_class, model_class = cls.tower_class()
        with device:
            tower = model_class._from_config(config_class(**vision_config), attn_implementation="sdpa", dtype=dtype)
            following = cls.following_modules(tower.config, extra)
        return nn.ModuleDict({"visual": tower, **{name: module.to(dtype) for name, module in following.items()}})

    @classmethod
    def following_modules(cls, config: Any, extra: Mapping[str, Any]) -> dict[str, nn.Module]:
        """What follows the tower of that config, by name: nothing, where the tower has its merger."""
        return {}

    @classmethod
    def read_model_config(cls, config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        vision_config, extra = super().read_model_config(config)
        # Older files call the channels `in_chans`, which transformers ignores.
        channels = {"in_channels": vision_config["in_chans"]} if "in_chans" in vision_config else {}
        return {**cls.vision_defaults, **channels, **vision_config}, extra

    # -- capacity --------------------------------------------------------------------------------------------------

    def pixel_row_shape(self, name: str) -> tuple[int, ...]:
        config = self.rule.vision_config
        channels = config.get("in_channels") or config["num_channels"]
        return (channels * config["temporal_patch_size"] * config["patch_size"] ** 2,)

    def patch_rows(self, capacity: GraphKey) -> int:
        """Patches N of a graph: the merge gives each output token `merge**2` of them."""
        return capacity.token_budget * self.rule.merge**2

    def pixel_fields(self, capacity: GraphKey) -> dict[str, PixelField]:
        return {"pixel_values": PixelField(self.patch_rows(capacity), self.pixel_row_shape("pixel_values"))}

    def metadata_fields(self, capacity: GraphKey) -> dict[str, MetadataField]:
        taps = partial(MetadataField, (self.patch_rows(capacity), self.table.taps if self.table else 0))
        return {
            "cu_seqlens": MetadataField((capacity.segment_slots + 1,), "int32", PAD_REPEAT_LAST),
            "position_ids": MetadataField((self.patch_rows(capacity), 2), "int32"),
            **({"interp_indices": taps("int32"), "interp_weights": taps("float32")} if self.table else {}),
        }

    def grids(self, items: Sequence[ItemGeometry]) -> list[GridGeometry]:
        """Patch grids of the items, in order."""
        return [self.rule.checked_grid(item) for item in items]

    def compute_metadata(
        self, items: Sequence[ItemGeometry], path: str, axis_key: tuple[int, ...]
    ) -> dict[str, np.ndarray]:
        grids = self.grids(items)
        positions = grid_positions(grids, self.position_merge or self.rule.merge)
        found = {"cu_seqlens": segment_offsets(grids), "position_ids": positions}
        if self.table:
            order, side = self.position_merge or self.rule.merge, self.table.side(self.rule)
            axes = (side, self.table.axis, self.table.coordinates)
            frames = [table_taps(grid.h, grid.w, order, *axes) for grid in grids for _ in range(grid.t)]
            for name, parts in zip(("interp_indices", "interp_weights"), zip(*frames, strict=True), strict=True):
                found[name] = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return found

    def capture_scalars(self, capacity: GraphKey) -> dict[str, int]:
        # One image may fill the whole budget, so no tighter bound of a segment is safe.
        return {"max_seqlen": self.patch_rows(capacity)}

    def dummy_items(self, capacity: GraphKey) -> list[ItemGeometry]:
        merge = self.rule.merge
        return [GridGeometry(IMAGE, 1, merge, merge * capacity.token_budget)]

    # -- reference and real images ---------------------------------------------------------------------------------

    def grid_rows(self, grid: GridGeometry) -> list[list[int]]:
        """Rows of transformers' `grid_thw` that stand for the item in a stock forward."""
        return [[grid.t, grid.h, grid.w]]

    def stock_rows(self, mm_kwargs: EncoderInputs) -> torch.Tensor:
        import torch

        rows = [row for item in mm_kwargs.chosen for row in self.grid_rows(self.rule.checked_grid(item))]
        grid_thw = torch.tensor(rows, device=self.device)
        return self.modules["visual"](mm_kwargs.rows("pixel_values").materialize(), grid_thw=grid_thw).pooler_output

    def preprocess(self, images: Sequence[Any]) -> tuple[list[ItemGeometry], dict[str, torch.Tensor]]:
        processor_class = self.image_processor_class()
        assert processor_class is not None
        return preprocess_patches(self, processor_class, images)


def cut_patches(image: torch.Tensor, patch: int, merge: int = 1) -> torch.Tensor:
    """Patches `[N, C, P, P]` of an image `[C, H, W]` in merge-block order; `merge` 1 is raster order."""
    sides = (merge, patch)
    cut = image.unflatten(2, (-1, *sides)).unflatten(1, (-1, *sides))
    return cut.permute(1, 4, 2, 5, 0, 3, 6).flatten(0, 3)


def preprocess_patches(
    encoder: VisionEncoder, processor_class: type[Any], images: Sequence[Any], **settings: Any
) -> tuple[list[ItemGeometry], dict[str, torch.Tensor]]:
    """Runs an image processor that packs patches, with the settings of the encoder's rule.

    Args:
        encoder: Gives the settings, the device and the dtype.
        processor_class: transformers' class; its output has `pixel_values` and `image_grid_thw`.
        images: PIL images.
        settings: Settings that the rule has under other names.

    Returns:
        Grids, and packed pixels `[N, 3 * temporal * patch**2]` on the encoder's device.

    Raises:
        InputError: The processor does not take an image's size.
        ModelError: The processor made another grid than the rule says.
    """
    import torch

    rule: GeometryRule = encoder.rule
    expected = [rule.image_geometry(image.width, image.height) for image in images]
    own = {name: rule.processor[name] for name in PROCESSOR_SETTINGS if name in rule.processor}
    # The processor's constructor writes into `size`.
    processor = processor_class(**copy.deepcopy({**own, **rule.processor.get("pixels", {}), **settings}))
    batch = processor(images=list(images), return_tensors="np")
    grids: list[ItemGeometry] = [GridGeometry(IMAGE, int(t), int(h), int(w)) for t, h, w in batch["image_grid_thw"]]
    if grids != expected:
        raise ModelError(
            f"{processor_class.__name__} made the grids {grids}, the rule of {type(rule).__name__} says {expected}; "
            "this version of transformers resizes differently"
        )
    pixels = torch.from_numpy(batch["pixel_values"]).to(device=encoder.device, dtype=encoder.dtype)
    return grids, {"pixel_values": pixels}
