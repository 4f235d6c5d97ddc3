"""Which requests a call has: mixes, a trace's own calls, arrivals."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from vitgraph.errors import InputError, UsageError
from vitgraph.specs.parts import WorkloadSpec
from vitgraph.specs.values import call_shares
from vitgraph.workloads.base import CallMix, MediaItem, Request, arrivals_of, grouping_of, split_by_calls
from vitgraph.workloads.registry import build_workload
from vitgraph.workloads.trace import save_trace

REQUESTS = [Request(index, (MediaItem(64, 64),)) for index in range(4000)]


def test_a_mix_is_a_share_of_the_calls_and_repeats_with_its_seed() -> None:
    groups = CallMix(call_shares("1:0.6,2:0.3,4:0.1"), seed=3)(REQUESTS)
    counts = Counter(map(len, groups[:-1]))
    assert {size: round(count / len(groups), 1) for size, count in counts.items()} == {1: 0.6, 2: 0.3, 4: 0.1}
    assert [request.index for group in groups for request in group] == list(range(4000))
    assert (
        groups
        == CallMix(call_shares("1:6,2:3,4:1"), seed=3)(REQUESTS)
        != CallMix(call_shares("1:6,2:3,4:1"), seed=4)(REQUESTS)
    )


def test_a_number_is_so_many_consecutive_requests() -> None:
    groups = CallMix(call_shares("3"))(REQUESTS[:7])
    assert [[request.index for request in group] for group in groups] == [[0, 1, 2], [3, 4, 5], [6]]


@pytest.mark.parametrize("text", ["0", "x", "1:0.5,2", "1:1,1:2", "2:-1", "1:inf", "", "99999"])
def test_what_is_no_mix_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--requests-per-call"):
        call_shares(text)


def test_a_trace_names_calls_and_arrivals_and_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "calls.csv"
    path.write_text("width,height,frames,request,call,arrival_s\n64,64,1,a,x,5.0\n32,32,1,b,y,5.5\n96,96,1,c,x,7\n")
    workload = build_workload(WorkloadSpec(dataset_name="trace", dataset_path=str(path), num_warmups=0))
    groups = grouping_of(None, workload.requests, 0)(workload.requests)
    assert [[request.index for request in group] for group in groups] == [[0, 2], [1]]
    assert arrivals_of("trace", workload.requests, 0) == [0.0, 0.5, 2.0]
    again = save_trace(workload, tmp_path / "again.csv")
    read = build_workload(WorkloadSpec(dataset_name="trace", dataset_path=str(again), num_warmups=0))
    assert [(r.call, r.arrival_s) for r in read.requests] == [("x", 5.0), ("y", 5.5), ("x", 7.0)]
    assert grouping_of("1", workload.requests, 0)(workload.requests) == [(request,) for request in workload.requests]


@pytest.mark.parametrize(
    ("rows", "message"),
    [("64,64,a,x,soon", "arrival_s is 'soon'"), ("64,64,a,x,1\n64,64,a,y,1", "is in call 'x' and in 'y'")],
)
def test_bad_calls_and_arrivals_are_refused(tmp_path: Path, rows: str, message: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(f"width,height,request,call,arrival_s\n{rows}\n")
    with pytest.raises(InputError, match=message):
        build_workload(WorkloadSpec(dataset_name="trace", dataset_path=str(path)))


def test_a_call_column_with_gaps_is_refused() -> None:
    requests = [Request(0, (MediaItem(64, 64),), call="x"), Request(1, (MediaItem(64, 64),))]
    with pytest.raises(InputError, match="request 1 names no call"):
        grouping_of(None, requests, 0)(requests)


def test_arrivals_have_the_rate_asked_for() -> None:
    times = arrivals_of("20", REQUESTS, seed=1)
    assert times[0] == 0.0
    assert times == sorted(times)
    assert 4000 / times[-1] == pytest.approx(20.0, rel=0.1)
    for rate in ("0", "-1", "often"):
        with pytest.raises(UsageError, match="--request-rate"):
            arrivals_of(rate, REQUESTS[:3], 0)
    with pytest.raises(UsageError, match="arrival_s"):
        arrivals_of("trace", REQUESTS[:3], 0)


def test_a_request_that_calls_share_becomes_one_for_each() -> None:
    request = Request(0, (MediaItem(64, 64), MediaItem(32, 32)), arrival_s=1.0)
    parts = split_by_calls([request], [[(0, 0)], [(0, 1)]])
    assert [(part.index, part.items, part.call) for part in parts] == [
        (0, request.items[:1], "0"),
        (1, request.items[1:], "1"),
    ]
