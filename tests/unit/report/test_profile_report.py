"""The table of a profile compared as whole text with a stored file, and the bars of its plot."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from made_up_profile import made_up_profile
from rich.console import Console

from vitgraph.errors import UsageError
from vitgraph.report.profile_plot import profile_bars, write_profile_plot
from vitgraph.report.profile_table import describe_items, render_profile

GOLDEN = Path(__file__).parents[2] / "data" / "golden" / "profile-100.txt"


def text_of(record: dict[str, Any], width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    render_profile(record, console)
    assert isinstance(console.file, io.StringIO)
    return "".join(f"{line.rstrip()}\n" for line in console.file.getvalue().splitlines())


def test_a_profile_as_whole_text() -> None:
    assert text_of(made_up_profile()) == GOLDEN.read_text(encoding="utf-8")


def test_a_cpu_profile_says_what_it_is_not() -> None:
    record = made_up_profile() | {"traced": "CPU operators", "speed_of_light": None}
    text = " ".join(text_of(record).split())
    assert "not of GPU kernels" in text
    assert "limit" not in text.lower()


def test_what_ran_eagerly_is_named() -> None:
    record = made_up_profile()
    record["call"]["eager_items"] = 3
    assert "3 items eager" in text_of(record)


def test_items_are_grouped_as_they_come() -> None:
    assert describe_items([[336, 336, 1]] * 2 + [[64, 32, 8], [336, 336, 1]]) == "2 × 336×336, 64×32×8 frames, 336×336"


def test_bars_are_as_long_as_the_call_and_the_limit_is_there() -> None:
    record = made_up_profile()
    bars = profile_bars(record)
    for mode in ("eager", "graph"):
        assert sum(bars[mode].values()) == pytest.approx(record["modes"][mode]["span_ms"])
    assert bars["limit"] == {"attention": 1.0, "product": 3.5}
    record["speed_of_light"] |= {"product_ms": None, "attention_ms": None}
    assert profile_bars(record)["limit"] == {"arithmetic": 4.5}


def test_overlapping_kernels_do_not_make_the_bar_longer() -> None:
    record = made_up_profile()
    record["modes"]["graph"]["busy_ms"] *= 0.5
    record["modes"]["graph"]["gap_ms"] = record["modes"]["graph"]["span_ms"] - record["modes"]["graph"]["busy_ms"]
    assert sum(profile_bars(record)["graph"].values()) == pytest.approx(record["modes"]["graph"]["span_ms"])


def test_the_plot_is_written_twice_and_never_replaced_unasked(tmp_path: Path) -> None:
    record = made_up_profile()
    paths = write_profile_plot(record, tmp_path)
    assert [path.name for path in paths] == ["profile.png", "profile.svg"]
    first = paths[1].read_bytes()
    with pytest.raises(UsageError, match="--overwrite"):
        write_profile_plot(record, tmp_path)
    write_profile_plot(record, tmp_path, overwrite=True)
    assert paths[1].read_bytes() == first
