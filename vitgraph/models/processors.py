"""What a checkpoint's processor files set, in the shape that the size rules read.

transformers' own classes read the files where it has them: they fill defaults, take older spellings and refuse. What
they hold then is followed by the rule or by the real processor, or refused by its name; nothing is passed over.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vitgraph.errors import ModelError
from vitgraph.hub import say
from vitgraph.models.family import CHANNELS, named_pairs
from vitgraph.models.processor_classes import transformers_class

if TYPE_CHECKING:
    from vitgraph.models.encoder import VisionEncoder

IMAGE_FILE, VIDEO_FILE, PROCESSOR_FILE = (
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
)

PIXELS = ("resample", "do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std")
"""Settings that change pixels and no size."""

PIXEL_EDGES = ("shortest_edge", "longest_edge", "min_pixels", "max_pixels")
"""Keys of a size that is a range of pixels; the latter two are older."""

PLAIN_PIXELS = {"do_resize": True, "do_rescale": True, "do_normalize": True, "rescale_factor": 1 / 255}
"""What the processors that are written here assume."""

WITHOUT_EFFECT = frozenset(
    (
        *("_valid_processor_keys", "auto_map", "data_format", "default_to_square", "device", "disable_grouping"),
        *("do_convert_rgb", "do_sample_frames", "draw_on_frames", "font", "feature_extractor_type", "image_token"),
        *("image_processor_type", "image_seq_length", "input_data_format", "max_num_patches", "processor_class"),
        *("return_metadata", "return_row_col_info", "return_tensors", "transformers_version", "video_metadata"),
        *("video_processor_type", "chunk_length", "dither", "feature_size", "hop_length", "n_fft", "n_samples"),
        *("nb_max_frames", "padding_side", "padding_value", "return_attention_mask", "sampling_rate"),
    )
)
"""Settings that change neither sizes nor pixels here: names of classes, forms of input and output, and what files of
omni models say of sound."""


OF_TOWER = {
    "size": ("image_size",),
    "patch_size": ("patch_size",),
    "temporal_patch_size": ("temporal_patch_size",),
    "merge_size": ("spatial_merge_size", "merge_kernel_size"),
    "merge_kernel_size": ("merge_kernel_size",),
    "pooling_kernel_size": ("pooling_kernel_size",),
}
"""Settings of processors that must agree with the tower, and its names for them."""


class ReadNames(dict[str, Any]):
    """Settings that remember which of them were asked for, there or not."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(settings)
        self.names: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)

    def __getitem__(self, name: str) -> Any:
        self.names.add(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self.names.add(str(name))
        return super().__contains__(name)


def resolve_processor(
    encoder: type[VisionEncoder],
    name: str,
    files: Mapping[str, Mapping[str, Any] | None],
    preset: Mapping[str, Any],
    vision_config: Mapping[str, Any],
) -> dict[str, Any]:
    """Processor settings of a checkpoint, in the shape of the presets.

    As in transformers, what processor_config.json nests comes before a file of its own, and videos without either take
    the image processor's file.

    Args:
        encoder: The family.
        name: The checkpoint, for messages.
        files: Contents of `IMAGE_FILE`, `VIDEO_FILE` and `PROCESSOR_FILE`; None where there is none.
        preset: Settings of the family's preset: what neither a file nor a class says.
        vision_config: The tower's config, with which the processor's tiles and patches must agree.

    Raises:
        ModelError: A setting that is not followed here, or that transformers' class does not take.
    """
    both = files.get(PROCESSOR_FILE) or {}
    own = files.get(IMAGE_FILE)
    image = both.get("image_processor") or own
    video = both.get("video_processor") or files.get(VIDEO_FILE)
    image_class, video_class = encoder.image_processor_class(), encoder.video_processor_class()
    if image_class is None and "image_processor" not in both:
        image = {**both, **(image or {})} if both or image is not None else None
    if image is None:
        source = f"the defaults of {image_class.__name__}" if image_class else "the published model's settings"
        say(f"{name} has no {IMAGE_FILE}: {source} are used")
    processor = dict(preset)
    changed = _read(encoder, name, image or {}, vision_config)
    processor.update(with_size(processor, changed))
    if "video" in processor:
        source_of_video = video if video is not None or video_class is None else own
        is_shared = source_of_video is image
        try:
            changed = _read(encoder, name, source_of_video or {}, vision_config, is_video=True, is_shared=is_shared)
        except ModelError as error:
            if source_of_video is not own:
                raise
            # The file is the image processor's; transformers would have no videos of this checkpoint at all.
            say(f"{error}. Videos have the defaults of {video_class.__name__ if video_class else 'the model'}")
            changed = {}
        processor["video"] = {**processor["video"], **changed}
        if encoder.whole_processor is not None:
            processor["video"].update(transformers_class(encoder.whole_processor).videos_kwargs["size"])
    return processor


TILE_LIMITS = (
    *("max_dynamic_patch", "max_tiles", "max_crops", "max_slice_nums", "max_patches"),
    "pan_and_scan_max_num_crops",
)
MOST_TILES = 256
"""Tiles of an image that a rule goes through; published models have at most 40."""


def contradiction(settings: Mapping[str, Any]) -> str | None:
    """What of a processor's settings, by the presets' names, no image could follow."""
    for part in (settings, settings.get("video") or {}, settings.get("size") or {}):
        pairs = [(name, "max_" + name[4:]) for name in part if name.startswith("min_")]
        for low, high in (*pairs, ("shortest_edge", "longest_edge")):
            if part.get(low) is not None and part.get(high) is not None and part[low] > part[high]:
                return f"{low} is {part[low]}, above {high}, which is {part[high]}; give both, or another value"
    for name in TILE_LIMITS:
        if isinstance(settings.get(name), int) and settings[name] > MOST_TILES:
            return f"{name} is {settings[name]}; an image is cut into {MOST_TILES} tiles at most here"
    return None


def with_size(processor: Mapping[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    size = {"size": {**processor.get("size", {}), **changed["size"]}} if "size" in changed else {}
    return {**changed, **size}


def of_tower(setting: str, vision_config: Mapping[str, Any]) -> Any:
    """What the tower has for a setting of its processor; None where that is not the tower's."""
    return next((vision_config[name] for name in OF_TOWER.get(setting, ()) if vision_config.get(name)), None)


def keys_read(encoder: type[VisionEncoder], setting: str) -> list[str]:
    """Keys of an image setting that is an object, as the family's rule reads them; none where it has no keys or is not
    read."""
    settings = (name for name, _ in named_pairs(encoder.image_settings))
    named = [name.removeprefix(f"{setting}.") for name in settings if name.startswith(f"{setting}.")]
    return named or (list(PIXEL_EDGES) if encoder.sized_by_pixels and setting == "size" else [])


def side_of(size: Any) -> Any:
    """Pixels on a side of a square that files give as a number, a pair, or an object with height and width."""
    sides = (
        list(size.values()) if isinstance(size, Mapping) else list(size) if isinstance(size, list | tuple) else [size]
    )
    return sides[0] if sides and all(side == sides[0] for side in sides) else size


def _read(
    encoder: type[VisionEncoder],
    name: str,
    given: Mapping[str, Any],
    vision_config: Mapping[str, Any],
    *,
    is_video: bool = False,
    is_shared: bool = False,
) -> dict[str, Any]:
    """What one file sets, every setting of it followed, without effect, or refused; of a file that images share with
    videos, what no rule reads is said of images alone."""
    for setting, value in given.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ModelError(f"{name}: its processor sets {setting} to {value}; it must be a finite number")
    processor_class = encoder.video_processor_class() if is_video else encoder.image_processor_class()
    read = encoder.read_video_processor_config if is_video else encoder.read_processor_config
    is_named = _names_class(encoder, given, processor_class)
    settings = ReadNames(class_settings(name, given, processor_class) if processor_class and is_named else given)
    plain = {**PLAIN_PIXELS, "resample": encoder.resample}
    defaults = class_settings(name, {}, processor_class) if processor_class else plain
    try:
        changed: dict[str, Any] = read(settings)
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        read_names = ", ".join(sorted(settings.keys() & settings.names))
        raise ModelError(f"{name}: its processor's settings ({read_names}) cannot be read: {error}") from error
    checked = (
        (settings.names | {*PIXELS} - {"resample"}) & given.keys() & (defaults.keys() | {"min_pixels", "max_pixels"})
    )
    for setting in sorted(checked - WITHOUT_EFFECT):
        value = given[setting] if setting not in CHANNELS else settings[setting]
        rule = broken_rule(setting, value, defaults.get(setting)) if value is not None else None
        if rule is not None:
            raise ModelError(f"{name}: its processor sets {setting} to {given[setting]!r}; it must be {rule}")
    # A null in the file takes the place of the class's value; a switch is off then, and a size is the class's.
    nulls = {n for n in settings.names & given.keys() if n not in WITHOUT_EFFECT and settings.get(n) is None}
    for setting in sorted(n for n in nulls if is_named and (processor_class is None or defaults.get(n) is not None)):
        if setting not in encoder.null_settings:
            raise ModelError(f"{name}: its processor sets {setting} to null; remove the setting, or give its value")
        changed[setting] = None
    for setting in changed.keys() - {"size"}:
        # What a class fills in is no word of the file.
        own = of_tower(setting, vision_config) if setting in given or processor_class is None else None
        if own is not None and side_of(changed[setting]) != side_of(own):
            raise ModelError(
                f"{name}: its processor has a {setting} of {changed[setting]}, its tower one of {own}; config.json "
                "and the processor's file do not belong together"
            )
    edges = list(dict(defaults).get("size") or keys_read(encoder, "size"))
    size = dict(settings).get("size") or {}
    has_edges = isinstance(size, Mapping) and all(edge in size for edge in edges)
    if is_named and given.get("size") and "size" in settings.names and not has_edges:
        raise ModelError(f"{name}: its processor sets size to {size}; it must have {' and '.join(edges)}")
    is_square = not isinstance(side_of(size), Mapping) or not size or bool(size.keys() & {*PIXEL_EDGES})
    if "size" in settings.names and not is_square:
        raise ModelError(f"{name}: its processor sets size to {size}; only squares are followed here")
    if given.get("do_sample_frames", True) in (False, None) and getattr(processor_class, "do_sample_frames", False):
        changed["do_sample_frames"] = False
    # Pixels of videos are drawn at random.
    follows_pixels = is_video or (encoder.image_processor is not None and is_named)
    strange = []
    for setting in given.keys() - settings.names - WITHOUT_EFFECT:
        value = settings.get(setting, given[setting])
        own = of_tower(setting, vision_config)
        if is_same(value, defaults.get(setting)) or value is None or side_of(value) == side_of(own):
            continue
        if setting == "crop_size" and not settings.get("do_center_crop"):
            continue
        if setting in PIXELS and follows_pixels:
            continue
        if setting in defaults and is_named:
            raise ModelError(
                f"{name}: its processor sets {setting} to {value!r}, which is not followed here (its default is "
                f"{defaults[setting]!r}); remove the setting, or run the model where it is"
            )
        strange.append(setting)
    if strange and not is_shared:
        say(f"{name}: settings of its processor that no size rule reads: {', '.join(sorted(strange))}")
    if follows_pixels and not is_video:
        changed["pixels"] = {
            setting: settings[setting]
            for setting in PIXELS
            if setting in settings and not is_same(settings[setting], defaults.get(setting))
        }
    return changed


def _names_class(encoder: type[VisionEncoder], given: Mapping[str, Any], processor_class: type[Any] | None) -> bool:
    """Whether settings belong to the class that the family follows; settings that name none do."""
    types = ("video_processor_type", "image_processor_type", "feature_extractor_type")
    named = next((given[kind] for kind in types if given.get(kind)), None)
    if named is None or processor_class is None:
        return True
    plain = str(named).removesuffix("Fast").replace("FeatureExtractor", "ImageProcessor")
    own = processor_class.__name__.removesuffix("Pil")
    return plain.removesuffix("Pil") in (own, own.replace("Video", "Image"), *encoder.processor_names) or (
        # A file for images that stands for videos names the image processor.
        processor_class is encoder.video_processor_class() and "video_processor_type" not in given
    )


def class_settings(name: str, given: Mapping[str, Any], processor_class: type[Any]) -> dict[str, Any]:
    """The settings that an object of transformers' class holds after reading `given`, defaults included."""
    try:
        # Drawing needs a font of the checkpoint, which is not fetched.
        plain = {name: False for name in ("draw_on_frames",) if hasattr(processor_class, name)}
        found = processor_class.from_dict({**plain, **{n: v for n, v in given.items() if n not in WITHOUT_EFFECT}})
        settings = {setting: getattr(found, setting, None) for setting in processor_class.valid_kwargs.__annotations__}
        if given:
            # What it checks in each call.
            found._validate_preprocess_kwargs(**found._standardize_kwargs(**settings))
    except Exception as error:
        # The classes validate with several libraries; each refusal concerns the file.
        raise ModelError(f"{name}: {processor_class.__name__} refuses its settings: {error}") from error
    shown = settings.keys() - WITHOUT_EFFECT
    # One class stands for its relatives, which a family may tell apart by name.
    return {setting: _plain(processor_class, setting, settings[setting]) for setting in shown} | {
        "video_processor_type": given.get("video_processor_type")
    }


def _plain(processor_class: type[Any], setting: str, value: Any) -> Any:
    """A value as files write it; a switch that a file leaves at null is off."""
    if setting in ("size", "crop_size", "pad_size") and value is not None:
        return {side: pixels for side, pixels in dict(value).items() if pixels is not None}
    if setting in CHANNELS and isinstance(value, int | float):
        return [value] * 3
    if value is None and isinstance(getattr(processor_class, setting, None), bool):
        return False
    return list(value) if isinstance(value, tuple) else value


def is_same(value: Any, default: Any) -> bool:
    if isinstance(value, list | tuple) and isinstance(default, list | tuple):
        return list(value) == list(default)
    if isinstance(value, float) and isinstance(default, int | float):
        return abs(value - default) <= 1e-9
    return bool(value == default)


BOOLEANS = (
    *("do_", "use_", "dynamic_image_size", "crop_to_patches", "cap_pixels_per_frame", "pad_input", "crop_mode"),
    "slice_mode",
)
FRACTIONS = ("fps", "rescale_factor", "ratio", "max_duration")


LEAST_FRACTION = 1e-4
"""Below it a number stands for nothing: frames hours apart, pixels that are all equal."""


def broken_rule(name: str, value: Any, example: Any) -> str | None:
    """What a setting must be where `value` is not that; told by another value of it, or by its name."""
    if isinstance(example, Mapping) or name == "size":
        sides = (*PIXEL_EDGES, "height", "width", "max_height", "max_width")
        parts = value.items() if isinstance(value, Mapping) else [("", 0)]
        fits = bool(parts) and all(side in sides and _is_count(part) for side, part in parts)
        rule = f"an object of positive integers such as {dict(example) if example else {'height': 448}}"
    elif isinstance(example, bool) or (example is None and name.startswith(BOOLEANS)):
        fits, rule = isinstance(value, bool), "true or false"
    elif isinstance(example, list | tuple) or name.endswith(("_mean", "_std")):
        nested = bool(example) and isinstance(example[0], list | tuple)
        numbers = value if isinstance(value, list | tuple) else [None]
        if nested:
            numbers = [number for pair in numbers for number in (pair if isinstance(pair, list | tuple) else [None])]
        fits = all(isinstance(number, int | float) for number in numbers) and (name != "image_std" or all(numbers))
        kind = "numbers, none of them 0," if name == "image_std" else "pairs of numbers" if nested else "numbers"
        rule = f"a list of {kind} such as {list(example or (0.5,) * 3)[:3]}"
    elif isinstance(example, float) or any(part in name for part in FRACTIONS):
        fits = isinstance(value, int | float) and not isinstance(value, bool) and LEAST_FRACTION <= value <= 1e6
        rule = f"a positive number, from {LEAST_FRACTION:g} to 1000000"
    else:
        fits, rule = _is_count(value), "a positive integer"
    return None if fits else rule


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 10**12
