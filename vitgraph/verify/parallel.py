"""Verification on several ranks: calls shared among them against each item's eager run alone, and one result of all."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vitgraph.errors import RankFailedError
from vitgraph.graphs.manager import EncoderCudaGraphManager
from vitgraph.models.base import EncoderInputs
from vitgraph.models.encoder import VisionEncoder
from vitgraph.planning.accounting import GraphCounters
from vitgraph.predict.assignment import Shares, share_by_size
from vitgraph.ranks.gather import RowGather
from vitgraph.ranks.manager import CallSharing, DataParallelEncoder
from vitgraph.records.kinds.verify import Check, VerifiedModel
from vitgraph.verify.findings import ERROR, FAILED, OK, SKIPPED, CheckBook, unreached
from vitgraph.verify.probes import Candidate, ProbeStore, encode_eagerly, item_catalogue, sample_candidates

if TYPE_CHECKING:
    from vitgraph.ranks.group import ParallelGroup

DATA_PARALLEL = "data_parallel"
RANDOM_CALLS = 12
PER_STRATUM = 2
MOST_ITEMS = 20


def verify_sharing(
    encoder: VisionEncoder,
    manager: EncoderCudaGraphManager | None,
    book: CheckBook,
    seed: int,
    group: ParallelGroup,
    found: dict[str, Any],
) -> None:
    """Adds the check `data_parallel` to a finished verification; every rank calls it once a model.

    Args:
        encoder: This rank's encoder.
        manager: Its manager, cleared; None where it could not be made.
        book: Takes the faults.
        seed: Seed of pixels and draws.
        group: The ranks.
        found: Facts of the verification so far, by field of its result; takes what these calls say.

    Raises:
        RankFailedError: A rank failed, so that no model can be verified any more.
    """
    book.checks[DATA_PARALLEL] = unreached(DATA_PARALLEL)
    trouble = found.get("error")
    if manager is not None and trouble is None:
        try:
            manager.capture()
        except Exception as error:
            # The other ranks must hear of it, or they would wait for this one.
            trouble = f"{type(error).__name__}: {error}"
    troubles = group.exchange(trouble, f"captured graphs of {type(encoder).__name__}", slow=True)
    named = [f"{place}: {text}" for place, text in zip(group.places, troubles, strict=True) if text]
    if manager is None or named:
        book.end(DATA_PARALLEL, SKIPPED, f"not every rank has its graphs ({'; '.join(named)})")
        return
    try:
        detail = _check_calls(encoder, manager, book, seed, group)
    except RankFailedError:
        raise
    except Exception as error:
        # The other ranks are in a gather that this one does not come to; nothing may wait for the device now.
        group.announce(error)
        raise RankFailedError(f"{group.places[group.rank]} failed: {type(error).__name__}: {error}") from error
    manager.clear()
    book.end(DATA_PARALLEL, OK, detail)
    if book.total_failures and found["status"] == OK:
        found["status"] = FAILED


@torch.inference_mode()
def _check_calls(
    encoder: VisionEncoder, manager: EncoderCudaGraphManager, book: CheckBook, seed: int, group: ParallelGroup
) -> str:
    store = ProbeStore(encoder, seed)
    rng = np.random.default_rng([seed, group.size])
    budgets = max(manager.plan.path_budgets.values(), key=lambda budgets: budgets[-1])
    candidates = sample_candidates(item_catalogue(encoder.rule), budgets, PER_STRATUM, 1, rng)
    assigners: Mapping[str, Callable[..., Shares]] = {"by size": share_by_size, "turned": _turned}
    gather = RowGather(group, encoder.rule.output_width, encoder.dtype)
    counters = GraphCounters()
    items, idle = 0, 0
    for number, chosen in enumerate(_calls(candidates, group.size, rng)):
        probes = store.batch(chosen)
        inputs = store.inputs(probes) if probes else EncoderInputs((), {}, {}, ())
        name, assign = list(assigners.items())[number % len(assigners)]
        sharing = CallSharing(encoder, group.rank, group.size, assign)
        ways = {"graph": manager.execute, "eager": lambda call: encode_eagerly(encoder, call)}
        for mode, encode in ways.items():
            outputs = DataParallelEncoder(encode, sharing, gather).execute(inputs)
            group.wait_device()
            where = f"{mode}, {len(probes)} items on {group.size} ranks, shared {name}"
            book.compare(DATA_PARALLEL, probes, outputs, where)
        selected = sharing.select(inputs)
        if selected is None:
            idle += 1
        else:
            counters.add(manager.plan_call(selected).batches)
        items += len(probes)
    hits = group.exchange((counters.hits, counters.misses, counters.items), "hits and misses")
    if sum(count for *_, count in hits) != items or sum(hit + miss for hit, miss, _ in hits) != items:
        book.fail(DATA_PARALLEL, f"{items} items were encoded, the ranks counted {hits} (hits, misses, items)")
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
    """One result of all ranks: the worst status of each check, the sum of what was compared, the first fault's place.

    Args:
        results: Of each rank, by rank.
    """
    first = results[0]
    errors = (f"rank {rank}: {result.error}" for rank, result in enumerate(results) if result.error)
    checks = [_merge_check([_check_named(result, check.name) for result in results]) for check in first.checks]
    summed = {
        name: sum(getattr(result, name) for result in results)
        for name in ("calls", "items", "replays", "graphs_dropped")
    }
    changes = {
        "status": min((result.status for result in results), key=[ERROR, FAILED, OK].index),
        "error": next(errors, None),
        "max_rel_l2": _largest(results),
        "own_error": max((one.own_error for one in results if one.own_error is not None), default=None),
        "seconds": max(result.seconds or 0.0 for result in results),
        "ranks": len(results),
        "checks": tuple(checks),
    }
    return first.model_copy(update=summed | changes)


def _check_named(result: VerifiedModel, name: str) -> Check:
    return next((check for check in result.checks if check.name == name), unreached(name))


def _merge_check(checks: Sequence[Check]) -> Check:
    worst = [ERROR, FAILED, SKIPPED, OK]
    rank = min(range(len(checks)), key=lambda index: worst.index(checks[index].status))
    chosen = checks[rank]
    detail = f"rank {rank}: {chosen.detail}" if rank or chosen.status == FAILED else chosen.detail
    summed = {name: sum(getattr(check, name) for check in checks) for name in ("compared", "failures")}
    return chosen.model_copy(update={"detail": detail, "max_rel_l2": _largest(checks), **summed})


def _largest(found: Sequence[VerifiedModel | Check]) -> float | None:
    """The largest distance; one that is no number wins over them all."""
    known = [one.max_rel_l2 for one in found if one.max_rel_l2 is not None]
    return max(known, key=lambda distance: (math.isnan(distance), distance), default=None)
