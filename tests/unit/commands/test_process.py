"""A stop is one word and a status wherever it comes, and never a traceback."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

import pytest

from vitgraph import __main__ as program
from vitgraph import cli
from vitgraph.commands import process
from vitgraph.errors import EXIT_INTERRUPTED, EXIT_SLOWER


class ProcessEnded(BaseException):
    """Instead of `os._exit`."""


@pytest.fixture(autouse=True)
def _own_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a process does with its signals and its end, as far as a test can have it."""

    def end(status: int) -> NoReturn:
        raise ProcessEnded(status)

    monkeypatch.setattr(os, "_exit", end)
    # Where another test has loaded it, the end would run what this process does at its own end.
    monkeypatch.setattr(process, "LEAK_REPORTER", "no such module")
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    before = {number: signal.getsignal(number) for number in process.STOP_SIGNALS}
    # A stop within a destructor of what other tests left is sent again, and would come when this test is over.
    monkeypatch.setattr(process, "_stop_main_thread", lambda: None)
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    for number, handler in before.items():
        signal.signal(number, handler)


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


@pytest.mark.parametrize("number", process.STOP_SIGNALS)
@pytest.mark.parametrize("end", [SystemExit, KeyboardInterrupt])
def test_a_stop_after_the_last_line_ends_in_a_status(
    end: type[BaseException], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every place between there and the end of the program in turn, also as a second stop that comes much later."""
    monkeypatch.setattr(process, "ONE_STOP_S", 0.0)
    own = EXIT_SLOWER if end is SystemExit else EXIT_INTERRUPTED
    for place in range(1000):
        stop = StopAt(number, place)

        def run(stop: StopAt = stop) -> NoReturn:
            sys.setprofile(stop)
            raise end(EXIT_SLOWER)

        monkeypatch.setattr(cli, "run", run)
        with pytest.raises(BaseException) as ended:
            program.main()
        assert isinstance(ended.value, SystemExit | ProcessEnded), (place, ended.value)
        assert ended.value.args[0] in (own, EXIT_INTERRUPTED), place
        if stop.left >= 0:
            break
    assert place > 10 and ended.value.args[0] == own
