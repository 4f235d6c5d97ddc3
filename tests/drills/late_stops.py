"""Stops the program at every place after its last line in turn, by every signal: prints how many places there are.

The last line is a status, or a first stop. A program of its own, as it takes over the process's signals and its end.
"""

from __future__ import annotations

import gc
import itertools
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


def stop_everywhere(number: int, end: type[BaseException]) -> int:
    """Exits with a line that names the place where a stop did not end in a status; returns how many places there are.

    Args:
        number: The signal.
        end: What ends the program: `SystemExit` with a status, or `KeyboardInterrupt`, a first stop.
    """
    own = EXIT_SLOWER if end is SystemExit else EXIT_INTERRUPTED
    for place in range(1000):
        stop = StopAt(number, place)

        def run(stop: StopAt = stop) -> NoReturn:
            sys.setprofile(stop)
            raise end(EXIT_SLOWER)

        cli.run = run  # type: ignore[assignment]
        try:
            program.main()
        except (SystemExit, ProcessEnded) as ended:
            status = ended.args[0]
        if status != own and (stop.left >= 0 or status != EXIT_INTERRUPTED):
            sys.exit(f"{signal.Signals(number).name} at place {place} after {end.__name__}: status {status}")
        if stop.left >= 0:
            return place
    sys.exit("there is no end of places")


def main() -> None:
    os_exit, os._exit = os._exit, _end
    process.ONE_STOP_S = 0.0
    gc.disable()
    combined = itertools.product(process.STOP_SIGNALS, (SystemExit, KeyboardInterrupt))
    places = [stop_everywhere(number, end) for number, end in combined]
    os._exit = os_exit
    sys.stdout.write(f"{min(places)}\n")


if __name__ == "__main__":
    main()
