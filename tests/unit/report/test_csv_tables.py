"""CSV tables compared as whole text with stored files."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from vitgraph.errors import UsageError
from vitgraph.records.bench_record import RunRecord
from vitgraph.report.csv_tables import PER_BUDGET_COLUMNS, SUMMARY_COLUMNS, write_per_budget_csv, write_summary_csv

DATA = Path(__file__).parents[2] / "data"


@pytest.fixture
def record() -> RunRecord:
    return RunRecord.load(DATA / "bench-run")


def test_summary_as_whole_text(record: RunRecord, tmp_path: Path) -> None:
    path = write_summary_csv(record, tmp_path / "new" / "summary.csv")
    assert path.read_bytes() == (DATA / "golden" / "summary.csv").read_bytes()


def test_per_budget_as_whole_text(record: RunRecord, tmp_path: Path) -> None:
    path = write_per_budget_csv(record, tmp_path / "per_budget.csv")
    assert path.read_bytes() == (DATA / "golden" / "per_budget.csv").read_bytes()


def test_what_was_not_measured_is_an_empty_cell(record: RunRecord, tmp_path: Path) -> None:
    record.data["summary"]["eager"]["gpu_mean_ms"] = None
    record.data["graph"]["captured"] = record["graph"]["captured"][1:2]
    record.data["graph"]["captured"][0] |= {"pool_bytes": None, "axis_key": [28, 36]}
    record.data["graph"]["per_budget"] = []
    summary = write_summary_csv(record, tmp_path / "summary.csv").read_text(encoding="utf-8")
    assert "eager,gpu_mean,,ms,320,,,,,\n" in summary
    per_budget = write_per_budget_csv(record, tmp_path / "per_budget.csv").read_text(encoding="utf-8")
    assert per_budget.splitlines()[1:] == ["default,512,8,28x36,0,0,0,,,,,,36.56,,6291456"]


def test_a_run_without_result_gives_headers_only(record: RunRecord, tmp_path: Path) -> None:
    record.data |= {"summary": {}, "comparison": None, "graph": None}
    for write, columns in ((write_summary_csv, SUMMARY_COLUMNS), (write_per_budget_csv, PER_BUDGET_COLUMNS)):
        path = write(record, tmp_path / f"{write.__name__}.csv")
        with path.open(encoding="utf-8", newline="") as file:
            assert list(csv.reader(file)) == [list(columns)]


def test_a_table_is_replaced_only_with_overwrite(record: RunRecord, tmp_path: Path) -> None:
    path = tmp_path / "summary.csv"
    path.write_text("mine\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"summary\.csv exists; results are not replaced"):
        write_summary_csv(record, path)
    assert path.read_text(encoding="utf-8") == "mine\n"
    write_summary_csv(record, path, overwrite=True)
    assert path.read_text(encoding="utf-8").startswith("mode,metric,value,unit,n,")
