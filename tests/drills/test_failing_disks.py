"""Every command ends in words on a disk that is full, read-only or gone, and two never share a folder."""

from __future__ import annotations

from itertools import cycle

import pytest
from failing_disks import KINDS, WRITING, drill_command, two_at_once


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind", "is_first"), list(zip(WRITING, cycle(KINDS), cycle((True, False)))))
def test_every_command_on_a_broken_disk_ends_in_words(name: str, kind: str, is_first: bool) -> None:
    assert not drill_command(name, kind, 1, seed=3, from_the_start=is_first)[1]
    assert two_at_once(name) is None
