"""Checks of single replays: predicted tokens, frozen scalars, boundaries, every graph, order, several paths."""

from __future__ import annotations

from itertools import combinations

import torch

from vitgraph.bench.verify_items import SAME_TOTAL, Candidate, LookAlikes, PredictedTokensError, find_look_alikes
from vitgraph.bench.verify_record import (
    EVERY_GRAPH,
    FROZEN_SCALARS,
    MULTI_PATH,
    ORDER,
    PREDICTED_TOKENS,
    STALE_METADATA,
    distances,
)
from vitgraph.bench.verify_session import VerifySession, call_name, graph_name, replayed_keys
from vitgraph.models.base import GraphCapacity
from vitgraph.planning.accounting import count_calls
from vitgraph.planning.budgets import GraphKey

ORDER_SIZES = 5


class SkipCheck(Exception):  # noqa: N818 (no error: a reason why a check has nothing to do)
    """A check has nothing to check here; its text says why."""


def check_predicted_tokens(session: VerifySession) -> str:
    """Rows and columns of an eager forward of every sampled size are those that the rule predicts."""
    for done, candidate in enumerate(session.sample):
        session.tick(PREDICTED_TOKENS, done, len(session.sample))
        try:
            session.store.get(candidate)
        except PredictedTokensError as error:
            session.book.fail(PREDICTED_TOKENS, str(error))
    tokens = [candidate.tokens for candidate in session.sample]
    return f"{len(tokens)} sizes of {min(tokens)} to {max(tokens)} tokens"


def check_frozen_scalars(session: VerifySession) -> str:
    """What a capture froze is an upper bound of what the batches that fill the graph need."""
    values, largest = 0, 0.0
    for key, graph in session.manager.graphs.items():
        usable = session.usable(key)
        if not usable:
            continue
        capacity = GraphCapacity(key.path, key.token_budget, key.segment_slots, key.axis_key)
        longest = max(usable, key=lambda one: one.spec.tokens_on(key.path) / one.spec.segments)
        for batch in ([longest], [usable[-1]], session.fullest(key, usable)):
            inputs = session.store.shape_inputs(batch)
            needed = session.encoder.prepare_encoder_cudagraph_replay_buffers(inputs, capacity).scalars
            for name, value in needed.items():
                frozen = graph.scalars.get(name)
                if frozen is None or value > frozen:
                    sizes = ", ".join(candidate.size for candidate in batch)
                    session.book.fail(
                        FROZEN_SCALARS, f"{name} is {value} for {sizes}, frozen at {frozen} ({graph_name(key)})"
                    )
                values += 1
                largest = max(largest, value / frozen) if frozen else largest
    if not values:
        raise SkipCheck("the model freezes no scalar at capture")
    return f"{values} values over {len(session.manager.graphs)} graphs, the largest {largest:.0%} of its bound"


def check_stale_metadata(session: VerifySession) -> str:
    """Back to back in one graph, batches that look alike from afar get boundaries and positions of their own."""
    found = _look_alikes(session)
    if not found:
        raise SkipCheck("no graph holds two batches that could be confused")
    kinds = []
    for done, pair in enumerate(found):
        session.tick(STALE_METADATA, done, len(found))
        first, second = session.store.batch(pair.first), session.store.batch(pair.second)
        where = f"{graph_name(pair.key)}, {pair.kind}"
        outputs, _ = session.execute_on(first, pair.key)
        before = session.book.total_failures
        reference = distances(outputs, [probe.reference for probe in first], _same_shapes(outputs, first))
        if not all(distance <= session.book.tolerance for distance, _ in reference) or len(reference) < len(first):
            raise SkipCheck(f"the first of two batches differs from eager already ({where})")
        for name, probes in (("the second batch", second), ("the first batch again", first)):
            outputs, _ = session.execute_on(probes, pair.key)
            session.book.compare(STALE_METADATA, probes, outputs, f"{name}, {where}")
        if session.book.total_failures == before:
            kinds.append(pair.kind)
    return "; ".join(dict.fromkeys(kinds))


def _same_shapes(outputs: list[torch.Tensor], probes: list) -> list[int]:
    return [i for i, (output, probe) in enumerate(zip(outputs, probes, strict=True)) if output.shape == probe.reference.shape]
