"""The model table: the README's matrix is what the code and the records say."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from pathlib import Path

import pytest

from vitgraph.models.registry import ROWS, catalog, resolve_preset, row_presets
from vitgraph.report.columns import Table
from vitgraph.report.views.machine import MATRIX_BEGIN, MATRIX_END, families_markdown, matrix_markdown, models_document

ROOT = Path(__file__).parents[3]


ENTRIES = catalog()


@pytest.mark.parametrize(("page", "made"), [("README.md", families_markdown), ("docs/models.md", matrix_markdown)])
def test_the_pages_hold_the_generated_tables(page: str, made: Callable[..., str]) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    shown = text[text.index(MATRIX_BEGIN) : text.index(MATRIX_END) + len(MATRIX_END)]
    assert shown == made(ENTRIES), f"run `vitgraph models --markdown` and put its tables into README.md and {page}"


def test_rows_of_one_kind_of_tower_stand_together() -> None:
    towers = [entry["tower"] for entry in ENTRIES]
    assert [tower for tower, _ in groupby(towers)] == list(dict.fromkeys(towers))
    table = models_document(ENTRIES).sections[0].blocks[0]
    assert isinstance(table, Table)
    assert [row["tower"] for row in table.rows] == towers and table.shown[0].name == "row"


def test_a_row_says_how_it_was_verified() -> None:
    run = {**ENTRIES[0]["verified"][0], "backend": "auto", "max_rel_l2": 0.013}
    text = matrix_markdown([{**ENTRIES[0], "verified": [run | {"compiled": False}, run | {"compiled": True}]}])
    assert "H200 auto, max distance 1.3%; H200 auto, compiled, max distance 1.3%" in text


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_row_has_a_full_and_a_debug_preset(row) -> None:
    assert {row.full_preset, row.debug_preset} <= set(row_presets(row.name))
    full, debug = resolve_preset(row.full_preset), resolve_preset(row.debug_preset)
    assert full is not None
    assert debug is not None
    assert full.weights is not None
    assert debug.weights is None
