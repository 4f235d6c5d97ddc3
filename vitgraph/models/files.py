"""The small files of a checkpoint, from a local folder or from the hub."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from vitgraph import reading
from vitgraph.errors import HubUnreachableError, ModelError
from vitgraph.hub import hub_problem

CONFIG_FILE = "config.json"


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None where there is no such file.

    Raises:
        ModelError: It cannot be read, or holds something else.
    """
    if not path.exists():
        return None
    content = reading.read_json(path, failure=ModelError)
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds a JSON {type(content).__name__}, not an object; copy the checkpoint again")
    return content


def download(hub_id: str, file: str, revision: str | None, *, required: bool) -> Path | None:
    """Local path of one file of a hub repository; None where an optional file does not exist.

    Raises:
        ModelError: Offline and not cached, no such repository, no access, or a required file is missing.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError

    ways_out = "use --load-format dummy with a preset (`vitgraph models` lists them) or a local checkpoint folder"
    is_offline = hub_problem() is not None
    try:
        # The hub's own library would ask again and again for a minute.
        return Path(hf_hub_download(hub_id, file, revision=revision, local_files_only=is_offline))
    except LocalEntryNotFoundError as error:
        if not required:
            return None
        why = f" ({hub_problem()})" if is_offline else ""
        raise HubUnreachableError(
            f"{hub_id}: {file} is not cached, and the hub cannot be reached{why}; {ways_out}"
        ) from error
    except EntryNotFoundError as error:
        if not required:
            return None
        raise ModelError(f"{hub_id} has no file {file}; is it a transformers checkpoint?") from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise ModelError(
            f"{hub_id}: {file} could not be fetched: {' '.join(str(error).split())}; {ways_out}"
        ) from error


def say(message: str) -> None:
    """Tells the user on the error stream what a checkpoint's files leave open or what of them is not used."""
    logging.getLogger("vitgraph").warning("%s", message)
