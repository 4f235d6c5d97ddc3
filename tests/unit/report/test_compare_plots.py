"""The figure of a comparison: which bars it has, what stands in the place of missing ones, and its files."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_up_comparison import MEANS, make_record, make_samples

from vitgraph.errors import UsageError
from vitgraph.report.compare_plots import draw_backends, write_compare_plots


def test_every_measured_mode_has_a_bar_and_every_other_a_word() -> None:
    record = make_record()
    upper, lower = draw_backends(record).axes
    for axes, field in ((upper, "mean_ms"), (lower, "p99_ms")):
        heights = {container.get_label(): [bar.get_height() for bar in container] for container in axes.containers}
        assert heights == {mode: [row[mode][field] for row in record.rows if row[mode]] for mode in ("eager", "graph")}
        words = [text.get_text() for text in axes.texts]
        assert "unavailable" in words
        assert "graph: unsupported" in words
    assert [label.get_text() for label in lower.get_xticklabels()] == list(MEANS)
    assert lower.get_ylabel() == "P99 a request (ms)"


def test_modes_differ_in_more_than_colour() -> None:
    eager, graph = draw_backends(make_record()).axes[0].containers
    assert {bar.get_hatch() for bar in eager} == {"//"}
    assert not any(bar.get_hatch() for bar in graph)


def test_few_requests_show_the_maximum_and_a_cpu_is_named() -> None:
    few = [row for row in make_samples() if row.call < 100]
    upper, lower = draw_backends(make_record(samples=few, mode="cpu-replay")).axes
    assert lower.get_ylabel() == "Maximum (n<300) a request (ms)"
    assert "replay on a CPU, no speed-up claimed" in "".join(text.get_text() for text in upper.texts)


def test_files_are_whole_repeatable_and_not_replaced_unasked(tmp_path: Path) -> None:
    record = make_record()
    first = write_compare_plots(record, tmp_path / "a")
    second = write_compare_plots(record, tmp_path / "b")
    assert [path.name for path in first] == ["backends.png", "backends.svg"]
    assert first[0].read_bytes().startswith(b"\x89PNG")
    assert first[1].read_bytes() == second[1].read_bytes()
    with pytest.raises(UsageError, match=r"backends\.png exists"):
        write_compare_plots(record, tmp_path / "a")


def test_nothing_is_drawn_of_nothing(tmp_path: Path) -> None:
    assert write_compare_plots(make_record({"A": (None, None)}, []), tmp_path) == []
    assert list(tmp_path.iterdir()) == []
