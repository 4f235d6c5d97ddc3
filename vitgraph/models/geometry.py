"""From an item's size to its geometry, tokens and planner facts: the processors' rules, without torch.

Each model family has one `GeometryRule`, built from the vision part of its config and its processor's settings. The
rules here are shared by several families; the tests compare every rule with the processor and with the tower.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

from vitgraph.errors import InputError
from vitgraph.models.resizing import smart_resize
from vitgraph.planning.budgets import DEFAULT_PATH, IMAGE, MOST_FRAMES, VIDEO, CaptureAxis, EncoderItemSpec


@dataclass(frozen=True, slots=True)
class ItemGeometry:
    """Base of a family's description of one item, an `image` or a `video`: hashable, free of pixels."""

    modality: str


@dataclass(frozen=True, slots=True)
class GridGeometry(ItemGeometry):
    """A patch grid `t x h x w`: temporal steps, patch rows, patch columns."""

    t: int
    h: int
    w: int

    @property
    def patches(self) -> int:
        return self.t * self.h * self.w


@dataclass(frozen=True, slots=True)
class TileGeometry(ItemGeometry):
    """A number of equal tiles (crops, slices, frames), each its own attention segment."""

    tiles: int


@dataclass(frozen=True, slots=True)
class EncoderCudaGraphPathConfig:
    """Capture policy of one encoder path.

    Attributes:
        min_token_budget: Smallest budget of the path (output tokens of one unit: an item, a tile).
        allow_zero_tokens: The path may be absent from an item, and is then skipped.
        has_segments: Attention takes a segment list; False for dense tiles, whose graphs need one slot tier.
    """

    min_token_budget: int
    allow_zero_tokens: bool = False
    has_segments: bool = True


@dataclass(frozen=True, slots=True)
class EncoderCudaGraphConfig:
    """Static facts of a model that the manager and the planner need.

    Attributes:
        modalities: `image`, `video`.
        output_width: Columns D of the graph's output (the language model's width; times the deepstack levels).
        paths: Capture policy of each path; single-path models have `default` only.
        axes: Capture axes.
        max_frames_per_video: Segments of the longest video that the processor makes.
        min_tokens_per_segment: Fewest output tokens of one attention segment; bounds the segment slots.
    """

    modalities: tuple[str, ...]
    output_width: int
    paths: Mapping[str, EncoderCudaGraphPathConfig] = field(
        default_factory=lambda: {DEFAULT_PATH: EncoderCudaGraphPathConfig(1)}
    )
    axes: tuple[CaptureAxis, ...] = ()
    max_frames_per_video: int = 1
    min_tokens_per_segment: int = 1

    @property
    def is_multi_path(self) -> bool:
        return len(self.paths) > 1


class GeometryRule(ABC):
    """How one model family turns sizes into grids or tiles, and those into tokens.

    Args:
        vision_config: The `vision_config` part of the model's config.json, as a dict.
        processor: The processor's settings (`size`, `patch_size`, `video`, ...), as a dict.
        extra: Facts outside the vision config that the encoder needs (`text_hidden_size`, ...).

    Attributes:
        modalities: `image`, `video`; a model of the family may take fewer than its tower could.
    """

    modalities: tuple[str, ...] = (IMAGE, VIDEO)
    without_videos: ClassVar[str] = "this model takes images only"
    """Why a video is refused where `modalities` has none."""
    mlp_matrices: ClassVar[int] = 2
    """Matrices of a block's MLP: 3 where it is gated."""
    merge_field: ClassVar[str] = "spatial_merge_size"
    """Field of `vision_config` or `extra` that counts the patches on a side of one output token."""
    has_segments: ClassVar[bool] = True
    """Attention takes a segment list, which tokens alone do not bound."""

    def __init__(
        self, vision_config: Mapping[str, Any], processor: Mapping[str, Any], extra: Mapping[str, Any] | None = None
    ) -> None:
        self.vision_config = dict(vision_config)
        self.processor = dict(processor)
        self.extra = dict(extra or {})
        self.prepare()

    def prepare(self) -> None:  # noqa: B027 - most families have nothing to do
        """Derives once what a family's methods share.

        Raises:
            ModelError: Settings contradict each other, or are not supported.
        """

    @property
    def output_width(self) -> int:
        """Columns of one output row, as the language model takes it."""
        return int(self.extra["text_hidden_size"])

    @property
    def video(self) -> Mapping[str, Any]:
        """The video processor's settings."""
        return self.processor["video"]

    @property
    def video_pixel_range(self) -> tuple[int, int]:
        """Fewest and most pixels of a video, or of each of its frames, as the family's processor counts."""
        return int(self.video["shortest_edge"]), int(self.video["longest_edge"])

    @property
    def merge(self) -> int:
        """Patches on a side of one output token."""
        return int(self.vision_config.get(self.merge_field) or self.extra.get(self.merge_field) or 1)

    @cached_property
    def patch(self) -> int:
        """Pixels on a side of a patch."""
        return int(self.vision_config["patch_size"])

    @property
    def channels(self) -> int:
        return int(self.vision_config.get("in_channels") or self.vision_config.get("num_channels", 3))

    @property
    def temporal(self) -> int:
        """Frames in one patch."""
        return int(self.vision_config.get("temporal_patch_size", 1))

    @property
    def merged_width(self) -> int:
        """Columns of the patches of one output token side by side."""
        return self.tower_shape.width * self.merge**2

    @property
    def tower_shape(self) -> TowerShape:
        """What the operations of the tower's blocks depend on, by the names that most vision configs have."""
        config = self.vision_config
        depth = config.get("depth") or config["num_hidden_layers"]
        return TowerShape(depth, config["hidden_size"], config["intermediate_size"], self.mlp_matrices)

    @abstractmethod
    def image_geometry(self, width: int, height: int) -> ItemGeometry:
        """Geometry of an image of `width` x `height` pixels.

        Raises:
            InputError: The processor does not take this size; the message says why.
        """

    def video_geometry(self, width: int, height: int, frames: int, fps: float | None) -> ItemGeometry:
        """Geometry of a video; `fps` is None where `frames` already are the frames that the processor gets."""
        raise InputError(f"a video of {width}x{height}x{frames} was given, but {self.without_videos}")

    @abstractmethod
    def item_spec(self, geometry: ItemGeometry) -> EncoderItemSpec:
        """Planner facts of an item."""

    @abstractmethod
    def pixel_rows(self, geometry: ItemGeometry) -> dict[str, int]:
        """Rows that the item has in each pixel buffer."""

    @abstractmethod
    def min_token_budget(self) -> int:
        """Smallest budget that is of use: the output tokens of a small item, or of one unit of it."""

    @property
    def paths(self) -> Mapping[str, EncoderCudaGraphPathConfig]:
        """Capture policy of each path."""
        return {DEFAULT_PATH: EncoderCudaGraphPathConfig(self.min_token_budget(), has_segments=self.has_segments)}

    @property
    def axes(self) -> tuple[CaptureAxis, ...]:
        """Capture axes."""
        return ()

    def most_segments(self) -> int:
        """Attention segments (or tiles) of the largest item that the processor makes."""
        return 1

    def min_tokens_per_segment(self) -> int:
        """Fewest output tokens of one attention segment, or of a unit of the budget where it has no segments."""
        return 1 if self.has_segments else self.min_token_budget()

    def graph_config(self) -> EncoderCudaGraphConfig:
        """Static facts for the manager."""
        return EncoderCudaGraphConfig(
            modalities=self.modalities,
            output_width=self.output_width,
            paths=self.paths,
            axes=self.axes,
            max_frames_per_video=self.most_segments(),
            min_tokens_per_segment=self.min_tokens_per_segment(),
        )

    def final_tokens(self, geometry: ItemGeometry) -> int:
        """Rows of the item's final embedding; they differ from the graph's where rows that no path computes join."""
        return self.item_spec(geometry).output_tokens

    def embedding_flops(self, patches: int) -> float:
        """Operations of the patch embedding."""
        return 2.0 * patches * self.channels * self.temporal * self.patch**2 * self.tower_shape.width

    @abstractmethod
    def flops(self, geometry: ItemGeometry) -> float:
        """Floating-point operations of the unpadded item: products and attention, multiply and add counted apart."""

    def budget_range(self, max_call_tokens: int) -> tuple[int, int]:
        """Smallest budget of the model and the most tokens that one call may hold."""
        return min(path.min_token_budget for path in self.paths.values()), max_call_tokens

    def geometry(self, width: int, height: int, frames: int = 1, fps: float | None = None) -> ItemGeometry:
        """Geometry of an item; one frame is an image, more are a video."""
        if width < 1 or height < 1 or frames < 1:
            raise InputError(f"item size {width}x{height}x{frames} (width x height x frames) must be positive")
        if frames > MOST_FRAMES:
            raise InputError(f"a video of {frames} frames was given; it may have at most {MOST_FRAMES}")
        if frames == 1:
            return self.image_geometry(width, height)
        if VIDEO not in self.modalities:
            return GeometryRule.video_geometry(self, width, height, frames, fps)
        return self.video_geometry(width, height, frames, fps if self.video.get("do_sample_frames", True) else None)


class TowerShape(NamedTuple):
    """What the operations of a tower's blocks depend on; an MLP has 2 matrices, or 3 where it is gated."""

    depth: int
    width: int
    mlp_width: int
    mlp_matrices: int = 2

    def flops(self, rows: int, pairs: float | None = None) -> float:
        """Operations of all pre-norm blocks over `rows` patches: qkv and output products, MLP, and attention over
        `pairs`, the sum over segments of length squared; None is one segment of all rows."""
        width, pairs = self.width, float(rows) ** 2 if pairs is None else pairs
        products = 2.0 * rows * (4 * width * width + self.mlp_matrices * width * self.mlp_width)
        return self.depth * (products + 4.0 * pairs * width)


class MergedGridRule(GeometryRule):
    """Families with a `t x h x w` patch grid, a square spatial merge and one attention segment a frame.

    Subclasses give the resize rules; tokens are `t * h * w / merge**2`.
    """

    @property
    def output_width(self) -> int:
        # Towers without a merger of their own are followed by a projector to the language model's width.
        found = self.vision_config.get("out_hidden_size")
        return int(found) if found is not None else super().output_width

    @property
    def factor(self) -> int:
        """Pixels on a side of one output token."""
        return self.patch * self.merge

    @property
    def image_pixel_range(self) -> tuple[int, int]:
        size = self.processor["size"]
        return int(size["shortest_edge"]), int(size["longest_edge"])

    def image_geometry(self, width: int, height: int) -> GridGeometry:
        return self.sized_grid(
            IMAGE, 1, width, height, lambda: smart_resize(height, width, self.factor, *self.image_pixel_range)
        )

    def sized_grid(
        self, modality: str, steps: int, width: int, height: int, resize: Callable[[], tuple[int, int]]
    ) -> GridGeometry:
        """The grid of an item after `resize`, which gives height and width in pixels; as it is with `do_resize` off.

        Raises:
            InputError: It is not resized, and a side is not a whole number of output tokens.
        """
        settings = self.video if modality == VIDEO else self.processor
        if settings.get("do_resize", True):
            height, width = resize()
        elif width % self.factor or height % self.factor:
            raise InputError(
                f"{modality} of {width}x{height}: the processor's do_resize is false, so both sides must be multiples "
                f"of {self.factor} pixels"
            )
        return GridGeometry(modality, steps, height // self.patch, width // self.patch)

    def item_spec(self, geometry: ItemGeometry) -> EncoderItemSpec:
        grid = self.checked_grid(geometry)
        return EncoderItemSpec(grid.modality, grid.patches, grid.patches // self.merge**2, grid.t)

    def checked_grid(self, geometry: ItemGeometry) -> GridGeometry:
        """The geometry as a grid whose sides the merge divides.

        Raises:
            InputError: A side is not a multiple of the merge size: tokens would be lost silently.
        """
        if not isinstance(geometry, GridGeometry):
            raise InputError(f"expected a patch grid, got {geometry!r}")
        if geometry.t > 1 and VIDEO not in self.modalities:
            raise InputError(
                f"grid [{geometry.t}, {geometry.h}, {geometry.w}] has {geometry.t} frames, but {self.without_videos}"
            )
        if geometry.h % self.merge or geometry.w % self.merge or min(geometry.t, geometry.h, geometry.w) < 1:
            raise InputError(
                f"grid [{geometry.t}, {geometry.h}, {geometry.w}] (t, h, w in patches) is not divisible by the spatial "
                f"merge {self.merge}; resize to multiples of {self.factor} pixels"
            )
        return geometry

    def pixel_rows(self, geometry: ItemGeometry) -> dict[str, int]:
        return {"pixel_values": self.checked_grid(geometry).patches}

    def min_token_budget(self) -> int:
        """Tokens of a 224x224 image by the processor's own rule, pixel floor included."""
        return self.item_spec(self.image_geometry(224, 224)).output_tokens

    def most_segments(self) -> int:
        return -(-self.most_frames() // self.temporal) if VIDEO in self.modalities else 1

    def most_frames(self) -> int:
        """Frames of the longest video that the processor makes."""
        return int(self.video.get("max_frames", 768))

    @property
    def projector_widths(self) -> Sequence[int]:
        """Widths before, between and after the linear layers that follow the blocks, over merged patches."""
        return self.merged_width, self.merged_width, self.output_width

    def merger_flops(self, grid: GridGeometry) -> float:
        """Operations after the blocks."""
        return linear_flops(grid.patches // self.merge**2, *self.projector_widths)

    def block_flops(self, grid: GridGeometry) -> float:
        """Operations of the blocks, which attend within a frame where a family's do not differ."""
        return self.tower_shape.flops(grid.patches, float(grid.t) * (grid.h * grid.w) ** 2)

    def flops(self, geometry: ItemGeometry) -> float:
        grid = self.checked_grid(geometry)
        return self.embedding_flops(grid.patches) + self.block_flops(grid) + self.merger_flops(grid)


def linear_flops(rows: int, *widths: int) -> float:
    """Operations of linear layers one after the other over `rows`."""
    return 2.0 * rows * sum(before * after for before, after in pairwise(widths))
