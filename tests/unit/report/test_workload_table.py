"""The workload's tables as whole texts, at the widths of a narrow and of a wide terminal, and its figures."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from vitgraph.errors import UsageError
from vitgraph.models.registry import resolve_model
from vitgraph.report.workload_plots import draw_sizes, draw_tokens, write_workload_plots
from vitgraph.report.workload_table import render_saved_trace, render_workload
from vitgraph.workloads.base import MediaItem, SkippedItem, Workload, number_requests
from vitgraph.workloads.inspect import inspect_workload

GOLDEN = Path(__file__).parents[2] / "data" / "golden"
MODELS = ("qwen3-vl-30b-a3b", "gemma-3-4b")


def make_facts() -> dict[str, Any]:
    sizes = [(336, 336), (336, 336), (640, 480), (1280, 720), (1920, 1080), (300, 900), (64, 64), (5000, 3000)]
    groups = [(MediaItem(*size),) for size in sizes]
    groups[0] = (*groups[0], MediaItem(640, 360, 120, fps=30.0))
    skipped = (SkippedItem("photos#9", "PIL cannot decode the image [truncated]"),)
    workload = Workload("few [sizes]", number_requests(groups), skipped=skipped, provenance={"statement": "Made up."})
    rules = {name: (resolve_model(name).row.name, resolve_model(name).rule()) for name in MODELS}
    return inspect_workload(workload, rules).as_dict()


def render(width: int, facts: dict[str, Any], encoding: str = "utf-8") -> str:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    render_workload(facts, Console(file=file, width=width, color_system=None, legacy_windows=False))
    file.seek(0)
    return "".join(f"{line.rstrip()}\n" for line in file.read().splitlines())


@pytest.mark.parametrize("width", [80, 200])
def test_the_text_is_the_stored_one(width: int) -> None:
    assert render(width, make_facts()) == (GOLDEN / f"workload_{width}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("width", [80, 100, 200])
def test_no_cell_is_cut_and_no_line_is_longer_than_the_terminal(width: int) -> None:
    facts = make_facts()
    facts["models"][0]["histogram"] = [{"low": 10**6 + i, "high": 10**7, "items": 10**7} for i in range(3)]
    lines = render(width, facts).splitlines()
    assert not any("…" in line for line in lines)
    assert max(map(len, lines)) <= width


def test_a_terminal_without_unicode_gets_hashes() -> None:
    facts = make_facts()
    # The rules and dashes of tables are rich's and this project's own; only the bars are looked at.
    facts["models"] = facts["models"][:1]
    text = render(80, facts, "utf-8")
    assert "█" in text
    file = io.TextIOWrapper(io.BytesIO(), encoding="latin-1", errors="replace")
    render_workload(facts, Console(file=file, width=80, color_system=None, legacy_windows=False))
    file.seek(0)
    assert "##########" in file.read()


def test_a_saved_trace_is_named_with_the_command_that_replays_it() -> None:
    console = Console(file=io.StringIO(), width=80, color_system=None)
    facts = {
        "path": "my sizes.csv",
        "requests": 1,
        "items": 2,
        "videos": 1,
        "fingerprint": "0123456789abcdef",
        "skipped": [{"source": f"log:{line}", "reason": "no"} for line in range(7)],
        "provenance": {"lines": 10, "lines_without_size": 2},
    }
    render_saved_trace(facts, console)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == (
        "my sizes.csv: 1 request, 2 items (1 video), fingerprint 0123456789abcdef\n"
        "2 lines of 10 named no size\n"
        "left out: log:0: no\nleft out: log:1: no\nleft out: log:2: no\nleft out: log:3: no\nleft out: log:4: no\n"
        "left out: 2 more; --json names all\n"
        "replay it with: vitgraph bench --dataset-name trace --dataset-path 'my sizes.csv'\n"
    )


SIZES = {(336, 336, 1): 3, (640, 360, 16): 1, (640, 360, 32): 1, (2000, 1000, 1): 1}


def test_the_sizes_figure_marks_each_size_once_by_modality() -> None:
    (axes,) = draw_sizes("few", SIZES).axes
    marks = {mark.get_label(): mark.get_offsets().tolist() for mark in axes.collections}
    assert marks == {"image": [[336, 336], [2000, 1000]], "video": [[640, 360]]}
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("Width (pixels)", "Height (pixels)")
    # Two lengths of the same video size share a mark, which is larger for it.
    assert axes.collections[1].get_sizes()[0] > axes.collections[0].get_sizes()[1]


def test_the_tokens_figure_has_a_line_a_model_that_differs_without_colour() -> None:
    (axes,) = draw_tokens("few", {"a": [100, 200, 300, 400], "owner/b": [50, 50]}).axes
    first, second = axes.lines
    assert first.get_linestyle() != second.get_linestyle()
    assert first.get_xydata().tolist() == [[100, 0], [100, 25], [200, 50], [300, 75], [400, 100]]
    assert [line.get_label() for line in axes.lines] == ["a\nmedian 250, max 400", "b\nmedian 50, max 50"]
    assert axes.get_xscale() == "log"


def test_figures_are_written_in_both_formats_and_not_replaced(tmp_path: Path) -> None:
    tokens = {"a": [100, 200], "b": []}
    written = write_workload_plots("few", SIZES, tokens, tmp_path)
    assert [path.name for path in written] == ["sizes.png", "sizes.svg", "tokens.png", "tokens.svg"]
    assert written[0].read_bytes().startswith(b"\x89PNG")
    before = written[1].read_bytes()
    with pytest.raises(UsageError, match=r"sizes\.png exists"):
        write_workload_plots("few", SIZES, tokens, tmp_path)
    write_workload_plots("few", SIZES, tokens, tmp_path, overwrite=True)
    assert written[1].read_bytes() == before


def test_no_tokens_figure_where_no_model_takes_an_item(tmp_path: Path) -> None:
    assert [path.stem for path in write_workload_plots("few", SIZES, {"a": []}, tmp_path)] == ["sizes", "sizes"]
