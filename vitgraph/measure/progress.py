"""What long work tells about itself: the command line shows it, ranks other than 0 are silent."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Takes phases, their steps, and notes."""

    def phase(self, name: str, total: int | None = None) -> None:
        """A new phase with `total` steps begins."""

    def step(self) -> None:
        """One step of the phase is done."""

    def note(self, text: str) -> None:
        """Something that the user should know."""

    def close(self) -> None:
        """Nothing more is told but notes: other processes tell of the work from now on."""


class SilentProgress:
    """Shows nothing, and keeps the notes.

    Attributes:
        notes: What was noted.
    """

    def __init__(self) -> None:
        self.notes: list[str] = []

    def phase(self, name: str, total: int | None = None) -> None:
        """Says nothing."""

    def step(self) -> None:
        """Says nothing."""

    def close(self) -> None:
        """Says nothing anyhow."""

    def note(self, text: str) -> None:
        """Keeps the text."""
        self.notes.append(text)
