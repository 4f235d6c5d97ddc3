"""The scaling table of runs on different numbers of GPUs, and that there is none where nothing scales."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from saved_run_folders import nothing_measured, on_a_cpu, write_run

from vitgraph.records.saved_runs import SavedRun, open_runs
from vitgraph.report.export import export_runs
from vitgraph.report.scaling import PUBLISHED_SOURCE, render_scaling, scaling_markdown, scaling_tables


def on_ranks(ranks: int, faster: float, backend: str = "FLASH_ATTN", model: str = "Qwen/Qwen3-VL-32B-Instruct") -> Any:
    """A change into a run of the published scenario on so many GPUs, `faster` times as fast as the example."""

    def change(record: dict[str, Any]) -> None:
        settings = record["settings"]
        settings["model"]["model"] = model
        settings["parallel"] = {"ranks": ranks, "tp_mode": "data", "assignment": "size", "rank_timeout_s": 60.0}
        settings["workload"] |= {"dataset_name": "random-mm", "random_mm_base_items_per_request": 20}
        record["environment"]["attn_backend"] = settings["model"]["attn_backend"] = backend
        for mode in ("eager", "graph"):
            for metric in ("mean_ms", "p99_ms"):
                record["summary"][mode][metric] /= faster
        if ranks > 1:
            record["summary"]["graph"]["parallel"] = {"gather_ms": 0.25, "time_imbalance": 1.125}

    return change


def opened(tmp_path: Path, **changes: Callable[[dict[str, Any]], None]) -> list[SavedRun]:
    return open_runs([write_run(tmp_path / name, change) for name, change in changes.items()])


def test_efficiency_is_that_of_the_means(tmp_path: Path) -> None:
    runs = opened(tmp_path, four=on_ranks(4, 2.0), one=on_ranks(1, 1.0), two=on_ranks(2, 1.5))
    (table,) = scaling_tables(runs)
    measured = [row for row in table.rows if row["run"]]
    assert [row["run"] for row in measured] == ["one", "two", "four"]
    assert [row["graph_efficiency"] for row in measured] == pytest.approx([1.0, 0.75, 0.5])
    assert [row["eager_efficiency"] for row in measured] == pytest.approx([1.0, 0.75, 0.5])
    assert [row["gather_ms"] for row in measured] == [None, 0.25, 0.25]
    assert measured[0]["graph_mean_ms"] == runs[1].record["summary"]["graph"]["mean_ms"]


def test_the_published_figures_stand_beside_their_scenario(tmp_path: Path) -> None:
    runs = opened(tmp_path, one=on_ranks(1, 1.0, "FLASHINFER"), two=on_ranks(2, 1.9, "FLASHINFER"))
    (table,) = scaling_tables(runs)
    published = table.rows[-1]
    assert (published["source"], published["ranks"], published["run"]) == (PUBLISHED_SOURCE, 4, None)
    assert (published["mean_improvement_pct"], published["p99_improvement_pct"]) == (44.4, 84.9)
    assert (published["eager_mean_ms"], published["graph_mean_ms"]) == (23.24, 12.91)
    console = Console(file=io.StringIO(), width=160)
    render_scaling([table], console)
    text = console.file.getvalue()
    assert "4 (vLLM's page, 4 GB200)" in text and "23.24→12.91" in text and "0.95→0.95" in text
    assert "\\+44.4%" in scaling_markdown([table]) or "+44.4%" in scaling_markdown([table])
    other = opened(tmp_path / "other", a=on_ranks(1, 1, model="m/m"), b=on_ranks(2, 1, model="m/m"))
    assert all(row["run"] for row in scaling_tables(other)[0].rows)


def packed(policy: str, change: Any) -> Any:
    def both(record: dict[str, Any]) -> None:
        change(record)
        record["settings"]["graph"]["packing"] = policy

    return both


def test_runs_that_pack_otherwise_are_a_series_of_their_own(tmp_path: Path) -> None:
    runs = opened(
        tmp_path,
        one=on_ranks(1, 1.0),
        two=on_ranks(2, 1.5),
        one_optimal=packed("optimal", on_ranks(1, 1.25)),
        two_optimal=packed("optimal", on_ranks(2, 2.5)),
    )
    (table,) = scaling_tables(runs)
    measured = [(row["backend"], row["run"], row["graph_efficiency"]) for row in table.rows if row["run"]]
    assert [(backend, run) for backend, run, _ in measured] == [
        ("FLASH_ATTN", "one"),
        ("FLASH_ATTN", "two"),
        ("FLASH_ATTN, packing optimal", "one_optimal"),
        ("FLASH_ATTN, packing optimal", "two_optimal"),
    ]
    assert [efficiency for *_, efficiency in measured] == pytest.approx([1.0, 0.75, 1.0, 1.0])
    assert sum(row["source"] == PUBLISHED_SOURCE for row in table.rows) == 1


def test_no_cell_is_cut_on_a_narrow_console(tmp_path: Path) -> None:
    tables = scaling_tables(opened(tmp_path, one=on_ranks(1, 1.0), two=on_ranks(2, 1.5)))
    console = Console(file=io.StringIO(), width=80)
    render_scaling(tables, console)
    text = console.file.getvalue()
    assert "…" not in text
    lines = [line.rstrip() for line in text.splitlines()]
    assert lines[0] == "Qwen3-VL-32B-Instruct on Synthetic GPU, synthetic-example"
    assert "Qwen/Qwen3-VL-32B-Instruct; bfloat16; 320 requests, 20 warm-ups, 2 rounds." in lines
    for figure in ("28.39→", "23.16", "+18.4%", "238.78→", "205.28", "+14.0%", "0.75"):
        assert figure in text


def test_no_gain_is_claimed_on_a_cpu(tmp_path: Path) -> None:
    def cpu(ranks: int) -> Callable[[dict[str, Any]], None]:
        def change(record: dict[str, Any]) -> None:
            on_ranks(ranks, 1.0)(record)
            on_a_cpu(record)

        return change

    (table,) = scaling_tables(opened(tmp_path, one=cpu(1), two=cpu(2)))
    assert [row["mean_improvement_pct"] for row in table.rows if row["run"]] == [None, None]


def test_there_is_no_table_where_nothing_scales(tmp_path: Path) -> None:
    same = opened(tmp_path / "same", a=on_ranks(1, 1.0), b=on_ranks(1, 1.1))
    assert scaling_tables(same) == []
    models = opened(tmp_path / "models", a=on_ranks(1, 1.0), b=on_ranks(2, 1.1, model="m/m"))
    assert scaling_tables(models) == []
    assert scaling_tables(opened(tmp_path / "failed", a=on_ranks(1, 1.0), b=nothing_measured)) == []
    written = {path.name for path in export_runs(same, tmp_path / "out", ("csv", "markdown"))}
    assert not any(name.startswith("scaling") for name in written)


def test_the_table_is_exported(tmp_path: Path) -> None:
    runs = opened(tmp_path, one=on_ranks(1, 1.0), two=on_ranks(2, 1.5))
    written = {path.name for path in export_runs(runs, tmp_path / "out", ("csv", "parquet", "markdown"))}
    assert {"scaling.csv", "scaling.parquet", "scaling.md"} <= written
    lines = (tmp_path / "out" / "scaling.csv").read_text().splitlines()
    assert len(lines) == 1 + 2 + 1
