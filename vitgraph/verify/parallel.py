"""Verification on several ranks: calls shared among them against each item's eager run alone, and one result of all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vitgraph.errors import RankFailedError
from vitgraph.measure.correctness import worst
from vitgraph.models.base import EncoderInputs
from vitgraph.models.encoder import VisionEncoder
from vitgraph.planning.accounting import GraphCounters
from vitgraph.predict.assignment import Shares, share_by_size
from vitgraph.ranks.sharing import CallSharing
from vitgraph.records.kinds.verify import Check, VerifiedModel
from vitgraph.verify.probes import Candidate, ProbeStore, encode_eagerly
from vitgraph.verify.session import ERROR, FAILED, OK, SKIPPED, CheckBook, VerifySession, unreached

if TYPE_CHECKING:
    from vitgraph.ranks.group import ParallelGroup

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
