"""What an export writes: whole files compared with stored ones, and the cases in which it must refuse or leave out."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from saved_run_folders import EXAMPLE, nothing_measured, on_a_cpu, scale, set_field, write_run

from vitgraph.errors import UsageError
from vitgraph.records.samples import SAMPLE_COLUMNS
from vitgraph.records.saved_runs import open_runs
from vitgraph.records.two_runs import compare_runs
from vitgraph.report.comparison_view import COMPARISON_COLUMNS
from vitgraph.report.csv_tables import MONOLITHIC_COLUMNS, PER_BUDGET_COLUMNS, PER_PATH_COLUMNS, SUMMARY_COLUMNS
from vitgraph.report.export import FORMATS, export_comparison, export_runs, parse_formats
from vitgraph.report.text_tables import latex_tables, latex_text, markdown_tables
from vitgraph.report.tidy_tables import TABLES

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "data" / "golden" / "export"
TABLE_NAMES = ("runs", "summary", "per_budget", "per_path", "misses", "dropped", "samples")
"""Tables of runs without monolithic graphs."""


def three_runs(folder: Path) -> list[Path]:
    return [EXAMPLE, write_run(folder / "cpu", on_a_cpu), write_run(folder / "failed", nothing_measured)]


def test_tables_as_whole_text(tmp_path: Path) -> None:
    runs = open_runs(three_runs(tmp_path))
    export_runs(runs, tmp_path / "out", ("csv", "markdown", "latex"))
    names = ["table.md", "table.tex", *(f"{name}.csv" for name in TABLE_NAMES if name != "samples"), "columns.csv"]
    for name in names:
        assert (tmp_path / "out" / name).read_text("utf-8") == (GOLDEN / name).read_text("utf-8"), name
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*names, "samples.csv"}


def test_a_comparison_as_whole_text(tmp_path: Path) -> None:
    change = set_field("settings", "graph", "packing", value="greedy-defer")
    second = write_run(tmp_path / "deferred", change, scale(graph=0.96, eager=1.01))
    comparison = compare_runs(*open_runs([EXAMPLE, second]))
    export_comparison(comparison, tmp_path / "out")
    for ending in ("csv", "md", "tex"):
        name = f"comparison.{ending}"
        assert (tmp_path / "out" / name).read_text("utf-8") == (GOLDEN / name).read_text("utf-8"), name
    endings = {path.suffix for path in (tmp_path / "out").iterdir()}
    assert endings == {".csv", ".parquet", ".md", ".tex", ".html"}


def test_parquet_holds_the_csv_whole_and_its_columns_described(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    runs = open_runs(three_runs(tmp_path))
    export_runs(runs, tmp_path / "out", ("csv", "parquet"))
    for table in TABLES:
        if table.name not in TABLE_NAMES:
            continue
        stored = pq.read_table(tmp_path / "out" / f"{table.name}.parquet")
        with (tmp_path / "out" / f"{table.name}.csv").open(encoding="utf-8", newline="") as file:
            rows = list(csv.reader(file))
        assert stored.column_names == rows[0] == [column.name for column in table.columns]
        assert stored.num_rows == len(rows) - 1
        for column, field in zip(table.columns, stored.schema, strict=True):
            assert field.metadata == {b"unit": column.unit.encode(), b"meaning": column.meaning.encode()}
    samples = pq.read_table(tmp_path / "out" / "samples.parquet").to_pylist()
    assert len(samples) == 3 * 1920
    assert samples[0]["wall_ms"] == runs[0].samples[0].wall_ms
    assert samples[0]["run"] == "bench-run"


def test_tidy_tables_have_the_columns_of_a_run_folder_after_the_run() -> None:
    columns = {table.name: tuple(column.name for column in table.columns) for table in TABLES}
    assert columns["summary"] == ("run", *SUMMARY_COLUMNS)
    assert columns["per_budget"] == ("run", *PER_BUDGET_COLUMNS)
    assert columns["per_path"] == ("run", *PER_PATH_COLUMNS)
    assert columns["monolithic"] == ("run", *MONOLITHIC_COLUMNS)
    assert columns["samples"] == ("run", *SAMPLE_COLUMNS)


def test_every_column_is_described_in_the_documentation() -> None:
    page = (ROOT / "docs" / "export.md").read_text(encoding="utf-8").splitlines()
    for columns in (*(table.columns for table in TABLES), COMPARISON_COLUMNS):
        for column in columns:
            assert f"| `{column.name}` | {column.kind} | {column.unit} | {column.meaning} |" in page


def test_all_formats_are_written_and_one_run_needs_no_folder_of_its_own_for_plots(tmp_path: Path) -> None:
    written = export_runs(open_runs([EXAMPLE]), tmp_path)
    plots = {f"plots/{name}.{end}" for name in ("latency_by_tokens", "latency_distribution", "budgets")
             for end in ("png", "svg")}  # fmt: skip
    tables = {f"{name}.{end}" for name in TABLE_NAMES for end in ("csv", "parquet")}
    expected = {"columns.csv", "table.md", "table.tex", "report.html", *plots, *tables}
    assert {path.relative_to(tmp_path).as_posix() for path in written} == expected
    assert all(path.stat().st_size for path in written)


def test_plots_of_several_runs_lie_apart(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / name / "run", requests=30) for name in ("a", "b")]
    export_runs(open_runs(paths), tmp_path / "out", ("plots",))
    assert sorted(path.name for path in (tmp_path / "out" / "plots").iterdir()) == ["a_run", "b_run"]


@pytest.mark.parametrize("existing", ["summary.csv", "report.html", "plots/budgets.svg"])
def test_one_existing_file_stops_all(existing: str, tmp_path: Path) -> None:
    (tmp_path / "plots").mkdir()
    (tmp_path / existing).write_text("mine", encoding="utf-8")
    with pytest.raises(UsageError, match="exists; results are not replaced"):
        export_runs(open_runs([EXAMPLE]), tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / existing]
    export_runs(open_runs([EXAMPLE]), tmp_path, overwrite=True)
    assert (tmp_path / existing).read_bytes() != b"mine"


def test_a_run_without_its_samples_still_has_tables_and_says_what_is_missing(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "bare")
    (folder / "samples.csv").unlink()
    (run,) = open_runs([folder])
    assert run.notes == ("bare: samples.csv is missing, so there are no samples and no plots of latency",)
    export_runs([run], tmp_path / "out", ("csv", "plots", "html"))
    assert (tmp_path / "out" / "samples.csv").read_text("utf-8").count("\n") == 1
    assert sorted(path.name for path in (tmp_path / "out" / "plots").iterdir()) == ["budgets.png", "budgets.svg"]
    assert "samples.csv is missing" in (tmp_path / "out" / "report.html").read_text("utf-8")


def test_only_bench_runs_of_a_known_version_are_taken(tmp_path: Path) -> None:
    tuned = tmp_path / "tuned"
    tuned.mkdir()
    (tuned / "run.json").write_text(json.dumps({"schema_version": 1, "kind": "tune"}), encoding="utf-8")
    with pytest.raises(UsageError, match=r"is a record of kind 'tune', and this takes runs of kind 'bench'"):
        open_runs([EXAMPLE, tuned])
    newer = write_run(tmp_path / "newer", set_field("schema_version", value=2))
    with pytest.raises(UsageError, match=r"has schema_version 2; this vitgraph reads up to 1. Update vitgraph"):
        open_runs([newer])
    with pytest.raises(UsageError, match=r"bench-run is given 2 times; give each run once"):
        open_runs([EXAMPLE, EXAMPLE / "run.json"])
    with pytest.raises(UsageError, match=r"cannot read .*none/run\.json: No such file"):
        open_runs([tmp_path / "none" / "run.json"])


def test_runs_are_named_by_as_much_of_their_path_as_tells_them_apart(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / name, requests=2) for name in ("x/run", "y/run", "y/other")]
    assert [run.name for run in open_runs(paths[1:])] == ["run", "other"]
    assert [run.name for run in open_runs(paths)] == ["x/run", "y/run", "y/other"]


def test_rows_of_one_backend_are_told_apart_by_their_runs(tmp_path: Path) -> None:
    paths = [EXAMPLE, write_run(tmp_path / "again_1", requests=10)]
    markdown = markdown_tables(open_runs(paths))
    assert "| Run | Backend | Mean latency improvement | P99 latency improvement |" in markdown
    assert "| again\\_1 | FLASH\\_ATTN | +22.9%" in markdown
    assert markdown.count("```bash") == 1
    assert r"again\_1 & FLASH\_ATTN & +22.9\%" in latex_tables(open_runs(paths))


def test_latex_prints_what_is_special_to_it() -> None:
    assert latex_text(r"a_b & 5% #1 {x} $\x") == r"a\_b \& 5\% \#1 \{x\} \$\textbackslash{}x"
    assert latex_text("~^ 5.13→4.52 ±2% (n<300) … –") == (
        r"\textasciitilde{}\textasciicircum{} 5.13$\rightarrow$4.52 $\pm$2\% (n$<$300) \dots{} --"
    )
    assert latex_text("-1.8% (-2) x-1 2026-01-15") == r"$-$1.8\% ($-$2) x-1 2026-01-15"


def test_formats_are_read_or_refused_with_the_known_ones() -> None:
    assert parse_formats(None) == FORMATS
    assert parse_formats("html, csv,html") == ("html", "csv")
    for text in ("pdf", "", "csv,pdf"):
        with pytest.raises(UsageError, match="give some of csv, parquet, markdown, latex, plots, html"):
            parse_formats(text)
