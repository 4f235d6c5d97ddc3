"""Commands that are run as processes of their own, one after the other, each with a folder for its result."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from vitgraph.records.store import RUN_FILE

STDERR_FILE = "stderr.txt"
STOP_WAIT_S = 60.0
"""What a process that is asked to stop gets to save what it has."""


def run_process(command: Sequence[str], folder: Path) -> tuple[bool, int]:
    """Runs one process to its end, with its standard error in a file of the folder.

    Args:
        folder: Made where it is missing; a record in it goes first.

    Returns:
        Whether the user stopped it, and its exit status.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RUN_FILE).unlink(missing_ok=True)
    process: subprocess.Popen[bytes] | None = None
    with (folder / STDERR_FILE).open("wb") as errors:
        null = subprocess.DEVNULL
        try:
            with _stops_later():
                # Its own session: it gets one interrupt, from here, and not a second from the terminal while it saves.
                process = subprocess.Popen(
                    list(command), stdin=null, stdout=null, stderr=errors, start_new_session=True
                )
            return False, process.wait()
        except KeyboardInterrupt:
            if process is None:
                raise
            process.send_signal(signal.SIGINT)
            try:
                return True, process.wait(STOP_WAIT_S)
            except subprocess.TimeoutExpired:
                return True, _kill(process)
        except BaseException:
            if process is not None:
                _kill(process)
            raise


@contextmanager
def _stops_later() -> Iterator[None]:
    """Stops that come meanwhile are heard at its end, so that none parts a process from who has just started it."""
    held: list[int] = []
    before = {number: handler for number in signal.valid_signals() if callable(handler := signal.getsignal(number))}
    for number in before:
        signal.signal(number, lambda number, _: held.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if held:
        signal.raise_signal(held[0])


def _kill(process: subprocess.Popen[bytes]) -> int:
    process.kill()
    return process.wait()


def last_line(folder: Path) -> str:
    """What a process said last on standard error; it may have left anything there, or nothing."""
    lines = (folder / STDERR_FILE).read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else ""
