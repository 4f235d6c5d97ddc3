"""Console output compared as whole text with stored files, and the cases in which something must not be claimed."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from vitgraph.records.bench_record import CPU_REPLAY_REASON, RunRecord
from vitgraph.records.old_forms import old_form
from vitgraph.records.sample_table import Samples, read_samples
from vitgraph.records.store import SAMPLES_FILE
from vitgraph.records.summary import compare_bench, latencies
from vitgraph.report.console import render_bench, render_captures

DATA = Path(__file__).parents[2] / "data"


def render(printer: Callable[[RunRecord, Console], None], record: RunRecord, width: int) -> str:
    """Printed text, without the blanks with which tables fill their last column."""
    console = Console(file=io.StringIO(), width=width, color_system=None)
    printer(record, console)
    assert isinstance(console.file, io.StringIO)
    return "".join(f"{line.rstrip()}\n" for line in console.file.getvalue().splitlines())


@pytest.fixture
def record() -> RunRecord:
    return RunRecord.load(DATA / "bench-run")


@pytest.fixture
def few() -> Samples:
    frame = read_samples(DATA / "bench-run" / SAMPLES_FILE).frame
    return Samples(frame[frame["call"] < 40])


def measured(record: RunRecord, samples: Samples, reasons: Sequence[str] = ()) -> dict[str, Any]:
    """What the samples tell, as the record holds it."""
    assert record.typed is not None
    found = {"latency": latencies(samples), "comparison": compare_bench(samples, invalid_reasons=reasons)}
    old = old_form(record.typed.model_copy(update={"result": record.typed.result.model_copy(update=found)}))
    return {"summary": old["summary"], "comparison": old["comparison"]}


def make_cpu_record(record: RunRecord, samples: Samples) -> RunRecord:
    skipped = ("launch_gap", "host_steps_ms", "call_overheads")
    graph = {name: entry for name, entry in record["graph"].items() if name not in skipped}
    unmeasured = ("replay_ms", "gpu_busy_ms", "launch_gap")
    rows = [{name: value for name, value in row.items() if name not in unmeasured} for row in graph["per_budget"]]
    data = record.data | {
        "graph": graph | {"mode": "cpu-replay", "pool_bytes": None, "per_budget": rows, "dropped": []},
        **measured(record, samples, [CPU_REPLAY_REASON]),
        "environment": {"device": "cpu", "attn_backend": "TORCH_SDPA"},
        "correctness": None,
    }
    return RunRecord(data)


@pytest.mark.parametrize("width", [80, 200])
def test_bench_as_whole_text(record: RunRecord, width: int) -> None:
    assert render(render_bench, record, width) == (DATA / "golden" / f"bench-{width}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("width", [80, 200])
def test_captures_as_whole_text(record: RunRecord, width: int) -> None:
    expected = (DATA / "golden" / f"captures-{width}.txt").read_text(encoding="utf-8")
    assert render(render_captures, record, width) == expected


def test_few_requests_on_a_cpu_as_whole_text(record: RunRecord, few: Samples) -> None:
    expected = (DATA / "golden" / "bench-cpu-80.txt").read_text(encoding="utf-8")
    assert render(render_bench, make_cpu_record(record, few), 80) == expected


def test_a_cpu_run_claims_nothing(record: RunRecord, few: Samples) -> None:
    text = render(render_bench, make_cpu_record(record, few), 200)
    assert "Replay on a CPU saves no launches; no speed-up is claimed here." in text
    assert "not a GPU" in text
    assert not [word for word in ("faster,", "slower,", "95% CI") if word in text]


def test_p99_of_few_requests_is_the_labelled_maximum(record: RunRecord, few: Samples) -> None:
    record.data |= measured(record, few)
    text = render(render_bench, record, 80)
    eager, graph = (record["summary"][mode]["max_ms"] for mode in ("eager", "graph"))
    assert f"{100 * (1 - graph / eager):+.1f}% ({eager:.2f}→{graph:.2f} ms)" in text
    assert "max (n<300), undecided" in text
    assert "P99 2" not in text  # neither mode prints a percentile that 40 requests cannot support


def test_an_invalid_run_names_the_reasons_and_shows_no_interval(record: RunRecord, few: Samples) -> None:
    reasons = ["the GPU clock fell to 61%", "process 7 ran"]
    record.data["comparison"] = measured(record, few, reasons)["comparison"]
    text = render(render_bench, record, 200)
    assert "Verdict           invalid: the GPU clock fell to 61%; process 7 ran\n" in text
    assert "95% CI" not in text


def test_slower_graphs_that_mostly_pad_are_explained(record: RunRecord) -> None:
    cause = (
        "; likely because the graphs compute 2.0 times the rows of eager (waste 50.0%) and GPU time binds, not launches"
    )
    record.data["comparison"]["verdict"] = "slower"
    assert "likely" not in render(render_bench, record, 300)
    graph = record.data["graph"]
    graph |= {"waste": 0.5, "budget_tokens_replayed": 2 * graph["tokens_replayed"]}
    assert f"noise floor of ±0.26%{cause}: use budgets nearer to the items' sizes" in render(render_bench, record, 300)
    record.data["comparison"]["verdict"] = "faster"
    assert "likely" not in render(render_bench, record, 300)


def test_an_undecided_verdict_stays_within_80_columns(record: RunRecord) -> None:
    record.data["comparison"]["mean"] |= {"verdict": "undecided", "delta_pct": 4.9, "ci95": [-100.4, 110.2]}
    lines = render(render_bench, record, 80).splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.lstrip().startswith("undecided,  ") for line in lines)
    assert any(line.lstrip().startswith("95% CI -110.2 … +100.4%") for line in lines)


def test_an_interrupted_run_prints_what_it_has(record: RunRecord, few: Samples) -> None:
    record.data |= {"status": "interrupted", "status_reason": "stopped by the user in round 2"}
    record.data |= measured(record, Samples(few.frame[:-4]))
    text = render(render_bench, record, 80)
    assert "\nInterrupted: stopped by the user in round 2\n" in text
    assert "Measured          40 requests × 2 rounds, modes interleaved; 1 sample without a\n" in text


def test_a_run_without_any_result_says_so(record: RunRecord) -> None:
    record.data |= {"status": "error", "status_reason": "out of memory", "summary": {}, "comparison": None}
    record.data |= {"graph": None, "correctness": None, "environment": {}}
    assert render(render_bench, record, 80) == (
        "vitgraph bench: Qwen/Qwen3-VL-30B-A3B-Instruct on unknown device, workload\n"
        "synthetic-example\n"
        "Error: out of memory\n"
        "\n"
        "No request was measured in both modes, so there is nothing to compare.\n"
        "\n"
        "Correctness  not checked\n"
        "Verdict      none: nothing was compared\n"
    )
    assert render(render_captures, record, 80) == "No graph was captured.\n"


def test_a_run_that_replayed_nothing_says_so(record: RunRecord) -> None:
    record.data["graph"] |= {"per_budget": [], "replays": 0, "waste": None}
    text = render(render_bench, record, 80)
    assert "\nNothing was replayed.\n" in text
    assert "Replays           0 (greedy packing)\n" in text


def test_another_backend_than_asked_for_is_shown(record: RunRecord) -> None:
    record.data["settings"]["model"]["attn_backend"] = "FLASHINFER"
    text = render(render_bench, record, 80)
    assert "FLASH_ATTN " in text
    assert "(asked for" in text
    assert "FLASHINFER)" in text


def test_paths_and_axis_keys_are_shown_where_there_are_some(record: RunRecord) -> None:
    entry = {
        "path": "global",
        "token_budget": 13824,
        "segment_slots": 8,
        "axis_key": [28, 36],
        "replays": 3,
        "items": 4,
    }
    entry |= {"tokens": 100, "waste": 0.25, "replay_ms": 123.456, "gpu_busy_ms": None, "launch_gap": None}
    record.data["graph"]["per_budget"] = [entry]
    lines = render(render_bench, record, 80).splitlines()
    assert "global   13824      8  28×36        3      4  75.0%  25.0%     123.46          –" in lines
    assert max(map(len, lines)) <= 80


def test_dropped_graphs_are_grouped_by_reason(record: RunRecord) -> None:
    dropped = [
        {"path": "default", "token_budget": budget, "segment_slots": 1, "axis_key": [], "reason": "out of memory"}
        for budget in range(100, 110)
    ]
    record.data["graph"]["dropped"] = [*dropped, dropped[0] | {"segment_slots": 8, "reason": "backend refused"}]
    text = render(render_captures, record, 400)
    assert "1 slot), 107 (1 slot) and 2 more: out of memory\n" in text
    assert "Not captured: 100 (8 slots): backend refused\n" in text


def test_a_name_with_brackets_is_printed_as_it_is(record: RunRecord) -> None:
    record.data["settings"]["model"]["model"] = "models/[red]odd[/red]"
    assert render(render_bench, record, 80).startswith("vitgraph bench: models/[red]odd[/red] on ")
