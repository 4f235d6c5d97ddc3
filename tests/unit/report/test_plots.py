"""Figures: which are drawn, what they contain, and that files are not replaced unasked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vitgraph.errors import UsageError
from vitgraph.records.bench_record import RunRecord, Sample
from vitgraph.records.samples import request_times
from vitgraph.report.plots import draw_budgets, draw_latency_by_tokens, draw_latency_distribution, write_plots

DATA = Path(__file__).parents[2] / "data"
NAMES = ("latency_by_tokens", "latency_distribution", "budgets")


def numbers(values: Any) -> list[float]:
    return [float(value) for value in values]


@pytest.fixture
def record() -> RunRecord:
    return RunRecord.load(DATA / "bench-run")


@pytest.fixture
def samples(record: RunRecord) -> list[Sample]:
    return record.load_samples().samples


def test_each_figure_is_written_as_png_and_svg(record: RunRecord, samples: list[Sample], tmp_path: Path) -> None:
    paths = write_plots(record, samples, tmp_path / "plots")
    assert [path.name for path in paths] == [f"{name}.{ending}" for name in NAMES for ending in ("png", "svg")]
    for path in paths:
        content = path.read_bytes()
        assert content.startswith(b"\x89PNG" if path.suffix == ".png" else b"<?xml")
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == sorted(path.name for path in paths)


def test_the_same_run_gives_the_same_svg(record: RunRecord, samples: list[Sample], tmp_path: Path) -> None:
    first, second = (write_plots(record, samples[:300], tmp_path / name)[1] for name in ("a", "b"))
    assert first.suffix == ".svg"
    assert first.read_bytes() == second.read_bytes()


def test_nothing_is_drawn_of_nothing(record: RunRecord, samples: list[Sample], tmp_path: Path) -> None:
    only_eager = [sample for sample in samples if sample.mode == "eager"]
    assert [path.stem for path in write_plots(record, only_eager, tmp_path)] == ["budgets", "budgets"]
    record.data["graph"] = None
    assert write_plots(record, [], tmp_path) == []


def test_one_existing_file_stops_all(record: RunRecord, samples: list[Sample], tmp_path: Path) -> None:
    (tmp_path / "budgets.svg").write_text("mine", encoding="utf-8")
    with pytest.raises(UsageError, match=r"budgets\.svg exists"):
        write_plots(record, samples[:60], tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["budgets.svg"]
    write_plots(record, samples[:60], tmp_path, overwrite=True)
    assert (tmp_path / "budgets.svg").read_bytes().startswith(b"<?xml")


def test_latency_by_tokens_marks_modes_fallbacks_and_budgets(record: RunRecord, samples: list[Sample]) -> None:
    axes = draw_latency_by_tokens(record, samples, request_times(samples, ("eager", "graph"))).axes[0]
    points = {str(part.get_label()): len(np.asarray(part.get_offsets())) for part in axes.collections}
    fallbacks = {sample.request for sample in samples if sample.misses}
    assert points == {
        "eager": 320,
        "graph": 320 - len(fallbacks),
        "graph, with an\neager fallback": len(fallbacks),
    }
    assert [numbers(line.get_xdata())[0] for line in axes.lines] == [
        512,
        1024,
        1536,
        2048,
        2560,
        3072,
        3584,
        4096,
        4864,
    ]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")


def test_distribution_marks_mean_and_p99_as_the_record_has_them(record: RunRecord, samples: list[Sample]) -> None:
    axes = draw_latency_distribution(record, request_times(samples, ("eager", "graph"))).axes[0]
    lines = [(line, numbers(line.get_xdata()), numbers(line.get_ydata())) for line in axes.lines]
    marks = {(line.get_marker(), round(x[0], 6)) for line, x, _ in lines if len(x) == 1}
    expected = {
        (marker, round(record["summary"][mode][field], 6))
        for mode in ("eager", "graph")
        for marker, field in (("o", "mean_ms"), ("D", "p99_ms"))
    }
    assert marks == expected
    curves = [(line.get_linestyle(), y[0], y[-1]) for line, x, y in lines if len(x) > 1]
    assert curves == [("--", 0.0, 100.0), ("-", 0.0, 100.0)]


def test_distribution_of_few_requests_marks_the_maximum(record: RunRecord, samples: list[Sample]) -> None:
    pair = request_times([sample for sample in samples if sample.request < 20], ("eager", "graph"))
    legend = draw_latency_distribution(record, pair).axes[0].get_legend()
    assert legend is not None
    texts = [text.get_text() for text in legend.get_texts()]
    assert texts[-1] == "maximum"
    assert texts[1].endswith(f"max {pair.times['graph'].max():.2f} ms")


def test_budget_bars_add_up_slots_and_name_the_misses(record: RunRecord) -> None:
    items_axes, waste_axes, outcome_axes = draw_budgets(record).axes
    bars: list[Any] = list(items_axes.patches)
    items = [int(bar.get_height()) for bar in bars]
    assert sum(items) == record["graph"]["hits"]
    assert len(items) == 9
    entries = [entry for entry in record["graph"]["per_budget"] if entry["token_budget"] == 1024]
    replays, tokens = (sum(entry[name] for entry in entries) for name in ("replays", "tokens"))
    waste_bar: Any = waste_axes.patches[1]
    assert waste_bar.get_height() == pytest.approx(100 * (1 - tokens / (1024 * replays)))
    assert [label.get_text() for label in outcome_axes.get_yticklabels()] == ["hit", "miss: too many tokens"]


def test_budgets_of_a_run_that_only_missed_are_drawn(record: RunRecord, tmp_path: Path) -> None:
    record.data["graph"] |= {"per_budget": [], "hits": 0, "misses": 389, "misses_by_reason": {"too_many_tokens": 389}}
    assert len(write_plots(record, [], tmp_path)) == 2
