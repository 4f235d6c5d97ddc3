"""Every command ends in words when it is stopped, and leaves a valid record or none."""

from __future__ import annotations

from itertools import cycle

import pytest
from every_command import COMMANDS
from stopped_commands import SIGNALS, drill_command, stop_command

from vitgraph.errors import EXIT_INTERRUPTED


@pytest.mark.parametrize("number", SIGNALS)
def test_a_stop_at_the_very_first_is_one_word(number: int) -> None:
    """Before anything of the command is done or even imported."""
    ended, wrong, _ = stop_command("models", number, 0.0, None)
    assert wrong is None and ended.status == EXIT_INTERRUPTED


@pytest.mark.slow
@pytest.mark.parametrize(("name", "number"), list(zip(COMMANDS, cycle(SIGNALS), strict=False)))
def test_every_command_that_is_stopped_ends_in_words(name: str, number: int) -> None:
    assert not drill_command(name, 1, seed=3, signals=(number,)).wrong
