"""Eager and graph, plain and compiled, in one run: what is loaded, in which order, and what the rows are worth."""

from __future__ import annotations

import io
from inspect import getclosurevars
from pathlib import Path
from typing import Any

import pytest
from made_up_comparison import make_record
from rich.console import Console
from transformers import AttentionInterface

from vitgraph.measure.candidate import COMPILED, PLAIN, CandidateSeries
from vitgraph.measure.compare import CONTRASTS, run_compile_rows
from vitgraph.measure.experiment import Experiment
from vitgraph.measure.preparation import PreparedBench, prepare_bench
from vitgraph.measure.progress import SilentProgress
from vitgraph.models import compilation
from vitgraph.records.candidates import COMPILE_KIND
from vitgraph.records.record import CompareRecord
from vitgraph.records.sample_table import EAGER, GRAPH
from vitgraph.records.sections import CompileCache, Compiled
from vitgraph.records.series import Improvement, Pair
from vitgraph.report.documents import document_of
from vitgraph.report.to_terminal import render
from vitgraph.specs.asked import BenchSpec
from vitgraph.specs.parts import GraphSpec, ModelSpec, RunSpec, WorkloadSpec


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
        seen["plain"] = (
            getclosurevars(AttentionInterface()[plain.transformers_name]).nonlocals["varlen"].__self__ is plain
        )
        seen["compiled"] = compilation._BACKENDS[compiled.name] is compiled
        seen["apart"] = plain is not compiled
        real(self, *arguments)

    monkeypatch.setattr(Experiment, "warm_up", look)
    record = run_compile_rows(prepared(), tmp_path, SilentProgress())
    assert seen == {"plain": True, "compiled": True, "apart": True}
    assert (record.kind, record.status) == (COMPILE_KIND, "complete")
    rows = {row.name: row for row in record.result.candidates}
    assert {name: row.status for name, row in rows.items()} == {PLAIN: "ok", COMPILED: "ok"}
    for name, mode in TIMES:
        found = rows[name].mode(mode)
        assert found.latency is not None and found.latency.calls == 4
        assert found.error_vs_float32 is not None and found.error_vs_float32 <= 1e-5
    compiled = rows[COMPILED].compiled
    assert compiled is not None and compiled.blocks > 0
    assert (compiled.seconds or 0.0) > 0 and (compiled.compilations or 0) >= 1
    assert rows[PLAIN].compiled is None
    assert record.result.comparison.speed_of_light_ms is None
    assert {pair.mean.verdict for pair in record.result.comparison.contrasts} == {"invalid"}
    assert (tmp_path / "run.json").exists()


def test_a_tower_that_cannot_be_compiled_keeps_its_row_and_the_plain_ones_are_measured(
    traced_only: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vitgraph.models.families.qwen3_vl.Qwen3VLEncoder.repeated_blocks", lambda self: [])
    result = run_compile_rows(prepared(), tmp_path, SilentProgress()).result
    rows = {row.name: row for row in result.candidates}
    assert rows[COMPILED].status == "error"
    assert "no repeated block" in str(rows[COMPILED].reason)
    latency = rows[PLAIN].graph.latency
    assert latency is not None and latency.calls == 4
    assert [(pair.base, pair.series) for pair in result.comparison.contrasts] == [("plain/eager", "plain/graph")]


TIMES = {(PLAIN, EAGER): 20.0, (COMPILED, EAGER): 16.0, (PLAIN, GRAPH): 10.0, (COMPILED, GRAPH): 5.0}


def made_up_record(mode: str = "cuda") -> CompareRecord:
    record = make_record(mode=mode)
    like = record.result.candidates[0]
    rows = {name: like.but(name=name) for name in (COMPILED, PLAIN)}
    for (name, one), mean_ms in TIMES.items():
        measured = like.mode(one)
        assert measured.latency is not None
        measured = measured.but(latency=measured.latency.but(mean_ms=mean_ms, p99_supported=True))
        rows[name] = rows[name].with_modes(**{one: measured})
    cache = CompileCache(hits=1, misses=0)
    compiled = Compiled(blocks=27, seconds=12.3, compilations=1, cache=cache, cache_dir="/cache")
    rows[COMPILED] = rows[COMPILED].but(compiled=compiled)
    comparison = record.result.comparison.but(
        speed_of_light_ms=4.0, contrasts=tuple(_pair(*pair) for pair in CONTRASTS)
    )
    assert record.resolved is not None
    return record.but(
        kind=COMPILE_KIND,
        resolved=record.resolved.but(packing="greedy"),
        result=record.result.but(candidates=tuple(rows.values()), comparison=comparison),
    )


def _pair(base: str, series: str) -> Pair:
    first, second = (TIMES[tuple(name.split("/"))] for name in (base, series))  # type: ignore[index]
    gain = 100 * (1 - second / first)
    found = Improvement(improvement_pct=gain, ci95=(gain - 1, gain + 1), noise_floor_pct=1.0, verdict="faster")
    return Pair(base=base, series=series, mean=found, p99=found)


def text_of(record: CompareRecord) -> str:
    console = Console(file=io.StringIO(), width=110, color_system=None)
    render(document_of(record), console)
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
    text = text_of(made_up_record("cpu-replay"))
    assert "no speed-up is claimed" in text
    assert "→" not in text
