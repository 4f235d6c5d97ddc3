"""Stops the program at every place after its last line in turn, each in turn of a second stop too: prints how many.

    python tests/drills/late_stops.py SIGTERM SystemExit

A program of its own, as it takes over the process's signals and its end.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from types import FrameType
from typing import NoReturn

from vitgraph import __main__ as program
from vitgraph import cli
from vitgraph.commands import process
from vitgraph.errors import EXIT_INTERRUPTED, EXIT_SLOWER


class ProcessEnded(BaseException):
    """Instead of `os._exit`."""


class StopAt:
    """Sends a stop at one of the places where Python hears signals: where a call begins, or one of C's has ended."""

    def __init__(self, number: int, place: int) -> None:
        self.number, self.left = number, place

    def __call__(self, frame: FrameType, event: str, called: object) -> None:
        if event == "return" and frame.f_code is program.main.__code__:
            sys.setprofile(None)
        elif event in ("call", "c_return") and called is not sys.setprofile:
            self.left -= 1
            if self.left < 0:
                sys.setprofile(None)
                signal.raise_signal(self.number)
                for _ in range(100):  # A jump back is where Python runs what handles it: here, not after the program.
                    pass


def _end(status: int) -> NoReturn:
    raise ProcessEnded(status)


def main(number: int, end: type[BaseException]) -> None:
    """Exits with a line that names the place where a stop did not end in a status.

    Args:
        number: The signal.
        end: What ends the program: `SystemExit` with a status, or `KeyboardInterrupt`, a first stop.
    """
    os_exit, os._exit = os._exit, _end
    process.ONE_STOP_S = 0.0
    own = EXIT_SLOWER if end is SystemExit else EXIT_INTERRUPTED
    gc.disable()
    for place in range(1000):
        stop = StopAt(number, place)

        def run(stop: StopAt = stop) -> NoReturn:
            sys.setprofile(stop)
            raise end(EXIT_SLOWER)

        cli.run = run  # type: ignore[assignment]
        try:
            program.main()
        except (SystemExit, ProcessEnded) as ended:
            if ended.args[0] not in (own, EXIT_INTERRUPTED):
                sys.exit(f"place {place}: status {ended.args[0]}")
            status = ended.args[0]
        if stop.left >= 0:
            break
    os._exit = os_exit
    sys.stdout.write(f"{place}\n")
    sys.exit(None if status == own else f"without a stop: status {status}")


if __name__ == "__main__":
    main(getattr(signal, sys.argv[1]), {"SystemExit": SystemExit, "KeyboardInterrupt": KeyboardInterrupt}[sys.argv[2]])
