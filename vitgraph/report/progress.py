"""Progress of a running command on stderr: bars in a terminal, elsewhere a plain line at least every ten seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from vitgraph.report.say import clean

PULSE_S = 10.0
"""Longest silence of a command whose standard error is no terminal."""

PREPARING = "preparing"


class Pulse:
    """What a command is doing, as plain lines: one when a phase begins, and one after every long silence."""

    def __init__(self, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._write, self._clock = write, clock
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._phase, self._total, self._done = PREPARING, 0, 0
        self._began = self._said = clock()

    def phase(self, name: str, total: int | None = None) -> None:
        """A new phase begins."""
        with self._lock:
            self._phase, self._total, self._done, self._began = name, total or 0, 0, self._clock()
            self._say()

    def step(self) -> None:
        """One step of the phase is done."""
        with self._lock:
            self._done += 1

    def beat(self) -> float:
        """Says where the command is if nothing was said for long enough; seconds until that is due again."""
        with self._lock:
            if self._clock() - self._said >= PULSE_S:
                self._say()
            return PULSE_S - (self._clock() - self._said)

    def _say(self) -> None:
        self._said = self._clock()
        seconds = self._said - self._began
        parts = [f"{self._done} of {self._total}"] if self._total else []
        parts += [f"{seconds:.0f} s"] if seconds >= 1 else []
        if 0 < self._done < self._total:
            parts.append(f"about {seconds / self._done * (self._total - self._done):.0f} s left")
        self._write(f"{self._phase}{': ' if parts else ''}{', '.join(parts)}")

    def start(self) -> None:
        """Says it from a thread of its own from now on."""
        threading.Thread(target=self._run, daemon=True).start()

    def stop(self) -> None:
        """Says nothing more."""
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.wait(max(0.1, self.beat())):
            pass


class ConsoleProgress:
    """Shows phases and notes; silent but for the notes where it is not enabled."""

    def __init__(self, *, enabled: bool) -> None:
        self._console = Console(stderr=True)
        in_terminal = enabled and self._console.is_terminal
        self._has_pulse = enabled and not in_terminal
        self._pulse = Pulse(self._line if self._has_pulse else lambda text: None)
        self._preparing = self._console.status(PREPARING)
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable=not in_terminal,
        )
        self._task: TaskID | None = None
        self._is_counted = False

    def __enter__(self) -> ConsoleProgress:
        if self._has_pulse:
            self._pulse.start()
        if not self._bars.disable:
            self._preparing.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._end_phase()
        self.close()

    def close(self) -> None:
        """Shows no phases from now on."""
        self._pulse.stop()
        self._preparing.stop()
        self._bars.stop()

    def phase(self, name: str, total: int | None = None) -> None:
        self._pulse.phase(name, total)
        self._preparing.stop()
        self._bars.start()
        self._end_phase()
        self._is_counted = total is not None
        self._task = self._bars.add_task(name, total=total if total is not None else 1)

    def _end_phase(self) -> None:
        """Fills the bar of a phase without steps; one with steps stands where it came to, also where it was stopped."""
        if self._task is not None and not self._is_counted:
            self._bars.update(self._task, completed=1)

    def step(self) -> None:
        self._pulse.step()
        if self._task is not None:
            self._bars.advance(self._task)

    def note(self, text: str) -> None:
        self._console.print(f"note: {clean(text)}", markup=False, highlight=False)

    def _line(self, text: str) -> None:
        print(clean(text), file=self._console.file, flush=True)
