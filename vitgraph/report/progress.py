"""Progress of a running command on stderr: a bar for each phase, notes between them."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class ConsoleProgress:
    """Shows phases and notes; silent but for the notes where it is not enabled.

    Args:
        enabled: Show the bars.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._console = Console(stderr=True)
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            disable=not enabled,
        )
        self._task: TaskID | None = None
        self._is_counted = False

    def __enter__(self) -> ConsoleProgress:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._end_phase()
        self._bars.stop()

    def phase(self, name: str, total: int | None = None) -> None:
        self._end_phase()
        self._is_counted = total is not None
        self._task = self._bars.add_task(name, total=total if total is not None else 1)

    def _end_phase(self) -> None:
        """Fills the bar of a phase without steps; one with steps stands where it came to, also where it was stopped."""
        if self._task is not None and not self._is_counted:
            self._bars.update(self._task, completed=1)

    def step(self) -> None:
        if self._task is not None:
            self._bars.advance(self._task)

    def note(self, text: str) -> None:
        self._console.print(f"note: {text}", markup=False, highlight=False)
