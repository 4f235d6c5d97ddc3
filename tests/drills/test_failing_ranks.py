"""A run of several ranks of which one is killed, stopped or fails ends in words, and leaves a valid record or none."""

from __future__ import annotations

import pytest
from failing_ranks import KINDS, drill_ranks


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_whose_rank_fails_ends_in_words(kind: str) -> None:
    found = drill_ranks(kind, 2, seed=2)
    assert not found.wrong and sum(found.ends.values()) >= 2
