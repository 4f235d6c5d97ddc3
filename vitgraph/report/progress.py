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

    def __enter__(self) -> ConsoleProgress:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None and kind is None:
            self._bars.update(self._task, completed=self._bars.tasks[-1].total)
        self._bars.stop()

    def phase(self, name: str, total: int | None = None) -> None:
        if self._task is not None:
            self._bars.update(self._task, completed=self._bars.tasks[-1].total)
        self._task = self._bars.add_task(name, total=total if total is not None else 1)

    def step(self) -> None:
        if self._task is not None:
            self._bars.advance(self._task)

    def note(self, text: str) -> None:
        self._console.print(f"note: {text}", markup=False, highlight=False)
