"""The HTML page: that it stands alone, puts the verdict first, claims nothing it may not, and its charts."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from saved_run_folders import EXAMPLE, nothing_measured, on_a_cpu, scale, set_field, write_run

from vitgraph.records.saved_runs import open_runs
from vitgraph.records.two_runs import compare_runs
from vitgraph.report import svg_charts
from vitgraph.report.comparison_view import comparison_page
from vitgraph.report.html_page import runs_page


def text_of(page: str) -> str:
    """What a reader sees, tags and style taken out."""
    body = page[page.index("<body>") :]
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", body)))


def one_page(folder: Path) -> str:
    return runs_page(open_runs([folder]))


@pytest.fixture(scope="module")
def example() -> str:
    return one_page(EXAMPLE)


def assert_stands_alone(page: str) -> None:
    assert "default-src 'none'" in page
    assert not re.search(r"<(script|link|img|iframe|object|base)\b", page)
    assert not re.search(r"@import|url\((?!#)|\ssrc=", page)
    assert all(target.startswith("#") for target in re.findall(r'href="([^"]*)"', page))


def test_the_page_loads_nothing(example: str) -> None:
    assert_stands_alone(example)


def test_the_verdict_comes_first_and_every_section_follows(example: str) -> None:
    text = text_of(example)
    order = [
        "Qwen/Qwen3-VL-30B-A3B-Instruct",
        "Graphs are faster",
        "Mean latency +22.9% (8.00→6.16 ms), 95% CI +19.9 … +26.3%",
        "P99 latency -1.8% (30.28→30.81 ms): undecided, 95% CI -6.3 … +2.9%.",
        "55 of 320 requests (17.2%) are slower than eager by more than 2%.",
        "Mean latency improvement P99 latency improvement FLASH_ATTN +22.9%",
        "Latency by tokens",
        "Latency distribution",
        "miss: too many tokens",
        "Items and waste by token budget",
        "Memory of each graph",
        "Total: graph pool 506.0 MiB, shared buffers 546.0 MiB, 18 graphs in 0.81 s.",
        "Not captured: 4864 (128 slots): out of memory",
        "Environment",
        "Device Synthetic GPU",
        "torch 2.11.0",
        "vitgraph bench \\ --model Qwen/Qwen3-VL-30B-A3B-Instruct \\ --mm-encoder-attn-backend FLASH_ATTN",
        "How to read this",
    ]
    places = [text.find(part) for part in order]
    assert -1 not in places, order[places.index(-1)]
    assert places == sorted(places)


def test_a_name_is_text_and_never_markup(tmp_path: Path) -> None:
    name = 'x"><script>alert(1)</script>&$title'
    page = one_page(write_run(tmp_path / "run", set_field("settings", "model", "model", value=name), requests=5))
    assert_stands_alone(page)
    assert html.escape(name) in page


def test_a_replay_on_a_cpu_claims_nothing(tmp_path: Path) -> None:
    text = text_of(one_page(write_run(tmp_path / "run", on_a_cpu, requests=20)))
    assert "No verdict: replayed on a CPU" in text
    assert "no speed-up is claimed here" in text
    assert not re.search(r"faster,|Graphs are", text[: text.index("How to read this")])


def test_a_run_that_measured_nothing_says_why(tmp_path: Path) -> None:
    page = one_page(write_run(tmp_path / "run", nothing_measured, requests=1))
    text = text_of(page)
    assert "Nothing was compared Out of memory: 80 GiB needed." in text
    assert "The run is incomplete (error): out of memory: 80 GiB needed" in text
    assert "vitgraph bench" in text


def test_wrong_outputs_are_the_headline(tmp_path: Path) -> None:
    def wrong(record: dict[str, Any]) -> None:
        nothing_measured(record)
        record["correctness"] = {"checked": 1, "max_rel_l2": 0.5, "tolerance": 0.02, "status": "incorrect"}

    assert "Outputs are wrong: nothing was timed" in text_of(one_page(write_run(tmp_path / "run", wrong, requests=1)))


@pytest.mark.parametrize(
    ("verdict", "headline"),
    [
        ("slower", "Graphs are slower"),
        ("same", "Graphs and eager take the same time"),
        ("undecided", "Undecided"),
        ("invalid", "No verdict: the measurement is not valid"),
    ],
)
def test_each_verdict_has_its_word_and_its_sign(verdict: str, headline: str, tmp_path: Path) -> None:
    page = one_page(write_run(tmp_path / "run", set_field("comparison", "verdict", value=verdict), requests=12))
    assert f'<section class="verdict {verdict}">' in page
    assert headline in text_of(page)


def test_several_runs_have_one_page_with_their_verdicts_first(tmp_path: Path) -> None:
    failed = write_run(tmp_path / "failed", nothing_measured, requests=1)
    page = runs_page(open_runs([EXAMPLE, failed]))
    assert_stands_alone(page)
    assert set(re.findall(r'href="#([^"]*)"', page)) == {"run-0", "run-1"} <= set(re.findall(r'id="([^"]*)"', page))
    text = text_of(page)
    assert text.index("faster") < text.index("Run bench-run")
    assert "failed – Nothing was compared" in text
    assert text.count("How to read this") == 1


def test_a_comparison_has_its_verdict_and_what_differs_first(tmp_path: Path) -> None:
    change = set_field("settings", "graph", "packing", value="greedy-defer")
    second = write_run(tmp_path / "deferred", change, scale(graph=1.2))
    page = comparison_page(compare_runs(*open_runs([EXAMPLE, second])))
    assert_stands_alone(page)
    text = text_of(page)
    order = [
        "The second run is slower",
        "Mean latency in graph mode +20.0% (6.16→7.40 ms), 95% CI +20.0 … +20.0%",
        "Compared: packing (greedy against greedy-defer).",
        "Differences with 95% intervals",
        "Latency distribution in graph mode",
        "How to read this",
    ]
    places = [text.find(part) for part in order]
    assert -1 not in places, order[places.index(-1)]
    assert places == sorted(places)


def scatter(tokens: list[float], misses: list[float], budgets: list[int]) -> str:
    times = np.linspace(5.0, 9.0, len(tokens))
    return svg_charts.latency_by_tokens(np.array(tokens), times, 0.8 * times, np.array(misses), budgets)


def test_the_scatter_draws_each_mode_with_its_marker_and_the_budgets_within_reach() -> None:
    chart = scatter([100, 200, 300, 400], [0, 0, 0, 1], [64, 128, 256, 512, 4096])
    assert chart.count('class="budget" d="M') - chart.count('<path class="budget" d="M11 0V14"/>') == 2
    groups = re.findall(r'points="([^"]*)" marker-start="url\(#m-(\w+)\)"', chart)
    assert [(name, len(points.split())) for points, name in groups] == [("eager", 4), ("graph", 3), ("miss", 1)]
    assert "graph, with an eager fallback" in chart
    assert "fallback" not in scatter([100, 200], [0, 0], [])


def test_points_that_fall_together_are_drawn_once() -> None:
    chart = scatter([100.0] * 500 + [200.0], [0.0] * 501, [])
    drawn = re.findall(r'points="([^"]*)" marker-start="url\(#m-eager\)"', chart)
    assert len(drawn[0].split()) < 260


def test_equal_values_and_a_single_request_can_be_drawn() -> None:
    for chart in (
        scatter([100.0], [0.0], [128]),
        scatter([100.0, 100.0], [0.0, 0.0], []),
        svg_charts.latency_distribution([svg_charts.Series("eager", "eager", np.array([2.0, 2.0, 2.0]))]),
        svg_charts.interval_rows([svg_charts.Interval("graph mean", "graph", 0.0, None, None)]),
    ):
        assert "nan" not in chart
        assert chart.count("<text") > 4


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (100.0, 5000.0, ["100", "200", "500", "1000", "2000", "5000"]),
        (3.0, 7.0, ["3", "4", "5", "6", "7"]),
        (10.0, 10.4, ["10", "10.1", "10.2", "10.3", "10.4"]),
        (1.0, 1e6, ["1", "10", "100", "1000", "10000", "100000", "1e+06"]),
    ],
)
def test_ticks_are_round_and_few(low: float, high: float, ticks: list[str]) -> None:
    scale_of_axis = svg_charts._Scale.over(np.array([low, high]), 0.0, 100.0)
    assert [f"{tick:g}" for tick in scale_of_axis.ticks()] == ticks
