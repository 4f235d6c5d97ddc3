"""What a command says while it works, where nobody sees bars."""

from __future__ import annotations

import io
import sys
import time

import pytest

from vitgraph.report import progress as module
from vitgraph.report.progress import PULSE_S, ConsoleProgress, Pulse


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_silence_is_never_longer_than_ten_seconds(clock: Clock) -> None:
    said: list[tuple[float, str]] = []
    pulse = Pulse(lambda line: said.append((clock.now, line)), clock)
    end = clock.now + 60
    while clock.now < end:
        clock.now += pulse.beat()
    times = [time for time, _ in said]
    assert max(b - a for a, b in zip([100.0, *times], [*times, end], strict=True)) <= PULSE_S == 10.0
    assert said[0] == (110.0, "preparing: 10 s")


def test_a_line_says_how_far_a_phase_is_and_what_is_left(clock: Clock) -> None:
    said: list[str] = []
    pulse = Pulse(said.append, clock)
    pulse.phase("measuring", 40)
    for _ in range(10):
        clock.now += 1.2
        pulse.step()
    pulse.beat()
    pulse.phase("timing replays alone")
    pulse.beat()
    assert said == ["measuring: 0 of 40", "measuring: 10 of 40, 12 s, about 36 s left", "timing replays alone"]


def test_lines_come_by_themselves_where_stderr_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(module, "PULSE_S", 0.01)
    with ConsoleProgress(enabled=True) as shown:
        while "preparing" not in stream.getvalue():
            time.sleep(0.01)
        shown.phase("capturing graphs", 3)
        while stream.getvalue().count("capturing graphs: 0 of 3") < 2:
            time.sleep(0.01)
        shown.note("a note")
    assert "note: a note\n" in stream.getvalue()


def test_nothing_but_notes_is_said_where_it_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with ConsoleProgress(enabled=False) as shown:
        shown.phase("measuring", 2)
        shown.step()
        shown.note("a note")
    assert stream.getvalue() == "note: a note\n"
