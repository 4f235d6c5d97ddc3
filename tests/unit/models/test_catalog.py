"""The model table: the README's matrix is what the code and the records say."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

import pytest
from rich.console import Console

from vitgraph.models.catalog import catalog, verifications
from vitgraph.models.registry import ROWS, resolve_preset, row_presets
from vitgraph.report.columns import Table
from vitgraph.report.to_terminal import render
from vitgraph.report.views.machine import MATRIX_BEGIN, MATRIX_END, families_markdown, matrix_markdown, models_document

ROOT = Path(__file__).parents[3]


ENTRIES = [entry.as_dict() for entry in catalog()]


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
    named = [row["tower"] for row in table.rows if row["tower"]]
    assert named == list(dict.fromkeys(towers))


@pytest.mark.parametrize(("memory_check", "is_explained"), [("not rerun", True), ("ok", False)])
def test_the_star_is_explained_where_a_row_has_one(memory_check: str, is_explained: bool) -> None:
    run = {**ENTRIES[0]["verified"][0], "max_rel_l2": 0.013, "memory_check": memory_check}
    entries = [{**ENTRIES[0], "verified": [run]}]
    console = Console(file=io.StringIO(), width=200)
    render(models_document(entries), console)
    assert isinstance(console.file, io.StringIO)
    for text in (matrix_markdown(entries), console.file.getvalue()):
        assert "H200 FLASH_ATTN, max distance 1.3%" in text
        assert ("1.3% *" in text) == ("* The check that memory returns" in text) == is_explained


@pytest.mark.parametrize("name", sorted(verifications()))
def test_what_is_called_verified_is_in_a_committed_record(name: str) -> None:
    for run in verifications()[name]:
        record = json.loads((ROOT / "results" / run["record"] / "run.json").read_text(encoding="utf-8"))
        (row,) = [row for row in record["result"]["models"] if row["row"] == name and row["preset"] == run["preset"]]
        assert row["max_rel_l2"] == run["max_rel_l2"]
        failed = [] if run["memory_check"] == "ok" else ["memory_returned"]
        assert [check["name"] for check in row["checks"] if check["status"] == "failed"] == failed


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_row_has_a_full_and_a_debug_preset(row) -> None:
    assert {row.full_preset, row.debug_preset} <= set(row_presets(row.name))
    full, debug = resolve_preset(row.full_preset), resolve_preset(row.debug_preset)
    assert full is not None
    assert debug is not None
    assert full.weights is not None
    assert debug.weights is None
