"""What the program's process does with stops, with its streams and at its end, beside what Python does."""

from __future__ import annotations

import atexit
import math
import os
import signal
import sys
import threading
import time
from types import CodeType, FrameType
from typing import Any

STOP_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
"""All of these are a stop: what was measured is kept. A batch system and a terminal that closes send the last two."""

AGAIN_S = 0.02
"""Wait before an interrupt that Python could not deliver is sent again."""

ONE_STOP_S = 1.0
"""Stops that follow each other by less are one."""

_stopped_at = -math.inf

is_ending = False
"""All is said and saved, or the stop was heard: no further one is raised."""

LEAK_REPORTER = "cudnn"
"""cuDNN's frontend holds its plans to the end; forty lines about that would follow every result with FLASHINFER."""


def be_stoppable() -> None:
    """Makes every stop a `KeyboardInterrupt` of the main thread, but those that the process was started to ignore."""
    global _stopped_at, is_ending
    if threading.current_thread() is not threading.main_thread():
        return
    _stopped_at, is_ending = -math.inf, False
    for number in STOP_SIGNALS:
        # A background job of a shell without job control, and nohup, ask not to be told.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _stop)
    sys.unraisablehook = _send_again


def _stop(*_: object) -> None:
    global _stopped_at
    before, _stopped_at = _stopped_at, time.monotonic()
    # Who stops twice at once, or a terminal and a launcher that both do, means one stop: what it saves is not cut off.
    if _stopped_at - before > ONE_STOP_S and not is_ending:
        raise KeyboardInterrupt


def has_just_stopped() -> bool:
    """A stop has been raised so lately that an error may be what became of it."""
    return time.monotonic() - _stopped_at < ONE_STOP_S


def _send_again(ignored: Any) -> None:
    """A stop that reached Python where it cannot raise (a finaliser, a callback of C code) is sent once more."""
    if issubclass(ignored.exc_type, KeyboardInterrupt):
        threading.Thread(target=_stop_main_thread, daemon=True).start()
    else:
        sys.__unraisablehook__(ignored)


def _stop_main_thread() -> None:
    global _stopped_at
    number = next((number for number in STOP_SIGNALS if signal.getsignal(number) is _stop), None)
    if number is None:
        # All is said and saved by now.
        return
    _stopped_at = -math.inf
    main = threading.main_thread().ident or 0
    time.sleep(AGAIN_S)
    while _stopped_at < 0:
        # What is raised where this is begun is lost for good.
        if not _is_within(_send_again.__code__, sys._current_frames().get(main)):
            # A real signal, since it also ends a wait for the system; one that comes just before the wait does not.
            signal.pthread_kill(main, number)
        time.sleep(AGAIN_S)


def _is_within(code: CodeType, frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


def flush_output() -> None:
    """Writes what is still to be written, where somebody reads it."""
    for name in ("stdout", "stderr"):
        try:
            getattr(sys, name).flush()
        except (AttributeError, OSError, ValueError):
            # Gone or closed; Python would complain of it once more at its end.
            setattr(sys, name, None)


def leave_stops_to_the_end(exit_status: int) -> None:
    """From now on a stop ends the process at once, with the status that it ends with anyway: all is said and saved."""
    if threading.current_thread() is threading.main_thread():
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda *_: os._exit(exit_status))


def keep_stdout() -> None:
    """Leaves standard output to this program: what libraries write there goes to standard error from now on.

    NCCL tells its version there once it is asked for warnings, in the middle of what `--json` prints.
    """
    sys.stdout.flush()
    encoding, errors = sys.stdout.encoding, sys.stdout.errors
    ours = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(ours, "w", buffering=1, encoding=encoding, errors=errors)


def end_without_leak_report(code: object) -> None:
    """Ends the process as Python does, up to where nanobind would list what a module still holds.

    Args:
        code: Of the `SystemExit` that ends the program; one that is no number is left to Python, as is every program
            without such a module.
    """
    if LEAK_REPORTER not in sys.modules or not isinstance(code, int | None):
        return
    atexit._run_exitfuncs()
    flush_output()
    os._exit(code or 0)
