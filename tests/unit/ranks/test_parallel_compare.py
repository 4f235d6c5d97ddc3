"""A backend comparison on several ranks: what rank 0 records of all, and a backend or a rank that fails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import RankResult, run_ranks, values
from saved_run_folders import read_compare
from test_parallel_bench import RANKS, bench_spec, fail_in_call, run_out_of_memory

from vitgraph.errors import BackendError
from vitgraph.measure.candidate import Candidate
from vitgraph.measure.compare import Comparison, prepare_compare
from vitgraph.measure.progress import SilentProgress
from vitgraph.measure.setup import load
from vitgraph.planning.accounting import GraphCounters
from vitgraph.ranks.group import ParallelGroup
from vitgraph.records.candidates import failure
from vitgraph.records.sample_table import read_samples
from vitgraph.records.store import SAMPLES_FILE
from vitgraph.specs.asked import CompareSpec

pytestmark = pytest.mark.slow

BACKENDS = ("TORCH_SDPA", "FLASH_ATTN")


def compare_on_ranks(folder: Path, before: Callable[[ParallelGroup], None] = lambda group: None) -> list[RankResult]:
    prepared = prepare_compare(CompareSpec(bench_spec(items=6), BACKENDS))
    bench = prepared.bench
    # What is imported here, the forked ranks need not import.
    load(bench.source, bench.spec.model, device=torch.device("cpu"), dtype=torch.float32)

    def work(group: ParallelGroup) -> Any:
        before(group)
        record = Comparison.of(prepared, SilentProgress(), group).record(folder)
        return record and record.status

    return run_ranks(RANKS, work)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compare") / "run"
    values(compare_on_ranks(folder))
    return folder


def test_the_record_is_that_of_all_ranks(folder: Path) -> None:
    record = read_compare(folder)
    assert record.status == "complete"
    row, missing = record.result.candidates
    assert (row.status, missing.status) == ("ok", "unavailable")
    assert row.graphs is not None and row.graph.latency is not None and row.eager.latency is not None
    expected: GraphCounters = prepare_compare(CompareSpec(bench_spec(items=6), BACKENDS)).bench.expected_counters()
    assert (row.graphs.items, row.graphs.hits) == (expected.items, expected.hits)
    assert row.graphs.replays == expected.replays
    shared, eager = row.graph.latency.sharing, row.eager.latency.sharing
    assert shared is not None and eager is not None and eager.gather_ms > 0
    assert sum(rank.hits for rank in shared.ranks) == expected.hits
    assert sum(rank.replays for rank in shared.ranks) == expected.replays
    assert record.environment is not None and record.resolved is not None
    assert [rank.rank for rank in record.environment.ranks] == [0, 1]
    assert record.resolved.ranks == RANKS


def test_samples_of_all_ranks_are_beside_it(folder: Path) -> None:
    table = read_samples(folder / SAMPLES_FILE)
    of_ranks = table.frame[table.frame["rank"].notna()]
    assert len(of_ranks) == RANKS * len(table.calls)
    keys = ["series", "round", "call", "position"]
    for _, call in table.calls.iterrows():
        parts = of_ranks[(of_ranks[keys] == call[keys]).all(axis=1)]
        assert sorted(parts["rank"]) == [0, 1]
        assert parts["items"].sum() == call["items"]
        assert parts["hits"].sum() == call["hits"]
        assert call["wall_ms"] == parts["wall_ms"].max()


def test_a_backend_that_one_rank_cannot_open_is_measured_on_none(tmp_path: Path) -> None:
    def spoil(group: ParallelGroup) -> None:
        if group.rank == 1:
            real = Candidate.model_spec

            def model_spec(self: Candidate, device: torch.device) -> Any:
                if self.name == "TORCH_SDPA":
                    raise BackendError("no such kernel on this GPU")
                return real(self, device)

            Candidate.model_spec = model_spec  # type: ignore[method-assign]

    values(compare_on_ranks(tmp_path, spoil))
    result = read_compare(tmp_path).result
    assert result.candidates[0].status == "unsupported"
    assert result.candidates[0].reason == "rank 1: no such kernel on this GPU"
    assert isinstance(failure(result), BackendError)


def test_a_rank_that_fails_in_a_shared_call_ends_the_run_with_its_name(tmp_path: Path) -> None:
    # Each rank alone checks four calls, and four are checked on all ranks; then come two warm-ups.
    results = compare_on_ranks(tmp_path, fail_in_call(4 + 4 + 2 + 5, run_out_of_memory))
    assert results[0].error is not None and "failed: MemoryError: no room for 3 GiB" in results[0].error
    record = read_compare(tmp_path)
    assert record.status == "error"
    assert str(record.status_reason).startswith("rank 1 (")
    latency = record.result.candidates[0].graph.latency
    assert latency is not None and latency.calls >= 3
