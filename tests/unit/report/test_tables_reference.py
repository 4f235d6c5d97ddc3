"""The reference page of tables is that of the columns, and every file that a report writes is in it."""

from __future__ import annotations

from pathlib import Path

import made_up_reports as made
import pytest

from vitgraph.report import reference

ROOT = Path(__file__).parents[3]


def test_the_page_is_up_to_date() -> None:
    assert (ROOT / reference.PAGE).read_text("utf-8") == reference.page(), "run python -m vitgraph.report.reference"


@pytest.mark.parametrize("kind", list(made.REPORTS))
def test_every_table_of_files_is_in_it(kind: str) -> None:
    known = {spec.name for specs in reference.TABLES.values() for spec in specs}
    assert {table.name for table in made.report(kind).tables} <= known


def test_every_column_says_what_it_holds() -> None:
    for specs in reference.TABLES.values():
        for spec in specs:
            names = [column.name for column in spec.columns]
            assert len(set(names)) == len(names)
            assert all(column.meaning for column in spec.columns)
