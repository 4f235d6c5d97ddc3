"""Published checkpoints: config and processor files to a `ModelSource`, and only the encoder's tensors to memory."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitgraph.errors import ModelError
from vitgraph.models.registry import ModelSource, all_presets, row_of_config, row_presets

if TYPE_CHECKING:
    import torch

CONFIG_FILE = "config.json"
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
VIDEO_PROCESSOR_FILE = "video_preprocessor_config.json"
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


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
    return _source_from_files(lambda file: _read_local_json(folder / file), name, str(folder), "folder", None)


def source_from_hub(hub_id: str, revision: str | None) -> ModelSource:
    """A hub repository: downloads its small config files.

    Raises:
        ModelError: The hub cannot be reached and nothing is cached, or the repository does not exist.
    """

    def read(file: str) -> dict[str, Any] | None:
        path = download(hub_id, file, revision, required=file == CONFIG_FILE)
        return _read_local_json(path) if path is not None else None

    return _source_from_files(read, hub_id, hub_id, "hub", revision)


def download(hub_id: str, file: str, revision: str | None, *, required: bool) -> Path | None:
    """Local path of one file of a hub repository; None where an optional file does not exist.

    Raises:
        ModelError: Offline and not cached, no such repository, no access, or a required file is missing.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(hub_id, file, revision=revision))
    except LocalEntryNotFoundError as error:
        if not required:
            return None
        raise ModelError(
            f"{hub_id}: {file} is not cached and the hub cannot be reached ({error.__class__.__name__}). Use "
            f"--load-format dummy with a preset ({', '.join(all_presets())}), a local checkpoint folder, or go online"
        ) from error
    except EntryNotFoundError as error:
        if not required:
            return None
        raise ModelError(f"{hub_id} has no file {file}; is it a transformers checkpoint?") from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise ModelError(
            f"{hub_id}: {file} could not be fetched: {error}. Use --load-format dummy with a preset "
            f"({', '.join(all_presets())}) or a local checkpoint folder"
        ) from error


def _read_local_json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error


def _source_from_files(
    read: Callable[[str], dict[str, Any] | None], name: str, weights: str, config_source: str, revision: str | None
) -> ModelSource:
    config = read(CONFIG_FILE)
    if config is None:
        raise ModelError(f"{name} has no {CONFIG_FILE}; give a transformers checkpoint folder, a hub id or a preset")
    row = row_of_config(config)
    encoder = row.encoder_class()
    # What a checkpoint's files leave open is taken from the row's full-size preset, which documents the family.
    preset = row_presets(row.name)[row.full_preset]
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


def encoder_tensors(
    weights: str, wanted: Callable[[str], bool], revision: str | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors whose key is wanted, reading only the shards that hold one.

    Args:
        weights: Local folder or hub id.
        wanted: Says whether a checkpoint key belongs to the encoder.
        revision: Hub revision.

    Raises:
        ModelError: No safetensors files, a damaged file, or not one wanted tensor.
    """
    from safetensors import SafetensorError, safe_open

    count = 0
    for path in _shards(weights, wanted, revision):
        try:
            with safe_open(path, framework="pt", device="cpu") as shard:
                for key in shard.keys():  # noqa: SIM118 (safe_open is no mapping)
                    if wanted(key):
                        count += 1
                        yield key, shard.get_tensor(key)
        except (SafetensorError, OSError, struct.error) as error:
            raise ModelError(f"{path} cannot be read as safetensors: {error}") from error
    if count == 0:
        raise ModelError(f"{weights} holds no tensor of the vision encoder; is it a language-model-only checkpoint?")


def _shards(weights: str, wanted: Callable[[str], bool], revision: str | None) -> list[Path]:
    folder = Path(weights)
    if folder.is_dir():
        index = _read_local_json(folder / INDEX_FILE)
        if index is not None:
            return [folder / name for name in _wanted_files(index, wanted)]
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise ModelError(f"{folder} holds no *.safetensors file; use --load-format dummy for random weights")
        return files
    index_path = download(weights, INDEX_FILE, revision, required=False)
    if index_path is None:
        single = download(weights, SINGLE_FILE, revision, required=True)
        return [single] if single is not None else []
    index = _read_local_json(index_path)
    names = _wanted_files(index or {}, wanted)
    return [path for name in names if (path := download(weights, name, revision, required=True)) is not None]


def _wanted_files(index: Mapping[str, Any], wanted: Callable[[str], bool]) -> list[str]:
    weight_map: dict[str, str] = index.get("weight_map", {})
    return sorted({file for key, file in weight_map.items() if wanted(key)})
