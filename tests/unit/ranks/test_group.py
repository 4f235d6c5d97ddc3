"""Ranks that wait for each other: values in order, and a clear end within a limit where one fails, dies or hangs."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_processes import RankResult, run_ranks, values

from vitgraph.errors import BudgetError
from vitgraph.planning.budgets import IMAGE, EncoderItemSpec
from vitgraph.predict.assignment import share_by_size
from vitgraph.ranks import group as group_module
from vitgraph.ranks.group import ParallelGroup, find_fault
from vitgraph.ranks.launch import rank_device
from vitgraph.ranks.sharing import RowLayout, gather_rows, join_rows

WIDTH = 3
LONG_S = 40.0
"""Longer than anything here takes; whoever waits so long was not told."""

ROWS = (2, 1, 4, 3, 9, 5)


@pytest.fixture(autouse=True)
def quick_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks are on one machine, so that one second is enough for an answer."""
    monkeypatch.setattr(group_module, "ANSWER_S", 1.0)


def gather_once(group: ParallelGroup) -> list[torch.Tensor]:
    """Six items over the ranks, each with its number in its rows."""
    shares = share_by_size([EncoderItemSpec(IMAGE, 8 * (index + 1), 1) for index in range(6)], group.size)
    layout = RowLayout.of(shares, ROWS)
    pieces = [torch.full((ROWS[index], WIDTH), float(index)) for index in shares[group.rank]]
    return gather_rows(group, pieces, layout, WIDTH, torch.float32)


def test_values_come_by_rank_and_rows_by_item() -> None:
    def work(group: ParallelGroup) -> Any:
        group.align()
        return group.exchange({"rank": group.rank, "text": "x" * 100 * group.rank}, "a test"), gather_once(group)

    for facts, rows in values(run_ranks(3, work)):
        assert [fact["rank"] for fact in facts] == [0, 1, 2]
        assert [len(fact["text"]) for fact in facts] == [0, 100, 200]
        assert [tuple(item.shape) for item in rows] == [(rows, WIDTH) for rows in ROWS]
        assert [item.unique().tolist() for item in rows] == [[float(index)] for index in range(6)]


def test_rows_that_follow_each_other_are_not_copied() -> None:
    whole = torch.arange(12.0).view(6, 2)
    assert join_rows(whole.split([1, 2, 3])).data_ptr() == whole.data_ptr()
    assert torch.equal(join_rows(whole.split([1, 2, 3])), whole)
    first, second = whole[:2], torch.full((2, 2), 7.0)
    assert torch.equal(join_rows([first, second]), torch.cat([first, second]))
    assert torch.equal(join_rows([whole[2:], whole[:2]]), torch.cat([whole[2:], whole[:2]]))
    assert torch.equal(join_rows([whole.t()[:1], whole.t()[1:]]), whole.t())


def blamed(results: list[RankResult], rank: int) -> list[str]:
    """The errors of the ranks other than `rank`; each must be that a rank failed, and name it."""
    errors = [result.error or "" for index, result in enumerate(results) if index != rank]
    for error in errors:
        assert error.startswith("RankFailedError: "), error
        assert f"rank {rank} (" in error, error
    return errors


def test_a_rank_that_fails_ends_the_others_with_its_own_words() -> None:
    def work(group: ParallelGroup) -> None:
        gather_once(group)
        if group.rank == 1:
            raise BudgetError("the budgets of this rank are odd")
        for _ in range(1000):
            gather_once(group)

    results = run_ranks(3, work)
    assert results[1].error == "BudgetError: the budgets of this rank are odd"
    for error in blamed(results, 1):
        assert error.endswith("failed: the budgets of this rank are odd")
    assert {result.exit_status for result in results} == {2}


def test_ranks_that_wait_hear_of_a_failure_at_once() -> None:
    """The failed rank's connections are open until both have heard, so that no wait breaks off by itself."""
    heard = multiprocessing.get_context("fork").Semaphore(0)

    def work(group: ParallelGroup) -> None:
        if group.rank == 1:
            group.announce(BudgetError("the budgets of this rank are odd"))
            assert all(heard.acquire(timeout=LONG_S) for _ in range(2))
            return
        try:
            gather_once(group)
        finally:
            heard.release()

    results = run_ranks(3, work)
    assert all(error.endswith("failed: the budgets of this rank are odd") for error in blamed(results, 1))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_killed_rank_ends_the_others_by_name(ranks: int) -> None:
    def work(group: ParallelGroup) -> None:
        gather_once(group)
        if group.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        for _ in range(1000):
            gather_once(group)

    results = run_ranks(ranks, work)
    assert results[1].exit_code == -signal.SIGKILL
    assert all("did not answer within 1 s" in error for error in blamed(results, 1))


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a launcher the store of the run is there before the ranks are."""
    monkeypatch.setattr(group_module, "JOIN_LIMIT_S", 1.0)
    given_up, meet = multiprocessing.get_context("fork").Semaphore(0), ParallelGroup._meet

    def come(group: ParallelGroup) -> None:
        if group.rank == 1:
            assert all(given_up.acquire(timeout=LONG_S) for _ in range(2))
            raise BudgetError("this rank did not come")
        try:
            meet(group)
        finally:
            given_up.release()

    monkeypatch.setattr(ParallelGroup, "_meet", come)
    for result in run_ranks(3, gather_once)[::2]:
        assert result.error is not None and "rank 1 did not answer within 1 s" in result.error
        assert "Noticed as the meeting of the ranks" in result.error


class StopsOnceTold(dist.Store):
    """A store whose process is stopped once it has told the others where they can connect to it."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self.get, self.wait, self.check, self.has_extended_api = store.get, store.wait, store.check, lambda: False
        self._set = store.set

    def set(self, key: str, value: Any) -> None:
        self._set(key, value)
        os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.slow
def test_a_rank_that_stops_while_the_ranks_connect_is_waited_for_within_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gloo tries five times, each time for the limit that it was given."""
    monkeypatch.setattr(group_module, "JOIN_LIMIT_S", 5.0)
    leader = multiprocessing.get_context("fork").Value("i")
    meet = ParallelGroup._meet

    def come(group: ParallelGroup) -> None:
        if group.rank == 0:
            leader.value, group._run_store = os.getpid(), StopsOnceTold(group._run_store)
        try:
            meet(group)
        finally:
            os.kill(leader.value, signal.SIGKILL)

    monkeypatch.setattr(ParallelGroup, "_meet", come)
    result = run_ranks(2, gather_once)[1]
    assert result.error is not None and "rank 0 did not answer within 1 s" in result.error


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_others_after_the_limit() -> None:
    ended = multiprocessing.get_context("fork").Semaphore(0)

    def work(group: ParallelGroup) -> None:
        gather_once(group)
        if group.rank == 2:
            assert all(ended.acquire(timeout=LONG_S) for _ in range(2))
        try:
            gather_once(group)
        finally:
            ended.release()

    results = run_ranks(3, work, limit_s=1.0)
    assert all("did not answer within 1 s" in error for error in blamed(results, 2))
    assert results[2].error is not None


class FakeEvent:
    """An event of a device, done or not."""

    def __init__(self, is_done: bool) -> None:
        self.is_done = is_done

    def query(self) -> bool:
        return self.is_done


def test_a_rank_whose_own_work_does_not_end_says_so() -> None:
    def work(group: ParallelGroup) -> None:
        group.wait_event(FakeEvent(False), own=FakeEvent(group.rank != 1))  # type: ignore[arg-type]

    results = run_ranks(2, work, limit_s=1.0)
    for result in results:
        assert result.error is not None and "its own work took more than 1 s" in result.error
        assert "rank 1 (" in result.error and "rank 0 (" not in result.error


def test_a_store_that_is_gone_ends_a_wait() -> None:
    def work(group: ParallelGroup) -> None:
        class Gone:
            def check(self, keys: list[str]) -> bool:
                raise RuntimeError("broken pipe")

            def set(self, key: str, value: str) -> None:
                raise RuntimeError("broken pipe")

        group._store = Gone()  # type: ignore[assignment]
        group.wait_event(FakeEvent(False))  # type: ignore[arg-type]

    for result in run_ranks(2, work):
        assert result.error == "RankFailedError: the store of the run is gone with the process that kept it"


def test_ranks_without_items_take_part_in_every_gather() -> None:
    """One item, then none at all, then one again: whoever left out a gather would now get the rows of another call."""

    def work(group: ParallelGroup) -> Any:
        def gather(pieces: list[torch.Tensor], layout: RowLayout) -> list[torch.Tensor]:
            return gather_rows(group, pieces, layout, WIDTH, torch.float32)

        found = []
        for owner in range(group.size):
            shares = tuple((0,) if rank == owner else () for rank in range(group.size))
            pieces = [torch.full((2, WIDTH), float(owner))] if owner == group.rank else []
            found.append(gather(pieces, RowLayout.of(shares, [2]))[0][0, 0].item())
            assert gather([], RowLayout.of(((),) * group.size, [])) == []
        return found

    assert values(run_ranks(4, work)) == [[0.0, 1.0, 2.0, 3.0]] * 4


def test_ranks_that_are_at_different_places_say_so() -> None:
    results = run_ranks(2, lambda group: group.exchange(1, "first" if group.rank == 0 else "second"))
    for result in results:
        assert result.error is not None
        assert "'first'" in result.error and "'second'" in result.error


def test_ranks_that_would_do_different_things_are_refused() -> None:
    def work(group: ParallelGroup) -> None:
        group.agree({"model": "a", "workload": f"w{group.rank // 2}"})

    for result in run_ranks(3, work):
        assert result.exit_status == 2
        assert result.error is not None
        assert result.error.startswith("UsageError: rank 2 (")
        assert "has workload w1" in result.error and result.error.endswith("the same command and files")


@pytest.mark.slow
def test_a_signal_ends_a_rank_in_the_middle_of_a_wait() -> None:
    """Inside torch or the driver, the signal would be handled when the wait is over, and so perhaps never."""

    ended = multiprocessing.get_context("fork").Event()

    def work(group: ParallelGroup) -> str | None:
        leader = group.exchange(os.getpid(), "ids")[0]
        if group.rank == 1:
            time.sleep(0.5)
            os.kill(leader, signal.SIGTERM)
            assert ended.wait(LONG_S)
            return None
        try:
            group.exchange(0, "never", slow=True)
        except KeyboardInterrupt:
            fault = group.failure_behind_stop()
            ended.set()
            return "stopped" if fault is None else str(fault)
        return "not stopped"

    results = run_ranks(2, work)
    assert results[0].value is not None and "rank 1" in results[0].value
    assert results[1].error is not None and "rank 0 (" in results[1].error and "told to stop" in results[1].error


def test_ranks_that_are_all_told_to_stop_answer_from_the_last_wait_too() -> None:
    """A rank that has done its part waits for the others; a stop of the whole run finds it there."""

    def work(group: ParallelGroup) -> str | None:
        ids = group.exchange(os.getpid(), "ids")
        if group.rank == 1:
            return None
        time.sleep(0.5)
        try:
            for rank in (1, 0):
                os.kill(ids[rank], signal.SIGTERM)
            time.sleep(5)
        except KeyboardInterrupt:
            fault = group.failure_behind_stop()
            return "stopped" if fault is None else str(fault)
        return "not stopped"

    assert run_ranks(2, work)[0].value == "stopped"


ERROR_REPORT = {"kind": "error", "text": "out of memory", "exit_status": 4, "time": 2.0}
LOST_REPORT = {"kind": "lost", "text": "", "exit_status": 1, "time": 1.0}
STOPPED_REPORT = {"kind": "stopped", "text": "", "exit_status": 1, "time": 3.0}


@pytest.mark.parametrize(
    ("reports", "was_stopped", "expected"),
    [
        ({1: ERROR_REPORT, 2: LOST_REPORT}, False, "B failed: out of memory"),
        ({1: ERROR_REPORT}, True, "B failed: out of memory"),
        ({1: LOST_REPORT}, False, "C did not answer within 1 s: killed, or hanging. Noticed as it broke"),
        ({}, False, "B and C did not answer within 1 s: killed, or hanging. Noticed as it broke"),
        ({1: LOST_REPORT, 2: STOPPED_REPORT}, False, "C was told to stop by a signal"),
        ({1: STOPPED_REPORT, 2: STOPPED_REPORT}, True, None),
        ({1: LOST_REPORT, 2: LOST_REPORT}, False, None),
    ],
)
def test_who_is_at_fault(reports: dict[int, dict[str, Any]], was_stopped: bool, expected: str | None) -> None:
    fault = find_fault("it broke", 0, ["A", "B", "C"], reports, waited_s=1.0, was_stopped=was_stopped)
    assert (None if fault is None else str(fault)) == expected
    if expected is not None and "failed" in expected:
        assert fault is not None and fault.exit_status == 4


def test_a_rank_needs_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert rank_device("auto", 1) == torch.device("cuda", 1)
    assert rank_device("cpu", 9) == torch.device("cpu")
    with pytest.raises(Exception, match="local rank 2 needs a GPU of its own, but torch sees 2"):
        rank_device("cuda", 2)
    with pytest.raises(Exception, match="--device is cuda:1, but several ranks need a GPU each"):
        rank_device("cuda:1", 0)
