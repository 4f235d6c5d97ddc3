"""Every file that a report writes is in the reference page of tables, with every column of it."""

from __future__ import annotations

import made_up_reports as made
import make_reference as reference
import pytest


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
