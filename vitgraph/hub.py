"""The model hub: whether it answers, and the small files of a checkpoint, which may be in a folder too.

It is asked once and with a bound, so that a run without a network is refused at once.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from vitgraph import __version__, reading
from vitgraph.errors import HubUnreachableError, ModelError

HUB_TIMEOUT_S = 3.0
DEFAULT_ENDPOINT = "https://huggingface.co"
_TRUE = ("1", "true", "yes", "on")


@cache
def hub_problem() -> str | None:
    """Why the hub cannot be reached; None where it answers."""
    found = check_hub()
    return None if found["reachable"] else f"{found['endpoint']}: {found['reason']}"


def check_hub(
    open_url: Callable[..., Any] = urllib.request.urlopen, timeout_s: float = HUB_TIMEOUT_S
) -> dict[str, Any]:
    """Whether the model hub answers within `timeout_s`; being offline is a fact and no error.

    Returns:
        `endpoint`, `reachable` and, where it is not, `reason`.
    """
    return start_hub_check(open_url, timeout_s)()


def start_hub_check(
    open_url: Callable[..., Any] = urllib.request.urlopen, timeout_s: float = HUB_TIMEOUT_S
) -> Callable[[], dict[str, Any]]:
    """Asks the hub in the background; the returned function gives the answer, `timeout_s` from now at the latest."""
    endpoint = os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in _TRUE:
        return lambda: {"endpoint": endpoint, "reachable": False, "reason": "HF_HUB_OFFLINE is set"}
    answers: queue.Queue[str | None] = queue.Queue()

    def ask() -> None:
        request = urllib.request.Request(endpoint, method="HEAD", headers={"User-Agent": f"vitgraph/{__version__}"})
        try:
            with open_url(request, timeout=timeout_s):
                answers.put(None)
        except urllib.error.HTTPError as error:
            # Any answer of the hub itself shows that it is there; a proxy in between answers with these.
            answers.put(None if error.code < 500 and error.code not in (403, 407) else f"answered {error.code}")
        except (OSError, ValueError) as error:
            answers.put(str(getattr(error, "reason", None) or error))

    # Looking a name up has no timeout of its own, so the wait is bounded here and the thread left behind.
    threading.Thread(target=ask, daemon=True).start()

    def answer() -> dict[str, Any]:
        try:
            reason = answers.get(timeout=timeout_s)
        except queue.Empty:
            reason = f"no answer within {timeout_s:g} s"
        return {"endpoint": endpoint, "reachable": reason is None, "reason": reason}

    return answer


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
