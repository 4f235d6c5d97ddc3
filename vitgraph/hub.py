"""Whether the model hub answers, asked once and with a bound, so that a run without a network is refused at once."""

from __future__ import annotations

import os
import queue
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from functools import cache
from typing import Any

from vitgraph import __version__

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
