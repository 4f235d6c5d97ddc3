"""A bench run on several ranks: what rank 0 records of all, and what is saved where a rank fails in the middle."""

from __future__ import annotations

import io
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import RankResult, run_ranks, values
from rich.console import Console
from saved_run_folders import read_bench

import vitgraph
from vitgraph.graphs.manager import EncoderCudaGraphManager
from vitgraph.measure.bench import run_bench
from vitgraph.measure.preparation import prepare_bench
from vitgraph.measure.progress import SilentProgress
from vitgraph.measure.setup import load
from vitgraph.ranks import group as group_module
from vitgraph.ranks.group import ParallelGroup
from vitgraph.records.record import BenchRecord
from vitgraph.records.sample_table import read_samples
from vitgraph.records.series import Sharing
from vitgraph.records.store import SAMPLES_FILE, read_record
from vitgraph.report.documents import document_of
from vitgraph.report.to_terminal import render
from vitgraph.specs.asked import BenchSpec
from vitgraph.specs.parts import GraphSpec, ModelSpec, ParallelSpec, RunSpec, WorkloadSpec

pytestmark = pytest.mark.slow

CALLS, ITEMS, RANKS = 8, 3, 2


def bench_spec(ranks: int = RANKS, *, items: int = ITEMS, prompts: int = CALLS, **run: Any) -> BenchSpec:
    workload = WorkloadSpec(
        dataset_name="random-mm",
        num_prompts=prompts,
        num_warmups=2,
        random_mm_base_items_per_request=items,
        random_mm_num_mm_items_range_ratio=0.6 if items > 1 else 0.0,
        random_mm_bucket_config={(96, 64, 1): 0.4, (160, 96, 1): 0.4, (224, 320, 1): 0.2},
        random_mm_limit_mm_per_prompt={"image": 8},
    )
    return BenchSpec(
        ModelSpec("qwen3-vl-debug", load_format="dummy", device="cpu", mm_processor_kwargs={"min_pixels": 1024}),
        GraphSpec(token_budgets=(16, 32), max_vision_items_per_batch=4),
        RunSpec(rounds=2, **run),
        workload,
        ParallelSpec(ranks, "data"),
    )


def run_on(spec: BenchSpec, folder: Path, before: Callable[[ParallelGroup], None] = lambda group: None) -> Any:
    prepared = prepare_bench(spec)
    # What is imported here, the forked ranks need not import.
    load(prepared.source, spec.model, device=torch.device("cpu"), dtype=torch.float32)

    def work(group: ParallelGroup) -> Any:
        before(group)
        record = run_bench(prepared, folder, SilentProgress(), group)
        return record and record.status

    return run_ranks(spec.parallel.ranks, work)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks") / "run"
    values(run_on(bench_spec(baseline="hf"), folder))
    return folder


def sharing_of(record: BenchRecord, series: str = "graph") -> Sharing:
    """How a series was shared among the ranks."""
    sharing = record.result.latency[series].sharing
    assert sharing is not None
    return sharing


@pytest.fixture(scope="module")
def record(folder: Path) -> BenchRecord:
    return read_bench(folder)


def test_the_counters_are_those_of_all_ranks(record: BenchRecord) -> None:
    expected = prepare_bench(bench_spec()).expected_counters()
    graph = record.result.graph
    assert record.status == "complete"
    assert graph.but(**expected.as_dict()) == graph
    assert 0 < graph.hits < graph.items
    by_rank = sharing_of(record).ranks
    for name in ("hits", "misses", "replays", "items"):
        assert sum(getattr(rank, name) for rank in by_rank) == getattr(graph, name)


def test_the_record_follows_its_schema(folder: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((Path(vitgraph.__file__).parents[1] / "docs" / "records.schema.json").read_text())
    problems = jsonschema.Draft202012Validator(schema).iter_errors(json.loads((folder / "run.json").read_text()))
    assert [f"{problem.json_path}: {problem.message}" for problem in problems] == []


def test_the_table_of_the_ranks(folder: Path, record: BenchRecord) -> None:
    console = Console(file=io.StringIO(), width=100)
    render(document_of(read_record(folder)), console)
    text = " ".join(console.file.getvalue().split())
    assert "By rank, milliseconds a request (counts requests)" in text
    for series in ("eager", "graph", "hf"):
        assert f"{series} 0 " in text and f"{series} 1 " in text
    gather = sharing_of(record).gather_ms
    assert f"gather {gather:.3f} ms once the last rank is there" in text or f"gather {gather:.2f} ms" in text
    assert "shared by size" in text


def test_ranks_pack_their_own_items(record: BenchRecord) -> None:
    alone = prepare_bench(bench_spec(1)).expected_counters()
    assert record.result.graph.items == alone.items
    assert record.result.graph.replays > alone.replays


def test_outputs_of_all_ranks_were_compared_with_one_process(record: BenchRecord) -> None:
    correctness = record.result.correctness
    assert correctness is not None and (correctness.status, correctness.checked) == ("ok", 2)


def test_every_rank_has_a_sample_of_every_timed_call(folder: Path, record: BenchRecord) -> None:
    table = read_samples(folder / SAMPLES_FILE)
    of_ranks = table.frame[table.frame["rank"].notna()]
    assert len(of_ranks) == RANKS * len(table.calls)
    assert set(table.series) == {"eager", "graph", "eager_repeat", "hf"}
    keys = ["series", "round", "call", "position"]
    for _, call in table.calls.iterrows():
        parts = of_ranks[(of_ranks[keys] == call[keys]).all(axis=1)]
        assert sorted(parts["rank"]) == [0, 1]
        for name in ("items", "tokens", "input_rows", "hits", "replays"):
            assert parts[name].sum() == call[name]
        assert call["wall_ms"] == parts["wall_ms"].max()
        assert (parts["wall_ms"] - parts["encode_ms"] - parts["gather_ms"]).abs().max() < 1e-5


def test_the_ranks_facts_are_in_the_record(record: BenchRecord) -> None:
    assert record.environment is not None and record.resolved is not None
    ranks = record.environment.ranks
    assert [rank.rank for rank in ranks] == [0, 1]
    assert all(rank.device == "cpu" and rank.attn_backend == "TORCH_SDPA" for rank in ranks)
    assert all(rank.captured == record.resolved.graphs for rank in ranks)
    assert record.settings["parallel"] == {
        "ranks": 2,
        "tp_mode": "data",
        "assignment": "size",
        "rank_timeout_s": 60.0,
    }
    for mode in ("eager", "graph", "hf"):
        shared = sharing_of(record, mode)
        assert shared.gather_ms > 0
        assert 1 <= shared.input_imbalance <= 2
        assert 1 <= shared.time_imbalance <= 2


def test_calls_of_one_item_leave_a_rank_idle_and_run(tmp_path: Path) -> None:
    values(run_on(bench_spec(3, items=1), tmp_path))
    shared = sharing_of(read_bench(tmp_path))
    assert [rank.idle_calls for rank in shared.ranks][1:] != [0, 0]
    none = dict.fromkeys(("items", "tokens", "hits", "misses", "replays"), 0)
    times = {"encode_ms", "wait_ms", "wall_ms"}
    assert shared.ranks[2].model_dump(exclude=times) == {"rank": 2, "idle_calls": CALLS, **none}
    assert shared.input_imbalance > 1.5


def fail_in_call(number: int, how: Callable[[], None], rank: int = 1) -> Callable[[ParallelGroup], None]:
    """Makes a rank fail when it encodes its share of the n-th graph call."""

    def prepare(group: ParallelGroup) -> None:
        group_module.ANSWER_S = 1.0
        if group.rank != rank:
            return
        real, seen = EncoderCudaGraphManager.execute, []

        def execute(self: EncoderCudaGraphManager, mm_kwargs: Any) -> Any:
            seen.append(mm_kwargs)
            if len(seen) == number:
                how()
            return real(self, mm_kwargs)

        EncoderCudaGraphManager.execute = execute  # type: ignore[method-assign]

    return prepare


def run_out_of_memory() -> None:
    raise MemoryError("no room for 3 GiB")


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("how", "said"),
    [(run_out_of_memory, "failed: MemoryError: no room for 3 GiB"), (kill_self, "did not answer within 1 s: killed")],
)
def test_what_was_measured_is_saved_with_the_rank_that_failed(
    how: Callable[[], None], said: str, tmp_path: Path
) -> None:
    # Two checked calls and two warm-ups come first; every call of this workload has items for both ranks.
    results: list[RankResult] = run_on(bench_spec(items=6), tmp_path, fail_in_call(2 + 2 + 5, how))
    assert results[0].error is not None and said in results[0].error
    record = read_bench(tmp_path)
    assert record.status == "error"
    assert str(record.status_reason).startswith("rank 1 (")
    assert said in str(record.status_reason)
    assert record.result.latency["graph"].calls == record.result.comparison.calls == 4
    table = read_samples(tmp_path / SAMPLES_FILE)
    assert len(table) == (RANKS + 1) * len(table.calls)


def test_rank_0_saves_its_own_failure(tmp_path: Path) -> None:
    results = run_on(bench_spec(items=6), tmp_path, fail_in_call(2 + 2 + 5, run_out_of_memory, rank=0))
    record = read_bench(tmp_path)
    assert (record.status, record.status_reason) == ("error", "MemoryError: no room for 3 GiB")
    assert record.result.latency["graph"].calls == 4
    assert results[1].error is not None and "rank 0 (" in results[1].error and "no room" in results[1].error


def test_a_failure_before_the_measuring_is_saved_too(tmp_path: Path) -> None:
    run_on(bench_spec(items=6), tmp_path, fail_in_call(1, run_out_of_memory))
    record = read_bench(tmp_path)
    assert (record.status, record.result.latency) == ("error", {})
    assert "rank 1 (" in str(record.status_reason) and "no room for 3 GiB" in str(record.status_reason)


def test_wrong_outputs_on_one_rank_are_never_timed(tmp_path: Path) -> None:
    def spoil(group: ParallelGroup) -> None:
        if group.rank == 1:
            real = EncoderCudaGraphManager.execute
            EncoderCudaGraphManager.execute = lambda self, call: [x * 1.01 for x in real(self, call)]  # type: ignore[method-assign]

    results = run_on(bench_spec(items=6), tmp_path, spoil)
    assert {result.exit_status for result in results} == {4}
    result = read_bench(tmp_path).result
    assert result.correctness is not None and result.correctness.status == "incorrect"
    assert result.latency == {}


def test_ranks_with_other_requests_are_refused(tmp_path: Path) -> None:
    first, second = prepare_bench(bench_spec()), prepare_bench(bench_spec(prompts=CALLS + 1))

    def work(group: ParallelGroup) -> Any:
        return run_bench(first if group.is_leader else second, tmp_path, SilentProgress(), group)

    for result in run_ranks(2, work):
        assert result.error is not None and "rank 1 (" in result.error and "has workload" in result.error
    assert json.loads((tmp_path / "run.json").read_text())["status"] == "error"
