"""Every command ends in words when it is stopped, and leaves a valid record or none."""

from __future__ import annotations

import pytest
from every_command import COMMANDS
from stopped_commands import drill_command


@pytest.mark.parametrize("name", ["tune-budgets", "workload make"])
def test_a_command_that_is_stopped_ends_in_words(name: str) -> None:
    found = drill_command(name, 2, seed=2)
    assert not found.wrong and found.ends["stopped"]


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_that_is_stopped_ends_in_words(name: str) -> None:
    assert not drill_command(name, 1, seed=3).wrong
