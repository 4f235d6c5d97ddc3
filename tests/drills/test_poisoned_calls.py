"""Random calls of every row on poisoned buffers."""

from __future__ import annotations

import os

import pytest
from poisoned_calls import debug_models, drill_row


def test_calls_on_poisoned_buffers() -> None:
    drilled = drill_row("qwen3-vl-debug", 15, seed=2)
    assert drilled.counters.hits > 15 and drilled.counters.misses


@pytest.mark.slow
@pytest.mark.parametrize("model", debug_models())
def test_many_calls_on_poisoned_buffers(model: str) -> None:
    """`VITGRAPH_DRILL_CALLS` asks for more of them than a change has to pass."""
    calls = int(os.environ.get("VITGRAPH_DRILL_CALLS", "12"))
    assert drill_row(model, calls, seed=1).counters.hits
