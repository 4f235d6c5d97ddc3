"""`verify`: captures an encoder's graphs, replays them in every way that has failed before, and compares with eager.

On several ranks, calls are shared among them against each item's eager run alone, and one result is made of all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from vitgraph.errors import BudgetError, RankFailedError, VitgraphError
from vitgraph.graphs.manager import EncoderCudaGraphManager
from vitgraph.measure.correctness import TOLERANCE, worst
from vitgraph.measure.setup import plan_graphs
from vitgraph.models.base import EncoderInputs
from vitgraph.models.encoder import VisionEncoder
from vitgraph.models.geometry import EncoderCudaGraphConfig, GeometryRule
from vitgraph.planning.accounting import GraphCounters
from vitgraph.planning.budgets import BudgetPlan
from vitgraph.predict.assignment import Shares, share_by_size
from vitgraph.ranks.group import ParallelGroup
from vitgraph.ranks.sharing import CallSharing
from vitgraph.records.results import Check, VerifiedModel
from vitgraph.specs.parts import DEFAULT_MAX_NUM_BATCHED_TOKENS, GraphSpec
from vitgraph.verify import checks, drills
from vitgraph.verify.probes import Candidate, PredictedTokensError, ProbeStore, encode_eagerly, item_catalogue
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
    "random_packings": (drills.random_packings, (*_EQUAL, "multi_path", "small_large_small", "order", "aliasing")),
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


DATA_PARALLEL = "data_parallel"
RANDOM_CALLS = 12
MOST_ITEMS = 20


def verify_sharing(
    encoder: VisionEncoder, session: VerifySession | None, book: CheckBook, group: ParallelGroup, found: dict[str, Any]
) -> None:
    """Adds the check `data_parallel` to a finished verification; every rank calls it once a model.

    Args:
        encoder: This rank's encoder.
        session: Its finished verification, whose graphs are cleared; None where it could not begin.
        book: Takes the faults.
        group: The ranks.
        found: Facts of the verification so far, by field of its result; takes what these calls say.

    Raises:
        RankFailedError: A rank failed, so that no model can be verified any more.
    """
    book.checks[DATA_PARALLEL] = unreached(DATA_PARALLEL)
    book.under_way = DATA_PARALLEL
    trouble = found.get("error")
    if session is not None and trouble is None:
        try:
            session.manager.capture()
        except Exception as error:
            # The other ranks must hear of it, or they would wait for this one.
            trouble = f"{type(error).__name__}: {error}"
    troubles = group.exchange(trouble, f"captured graphs of {type(encoder).__name__}", slow=True)
    named = [f"{place}: {text}" for place, text in zip(group.places, troubles, strict=True) if text]
    if session is None or named:
        book.end(SKIPPED, f"not every rank has its graphs ({'; '.join(named)})")
        return
    try:
        detail = _check_calls(session, group)
    except RankFailedError:
        raise
    except Exception as error:
        # The other ranks are in a gather that this one does not come to; nothing may wait for the device now.
        group.announce(error)
        raise RankFailedError(f"{group.places[group.rank]} failed: {type(error).__name__}: {error}") from error
    session.manager.clear()
    book.end(OK, detail)
    if book.total_failures and found["status"] == OK:
        found["status"] = FAILED


@torch.inference_mode()
def _check_calls(session: VerifySession, group: ParallelGroup) -> str:
    encoder, manager, book = session.encoder, session.manager, session.book
    # One of its own: pixels depend on what was made before, and must be the same on all ranks.
    store = ProbeStore(encoder, session.seed)
    rng = np.random.default_rng([session.seed, group.size])
    assigners: Mapping[str, Callable[..., Shares]] = {"by size": share_by_size, "turned": _turned}
    counters = GraphCounters()
    items, idle = 0, 0
    for number, chosen in enumerate(_calls(session.sample, group.size, rng)):
        probes = store.batch(chosen)
        inputs = store.inputs(probes) if probes else EncoderInputs((), {}, {}, ())
        name, assign = list(assigners.items())[number % len(assigners)]
        sharing = CallSharing(group, encoder, assign)
        for mode, encode in (("graph", manager.execute), ("eager", partial(encode_eagerly, encoder))):
            outputs = sharing.encode(encode, inputs)
            group.wait_device()
            book.compare(probes, outputs, f"{mode}, {len(probes)} items on {group.size} ranks, shared {name}")
        selected = sharing.select(inputs, sharing.divide(inputs.chosen))
        if selected is None:
            idle += 1
        else:
            counters.add(manager.plan_call(selected).batches)
        items += len(probes)
    hits = group.exchange((counters.hits, counters.misses, counters.items), "hits and misses")
    if sum(count for *_, count in hits) != items or sum(hit + miss for hit, miss, _ in hits) != items:
        book.fail(f"{items} items were encoded, the ranks counted {hits} (hits, misses, items)")
    return f"{items} items over {group.size} ranks, {sum(hit for hit, *_ in hits)} hits; rank 0 idle in {idle} calls"


def _calls(candidates: Sequence[Candidate], ranks: int, rng: np.random.Generator) -> list[list[Candidate]]:
    """Calls of no item, of fewer items than ranks, of as many, of one more, and random ones."""
    cheap = sorted(candidates, key=lambda one: one.flops)[: max(2, len(candidates) * 3 // 4)]
    counts = [0, 1, ranks - 1, ranks, ranks + 1, 3, MOST_ITEMS]
    counts += [int(count) for count in rng.integers(1, 2 * ranks + 2, RANDOM_CALLS)]
    return [[cheap[int(index)] for index in rng.integers(0, len(cheap), count)] for count in counts]


def _turned(specs: Sequence[Any], ranks: int) -> Shares:
    """The shares by size, each with the next rank, so that rank 0 is the idle one."""
    shares = share_by_size(specs, ranks)
    return (shares[-1], *shares[:-1])


def merge_ranks(results: Sequence[VerifiedModel]) -> VerifiedModel:
    """One result of all ranks, given by rank: the worst status of each check, the sum of what was compared, the first
    fault's place."""
    by_name = [{check.name: check for check in result.checks} for result in results]
    checks = [
        _merge_check([found.get(check.name, unreached(check.name)) for found in by_name]) for check in results[0].checks
    ]
    errors = (f"rank {rank}: {result.error}" for rank, result in enumerate(results) if result.error)
    changes = {
        "status": min((result.status for result in results), key=[ERROR, FAILED, OK].index),
        "error": next(errors, None),
        "max_rel_l2": worst(result.max_rel_l2 for result in results),
        "own_error": worst(result.own_error for result in results),
        "seconds": max(result.seconds or 0.0 for result in results),
        "ranks": len(results),
        "checks": tuple(checks),
    }
    counts = ("calls", "items", "replays", "graphs_dropped")
    summed = {name: sum(getattr(result, name) for result in results) for name in counts}
    return results[0].model_copy(update=summed | changes)


def _merge_check(checks: Sequence[Check]) -> Check:
    order = [ERROR, FAILED, SKIPPED, OK]
    rank = min(range(len(checks)), key=lambda index: order.index(checks[index].status))
    chosen = checks[rank]
    detail = f"rank {rank}: {chosen.detail}" if rank or chosen.status == FAILED else chosen.detail
    summed = {name: sum(getattr(check, name) for check in checks) for name in ("compared", "failures")}
    largest = worst(check.max_rel_l2 for check in checks)
    return chosen.model_copy(update={"detail": detail, "max_rel_l2": largest, **summed})
