"""One document in every medium: what it shows, that nothing in it is cut, and that no text in it is obeyed."""

from __future__ import annotations

import csv
import html
import io
import re
from pathlib import Path

import made_up_reports as made
import pytest
from made_up_document import ODD, SPEC, made_up_document, terminal_text

from vitgraph.errors import UsageError
from vitgraph.records.series import Latency
from vitgraph.report import say
from vitgraph.report.charts import chart_files
from vitgraph.report.columns import Column
from vitgraph.report.documents import FORMATS, csv_bytes, parse_formats, write
from vitgraph.report.markup import to_html, to_latex, to_markdown
from vitgraph.report.say import clean
from vitgraph.report.views.claims import moved_by_one
from vitgraph.report.views.runs import join_tables

CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
PAGE_WORDS = re.compile(r"<(script|link|img|iframe|object|base)\b|@import|url\((?!#)|\ssrc=")


@pytest.mark.parametrize("width", [80, 100, 200])
def test_a_terminal_shows_every_header_and_figure_whole(width: int) -> None:
    text = terminal_text(made_up_document(), width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    words = text.split()
    for column in SPEC.columns:
        for word in column.header.split():
            assert word in words, word
    for number in range(9):
        assert f"{1000.0 * number:.2f}" in text
    # A table in parts names its rows in each of them.
    assert text.count("=1+1") >= 1


def test_what_was_run_and_the_verdict_come_first_in_every_medium() -> None:
    document = made_up_document(title="of a model")
    for text in (terminal_text(document, 80), to_markdown(document), to_html(document)):
        flat = " ".join(re.sub(r"<style>.*?</style>", "", text, flags=re.DOTALL).split())
        places = [flat.find(part) for part in ("blocks not compiled", "Graphs are faster", "Odd things", "Reason")]
        assert -1 not in places and places == sorted(places), places
    latex = to_latex(document)
    assert latex.index("blocks not compiled") < latex.index(r"\toprule")


def test_control_characters_and_bidi_marks_reach_no_medium(tmp_path: Path) -> None:
    document = made_up_document()
    assert not CONTROL.search(clean(ODD))
    for text in (terminal_text(document, 80), to_markdown(document), to_html(document), to_latex(document)):
        assert not CONTROL.search(text.replace("\n", " "))
        assert "\\x1b[31m" in text.replace(r"\textbackslash{}", "\\").replace("\\\\", "\\").replace("\\[", "[")
    for path in write(document, tmp_path, ("csv", "plots")):
        if path.suffix != ".png":
            assert not CONTROL.search(path.read_text(encoding="utf-8").replace("\n", " ")), path


def test_a_page_stands_alone_and_escapes_everything() -> None:
    page = to_html(made_up_document())
    assert "default-src 'none'" in page
    assert not PAGE_WORDS.search(page)
    assert all(target.startswith("#") for target in re.findall(r'href="([^"]*)"', page))
    assert "<i>" not in page and html.escape("<i>") in page
    ids = re.findall(r'\sid="([^"]*)"', page)
    assert len(set(ids)) == len(ids)
    for target in re.findall(r'(?:url\(#|href="#)([\w.-]+)', page):
        assert target in ids


def test_charts_follow_the_colours_of_the_page_and_draw_any_name(tmp_path: Path) -> None:
    document = made_up_document()
    page = to_html(document)
    svg = page[page.index("<svg") : page.index("</svg>")]
    assert "var(--" in svg and not re.search(r"#[0-9a-f]{6}", svg)
    assert "\\frac{$" in html.unescape(svg)
    assert "_hidden" in svg
    files = chart_files(document.charts)
    assert files["latency.png"].startswith(b"\x89PNG")
    assert files == chart_files(document.charts)


def test_csv_cells_are_no_formulas_and_numbers_stay_numbers() -> None:
    table = SPEC.filled([{"name": name, "mean_0": -1.5} for name in ("=1+1", "+1", "-x", "@SUM(A1)", "a=b")])
    rows = list(csv.DictReader(io.StringIO(csv_bytes(table).decode())))
    assert [row["name"] for row in rows] == ["'=1+1", "'+1", "'-x", "'@SUM(A1)", "a=b"]
    assert {row["mean_0"] for row in rows} == {"-1.5"}
    assert {row["mean_1"] for row in rows} == {""}


def test_latex_is_one_float_a_table_that_fits_with_a_label() -> None:
    text = to_latex(made_up_document())
    assert text.count(r"\begin{table}") == text.count(r"\label{tab:vitgraph-test-odd}") == 1
    assert r"\begin{adjustbox}{max width=\linewidth" in text
    assert r"\textbackslash{}frac\{\$ 5\% \#1" in text


@pytest.mark.parametrize("kind", list(made.REPORTS))
def test_latex_of_every_report_is_balanced_and_every_row_has_its_cells(kind: str) -> None:
    text = to_latex(made.report(kind))
    assert re.search(r"[^\x20-\x7e\xa0-\u017f\n]", text) is None, "a letter that LaTeX's own fonts lack"
    opened: list[str] = []
    for word, name in re.findall(r"\\(begin|end)\{(\w+)\}", text):
        opened.append(name) if word == "begin" else None
        assert word == "begin" or opened.pop() == name
    assert opened == []
    plain = re.sub(r"\\[a-zA-Z]+|\\.", "", text)
    assert plain.count("{") == plain.count("}") and plain.count("$") % 2 == 0
    labels = re.findall(r"\\label\{(.*?)\}", text)
    for table in re.findall(r"\\begin\{tabular\}.*?\\end\{tabular\}", text, re.DOTALL):
        columns = re.match(r"\\begin\{tabular\}\{([lr]+)\}", table)
        rows = [line for line in table.splitlines() if line.endswith(r"\\")]
        assert columns is not None and len(rows) > 1
        for row in rows:
            assert len(re.findall(r"(?<!\\)&", row)) == len(columns[1]) - 1, row
            assert not re.search(r"(?<!\\)[#%_]", row), row
    assert len(set(labels)) == len(labels) == text.count(r"\begin{table}")


def test_markdown_shows_special_characters_as_they_are() -> None:
    text = to_markdown(made_up_document())
    row = next(line for line in text.splitlines() if line.startswith("| a"))
    assert row.count(" | ") == len(SPEC.columns) - 1
    assert r"\<i\>\|\`$\\frac" in row
    # A fence in the content does not close the fence around it.
    assert "````text\nrun " in text


@pytest.mark.slow
def test_files_are_all_formats_and_never_replaced_unasked(tmp_path: Path) -> None:
    document = made_up_document()
    written = write(document, tmp_path)
    names = {path.relative_to(tmp_path).as_posix() for path in written}
    assert names == {"odd.csv", "odd.parquet", "columns.csv", "table.md", "table.tex", "report.html",
                     "plots/latency.png", "plots/latency.svg"}  # fmt: skip
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "table.tex").write_text("mine")
    with pytest.raises(UsageError, match="exists; results are not replaced"):
        write(document, tmp_path / "new")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["table.tex"]
    write(document, tmp_path / "new", ("latex",), overwrite=True)
    assert (tmp_path / "new" / "table.tex").read_text() != "mine"


def test_parquet_holds_numbers_whole_and_describes_its_columns(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    column = Column("value", "number", "ms", "a time", "Value")
    document = made_up_document(tables=(SPEC.filled([{"name": "a", "mean_0": 1 / 3}]),))
    write(document, tmp_path, ("parquet",))
    stored = pq.read_table(tmp_path / "odd.parquet")
    assert stored.to_pylist()[0]["mean_0"] == 1 / 3
    assert stored.schema.field("mean_0").metadata == {b"unit": column.unit.encode(), b"meaning": b"a mean"}


def test_tables_of_several_records_are_one_with_their_names() -> None:
    (joined,) = join_tables({"one": [SPEC.filled([{"name": "a"}])], "two": [SPEC.filled([{"name": "b"}])]})
    assert [(row["run"], row["name"]) for row in joined.rows] == [("one", "a"), ("two", "b")]
    assert joined.columns[0].name == "run"


def test_what_a_table_counts_stands_in_its_title() -> None:
    assert SPEC.filled([]).heading == "Odd things (counts requests)"


def test_no_impossible_launch_gap_is_printed() -> None:
    assert (say.gap(0.94), say.gap(1.04), say.gap(None)) == ("within noise", "1.04×", "–")


def test_a_series_that_one_request_moves_is_told_from_a_slow_one() -> None:
    def latency(mean: float, p50: float, largest: float) -> Latency:
        times = {"mean_ms": mean, "p50_ms": p50, "p90_ms": p50, "p99_ms": p50, "max_ms": largest, "std_ms": 1.0}
        return Latency(**times, p99_supported=False, requests=400, calls=400, outliers=0)

    usual = {name: latency(5.0, 4.8, 12.0) for name in "abc"}
    found = moved_by_one(usual | {"slow": latency(50.0, 48.0, 120.0), "moved": latency(12.0, 4.8, 2670.0)})
    assert found == {"moved": "one of 400 took 2,670 ms"}


def test_formats_are_read_or_refused_with_the_known_ones() -> None:
    assert parse_formats(None) == FORMATS
    assert parse_formats("html, csv,html") == ("html", "csv")
    for text in ("pdf", "", "csv,pdf"):
        with pytest.raises(UsageError, match="give some of csv, parquet, markdown, latex, plots, html"):
            parse_formats(text)


def test_a_sentence_starts_with_a_capital_unless_its_first_word_has_its_own() -> None:
    assert say.sentence("no video") == "No video." and say.sentence("vLLM 0.33 runs it!") == "vLLM 0.33 runs it!"
