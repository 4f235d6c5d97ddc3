"""Published checkpoints: config and processor files to a `ModelSource`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vitgraph.errors import ModelError
from vitgraph.models.files import CONFIG_FILE, download, read_json
from vitgraph.models.registry import ModelSource, preset_of, row_of_config

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
VIDEO_PROCESSOR_FILE = "video_preprocessor_config.json"


def rename_key(key: str, patterns: Sequence[tuple[str, str]], prefix: str = "") -> str | None:
    """The module name of a published key, by the first pattern that matches; None where none does.

    Args:
        key: The key in the checkpoint.
        patterns: Regular expressions with what replaces them.
        prefix: Regular expression before each of them.
    """
    for pattern, target in patterns:
        name, count = re.subn(prefix + pattern, target, key)
        if count:
            return name
    return None


def source_from_folder(folder: Path, name: str) -> ModelSource:
    """A local checkpoint folder.

    Raises:
        ModelError: config.json is missing, not JSON, or of an unknown architecture.
    """
    return _source_from_files(lambda file: read_json(folder / file), name, str(folder), "folder", None)


def source_from_hub(hub_id: str, revision: str | None) -> ModelSource:
    """A hub repository: downloads its small config files.

    Raises:
        ModelError: The hub cannot be reached and nothing is cached, or the repository does not exist.
    """

    def read(file: str) -> dict[str, Any] | None:
        path = download(hub_id, file, revision, required=file == CONFIG_FILE)
        return read_json(path) if path is not None else None

    return _source_from_files(read, hub_id, hub_id, "hub", revision)


def _source_from_files(
    read: Callable[[str], dict[str, Any] | None], name: str, weights: str, config_source: str, revision: str | None
) -> ModelSource:
    config = read(CONFIG_FILE)
    if config is None:
        raise ModelError(f"{name} has no {CONFIG_FILE}; give a transformers checkpoint folder, a hub id or a preset")
    row = row_of_config(config)
    encoder = row.encoder_class()
    # What a checkpoint's files leave open is taken from the preset that documents the architecture.
    preset = preset_of(row, config["architectures"][0])
    processor: dict[str, Any] = dict(preset["processor"])
    video = read(VIDEO_PROCESSOR_FILE)
    for file in PROCESSOR_FILES:
        found = read(file) or {}
        video = video or found.get("video_processor")
        changed = encoder.read_processor_config(found.get("image_processor", found))
        if "size" in changed:
            changed["size"] = {**processor.get("size", {}), **changed["size"]}
        processor.update(changed)
    if video is not None and "video" in processor:
        processor["video"] = {**processor["video"], **encoder.read_video_processor_config(video)}
    vision_config, extra = encoder.read_model_config(config)
    return ModelSource(
        row=row,
        name=name,
        vision_config=vision_config,
        processor=processor,
        extra={**preset["extra"], **extra},
        weights=weights,
        architecture=config["architectures"][0],
        config_source=config_source,
        revision=revision,
    )
