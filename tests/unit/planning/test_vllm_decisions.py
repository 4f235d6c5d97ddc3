"""Replays what vLLM 0.33 decided on 480 recorded cases: budgets, settings, batches, load balance.

vLLM counts a two-path item once a path and vitgraph counts items, so hits are not compared. Another file with cases of
the same shape can be named in `VITGRAPH_VLLM_DECISIONS`.
"""

from __future__ import annotations

import json
import os
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from vitgraph.errors import BudgetError
from vitgraph.planning.budgets import (
    BudgetPlan,
    EncoderItemSpec,
    generate_budgets,
    resolve_budget_settings,
    select_budget,
)
from vitgraph.planning.packing import group_items, pack_items
from vitgraph.predict.assignment import assign_load_balanced

STORED = Path(__file__).parents[2] / "data" / "vllm-0.33-decisions.json"
CASES: dict[str, list[dict[str, Any]]] = json.loads(
    Path(os.environ.get("VITGRAPH_VLLM_DECISIONS", STORED)).read_text(encoding="utf-8")
)


def test_the_file_has_cases_of_every_kind() -> None:
    assert all(len(CASES[kind]) > 0 for kind in ("generate_budgets", "resolve", "pack", "load_balance"))


def test_generated_budgets() -> None:
    for case in CASES["generate_budgets"]:
        if case.get("budgets", "error") == "error":
            with pytest.raises(BudgetError):
                generate_budgets(case["min"], case["max"])
        else:
            assert generate_budgets(case["min"], case["max"]) == case["budgets"], case


def resolved(case: dict[str, Any]) -> dict[str, Any] | str:
    """The settings of a case in vLLM's words, or `error`."""
    try:
        settings = resolve_budget_settings(
            tuple(case["model_range"]),
            case["token_budgets"],
            case["max_vision_items_per_batch"],
            case["max_frames_per_batch"],
            video_limit_per_prompt=case["video_limit_per_prompt"],
            max_frames_per_video=case["max_frames_per_video"],
        )
    except BudgetError:
        return "error"
    return {
        "token_budgets": list(settings.token_budgets),
        "max_batch_size": settings.max_items,
        "max_frames_per_batch": settings.max_frames,
    }


def test_resolved_settings() -> None:
    for case in CASES["resolve"]:
        assert resolved(case) == case["result"], case


def _pack_case(case: dict[str, Any]) -> tuple[list[EncoderItemSpec], BudgetPlan]:
    specs = [EncoderItemSpec("image", 1, sum(paths.values()), 1, paths) for paths in case["items"]]
    budgets = {path: tuple(b for b in listed if b) for path, listed in case["path_token_budgets"].items()}
    items = case["max_vision_items_per_batch"]
    tiers = {(path, budget): (items,) for path, listed in budgets.items() for budget in listed}
    return specs, BudgetPlan(budgets, items, 0, tiers)


def test_greedy_defer_batches() -> None:
    for case in CASES["pack"]:
        specs, plan = _pack_case(case)
        batches = []
        for group in group_items(specs, plan, "greedy-defer"):
            totals = {path: sum(specs[index].tokens_on(path) for index in group) for path in plan.paths}
            budgets = {path: select_budget(plan.path_budgets[path], total) for path, total in totals.items() if total}
            batches.append({"items": group, "budgets": budgets})
        assert batches == case["batches"], case
        # The packed form selects the same budgets and loses no item.
        packed = pack_items(specs, plan, "greedy-defer")
        assert [batch.items for batch in packed] == [tuple(sorted(batch["items"])) for batch in case["batches"]], case
        chosen = [
            {path: run.key.token_budget if run.key else None for path, run in batch.runs.items()} for batch in packed
        ]
        assert chosen == [batch["budgets"] for batch in case["batches"]], case


def test_load_balance() -> None:
    for case in CASES["load_balance"]:
        shares, order = assign_load_balanced(case["sizes"], case["ranks"]), iter(case["order"])
        members = [sorted(islice(order, count)) for count in case["items_per_rank"]]
        assert [list(share) for share in shares] == members, case
        assert [sum(case["sizes"][index] for index in share) for share in shares] == case["size_per_rank"], case
