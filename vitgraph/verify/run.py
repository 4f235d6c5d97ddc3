"""`verify`: captures an encoder's graphs, replays them in every way that has failed before, and compares with eager."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from vitgraph.errors import BudgetError, VitgraphError
from vitgraph.graphs.manager import EncoderCudaGraphManager
from vitgraph.measure.correctness import TOLERANCE
from vitgraph.measure.setup import plan_graphs
from vitgraph.models.encoder import VisionEncoder
from vitgraph.models.geometry import EncoderCudaGraphConfig, GeometryRule
from vitgraph.planning.budgets import BudgetPlan
from vitgraph.ranks.group import ParallelGroup
from vitgraph.records.kinds.verify import VerifiedModel
from vitgraph.specs.parts import DEFAULT_MAX_NUM_BATCHED_TOKENS, GraphSpec
from vitgraph.verify import checks, drills
from vitgraph.verify.parallel import verify_sharing
from vitgraph.verify.probes import PredictedTokensError, item_catalogue
from vitgraph.verify.session import (
    CPU_EFFORT,
    ERROR,
    FAILED,
    GPU_EFFORT,
    OK,
    PREDICTED_TOKENS,
    SKIPPED,
    CheckBook,
    Effort,
    SkipCheck,
    VerifySession,
    unreached,
)

LARGEST_DEFAULT_BUDGET = 4096
DEFAULT_MAX_ITEMS = 8

_SOUND = ("predicted_tokens", "finite", "frozen_scalars")
_EQUAL = (*_SOUND, "stale_metadata", "every_graph")


def _finite(session: VerifySession) -> str:
    """Every output of every check so far was finite; the faults were noted where they were found."""
    return f"{sum(check.compared for check in session.book.checks.values())} item outputs"


CHECKS: dict[str, tuple[Callable[[VerifySession], str], tuple[str, ...]]] = {
    "predicted_tokens": (checks.predicted_tokens, ()),
    "frozen_scalars": (checks.frozen_scalars, ("predicted_tokens", "finite")),
    "stale_metadata": (checks.stale_metadata, _SOUND),
    "every_graph": (checks.every_graph, (*_SOUND, "stale_metadata")),
    "multi_path": (checks.multi_path, _EQUAL),
    "small_large_small": (drills.small_large_small, _EQUAL),
    "order": (checks.order, (*_EQUAL, "multi_path", "small_large_small")),
    "aliasing": (drills.aliasing, _SOUND),
    "random_packings": (
        drills.random_packings,
        (*_EQUAL, "multi_path", "small_large_small", "order", "aliasing"),
    ),
    "static_buffers": (drills.static_buffers, (*_SOUND, "stale_metadata")),
    "counters": (drills.counters, _SOUND),
    "finite": (_finite, ()),
    "memory_returned": (drills.memory_returned, ("predicted_tokens",)),
}
"""By name, what runs, and the checks without which it would only repeat a fault; each blames what it alone can see."""


def verify_row(
    encoder: VisionEncoder,
    *,
    seed: int = 0,
    calls: int = 200,
    token_budgets: Sequence[int] | None = None,
    max_items: int | None = None,
    manager_class: type[EncoderCudaGraphManager] = EncoderCudaGraphManager,
    group: ParallelGroup | None = None,
) -> VerifiedModel:
    """Captures an encoder's graphs and runs every check on them.

    An item passes within the dtype's tolerance, and beyond it within what the tower's own rounding explains.

    Args:
        encoder: The encoder, with its weights and backend.
        seed: Seed of pixels and draws.
        calls: Random calls.
        token_budgets: Budgets to capture; None takes a short list from the model's smallest.
        max_items: Items of a replay, and random calls have up to twice as many; None takes a few, as many as fit.
        manager_class: The manager to verify.
        group: Ranks that verify the same encoder, and then share calls.

    Returns:
        The result; whatever goes wrong is in it. Only an interruption by the user is raised.
    """
    book = CheckBook(TOLERANCE[encoder.dtype], checks={name: unreached(name) for name in CHECKS})
    found: dict[str, Any] = {"status": ERROR}
    started = time.perf_counter()
    manager: EncoderCudaGraphManager | None = None
    session: VerifySession | None = None
    try:
        effort = effort_on(encoder.device)
        manager = manager_class(encoder, plan_verification(encoder.rule, effort, token_budgets, max_items))
        session = VerifySession(encoder, manager, book, effort, seed, calls)
        book.rounding = session.store.rounding
        _capture_and_check(session, found)
    except Exception as error:
        # One encoder's fault must not end the verification of the others; the reason is kept.
        found |= {"status": ERROR, "error": describe_error(error)}
    finally:
        try:
            if manager is not None:
                manager.clear()
        except Exception as error:
            # After a device fault nothing can be released; the first reason is the one to report.
            found |= {"status": ERROR, "error": found.get("error") or describe_error(error)}
        found["seconds"] = time.perf_counter() - started
    if group is not None:
        verify_sharing(encoder, session, book, group, found)
    return VerifiedModel(
        architecture=type(encoder).__name__,
        device=str(encoder.device),
        dtype=str(encoder.dtype).removeprefix("torch."),
        backend_used=encoder.attention.implementation,
        attn_choices=encoder.attention.choices() or None,  # type: ignore[arg-type]
        tolerance=book.tolerance,
        checks=tuple(book.checks.values()),
        max_rel_l2=book.max_rel_l2,
        own_error=book.own_error,
        seed=seed,
        **found,
    )


@torch.inference_mode()
def _capture_and_check(session: VerifySession, found: dict[str, Any]) -> None:
    manager = session.manager
    found["budgets"] = manager.plan.path_budgets
    manager.capture()
    found |= {"graphs_captured": len(manager.graphs), "graphs_dropped": len(manager.dropped)}
    try:
        for name in CHECKS:
            _run_check(session, name)
    finally:
        found |= {"calls": session.random_calls, "items": session.items, "replays": session.replays.total()}
    found["status"] = FAILED if session.book.total_failures else OK


def _run_check(session: VerifySession, name: str) -> None:
    function, needs = CHECKS[name]
    book = session.book
    book.under_way = name
    blocker = next((other for other in needs if book.checks[other].failures), None)
    if blocker is not None:
        book.end(SKIPPED, f"{blocker} failed, which this would only repeat")
        return
    before = book.total_failures
    try:
        status, detail = OK, function(session)
        if book.total_failures > before:
            status, detail = SKIPPED, "what it found belongs to the checks that failed"
    except SkipCheck as reason:
        status, detail = SKIPPED, str(reason)
    except PredictedTokensError as error:
        book.fail(str(error), PREDICTED_TOKENS)
        status, detail = SKIPPED, "predicted tokens and eager rows differ"
    except Exception as error:
        # Of an error that is not ours the row ends here, and the check under way says so.
        book.fail(describe_error(error))
        if not isinstance(error, VitgraphError):
            raise
        return
    book.end(status, detail)


def effort_on(device: torch.device) -> Effort:
    """How much is verified on a device."""
    return GPU_EFFORT if device.type == "cuda" else CPU_EFFORT


def describe_error(error: BaseException) -> str:
    """Class and message."""
    return f"{type(error).__name__}: {error}"


def plan_verification(
    rule: GeometryRule, effort: Effort, token_budgets: Sequence[int] | None = None, max_items: int | None = None
) -> BudgetPlan:
    """The graphs to verify: a few doublings from the model's smallest budget, or the given budgets.

    Replays with videos get a few frames an item.

    Raises:
        BudgetError: The settings contradict each other or the model.
    """
    config = rule.graph_config()
    if max_items is not None and max_items < 1:
        raise BudgetError(f"max items is {max_items}; a replay holds at least one")
    budgets = list(token_budgets) if token_budgets else _default_budgets(rule, config, effort)
    items = min(DEFAULT_MAX_ITEMS, *budgets) if max_items is None else max_items
    frames = (max_items or DEFAULT_MAX_ITEMS) * effort.frames_per_item
    spec = GraphSpec(
        token_budgets=tuple(budgets),
        max_vision_items_per_batch=items,
        max_frames_per_batch=min(items * config.max_frames_per_video, frames),
        video_limit_per_prompt=1,
    )
    return plan_graphs(rule, spec, [])


def _default_budgets(rule: GeometryRule, config: EncoderCudaGraphConfig, effort: Effort) -> list[int]:
    low, high = rule.budget_range(DEFAULT_MAX_NUM_BATCHED_TOKENS)
    # Some rules make no item as small as the smallest budget; no replay could check that graph.
    catalogue = item_catalogue(rule)
    low = max([low, *(candidate.tokens for candidate in catalogue[:1])])
    # Each path needs two budgets at least, or a change of graph would never be seen.
    enough = 2 * max(policy.min_token_budget for policy in config.paths.values())
    budgets = [low]
    while len(budgets) < effort.doublings and 2 * budgets[-1] <= max(LARGEST_DEFAULT_BUDGET, 4 * low):
        flops = max((one.flops for one in catalogue if one.tokens <= 2 * budgets[-1]), default=0.0)
        if flops > effort.most_flops and len(budgets) > 1:
            break
        budgets.append(2 * budgets[-1])
    while budgets[-1] < enough:
        budgets.append(2 * budgets[-1])
    return [budget for budget in budgets if budget <= high] or [high]
