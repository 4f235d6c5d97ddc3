"""Step3-VL (10B) and Step3 (321B): one tower on the whole image and on sliding-window crops, a path for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

from vitgraph.errors import InputError, ModelError
from vitgraph.models import functional, nn, torch
from vitgraph.models.family import CHANNELS, QKV, Tower, given
from vitgraph.models.geometry import TowerShape
from vitgraph.models.resizing import normalized
from vitgraph.models.two_path import GLOBAL, LOCAL, CropGeometry, TwoPathEncoder, TwoPathRule

VISION_DEFAULTS: Mapping[str, Any] = {
    "num_channels": 3,
    "image_size": 728,
    "patch_size": 14,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
}
"""Defaults of both models' config classes."""

PERCEPTION_DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 1536,
    "num_hidden_layers": 47,
    "num_attention_heads": 16,
    "mlp_ratio": 8960 / 1536,
    "layer_scale_init_value": 0.1,
}
STEP3_DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 1792,
    "intermediate_size": 3072,
    "output_hidden_size": 4096,
    "num_hidden_layers": 63,
    "num_attention_heads": 16,
}

WIDE_ENOUGH, LONG_STRIP = 1.5, 4
"""Aspect ratios: above the first a small image is cut too, above the second the window is the short side."""

THIN_SIDE = 32
"""Pixels; thinner images that are also long strips are padded to a square first."""


class Step3VLRule(TwoPathRule):
    """Crops: windows side by side over the image, after each side was rounded to whole windows. Global view: the whole
    image, resized to a square.

    Raises:
        ModelError: A side is no whole number of patches, or too small for the two downsampling convolutions.
    """

    local_pixels = "patch_pixel_values"

    def prepare(self) -> None:
        self.is_perception = is_perception(self.vision_config)
        for name, side in (("global", self.global_side), ("local", self.local_side)):
            if side % self.patch or side < 4 * self.patch:
                raise ModelError(
                    f"the {name} side is {side} pixels; it must be a multiple of the patch size {self.patch} and at "
                    f"least {4 * self.patch}"
                )

    @property
    def patches_per_side(self) -> dict[str, int]:
        return {path: self.side_of(path) // self.patch for path in (GLOBAL, LOCAL)}

    def downsampled(self, grid: int) -> tuple[int, int]:
        """Cells on a side after the first and after both convolutions."""
        if self.is_perception:
            middle = (grid - 1) // 2 + 1
        else:
            middle = (grid - 2) // int(self.extra["understand_projector_stride"]) + 1
        return middle, (middle - 1) // 2 + 1

    @cached_property
    def path_tokens(self) -> Mapping[str, int]:
        return {path: self.downsampled(grid)[1] ** 2 for path, grid in self.patches_per_side.items()}

    def is_squared(self, width: int, height: int) -> bool:
        """True for thin strips, which are padded to a square before anything else."""
        return min(width, height) < THIN_SIDE and max(width, height) / min(width, height) > LONG_STRIP

    def bounded_size(self, width: int, height: int) -> tuple[int, int]:
        """Width and height in pixels after padding and after shrinking to the longest side allowed.

        Raises:
            InputError: A side would vanish.
        """
        new_width, new_height = (max(width, height),) * 2 if self.is_squared(width, height) else (width, height)
        most = int(self.processor["max_image_side"])
        if max(new_width, new_height) > most:
            scale = most / max(new_width, new_height)
            new_width, new_height = int(new_width * scale), int(new_height * scale)
        if min(new_width, new_height) < 1:
            raise InputError(
                f"image of {width}x{height} would shrink to {new_width}x{new_height} pixels, as no side may be above "
                f"{most}; the processor refuses that. Crop it or leave it out"
            )
        return new_width, new_height

    def window(self, width: int, height: int) -> int:
        """Pixels on a side of the window for an image of `bounded_size`; 0 where it is not cut.

        The 321B model cuts an image whose long side is the global view's; the 10B model and its successors do not,
        though vLLM 0.33, which has one processor for both, cuts theirs too.
        """
        short, long = sorted((width, height))
        if long < self.global_side or (self.is_perception and long == self.global_side):
            return short if long / short > WIDE_ENOUGH else 0
        return min(short, self.local_side) if long / short > LONG_STRIP else self.local_side

    def crop_grid(self, width: int, height: int) -> tuple[int, int]:
        size = self.bounded_size(width, height)
        window = self.window(*size)
        if window == 0:
            return 0, 0
        columns, rows = (windows_on_side(side, window) for side in size)
        return columns, rows

    def view_flops(self, side: int) -> float:
        config, grid = self.vision_config, side // self.patch
        width, depth, patches = config["hidden_size"], config["num_hidden_layers"], grid * grid
        middle, cells = self.downsampled(grid)
        if self.is_perception:
            rows, mlp = patches, int(width * config["mlp_ratio"])
            kernel, inner, outer = 3, 2 * width, 4 * width
        else:
            from_class, mlp = 4, config["intermediate_size"]
            rows, kernel = patches + from_class, 2
            inner, outer = config["output_hidden_size"], 2 * config["output_hidden_size"]
        return (
            2.0 * patches * config["num_channels"] * self.patch**2 * width
            + TowerShape(depth, width, mlp).flops(rows)
            + 2.0 * (middle**2 * kernel**2 * width * inner + cells**2 * 9 * inner * outer)
            + 2.0 * cells**2 * outer * self.output_width
        )


def is_perception(vision_config: Mapping[str, Any]) -> bool:
    """True for the 10B model's perception encoder, False for the 321B model's tower."""
    return "output_hidden_size" not in vision_config


def windows_on_side(side: int, window: int) -> int:
    """Windows that cover a side of `side` pixels: one more where a fifth of a window or more would be left over.

    The fraction is compared as the published code does, in floating point.
    """
    ratio = side / window
    if ratio < 1:
        return 1
    return int(ratio) + 1 if ratio - side // window > 0.2 else int(ratio)


class Step3VLEncoder(TwoPathEncoder):
    """`Step3p7VisionModel`'s modules with ready positions, or the 321B model's own tower, and the projector."""

    rule_class = Step3VLRule
    rule: Step3VLRule
    resample = 2
    patch_convolutions = ("visual.embeddings.patch_embedding",)
    blocks = "visual.layers"
    checkpoint_keys = (
        (r"vision_model\.conv1\.", "visual.embeddings.patch_embedding."),
        (r"vision_model\.positional_embedding$", "visual.embeddings.position_embedding.weight"),
        (r"vision_model\.ln_pre\.", "visual.pre_layernorm."),
        (r"vision_model\.transformer\.resblocks\.(\d+)\.ln_1\.", r"visual.layers.\1.layernorm_before."),
        (r"vision_model\.transformer\.resblocks\.(\d+)\.ln_2\.", r"visual.layers.\1.layernorm_after."),
        (r"vision_model\.transformer\.resblocks\.(\d+)\.ls_([12])\.gamma$", r"visual.layers.\1.lambda_\2"),
        (r"vision_model\.transformer\.resblocks\.(\d+)\.mlp\.c_fc\.", r"visual.layers.\1.mlp.fc1."),
        (r"vision_model\.transformer\.resblocks\.(\d+)\.mlp\.c_proj\.", r"visual.layers.\1.mlp.fc2."),
        (r"vision_model\.transformer\.resblocks\.(\d+)\.attn\.in_proj_", r"visual.layers.\1.self_attn.rotary_qkv."),
        (r"vision_model\.transformer\.resblocks\.(\d+)\.attn\.", r"visual.layers.\1.self_attn."),
        (r"vision_model\.vit_downsampler([12])\.", r"visual.downsampler\1."),
        (r"vision_model\.(layers|pre_layernorm|downsampler[12])\.", r"visual.\1."),
        (r"vision_model\.(embeddings|transformer\.layers)\.", r"visual.\1."),
        (r"(vit_downsampler2?)\.", r"visual.\1."),
        (r"(?:vit_large_projector|multi_modal_projector)\.", "projector."),
    )
    fused: ClassVar[Mapping[str, Sequence[str]]] = {".rotary_qkv.": QKV, ".qkv_proj.": QKV}
    paired = (".rotary_qkv.",)
    extra_fields = ("projector_bias", "understand_projector_stride")
    # Switches of the 10B model's perception encoder.
    fixed: ClassVar[Mapping[str, Any]] = {
        "vision_config.use_cls_token": False,
        "vision_config.use_abs_posemb": True,
        "vision_config.use_rope2d": True,
        "vision_config.use_ln_pre": True,
        "vision_config.use_ln_post": False,
    }
    image_settings = (
        *(("size.height", "global_size"), "global_size", "local_size", ("patch_size", "local_size")),
        *(("max_image_size", "max_image_side"), "max_image_side", *CHANNELS),
    )

    def prepare(self) -> None:
        from vitgraph.models.families.step3_vl_modules import perception_positions

        tower, rule = self.visual, self.rule
        make = perception_positions if rule.is_perception else lambda tower, grid: (tower.embeddings.positions(grid),)
        self._positions: dict[str, tuple[Any, ...]] = {
            path: make(tower, grid) for path, grid in rule.patches_per_side.items()
        }

    @classmethod
    def build_tower(cls, vision_config: Mapping[str, Any], extra: Mapping[str, Any], dtype: torch.dtype) -> Any:
        from vitgraph.models.families.step3_vl_modules import Step3Tower

        if is_perception(vision_config):
            return Tower("step3p7", "Step3p7VisionConfig", "Step3p7VisionModel").build(vision_config, dtype)
        return Step3Tower(vision_config, extra["understand_projector_stride"]).to(dtype)

    @classmethod
    def following_modules(cls, config: Any, extra: Mapping[str, Any]) -> dict[str, nn.Module]:
        features = 2 * getattr(config, "output_hidden_size", 2 * config.hidden_size)
        bias = bool(extra.get("projector_bias", False))
        return {"projector": nn.Linear(features, extra["text_hidden_size"], bias=bias)}

    @classmethod
    def read_model_config(cls, config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        found, extra = super().read_model_config(config)
        is_10b = config.get("model_type") != "step3_vl" and is_perception(found)
        defaults = {**VISION_DEFAULTS, **(PERCEPTION_DEFAULTS if is_10b else STEP3_DEFAULTS)}
        names = (("width", "hidden_size"), ("layers", "num_hidden_layers"), ("heads", "num_attention_heads"))
        restated = given(found, (*names, ("ls_init_value", "layer_scale_init_value"), *defaults))
        vision = {**defaults, **{name: value for name, value in restated.items() if name in defaults}}
        if is_10b:
            vision["max_position_embeddings"] = (vision["image_size"] // vision["patch_size"]) ** 2
        return vision, extra

    def encode_views(self, pixels: torch.Tensor, path: str) -> torch.Tensor:
        from vitgraph.models.families.step3_vl_modules import perception_features

        if self.rule.is_perception:
            features = perception_features(self.visual, pixels, *self._positions[path])
        else:
            features = self.visual(pixels, *self._positions[path])
        return self.modules["projector"](features)

    def assemble(self, item: CropGeometry, global_rows: torch.Tensor, local_rows: torch.Tensor | None) -> torch.Tensor:
        """The crops in order, then the global view."""
        return global_rows if local_rows is None else torch.cat([local_rows, global_rows])

    def stock_views(self, pixels: torch.Tensor, path: str) -> torch.Tensor:
        if self.rule.is_perception:
            return self.modules["projector"](self.visual(pixels).last_hidden_state)
        # transformers has no class for it: its own tower, one view after the other.
        return torch.cat([self.encode_views(view[None], path) for view in pixels])

    def image_views(self, image: Any, item: CropGeometry) -> tuple[torch.Tensor, torch.Tensor]:
        """The published processor's rule: PIL cuts, and the normalised pieces are resized with antialiasing."""
        from PIL import Image

        rule = self.rule
        size = rule.bounded_size(*image.size)
        if rule.is_squared(*image.size):
            padded = Image.new("RGB", (max(image.size),) * 2)
            padded.paste(image, (0, 0))
            image = padded
        image = image.resize(size, Image.Resampling.BILINEAR)
        whole = self._resized(image, rule.global_side)
        if not item.crops:
            return whole[0], torch.empty(0, 3, rule.local_side, rule.local_side)
        window = rule.window(*size)
        wide, high = (
            count * window if side >= window else side
            for side, count in zip(size, (item.columns, item.rows), strict=True)
        )
        image = image.resize((wide, high), Image.Resampling.BILINEAR)
        boxes = [
            (column * window, row * window, (column + 1) * window, (row + 1) * window)
            for row in range(item.rows)
            for column in range(item.columns)
        ]
        return whole[0], torch.cat([self._resized(image.crop(box), rule.local_side) for box in boxes])

    def _resized(self, image: Any, side: int) -> torch.Tensor:
        pixels = normalized(image, self.rule.processor["image_mean"], self.rule.processor["image_std"])
        return functional.interpolate(
            pixels[None], size=(side, side), mode="bilinear", antialias=True, align_corners=False
        )
