"""Eager and graph, plain and compiled, in one run: what is loaded, in which order, and what the rows are worth."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from made_up_comparison import make_record
from record_dicts import CompareRecord
from records_of_dicts import record_of
from rich.console import Console
from torch import nn
from transformers import AttentionInterface

from vitgraph.attention import opaque
from vitgraph.measure.bench import PreparedBench, prepare_bench
from vitgraph.measure.candidate import CandidateSeries
from vitgraph.measure.compile_matrix import (
    COMPILED,
    CONTRASTS,
    PLAIN,
    run_compile_matrix,
)
from vitgraph.measure.experiment import Experiment
from vitgraph.measure.progress import SilentProgress
from vitgraph.models.compile.compilation import CACHE_VARIABLE
from vitgraph.records.candidates import COMPILE_KIND
from vitgraph.records.sample_table import EAGER, GRAPH
from vitgraph.report.documents import document_of
from vitgraph.report.to_terminal import render
from vitgraph.specs import BenchSpec, GraphSpec, ModelSpec, RunSpec, WorkloadSpec


@pytest.fixture
def traced_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Compiles with the backend that only traces: the compiler's own work takes half a minute."""
    real = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: real(self, **options | {"backend": "eager"}))
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def prepared() -> PreparedBench:
    return prepare_bench(
        BenchSpec(
            ModelSpec("qwen3-vl-debug", load_format="dummy", device="cpu"),
            GraphSpec(token_budgets=(64,)),
            RunSpec(rounds=1),
            WorkloadSpec(
                dataset_name="random-mm",
                num_prompts=4,
                num_warmups=1,
                random_mm_bucket_config={(224, 224, 1): 0.5, (160, 320, 1): 0.5},
            ),
        )
    )


@pytest.mark.slow
def test_all_four_rows_are_measured_and_each_tower_calls_its_own_backend(
    traced_only: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}
    real = Experiment.warm_up

    def look(self: Experiment, *arguments: Any) -> None:
        candidates = {series.candidate for series in self.series if isinstance(series, CandidateSeries)}
        encoders = {candidate.name: candidate._encoder for candidate in candidates}
        plain, compiled = encoders[PLAIN].attention, encoders[COMPILED].attention
        seen["plain"] = AttentionInterface()[plain.transformers_name].__self__ is plain
        seen["compiled"] = opaque._BACKENDS[compiled.name] is compiled
        seen["apart"] = plain is not compiled
        real(self, *arguments)

    monkeypatch.setattr(Experiment, "warm_up", look)
    record = CompareRecord.of(run_compile_matrix(prepared(), tmp_path, ["vitgraph"], SilentProgress()))
    assert seen == {"plain": True, "compiled": True, "apart": True}
    assert (record["kind"], record["status"]) == (COMPILE_KIND, "complete")
    rows = {row["requested"]: row for row in record.rows}
    assert {name: row["status"] for name, row in rows.items()} == {PLAIN: "ok", COMPILED: "ok"}
    for name, mode in TIMES:
        assert rows[name][mode]["n"] == 4
        assert rows[name]["error_vs_float32"][mode] <= 1e-5
    assert rows[COMPILED]["compile_s"] > 0
    assert rows[COMPILED]["compilations"] >= 1
    assert "compile_s" not in rows[PLAIN]
    assert record["comparison"]["speed_of_light_ms"] is None
    assert {entry["verdict"] for entry in record["comparison"]["contrasts"]} == {"invalid"}
    assert (tmp_path / "run.json").exists()


def test_a_tower_that_cannot_be_compiled_keeps_its_row_and_the_plain_ones_are_measured(
    traced_only: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vitgraph.models.families.qwen3_vl.Qwen3VLEncoder.repeated_blocks", lambda self: [])
    record = CompareRecord.of(run_compile_matrix(prepared(), tmp_path, ["vitgraph"], SilentProgress()))
    rows = {row["requested"]: row for row in record.rows}
    assert rows[COMPILED]["status"] == "error"
    assert "no repeated block" in rows[COMPILED]["reason"]
    assert rows[PLAIN]["graph"]["n"] == 4
    assert {(entry["first"], entry["second"]) for entry in record["comparison"]["contrasts"]} == {("eager", "graph")}


TIMES = {(PLAIN, EAGER): 20.0, (COMPILED, EAGER): 16.0, (PLAIN, GRAPH): 10.0, (COMPILED, GRAPH): 5.0}


NAMES = {"plain/eager": "eager", "compiled/eager": "eager+compile", "plain/graph": "graph"}
NAMES["compiled/graph"] = "graph+compile"


def made_up_record() -> CompareRecord:
    record = make_record()
    rows = []
    for name in (COMPILED, PLAIN):
        row = {**record.rows[0], "requested": name, "launch_gap": 1.02}
        for mode in (EAGER, GRAPH):
            row[mode] = {**row[mode], "mean_ms": TIMES[name, mode], "p99_supported": True}
        rows.append(row)
    rows[0] |= {
        "compile_s": 12.3,
        "compilations": 1,
        "compile_cache": {"hits": 1, "misses": 0},
        "compile_cache_dir": "/cache",
    }
    record.data |= {"kind": COMPILE_KIND, "backends": rows}
    record.data["settings"] |= {"bench": {"requests_per_call": 1}, "graph": {"packing": "greedy"}}
    record.data["settings"]["model"] |= {"compile": False}
    floors = {mode: {"mean": 1.0, "p99": 1.0} for mode in (EAGER, GRAPH)}
    facts = {"noise_floor_pct": floors, "invalid_reasons": []}
    record.data["comparison"] |= facts | {
        "speed_of_light_ms": 4.0,
        "contrasts": [
            {"first": NAMES[base], "second": NAMES[series], "metric": metric, **_gain(base, series)}
            for base, series in CONTRASTS
            for metric in ("mean", "p99")
        ],
    }
    return record


def _gain(base: str, series: str) -> dict[str, Any]:
    first, second = (TIMES[tuple(name.split("/"))] for name in (base, series))  # type: ignore[index]
    delta = 100 * (second / first - 1)
    return {"delta_pct": delta, "ci95": [delta - 1, delta + 1], "noise_floor_pct": 1.0, "verdict": "faster"}


def text_of(record: CompareRecord) -> str:
    console = Console(file=io.StringIO(), width=110, color_system=None)
    render(document_of(record_of(record.data)), console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_table_names_the_rows_their_limit_and_the_gains() -> None:
    lines = text_of(made_up_record()).splitlines()
    cells = {line.split("  ")[0]: line.split() for line in lines if line.startswith(("eager", "graph"))}
    assert list(cells)[:4] == ["eager", "eager+compile", "graph", "graph+compile"]
    assert [cells[name][1] for name in ("eager", "eager+compile", "graph", "graph+compile")] == [
        "20.00",
        "16.00",
        "10.00",
        "5.00",
    ]
    assert "5.00×" in cells["eager"]
    assert "1.25×" in cells["graph+compile"]
    assert any(line.startswith("eager → graph+compile") and "+75.0%" in line and "faster" in line for line in lines)
    assert "Compilation 12.3 s in 1 compilation, 1 of them from the cache in /cache" in " ".join(
        text_of(made_up_record()).split()
    )


def test_a_cpu_claims_no_gain() -> None:
    record = made_up_record()
    record.data["comparison"]["mode"] = "cpu-replay"
    text = text_of(record)
    assert "no speed-up is claimed" in text
    assert "→" not in text
