"""The rows of the registry as parameters of tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from vitgraph.models.registry import ROWS, ModelRow


def each_row(value: Callable[[ModelRow], Any] = lambda row: row, rows: Iterable[ModelRow] = ROWS) -> list[Any]:
    """A parameter a row: the first of each kind of tower is always tested, the others beside what is slow."""
    found, kinds = [], set()
    for row in rows:
        kind = row.name if row.tower == "own" else row.tower
        found.append(pytest.param(value(row), id=row.name, marks=[pytest.mark.slow] if kind in kinds else []))
        kinds.add(kind)
    return found
