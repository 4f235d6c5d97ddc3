"""The report of every kind of record as whole text, and what must and must not be claimed in it."""

from __future__ import annotations

import csv
import os
import re
from pathlib import Path
from typing import Any

import made_up_reports as made
import pandas as pd
import pytest
from made_up_comparison import make_samples
from made_up_document import terminal_text

from vitgraph.errors import UsageError
from vitgraph.records.series import Latency
from vitgraph.report import charts
from vitgraph.report.documents import document_of, write, write_derived
from vitgraph.report.draw import draw_backends, draw_budgets
from vitgraph.report.markup import to_html, to_latex, to_markdown
from vitgraph.report.views.bench import bench_document, bench_tables
from vitgraph.report.views.parts import profile_bars
from vitgraph.report.views.runs import runs_document

GOLDEN = Path(__file__).parents[2] / "data" / "golden"
REWRITE = "VITGRAPH_REWRITE_GOLDEN"
"""Set in the environment to write the stored texts anew; what changed in them is then to be read in the diff."""


def flat(document: Any, width: int = 200) -> str:
    return " ".join(terminal_text(document, width).split())


@pytest.mark.parametrize("width", [80, 200])
@pytest.mark.parametrize("kind", list(made.REPORTS))
def test_each_report_is_the_stored_text_and_nothing_in_it_is_cut(kind: str, width: int) -> None:
    document = made.report(kind)
    text, file = terminal_text(document, width), GOLDEN / f"{kind}-{width}.txt"
    if os.environ.get(REWRITE):
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")
    # Lines to paste are not broken.
    assert all(len(line) <= width for line in text.splitlines() if "--" not in line)
    assert not re.search(r"\S…", text), "cut with dots"


@pytest.mark.parametrize("kind", list(made.REPORTS))
def test_each_report_can_be_shown_in_every_medium(kind: str, tmp_path: Path) -> None:
    document = made.report(kind)
    for text in (to_markdown(document), to_latex(document)):
        assert "nan ms" not in text
    page = to_html(document)
    assert not re.search(r"<(script|link|img|iframe)\b|@import|url\((?!#)|\ssrc=", page)
    assert all(target.startswith("#") for target in re.findall(r'href="([^"]*)"', page))
    for path in write(document, tmp_path, ("csv", "parquet")):
        assert path.stat().st_size


@pytest.mark.parametrize("kind", ["bench", "compare-backends", "two-runs"])
def test_reports_of_runs_say_first_what_was_run(kind: str) -> None:
    first = terminal_text(made.report(kind), 400).splitlines()[1]
    for phrase in ("blocks not compiled", "packing", "request"):
        assert phrase in first


def test_blocks_that_were_compiled_are_named() -> None:
    text = flat(made.bench_report(resolved__compile=True))
    assert "blocks compiled" in text and "blocks not compiled" not in text


# -- bench -------------------------------------------------------------------------------------------------------------


def test_a_cpu_run_claims_nothing(tmp_path: Path) -> None:
    report = made.bench_report(**made.ON_A_CPU)
    for text in (terminal_text(report, 200), to_markdown(report), to_latex(report)):
        assert "not a GPU" in text
        assert not [word for word in ("faster,", "slower,", "95% CI") if word in text]
    assert "No verdict: replayed on a CPU" in flat(report)


def test_the_tail_of_few_requests_is_the_labelled_maximum() -> None:
    few: dict[str, Any] = {f"result__latency__{mode}__p99_supported": False for mode in ("eager", "graph")}
    text = flat(made.bench_report(**few))
    assert "+3.6% (35.38→34.10 ms)" in text
    assert "max (n<300), undecided" in text
    assert "P90 Max" in text, "no P99 that these requests cannot support"


def test_an_invalid_run_names_the_reasons_and_shows_no_interval() -> None:
    invalid = {f"result__comparison__pairs__0__{metric}__verdict": "invalid" for metric in ("mean", "p50", "p99")}
    reason = "the GPU clock fell to 61%; process 7 ran"
    changes = {**invalid, "result__comparison__verdict": "invalid", "result__comparison__verdict_reason": reason}
    text = flat(made.bench_report(**changes))
    assert "the measurement is not valid" in text and reason in text
    assert "95% CI" not in text


def test_slower_graphs_that_mostly_pad_are_explained() -> None:
    slower = {"result__comparison__verdict": "slower"}
    assert "likely" not in flat(made.bench_report(**slower))
    rows = made.bench_record().result.graph.tokens_replayed
    padded = {"result__graph__waste": 0.5, "result__graph__budget_tokens_replayed": 2 * rows}
    text = flat(made.bench_report(**slower, **padded))
    assert "likely because the graphs compute 2.0 times the rows of eager (waste 50.0%)" in text
    assert "likely" not in flat(made.bench_report(**padded))


@pytest.mark.parametrize(
    ("verdict", "headline"),
    [
        ("slower", "Graphs are slower"),
        ("same", "Graphs and eager take the same time"),
        ("undecided", "Undecided"),
        ("invalid", "No verdict: the measurement is not valid"),
    ],
)
def test_each_verdict_has_its_words_and_its_sign_on_the_page(verdict: str, headline: str) -> None:
    page = to_html(bench_document(made.bench_record(result__comparison__verdict=verdict)))
    assert f'<section class="verdict {verdict}">' in page
    assert headline in page


def test_wrong_outputs_are_the_headline() -> None:
    wrong = {"checked": 1, "max_rel_l2": 0.5, "tolerance": 0.02, "status": "incorrect"}
    record = made.changed(made.bench_record(**made.NOTHING_MEASURED), {"result.correctness": wrong})
    assert "Outputs are wrong: nothing was timed" in flat(bench_document(record))


def test_another_backend_than_asked_for_is_shown() -> None:
    assert "FLASH_ATTN (asked for FLASHINFER)" in flat(made.bench_report(resolved__attn_backend="FLASHINFER"))


def test_paths_and_axis_keys_are_shown_where_there_are_some() -> None:
    use = {"path": "global", "token_budget": 13824, "segment_slots": 8, "axis_key": [28, 36], "replays": 3, "items": 4}
    use |= {"tokens": 100, "segments": 4, "waste": 0.25, "replay_ms": 123.456}
    lines = terminal_text(made.bench_report(result__graph__per_budget=[use]), 80).splitlines()
    assert any(
        line.split() == ["global", "13824", "8", "28×36", "3", "4", "75.0%", "25.0%", "123.46"] for line in lines
    )


def test_dropped_graphs_are_grouped_by_reason() -> None:
    graphs = [
        {"path": "default", "token_budget": 100 + n, "segment_slots": 1, "reason": "no memory"} for n in range(10)
    ]
    graphs.append({"path": "default", "token_budget": 100, "segment_slots": 8, "reason": "backend refused"})
    text = flat(made.bench_report(result__graph__dropped=graphs), 400)
    assert "1 slot), 107 (1 slot) and 2 more: no memory" in text
    assert "Not captured: 100 (8 slots): backend refused" in text


def test_impossible_figures_are_said_to_be_noise() -> None:
    overhead = {"items": 1, "tokens": 9, "replays": 1, "call_ms": 2.0, "replays_ms": 3.09, "overhead_ms": -1.09}
    changes = {"result__graph__launch_gap": 0.94, "result__graph__call_overheads": [overhead]}
    text = flat(made.bench_report(**changes))
    assert "Launch gap within noise" in text and "Call overhead within noise" in text
    assert "0.94" not in text and "-1.09" not in text


def test_an_outlier_that_moves_a_mean_is_named() -> None:
    changes = {"result__latency__eager__max_ms": 2670.0, "result__latency__eager__mean_ms": 16.0}
    assert "eager: one of 320 took 2,670 ms, which alone moves its mean." in flat(made.bench_report(**changes))


def test_latency_charts_draw_what_was_measured_and_budgets_within_reach() -> None:
    tokens, distribution, budgets = (chart.draw() for chart in made.bench_report().charts)
    (axes,) = tokens.axes
    points = {str(part.get_label()): len(part.get_offsets()) for part in axes.collections}
    missed = points["graph, with an eager fallback"]
    assert points == {"eager": 320, "graph": 320 - missed, "graph, with an eager fallback": missed}
    lines = [int(line.get_xdata()[0]) for line in axes.lines]
    assert lines == [512, 1024, 1536, 2048, 2560, 3072, 3584, 4096, 4864]
    marks = {round(float(line.get_xdata()[0]), 6) for line in distribution.axes[0].lines if len(line.get_xdata()) == 1}
    latency = made.bench_record().result.latency
    assert marks == {round(of, 6) for one in latency.values() for of in (one.mean_ms or 0, one.p99_ms or 0)}
    outcome, items, _ = budgets.axes
    assert [label.get_text() for label in outcome.get_yticklabels()] == ["hit", "miss: too many tokens"]
    assert sum(bar.get_width() for bar in items.patches) == made.bench_record().result.graph.hits


def test_tables_hold_the_figures_of_the_record() -> None:
    record = made.bench_record()
    summary, per_budget, *_ = bench_tables(record)
    rows = {(row["series"], row["metric"]): row for row in summary.rows}
    pair = record.result.comparison.pair("eager", "graph")
    assert pair is not None
    assert rows["graph", "mean"]["improvement_pct"] == pair.mean.improvement_pct
    assert rows["graph", "mean"]["value"] == record.result.latency["graph"].mean_ms
    assert rows["eager", "mean"]["improvement_pct"] is None
    assert sum(row["replays"] for row in per_budget.rows) == record.result.graph.replays
    assert bench_tables(made.bench_record(**made.NOTHING_MEASURED))[0].rows == ()


# -- several runs ------------------------------------------------------------------------------------------------------


def opened(folder: Path, **changes: Any) -> list[Any]:
    """The example with each of the changes, as runs of their own."""
    found = made.saved_run()
    return [type(found)(name, made.changed(found.record, change), found.samples) for name, change in changes.items()]


def test_what_all_runs_share_stands_above_and_what_differs_in_a_column(tmp_path: Path) -> None:
    runs = opened(tmp_path, one={}, other={"environment.encoder.attn_backend": "FLASHINFER", "resolved.compile": True})
    markdown = to_markdown(runs_document(runs))
    shared = markdown.splitlines()[2]
    assert "Synthetic GPU · bfloat16" in shared and "FLASH" not in shared and "compiled" not in shared
    (header,) = (line for line in markdown.splitlines() if line.startswith("| Run |"))
    assert "| Backend | Blocks |" in header
    assert r"FLASHINFER (asked for FLASH\_ATTN) | blocks compiled |" in markdown
    assert r"| +22.9% (+19.9 … +26.3) |" in markdown


def test_latex_of_many_runs_is_one_table(tmp_path: Path) -> None:
    text = to_latex(runs_document(opened(tmp_path, one={}, two={"resolved.compile": True})))
    assert text.count(r"\begin{table}") == text.count(r"\label{tab:") == 1


@pytest.mark.slow
def test_the_page_of_several_runs_links_to_each(tmp_path: Path) -> None:
    page = to_html(runs_document(opened(tmp_path, one={}, two={"resolved.compile": True})))
    assert set(re.findall(r'href="#(run-[^"]*)"', page)) == {"run-0", "run-1"}
    assert {"run-0", "run-1"} <= set(re.findall(r'id="([^"]*)"', page))


def test_an_export_joins_the_tables_of_its_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(charts, "chart_files", lambda found: {f"{chart.name}.png": b"not drawn" for chart in found})
    write(runs_document(opened(tmp_path, one={}, two={})), tmp_path, ("csv", "plots"))
    with (tmp_path / "summary.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["run"] for row in rows} == {"one", "two"}
    with (tmp_path / "samples.csv").open() as file:
        samples = list(csv.DictReader(file))
    assert len(samples) == 2 * len(made.saved_run().samples)
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {"one", "two"}


def ranked(ranks: int, faster: float, **more: Any) -> dict[str, Any]:
    """A run of the published scenario on so many GPUs, `faster` times as fast as the example."""
    latency = made.bench_record().result.latency
    times = {
        f"result.latency.{mode}.{name}_ms": getattr(latency[mode], f"{name}_ms") / faster
        for mode in ("eager", "graph")
        for name in ("mean", "p99")
    }
    settings = {"workload": {"dataset_name": "random-mm", "random_mm_base_items_per_request": 20}}
    return (
        {"resolved.ranks": ranks, "resolved.model": "Qwen/Qwen3-VL-32B-Instruct", "settings": settings} | times | more
    )


def scaling_rows(document: Any) -> list[Any]:
    return [row for table in document.tables if table.name == "scaling" for row in table.rows]


def test_efficiency_is_that_of_the_means_and_published_figures_stand_beside(tmp_path: Path) -> None:
    runs = opened(tmp_path, four=ranked(4, 2.0), one=ranked(1, 1.0), two=ranked(2, 1.5))
    document = runs_document(runs)
    rows = scaling_rows(document)
    assert [row["run"] for row in rows] == ["one", "two", "four", None]
    assert [row["graph_efficiency"] for row in rows[:3]] == pytest.approx([1.0, 0.75, 0.5])
    assert (rows[3]["source"], rows[3]["mean_improvement_pct"]) == ("vLLM's page, 4 GB200", 18.4)
    assert "Scaling: Qwen/Qwen3-VL-32B-Instruct on Synthetic GPU" in flat(document)


def test_runs_that_pack_otherwise_or_of_another_model_are_no_series(tmp_path: Path) -> None:
    packed = {"resolved.packing": "optimal"}
    runs = opened(tmp_path, a=ranked(1, 1.0), b=ranked(2, 1.5), c=ranked(1, 1.2, **packed), d=ranked(2, 2.4, **packed))
    found = [(row["backend"], row["graph_efficiency"]) for row in scaling_rows(runs_document(runs)) if row["run"]]
    assert [name for name, _ in found] == ["FLASH_ATTN"] * 2 + ["FLASH_ATTN, packing optimal"] * 2
    other = opened(tmp_path, a=ranked(1, 1.0), b=ranked(2, 1.5, **{"resolved.model": "m/m"}))
    assert scaling_rows(runs_document(other)) == []


def test_two_runs_are_judged_with_one_sign(tmp_path: Path) -> None:
    report = made.two_runs_report(tmp_path / "slower", graph=1.2)
    text = flat(report)
    assert "The second run is slower: mean latency in graph mode -20.0% (6.16→7.40 ms)" in text
    assert "Compared: packing (greedy against greedy-defer)." in text
    (table,) = report.tables
    row = next(row for row in table.rows if (row["series"], row["metric"]) == ("graph", "mean"))
    assert row["improvement_pct"] == pytest.approx(-20.0)
    assert row["improvement_low_pct"] <= row["improvement_pct"] <= row["improvement_high_pct"] + 1e-9


# -- other kinds -------------------------------------------------------------------------------------------------------


def test_a_comparison_on_a_cpu_recommends_nothing() -> None:
    text = flat(made.compare_report(invalid_reasons=("replay on a CPU",), mode="cpu-replay"))
    assert "not a GPU" in text
    assert not [word for word in ("best,", "faster,", "95% CI", "Use ") if word in text]


def test_failures_of_single_modes_are_named_with_their_reasons() -> None:
    text = flat(made.compare_report())
    assert "ROCM_AITER_FA unavailable: it needs an AMD GPU" in text
    assert "TORCH_SDPA graph unsupported: attention backend TORCH_SDPA reads segment lengths on the host" in text


def test_every_measured_mode_has_a_bar_and_every_other_a_word() -> None:
    (chart,) = made.compare_report().charts
    upper, lower = chart.draw().axes
    assert lower.get_xlabel() == "P99 of a request (ms)"
    assert {container.get_label(): len(container) for container in upper.containers} == {"eager": 4, "graph": 3}
    words = [text.get_text() for text in upper.texts]
    assert "graph: unsupported" in words and "eager: unavailable" in words
    eager, graph = upper.containers
    assert {bar.get_hatch() for bar in eager} != {bar.get_hatch() for bar in graph}


def latency(ms: float, largest: float) -> Latency:
    times = {"mean_ms": ms, "p50_ms": ms, "p90_ms": ms, "p99_ms": ms, "max_ms": largest, "std_ms": 1.0}
    return Latency(**times, p99_supported=False, requests=100, calls=100, outliers=0)


def test_a_bar_that_one_request_moves_is_marked_and_does_not_set_the_scale() -> None:
    latencies = {("A", "eager"): latency(5.0, 9.0), ("A", "graph"): latency(30.0, 2670.0)}
    words = {("A", "graph"): "one of 100 took 2,670 ms"}
    for axes in draw_backends("s", ["A"], latencies, words, "max_ms").axes:
        assert axes.get_xlim()[1] < 20
        assert any("one of 100 took 2,670 ms" in text.get_text() for text in axes.texts)


def test_marks_of_bars_cover_neither_the_names_nor_one_another() -> None:
    latencies = {("A", "eager"): latency(40.0, 40.0), ("A", "graph"): latency(29.0, 29.0)}
    figure = draw_backends("s", ["A"], latencies, {("A", "graph"): "one of 200 took 185.5 ms"}, "max_ms")
    figure.canvas.draw()
    for axes in figure.axes:
        for text in axes.texts:
            box = text.get_window_extent().transformed(axes.transData.inverted())
            assert box.x0 >= 0 and box.x1 <= 1.02 * axes.get_xlim()[1], text.get_text()


def test_the_subtitle_of_a_tall_chart_covers_no_axes() -> None:
    uses = pd.DataFrame([{"name": str(number), "count": number, "waste_pct": 1.0} for number in range(1, 41)])
    figure = draw_budgets("Title", "what was measured on what, at some length, " * 3, "Replays", uses)
    figure.canvas.draw()
    (subtitle,) = figure.texts[-1:]
    assert all(axes.get_tightbbox().y1 < subtitle.get_window_extent().y0 for axes in figure.axes)


def test_few_requests_show_the_maximum_of_backends() -> None:
    few = [row for row in make_samples() if row.call < 150]
    text = flat(made.compare_report(samples=few))
    assert "P99 latency improvement: of the max (n<300), of which nothing is claimed." in text


def test_a_profile_of_a_cpu_says_what_it_is_not() -> None:
    text = flat(document_of(made.profile_record(result__traced="CPU operators", result__speed_of_light=None)))
    assert "not of GPU kernels" in text and "limit" not in text.lower()


def test_profile_bars_are_as_long_as_the_call() -> None:
    result = made.profile_record().result
    assert result is not None
    bars = profile_bars(result)
    for mode in ("eager", "graph"):
        assert sum(bars[mode].values()) == pytest.approx(result.modes[mode].span_ms)
    assert bars["limit"] == {"attention": 1.0, "matrix products": 3.5}


def test_a_verification_lists_faults_always_and_all_checks_of_one_model() -> None:
    one, two = made.verify_record(made.verified("a")), made.verify_record(made.verified("a"), made.verified("b"))
    assert "9 sizes" in flat(document_of(one)) and "1 of 1 encoder verified" in flat(document_of(one))
    assert "9 sizes" not in flat(document_of(two))
    assert f"{made.FAULT} (and 2 more)" in flat(made.verify_report())
    assert "Not verified: OutOfMemoryError" in flat(made.verify_report())


def test_derived_files_are_written_again_and_a_failure_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from saved_run_folders import write_run

    folder, said = write_run(tmp_path / "run", requests=20), []
    names = {path.relative_to(folder).as_posix() for path in write_derived(folder, said.append)}
    assert {"summary.csv", "per_budget.csv", "plots/budgets.png"} <= names and "samples.csv" not in names
    monkeypatch.setattr(charts, "chart_files", lambda found: {f"{chart.name}.png": b"not drawn" for chart in found})
    assert write_derived(folder, said.append) and said == []
    assert write_derived(tmp_path, said.append) == [] and said == []
    (folder / "summary.csv").unlink()
    (folder / "summary.csv").mkdir()
    assert write_derived(folder, said.append) == []
    assert "the record itself is saved" in said[0]


def test_a_file_in_the_way_stops_all(tmp_path: Path) -> None:
    (tmp_path / "summary.csv").write_text("mine")
    with pytest.raises(UsageError, match=r"summary\.csv exists"):
        write(made.bench_report(), tmp_path, ("csv",))
    assert [path.name for path in tmp_path.iterdir()] == ["summary.csv"]
