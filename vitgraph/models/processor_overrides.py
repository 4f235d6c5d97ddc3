"""`--mm-processor-kwargs` applied to a model: to images and to videos, each by the names that its processor takes."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vitgraph.errors import UsageError
from vitgraph.models.processors import (
    PIXELS,
    PLAIN_PIXELS,
    WITHOUT_EFFECT,
    ReadNames,
    broken_rule,
    class_settings,
    contradiction,
    is_same,
    keys_read,
    of_tower,
    side_of,
    with_size,
)
from vitgraph.models.registry import ModelSource

if TYPE_CHECKING:
    from vitgraph.models.encoder import VisionEncoder


def override_processor(source: ModelSource, given: Mapping[str, Any]) -> ModelSource:
    """The model with `--mm-processor-kwargs` applied: to images and to videos, each by the names that it takes.

    The names are the processor's or of vLLM's spelling; `images_kwargs` and `videos_kwargs` may nest them.

    Raises:
        UsageError: A name that neither processor takes, a setting that is not followed here, or a value that it cannot
            have.
    """
    encoder = source.row.encoder_class()
    nested = {name: given.get(name) or {} for name in ("images_kwargs", "videos_kwargs")}
    for name, part in nested.items():
        if not isinstance(part, Mapping):
            raise UsageError(f"--mm-processor-kwargs sets {name} to {part!r}; it must be an object of settings")
    flat = {name: value for name, value in given.items() if name not in nested}
    image_names = _override_names(encoder, source.processor, encoder.image_processor_class(), "image")
    has_video = "video" in source.processor
    video_names = _override_names(encoder, source.processor, encoder.video_processor_class(), "video")
    video_names = video_names if has_video else {}
    for name, part, known in (
        *((name, flat, image_names | video_names) for name in flat),
        *((name, nested["images_kwargs"], image_names) for name in nested["images_kwargs"]),
        *((name, nested["videos_kwargs"], video_names) for name in nested["videos_kwargs"]),
    ):
        _check_override(source.name, name, part[name], known)
        keys = keys_read(encoder, name)
        if keys and not (isinstance(part[name], Mapping) and part[name].keys() & set(keys)):
            raise UsageError(
                f"--mm-processor-kwargs sets {name} to {part[name]}; of it the rule of {source.name} reads "
                f"{', '.join(keys)}"
            )
        own = of_tower(name, source.vision_config) if name != "size" else None
        if own is not None and side_of(part[name]) != side_of(own):
            raise UsageError(f"--mm-processor-kwargs sets {name} to {part[name]}; the tower of {source.name} has {own}")
    of_images = {**_only(flat, image_names), **nested["images_kwargs"]}
    of_images = {encoder.spellings.get(name, name): value for name, value in of_images.items()}
    of_videos = {**_only(flat, video_names), **nested["videos_kwargs"]}
    processor, extra = dict(source.processor), dict(source.extra)
    changed, read = _override(encoder.read_processor_config, of_images)
    if has_video:
        video_changed, video_read = _override(encoder.read_video_processor_config, of_videos)
        processor["video"] = {**processor["video"], **video_changed}
        read |= video_read
    pixels = {name: value for name, value in of_images.items() if name in PIXELS and name not in changed}
    if pixels and encoder.image_processor is not None:
        processor["pixels"] = {**processor.get("pixels", {}), **pixels}
        read |= pixels.keys()
    current = {**PLAIN_PIXELS, **image_names, **source.processor}
    ignored = [n for n in {**of_images, **of_videos} if n not in read and not is_same(given.get(n), current.get(n))]
    if ignored:
        raise UsageError(
            f"--mm-processor-kwargs sets {', '.join(sorted(ignored))}, which the size rule of {source.name} does not "
            f"follow; it follows {', '.join(sorted((read | _read_names(encoder)) - WITHOUT_EFFECT))}"
        )
    processor.update(with_size(source.processor, changed))
    extra = {fact: value for fact, value in extra.items() if fact not in changed}
    wrong = contradiction({**processor, **extra})
    if wrong is not None:
        raise UsageError(f"--mm-processor-kwargs leaves settings that contradict each other: {wrong}")
    return replace(source, processor=processor, extra=extra)


def _only(settings: Mapping[str, Any], names: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name in names}


def _override(read: Any, settings: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
    recorded = ReadNames(settings)
    try:
        return read(recorded), recorded.names
    except (TypeError, ValueError, LookupError) as error:
        shown = ", ".join(sorted(settings))
        raise UsageError(f"--mm-processor-kwargs ({shown}) cannot be read: {error}") from error


def _read_names(encoder: type[VisionEncoder]) -> set[str]:
    """Settings that the family's rule reads, in every spelling."""
    return _override(encoder.read_processor_config, {})[1] | _override(encoder.read_video_processor_config, {})[1]


def _override_names(
    encoder: type[VisionEncoder], processor: Mapping[str, Any], processor_class: type[Any] | None, modality: str
) -> dict[str, Any]:
    """Names that the processor of a modality takes, with a value of the right kind (None where any may do)."""
    read = encoder.read_processor_config if modality == "image" else encoder.read_video_processor_config
    values = dict.fromkeys(_override(read, {})[1]) if processor_class is None or modality == "image" else {}
    if processor_class is None:
        values |= dict.fromkeys((*PLAIN_PIXELS, "image_mean", "image_std"))
    else:
        values |= class_settings("", {}, processor_class)
    current = processor if modality == "image" else processor.get("video", {})
    values |= {name: value for name, value in current.items() if name in values and value is not None}
    return {name: value for name, value in values.items() if name not in WITHOUT_EFFECT}


def _check_override(model: str, name: str, value: Any, known: Mapping[str, Any]) -> None:
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; it takes {', '.join(sorted(known))}"
        raise UsageError(f"--mm-processor-kwargs names {name!r}, which the processor of {model} does not take{hint}")
    rule = broken_rule(name, value, known[name])
    if rule is not None:
        raise UsageError(f"--mm-processor-kwargs sets {name} to {value!r}; it must be {rule}")
