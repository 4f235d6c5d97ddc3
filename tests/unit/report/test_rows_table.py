"""The table of many runs: what it says once, what it says of each, and what must not be claimed in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from saved_run_folders import EXAMPLE, nothing_measured, on_a_cpu, set_field, write_run

from vitgraph.records.saved_runs import open_runs
from vitgraph.report.rows_table import rows_markdown

HEADER = (
    "| Row | Model | Trace | Mean ms, eager→graph | Mean improvement | P99 ms, eager→graph | P99 improvement | "
    "Slower requests | Launch gap | Waste | Graph pool | Verdict |"
)
CELLS = (
    "synthetic-example | 8.00→6.16 | +22.9% (+19.9 … +26.3) | 30.28→30.81 | -1.8% (-6.3 … +2.9) | 55 of 320 (17.2%) | "
    "1.04× | 17.3% | 506.0 MiB | faster (P99: undecided) |"
)


def lines_of(*folders: Path) -> list[str]:
    return rows_markdown(open_runs(folders)).splitlines()


def another_row(record: dict[str, Any]) -> None:
    record["settings"]["model"]["model"] = "gemma-3"
    record["settings"]["resolved"]["row"] = "gemma3"


def test_a_line_a_run_and_what_all_share_above_them(tmp_path: Path) -> None:
    lines = lines_of(EXAMPLE, write_run(tmp_path / "gemma", another_row))
    assert lines[0] == "Synthetic GPU; bfloat16; FLASH\\_ATTN; 1 rank; 320 requests, 20 warm-ups, 2 rounds."
    assert lines[2] == HEADER
    assert lines[4:6] == [
        f"| `qwen3_vl` | Qwen/Qwen3-VL-30B-A3B-Instruct | {CELLS}",
        f"| `gemma3` | gemma-3 | {CELLS}",
    ]
    assert lines[7].startswith("Positive = graph faster")


def test_what_differs_has_a_column_and_equal_models_their_folders(tmp_path: Path) -> None:
    change = set_field("environment", "attn_backend", value="FLASHINFER")
    lines = lines_of(EXAMPLE, write_run(tmp_path / "other", change))
    assert lines[2].startswith("| Row | Model | Trace | Backend | Mean ms")
    assert lines[4].startswith("| `qwen3_vl` | Qwen/Qwen3-VL-30B-A3B-Instruct (bench-run) | synthetic-example | FLASH")
    assert "(other) | synthetic-example | FLASHINFER (asked for FLASH\\_ATTN) |" in lines[5]


def test_runs_on_different_numbers_of_gpus_are_told_apart_in_the_table(tmp_path: Path) -> None:
    four = write_run(tmp_path / "four", set_field("settings", "parallel", value={"ranks": 4}))
    lines = lines_of(EXAMPLE, four)
    assert lines[0] == "Synthetic GPU; bfloat16; FLASH\\_ATTN; 320 requests, 20 warm-ups, 2 rounds."
    assert lines[2].startswith("| Row | Model | Trace | Ranks | Mean ms")
    assert "(bench-run) | synthetic-example | 1 rank |" in lines[4]
    assert "(four) | synthetic-example | 4 ranks |" in lines[5]


def test_a_cpu_and_a_failed_run_claim_nothing_and_say_why(tmp_path: Path) -> None:
    lines = lines_of(write_run(tmp_path / "cpu", on_a_cpu), write_run(tmp_path / "failed", nothing_measured))
    cpu, failed = (line for line in lines if line.startswith("| `"))
    assert cpu.endswith("| none |")
    assert "…" not in cpu
    assert failed.endswith("| – | – | – | – | – | 1.04× | – | – | error |")
    assert "cpu: no verdict: replay on a CPU saves no launches; no speed-up is claimed here." in lines
    assert "failed: error: out of memory: 80 GiB needed." in lines


def test_few_requests_show_a_maximum_by_its_name(tmp_path: Path) -> None:
    def few(record: dict[str, Any]) -> None:
        for mode in ("eager", "graph"):
            record["summary"][mode]["p99_supported"] = False
        record["comparison"]["p99"]["ci95"] = None

    assert "| max 35.38→34.10 | +3.6% |" in lines_of(write_run(tmp_path / "few", few))[4]
