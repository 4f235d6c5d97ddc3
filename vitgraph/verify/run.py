"""`verify`: captures an encoder's graphs, replays them in every way that has failed before, and compares with eager."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from vitgraph.errors import BudgetError, InputError, VitgraphError
from vitgraph.graphs.manager import EncoderCudaGraphManager
from vitgraph.measure.correctness import TOLERANCE
from vitgraph.measure.setup import plan_graphs
from vitgraph.models.encoder import VisionEncoder
from vitgraph.models.geometry import EncoderCudaGraphConfig, GeometryRule
from vitgraph.planning.budgets import BudgetPlan
from vitgraph.ranks.group import ParallelGroup
from vitgraph.records.kinds.verify import VerifiedModel
from vitgraph.specs import DEFAULT_MAX_NUM_BATCHED_TOKENS, GraphSpec
from vitgraph.verify.checks import (
    check_every_graph,
    check_frozen_scalars,
    check_multi_path,
    check_order,
    check_predicted_tokens,
    check_stale_metadata,
)
from vitgraph.verify.drills import (
    check_aliasing,
    check_counters,
    check_memory_returned,
    check_random_packings,
    check_small_large_small,
    check_static_buffers,
)
from vitgraph.verify.findings import (
    ALIASING,
    COUNTERS,
    ERROR,
    EVERY_GRAPH,
    FAILED,
    FINITE,
    FROZEN_SCALARS,
    MEMORY_RETURNED,
    MULTI_PATH,
    OK,
    ORDER,
    PREDICTED_TOKENS,
    RANDOM_PACKINGS,
    SKIPPED,
    SMALL_LARGE_SMALL,
    STALE_METADATA,
    STATIC_BUFFERS,
    CheckBook,
    SkipCheck,
    unreached,
)
from vitgraph.verify.parallel import verify_sharing
from vitgraph.verify.probes import PredictedTokensError, ProbeStore, item_catalogue, sample_candidates
from vitgraph.verify.session import CPU_EFFORT, GPU_EFFORT, Effort, ProgressCallback, VerifySession

LARGEST_DEFAULT_BUDGET = 4096
DEFAULT_MAX_ITEMS = 8

_SOUND = (PREDICTED_TOKENS, FINITE, FROZEN_SCALARS)
_EQUAL = (*_SOUND, STALE_METADATA, EVERY_GRAPH)


def _check_finite(session: VerifySession) -> str:
    """Every output of every check so far was finite; the faults were noted where they were found."""
    return f"{sum(check.compared for check in session.book.checks.values())} item outputs"


CHECKS: tuple[tuple[str, Callable[[VerifySession], str], tuple[str, ...]], ...] = (
    (PREDICTED_TOKENS, check_predicted_tokens, ()),
    (FROZEN_SCALARS, check_frozen_scalars, (PREDICTED_TOKENS, FINITE)),
    (STALE_METADATA, check_stale_metadata, _SOUND),
    (EVERY_GRAPH, check_every_graph, (*_SOUND, STALE_METADATA)),
    (MULTI_PATH, check_multi_path, _EQUAL),
    (SMALL_LARGE_SMALL, check_small_large_small, _EQUAL),
    (ORDER, check_order, (*_EQUAL, MULTI_PATH, SMALL_LARGE_SMALL)),
    (ALIASING, check_aliasing, _SOUND),
    (RANDOM_PACKINGS, check_random_packings, (*_EQUAL, MULTI_PATH, SMALL_LARGE_SMALL, ORDER, ALIASING)),
    (STATIC_BUFFERS, check_static_buffers, (*_SOUND, STALE_METADATA)),
    (COUNTERS, check_counters, _SOUND),
    (FINITE, _check_finite, ()),
    (MEMORY_RETURNED, check_memory_returned, (PREDICTED_TOKENS,)),
)
"""Name, function, and the checks without which it would only repeat a fault; each blames what it alone can see."""


def verify_row(
    encoder: VisionEncoder,
    *,
    seed: int = 0,
    calls: int = 200,
    tolerance: float | None = None,
    token_budgets: Sequence[int] | None = None,
    max_items: int | None = None,
    max_frames: int | None = None,
    progress: ProgressCallback | None = None,
    manager_class: type[EncoderCudaGraphManager] = EncoderCudaGraphManager,
    group: ParallelGroup | None = None,
) -> VerifiedModel:
    """Captures an encoder's graphs and runs every check on them.

    Args:
        encoder: The encoder, with its weights and backend.
        seed: Seed of pixels and draws.
        calls: Random calls.
        tolerance: Largest relative L2 distance from eager; None takes the dtype's, and beyond it what the tower's own
            rounding explains, measured on the item.
        token_budgets: Budgets to capture; None takes a short list from the model's smallest.
        max_items: Items of a replay, and random calls have up to twice as many; None takes a few, as many as fit.
        max_frames: Attention segments of a replay with videos; None takes a few an item, 0 sends videos to eager.
        progress: Told about steps.
        manager_class: The manager to verify.
        group: Ranks that verify the same encoder, and then share calls.

    Returns:
        The result; whatever goes wrong is in it. Only an interruption by the user is raised.
    """
    book = CheckBook(TOLERANCE[encoder.dtype] if tolerance is None else tolerance)
    book.checks = {name: unreached(name) for name, _, _ in CHECKS}
    found: dict[str, Any] = {"status": ERROR}
    started = time.perf_counter()
    manager: EncoderCudaGraphManager | None = None
    try:
        effort = effort_on(encoder.device)
        plan = plan_verification(encoder.rule, effort, token_budgets, max_items, max_frames)
        manager = manager_class(encoder, plan)
        session = _open_session(encoder, manager, book, effort, seed, calls, progress)
        book.rounding = session.store.rounding if tolerance is None else None
        _capture_and_check(session, found)
    except Exception as error:
        # One encoder's fault must not end the verification of the others; the reason is kept.
        found |= {"status": ERROR, "error": describe_error(error)}
    finally:
        if manager is not None:
            _release(manager, found)
        found["seconds"] = time.perf_counter() - started
    if group is not None:
        verify_sharing(encoder, manager, book, seed, group, found)
    return VerifiedModel(
        architecture=type(encoder).__name__,
        device=str(encoder.device),
        dtype=dtype_name(encoder.dtype),
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
    manager.capture(lambda done, total, _: session.tick("capture", done, total))
    found |= {"graphs_captured": len(manager.graphs), "graphs_dropped": len(manager.dropped)}
    try:
        for position, (name, function, needs) in enumerate(CHECKS):
            session.tick(name, position, len(CHECKS))
            _run_check(session, name, function, needs)
    finally:
        found |= {"calls": session.random_calls, "items": session.items, "replays": session.replays.total()}
    found["status"] = FAILED if session.book.total_failures else OK


def _release(manager: EncoderCudaGraphManager, found: dict[str, Any]) -> None:
    try:
        manager.clear()
    except Exception as error:
        # After a device fault nothing can be released; the first reason is the one to report.
        found |= {"status": ERROR, "error": found.get("error") or describe_error(error)}


def effort_on(device: torch.device) -> Effort:
    """How much is verified on a device."""
    return GPU_EFFORT if device.type == "cuda" else CPU_EFFORT


def describe_error(error: BaseException) -> str:
    """Class and message."""
    return f"{type(error).__name__}: {error}"


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype as options spell it."""
    return str(dtype).removeprefix("torch.")


def plan_verification(
    rule: GeometryRule,
    effort: Effort,
    token_budgets: Sequence[int] | None = None,
    max_items: int | None = None,
    max_frames: int | None = None,
) -> BudgetPlan:
    """The graphs to verify: a few doublings from the model's smallest budget, or the given budgets.

    Raises:
        BudgetError: The settings contradict each other or the model.
    """
    config = rule.graph_config()
    if max_items is not None and max_items < 1:
        raise BudgetError(f"max items is {max_items}; a replay holds at least one")
    budgets = list(token_budgets) if token_budgets else _default_budgets(rule, config, effort)
    items = min(DEFAULT_MAX_ITEMS, *budgets) if max_items is None else max_items
    if max_frames is None:
        max_frames = min(items * config.max_frames_per_video, (max_items or DEFAULT_MAX_ITEMS) * effort.frames_per_item)
    spec = GraphSpec(
        token_budgets=tuple(budgets),
        max_vision_items_per_batch=items,
        max_frames_per_batch=max_frames,
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


def _open_session(
    encoder: VisionEncoder,
    manager: EncoderCudaGraphManager,
    book: CheckBook,
    effort: Effort,
    seed: int,
    calls: int,
    progress: ProgressCallback | None,
) -> VerifySession:
    catalogue = item_catalogue(encoder.rule)
    if not catalogue:
        raise InputError("the model's rule refuses every size that is tried; its processor settings cannot be right")
    budgets = max(manager.plan.path_budgets.values(), key=lambda budgets: budgets[-1])
    rng = np.random.default_rng(seed)
    return VerifySession(
        encoder=encoder,
        manager=manager,
        store=ProbeStore(encoder, seed),
        book=book,
        effort=effort,
        catalogue=catalogue,
        sample=sample_candidates(catalogue, budgets, effort.per_stratum, effort.oversize, rng),
        seed=seed,
        calls=calls,
        progress=progress,
    )


def _run_check(
    session: VerifySession, name: str, function: Callable[[VerifySession], str], needs: Sequence[str]
) -> None:
    book = session.book
    blocker = next((other for other in needs if book.has_failed(other)), None)
    if blocker is not None:
        book.end(name, SKIPPED, f"{blocker} failed, which this would only repeat")
        return
    before = book.total_failures
    try:
        detail = function(session)
    except SkipCheck as reason:
        status, detail = SKIPPED, str(reason)
    except PredictedTokensError as error:
        book.fail(PREDICTED_TOKENS, str(error))
        status, detail = SKIPPED, "predicted tokens and eager rows differ"
    except VitgraphError as error:
        book.fail(name, describe_error(error))
        return
    except Exception as error:
        # The row ends here, and the check under way says so.
        book.fail(name, describe_error(error))
        raise
    else:
        status = OK
        if book.total_failures > before:
            status, detail = SKIPPED, "what it found belongs to the checks that failed"
    book.end(name, status, detail)
