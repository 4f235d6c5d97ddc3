"""No value of any option of any command ends in a traceback, hangs, or reaches the terminal as an escape."""

from __future__ import annotations

from pathlib import Path

import pytest
from odd_values import WITH_OPTIONS, fill_folder, wrong_of_command


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with what no reader expects."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VITGRAPH_DEBUG", raising=False)
    fill_folder()


@pytest.mark.slow
@pytest.mark.parametrize("command", WITH_OPTIONS)
def test_odd_values_of_every_option_end_in_words(command: str, place: None) -> None:
    assert not wrong_of_command(command, 1)
