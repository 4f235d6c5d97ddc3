"""Every command ends in words on a disk that is full, read-only or gone, and two never share a folder."""

from __future__ import annotations

import pytest
from failing_disks import KINDS, WRITING, drill_command, two_at_once


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITING)
def test_every_command_on_a_broken_disk_ends_in_words(name: str) -> None:
    for turn, kind in enumerate(KINDS, WRITING.index(name)):
        assert not drill_command(name, kind, 1, seed=3, from_the_start=turn % 2 == 0)[1]
    assert two_at_once(name) is None
