"""Random calls of every row on poisoned buffers."""

from __future__ import annotations

import pytest
from poisoned_calls import CALLS_A_ROW, debug_models, drill_row


def test_calls_on_poisoned_buffers() -> None:
    drilled = drill_row("qwen3-vl-debug", 40, seed=2)
    assert drilled.counters.hits > 40 and drilled.counters.misses


@pytest.mark.slow
@pytest.mark.parametrize("model", debug_models())
def test_thousands_of_calls_on_poisoned_buffers(model: str) -> None:
    assert drill_row(model, CALLS_A_ROW, seed=1).counters.hits
