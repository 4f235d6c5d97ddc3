"""`verify` on several ranks: calls shared among them are checked on each, and their results become one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_processes import run_ranks, values

from vitgraph.graphs.manager import EncoderCudaGraphManager
from vitgraph.models.encoder import VisionEncoder
from vitgraph.planning.budgets import BudgetPlan
from vitgraph.ranks.group import ParallelGroup
from vitgraph.ranks.sharing import CallSharing, RowLayout
from vitgraph.records.results import Check, VerifiedModel
from vitgraph.verify.run import merge_ranks, verify_row


def verified(
    tower: VisionEncoder, ranks: int, before: Callable[[ParallelGroup], None] = lambda group: None, **settings: Any
) -> list[VerifiedModel]:
    def work(group: ParallelGroup) -> dict[str, Any]:
        before(group)
        return verify_row(tower, calls=1, token_budgets=(16,), group=group, **settings).model_dump(mode="json")

    return [VerifiedModel.model_validate(found) for found in values(run_ranks(ranks, work))]


def check(result: VerifiedModel, name: str) -> Check:
    return next(check for check in result.checks if check.name == name)


@pytest.mark.slow
def test_ranks_verify_the_same_encoder_and_share_calls(small_tower: VisionEncoder) -> None:
    results = verified(small_tower, 2)
    for result in results:
        assert (result.status, result.error) == ("ok", None)
        shared = check(result, "data_parallel")
        assert (shared.status, shared.failures) == ("ok", 0)
        assert shared.compared > 100
        assert "over 2 ranks" in shared.detail
    merged = merge_ranks(results)
    assert (merged.status, merged.ranks, merged.failed_checks) == ("ok", 2, [])
    assert check(merged, "data_parallel").compared == sum(check(r, "data_parallel").compared for r in results)


@pytest.mark.slow
def test_rows_in_another_order_are_found(small_tower: VisionEncoder) -> None:
    def turn_rows_around(group: ParallelGroup) -> None:
        real = RowLayout.split
        RowLayout.split = lambda self, rows: real(self, rows)[::-1]  # type: ignore[method-assign]

    for result in verified(small_tower, 2, turn_rows_around):
        assert result.status == "failed"
        assert set(result.failed_checks) <= {"order", "data_parallel"}
        assert result.failed_checks


def test_one_process_has_no_such_check(small_tower: VisionEncoder) -> None:
    result = verify_row(small_tower, calls=1, token_budgets=(16,))
    assert "data_parallel" not in [check.name for check in result.checks]


class UnableOnRank1(EncoderCudaGraphManager):
    """Captures nothing on rank 1."""

    rank = 0

    def __init__(self, model: Any, plan: BudgetPlan, **settings: Any) -> None:
        super().__init__(model, plan, **settings)

    def capture(self, progress: Any = None) -> None:
        if self.rank == 1:
            raise torch.OutOfMemoryError("no room")
        super().capture(progress)


@pytest.mark.slow
def test_a_rank_that_cannot_capture_is_named_and_the_others_go_on(small_tower: VisionEncoder) -> None:
    def number(group: ParallelGroup) -> None:
        UnableOnRank1.rank = group.rank

    results = verified(small_tower, 2, number, manager_class=UnableOnRank1)
    assert [result.status for result in results] == ["ok", "error"]
    for result in results:
        shared = check(result, "data_parallel")
        assert shared.status == "skipped"
        assert "rank 1 (" in shared.detail and "no room" in shared.detail
    merged = merge_ranks(results)
    assert merged.status == "error"
    assert merged.error.startswith("rank 1: OutOfMemoryError: no room")


@pytest.mark.slow
def test_a_rank_that_fails_among_shared_calls_is_named(small_tower: VisionEncoder) -> None:
    def fail_on_rank_1(group: ParallelGroup) -> None:
        if group.rank == 1:

            def encode(self: CallSharing, *arguments: Any) -> None:
                raise MemoryError("no room for the rows")

            CallSharing.encode = encode  # type: ignore[method-assign, assignment]

    def work(group: ParallelGroup) -> dict[str, Any]:
        fail_on_rank_1(group)
        return verify_row(small_tower, calls=1, token_budgets=(16,), group=group).model_dump(mode="json")

    for result in run_ranks(2, work):
        assert result.error is not None and result.error.startswith("RankFailedError: rank 1 (")
        assert "MemoryError: no room for the rows" in result.error


@pytest.mark.parametrize(("second", "status"), [("ok", "ok"), ("failed", "failed"), ("error", "error")])
def test_the_worst_rank_decides(second: str, status: str) -> None:
    def result(status: str, distance: float) -> VerifiedModel:
        has_failed = status == "failed"
        one = Check(
            name="finite",
            status="failed" if has_failed else "ok",
            max_rel_l2=distance,
            compared=3,
            failures=int(has_failed),
            detail=f"was {status}",
        )
        facts: dict[str, Any] = {"status": status, "calls": 2, "items": 5, "replays": 4, "max_rel_l2": distance}
        return VerifiedModel(architecture="Tower", checks=(one,), **facts)

    merged = merge_ranks([result("ok", 1e-6), result(second, 1e-3)])
    assert merged.status == status
    assert (merged.calls, merged.items, merged.max_rel_l2) == (4, 10, 1e-3)
    only = check(merged, "finite")
    assert (only.compared, only.max_rel_l2) == (6, 1e-3)
    assert only.detail == ("rank 1: was failed" if second == "failed" else "was ok")
    assert math.isnan(merge_ranks([result("ok", 1e-6), result("ok", math.nan)]).max_rel_l2 or 0.0)
