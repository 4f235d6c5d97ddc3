"""The backend table compared as whole text with stored files, its CSV form, and what must not be claimed in it."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pytest
from made_up_comparison import MEANS, make_record, make_samples
from rich.console import Console

from vitgraph.errors import UsageError
from vitgraph.records.bench_record import CPU_REPLAY_REASON
from vitgraph.records.compare_record import CompareRecord
from vitgraph.report.compare_csv import BACKEND_COLUMNS, write_backends_csv, write_micro_csv
from vitgraph.report.compare_table import render_availability, render_compare
from vitgraph.report.micro_table import render_micro

GOLDEN = Path(__file__).parents[2] / "data" / "golden"


def text_of(width: int, *arguments: Any, printer: Any = render_compare) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    printer(*arguments, console)
    assert isinstance(console.file, io.StringIO)
    return "".join(f"{line.rstrip()}\n" for line in console.file.getvalue().splitlines())


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("width", [80, 200])
def test_a_comparison_as_whole_text(width: int) -> None:
    expected = (GOLDEN / f"compare-{width}.txt").read_text(encoding="utf-8")
    assert text_of(width, make_record()) == expected


def test_nothing_is_cut_at_80_columns_with_three_digit_latencies() -> None:
    slow = {name: tuple(None if ms is None else 120 * ms for ms in pair) for name, pair in MEANS.items()}
    text = text_of(80, make_record(slow, make_samples(slow)))  # type: ignore[arg-type]
    assert "615.6→542.5  1546.4→1367.9  graph +3.7%          1.05×    1.1e-02\n" in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("width", [80, 200])
def test_a_cpu_run_claims_nothing(width: int) -> None:
    record = make_record(invalid_reasons=(CPU_REPLAY_REASON,), mode="cpu-replay")
    text = text_of(width, record)
    assert f"No recommendation: {CPU_REPLAY_REASON}." in " ".join(text.split())
    assert "not a GPU" in text
    assert not [word for word in ("best,", "faster,", "95% CI", "Use ") if word in text]


def test_the_tail_of_few_requests_is_the_labelled_maximum() -> None:
    few = [row for row in make_samples() if row.call < 150]
    record = make_record(samples=few)
    text = text_of(200, record)
    eager, graph = (record.rows[0][mode]["max_ms"] for mode in ("eager", "graph"))
    assert "Maximum (n<300) latency improvement" in text
    assert f"({eager:.2f}→{graph:.2f} ms)" in text
    assert "P99" not in text


def test_an_interrupted_run_says_so_and_a_name_in_brackets_survives() -> None:
    record = make_record()
    record.data |= {"status": "interrupted", "status_reason": "stopped by the user while measuring"}
    record.data["settings"]["model"]["model"] = "[bold]model"
    text = text_of(80, record)
    assert "Interrupted: stopped by the user while measuring\n" in text
    assert "[bold]model on NVIDIA H200" in text


def test_it_says_which_processes_measured_the_backends() -> None:
    def measured(ranks: int, is_isolated: bool) -> str:
        record = make_record()
        record.data["settings"]["parallel"] = {"ranks": ranks}
        record.data["comparison"]["isolated"] = is_isolated
        (line,) = [line for line in text_of(200, record).splitlines() if line.startswith("Measured")]
        return line.partition("4 backends, ")[2]

    assert measured(1, is_isolated=False) == "interleaved in one process"
    assert measured(4, is_isolated=False) == "interleaved on 4 ranks"
    assert measured(1, is_isolated=True) == "each backend in a process of its own"
    assert measured(4, is_isolated=True) == "each backend on 4 ranks of its own"


def test_failures_of_single_modes_are_named_with_their_reasons() -> None:
    record = make_record()
    row = record.rows[0]
    row["graph"], row["improvement"] = None, None
    row["modes"]["graph"] = {"status": "out_of_memory", "reason": "0 graphs captured of 24 planned"}
    text = text_of(200, record)
    assert "graph out of memory" in text
    assert "FLASH_ATTN graph  out of memory: 0 graphs captured of 24 planned\n" in text


def test_a_dry_run_lists_what_is_available_first() -> None:
    rows = [{"name": "A", "unavailable_reason": "no GPU"}, {"name": "B", "unavailable_reason": None}]
    assert text_of(80, rows, printer=render_availability) == "B  available\nA  unavailable: no GPU\n"


def test_the_csv_has_a_row_a_backend_and_mode(tmp_path: Path) -> None:
    record = make_record()
    path = write_backends_csv(record, tmp_path / "backends.csv")
    rows = read_csv(path)
    assert tuple(rows[0]) == BACKEND_COLUMNS
    assert [(row["backend"], row["mode"]) for row in rows] == [
        (name, mode) for name in MEANS for mode in ("eager", "graph")
    ]
    by_series = {(row["backend"], row["mode"]): row for row in rows}
    best = by_series["FLASHINFER", "graph"]
    assert float(best["mean_ms"]) == pytest.approx(record.rows[1]["graph"]["mean_ms"], rel=1e-5)
    assert float(best["delta_mean_pct"]) == pytest.approx(record.rows[1]["improvement"]["mean"]["delta_pct"], rel=1e-5)
    assert (best["verdict_best"], best["delta_best_pct"]) == ("best", "0")
    assert (best["hits"], best["pool_bytes"], best["requests"]) == ("380", "734003200", "400")
    eager = by_series["FLASHINFER", "eager"]
    assert eager["delta_mean_pct"] == eager["pool_bytes"] == eager["launch_gap"] == ""
    missing = by_series["ROCM_AITER_FA", "eager"]
    assert (missing["status"], missing["reason"], missing["mean_ms"]) == ("unavailable", "it needs an AMD GPU", "")
    with pytest.raises(UsageError, match="results are not replaced"):
        write_backends_csv(record, path)


def test_the_csv_of_a_run_that_measured_nothing_has_its_reasons(tmp_path: Path) -> None:
    missing: dict[str, tuple[float | None, float | None]] = {"A": (None, None)}
    record: CompareRecord = make_record(missing, [])
    rows = read_csv(write_backends_csv(record, tmp_path / "backends.csv"))
    assert [row["status"] for row in rows] == ["unavailable", "unavailable"]
    assert "no request was measured" in text_of(80, record)


def micro_row(backend: str, **changes: Any) -> dict[str, Any]:
    return {
        "backend": backend,
        "implementation": f"{backend.lower()} 1",
        "status": "ok",
        "reason": None,
        "sweep": "length",
        "segment_length": 400,
        "segments": 8,
        "slots": 8,
        "rows": 3200,
        "timed_as": "graph",
        "milliseconds": 0.0661,
        "first_call_ms": 3.0,
        "relative_error": 2e-3,
        "limit_ms": 0.0075,
        "limit_share": 0.1135,
    } | changes


def test_attention_alone_as_whole_text(tmp_path: Path) -> None:
    empty = dict.fromkeys(("sweep", "segment_length", "segments", "slots", "rows", "milliseconds", "limit_ms"))
    rows = [
        micro_row("FAST"),
        micro_row("FAST", sweep="slots", segments=1, slots=64, milliseconds=0.02),
        micro_row("SLOW", timed_as="eager", milliseconds=0.5, limit_share=0.015),
        micro_row("SLOW", sweep="slots", segments=1, slots=64, status="incorrect", reason="relative error nan"),
        micro_row("GONE", status="unsupported", reason="needs an AMD GPU", **empty),
    ]
    record = {
        "status": "complete",
        "status_reason": None,
        "settings": {"model": {"model": "some-model"}},
        "environment": {"device": "NVIDIA H200"},
        "heads": 16,
        "head_width": 72,
        "dtype": "bfloat16",
        "matrix_rate_tflops": 788.2,
        "rows": rows,
    }
    assert text_of(200, record, printer=render_micro) == (GOLDEN / "compare-micro.txt").read_text(encoding="utf-8")
    written = read_csv(write_micro_csv(rows, tmp_path / "micro.csv"))
    assert [row["milliseconds"] for row in written] == ["0.0661", "0.02", "0.5", "0.0661", ""]
    assert written[4]["reason"] == "needs an AMD GPU"
