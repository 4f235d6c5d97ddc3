"""Data sets of the hub: its rows where it answers, else what an earlier use of the set left in the local caches."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from vitgraph.errors import HubUnreachableError, InputError
from vitgraph.hub import hub_problem
from vitgraph.reading import names_below

_SHARD = re.compile(r"(?P<split>.*)-\d{5}-of-(?P<count>\d{5})")


def cached_folder(hub_id: str, subset: str | None) -> Path | None:
    """The folder of a data set's parquet files in the hub's cache, where they alone are there; None where the hub
    answers, `datasets` has prepared the set, or they are not cached. A `subset` is a folder of its own where the set
    has several.

    Raises:
        InputError: Some of the files are there and others are not.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    if hub_problem() is None or _prepared(hub_id, subset) is not None:
        return None
    try:
        whole = Path(snapshot_download(hub_id, repo_type="dataset", local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    folder = whole / subset if subset and (whole / subset).is_dir() else whole
    files = parquet_files(folder)
    for file in files:
        shard = _SHARD.match(file.stem)
        if shard is not None:
            there = sum(other.parent == file.parent and other.name.startswith(shard["split"] + "-") for other in files)
            if there < int(shard["count"]):
                raise InputError(
                    f"the cache has {there} of {int(shard['count'])} files of split {shard['split']!r} of data set "
                    f"{hub_id}, and the hub cannot be reached ({hub_problem()}); fetch the rest with "
                    f"`hf download --repo-type dataset {hub_id}`"
                )
    return folder if files else None


def parquet_files(folder: Path) -> list[Path]:
    """The parquet files of a folder and its subfolders, in order.

    Raises:
        InputError: It has more files than are looked through.
    """
    return sorted(folder / name for name in names_below(folder, failure=InputError) if name.endswith(".parquet"))


def hub_rows(hub_id: str, subset: str | None, split: str, *, streams: bool) -> Any:
    """The rows of a data set, from the hub where it answers, else as `datasets` has prepared them before.

    Raises:
        HubUnreachableError: The hub does not answer, and nothing is cached.
    """
    import datasets

    problem = hub_problem()
    if problem is None:
        return datasets.load_dataset(hub_id, name=subset, split=split, streaming=streams)
    prepared = _prepared(hub_id, subset)
    if prepared is None:
        raise HubUnreachableError(
            f"data set {hub_id} is no local folder or file and not in the local cache, and the hub cannot be reached "
            f"({problem})"
        )
    return prepared.as_streaming_dataset(split) if streams else prepared.as_dataset(split)


def _prepared(hub_id: str, subset: str | None) -> Any:
    """What `datasets` has made of the set before; None where it has not, or not of that configuration."""
    from datasets.packaged_modules.cache.cache import Cache

    try:
        return Cache(
            dataset_name=hub_id.split("/")[-1], repo_id=hub_id, config_name=subset, version="auto", hash="auto"
        )
    except ValueError:
        return None
