"""Columns that come from the fields of records, and tables of typed rows."""

from __future__ import annotations

import pytest

from vitgraph.records.sections import value_at
from vitgraph.records.series import Counters, GraphUse, Latency
from vitgraph.report.columns import Column, fields, table_of

USE = GraphUse(path="default", token_budget=64, segment_slots=4, replays=3, items=5, tokens=90, segments=5, waste=0.5)


def test_a_field_gives_its_column_meaning_kind_and_unit() -> None:
    columns = {one.name: one for one in fields(GraphUse, "use", "path", replay_ms="Replay ms", waste="Waste", items="")}
    assert [(one.kind, one.unit) for one in columns.values()] == [
        *(("text", ""), ("number", "ms"), ("number", "share"), ("integer", "items"))
    ]
    assert columns["replay_ms"].meaning == "wall time of a replay, in ms"
    assert [one.header for one in columns.values()] == ["", "Replay ms", "Waste", ""]
    (supported,) = fields(Latency, "", "p99_supported")
    assert supported.kind == "truth"
    # What holds several values is no number.
    assert fields(Counters, "", "misses_by_reason")[0].kind == "text"


def test_a_field_that_a_record_does_not_have_is_no_column() -> None:
    with pytest.raises(KeyError, match="replay_s"):
        fields(GraphUse, "use", "replay_s")


def test_a_table_finds_its_values_in_what_its_rows_are_of() -> None:
    double = Column(
        "double", "integer", "replays", "twice the replays", "Double", of=lambda row: 2 * row["use"].replays
    )
    spec = table_of("uses", *fields(GraphUse, "use", replays="Replays", replay_ms="Replay ms"), double)
    table = spec.of([{"use": USE}, {"use": USE.model_copy(update={"replay_ms": 0.5})}])
    assert [list(row.values()) for row in table.rows] == [[3, None, 6], [3, 0.5, 6]]
    assert [[cell.text for cell in row] for row in table.cells()] == [["3", "–", "6"], ["3", "0.500", "6"]]


def test_what_is_missing_on_the_way_to_a_value_is_not_measured() -> None:
    assert value_at({"use": None}, "use.replays") is None
    assert value_at({}, "use.replays") is None
    assert value_at({"use": {"replays": 0}}, "use.replays") == 0
