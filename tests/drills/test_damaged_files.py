"""Damaged input of every kind that is read ends in words, never in a traceback or a hang."""

from __future__ import annotations

import pytest
from damaged_files import Kind, configs, kinds, run_kind

KINDS = kinds()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_damaged_inputs_end_in_words(kind: Kind) -> None:
    _, wrong = run_kind(kind, 12, seed=1)
    assert not wrong


@pytest.mark.slow
@pytest.mark.parametrize("kind", configs(), ids=lambda kind: kind.name)
def test_damaged_configs_of_every_row_end_in_words(kind: Kind) -> None:
    _, wrong = run_kind(kind, 2, seed=2)
    assert not wrong
