"""Checks of single replays: predicted tokens, frozen scalars, boundaries, every graph, order, several paths."""

from __future__ import annotations

import numpy as np

from vitgraph.planning.accounting import count_calls
from vitgraph.planning.budgets import GraphKey
from vitgraph.verify.probes import SAME_TOTAL, Candidate, LookAlikes, PredictedTokensError, find_look_alikes
from vitgraph.verify.session import (
    EVERY_GRAPH,
    FINITE,
    SkipCheck,
    VerifySession,
    call_name,
    distances,
    graph_name,
    replayed_keys,
)

ORDER_SIZES = 5


def predicted_tokens(session: VerifySession) -> str:
    """Rows and columns of an eager forward of every sampled size are those that the rule predicts."""
    for candidate in session.sample:
        try:
            probe = session.store.get(candidate)
        except PredictedTokensError as error:
            session.book.fail(str(error))
            continue
        if not probe.reference.isfinite().all():
            session.book.fail(
                f"eager gives values that are not finite for {candidate.size}, pixel seed {probe.seed}", FINITE
            )
    tokens = [candidate.tokens for candidate in session.sample]
    return f"{len(tokens)} sizes of {min(tokens)} to {max(tokens)} tokens"


def frozen_scalars(session: VerifySession) -> str:
    """What a capture froze is an upper bound of what the batches that fill the graph need."""
    values, largest = 0, 0.0
    for key, graph in session.manager.graphs.items():
        usable = session.usable(key)
        if not usable:
            continue
        longest = max(usable, key=lambda one: one.spec.tokens_on(key.path) / one.spec.segments)
        for batch in ([longest], [usable[-1]], session.fullest(key, usable)):
            items = [candidate.geometry for candidate in batch]
            metadata = session.encoder.compute_metadata(items)
            for name, value in session.encoder.compute_scalars(metadata).items():
                frozen = graph.scalars.get(name)
                if frozen is None or value > frozen:
                    sizes = ", ".join(candidate.size for candidate in batch)
                    session.book.fail(f"{name} is {value} for {sizes}, frozen at {frozen} ({graph_name(key)})")
                values += 1
                largest = max(largest, value / frozen) if frozen else largest
    if not values:
        raise SkipCheck("the model freezes no scalar at capture")
    return f"{values} values over {len(session.manager.graphs)} graphs, the largest {largest:.0%} of its bound"


def stale_metadata(session: VerifySession) -> str:
    """Back to back in one graph, batches that look alike from afar get boundaries and positions of their own."""
    found: dict[tuple[str, str], tuple[GraphKey, LookAlikes]] = {}
    for key in sorted(session.manager.graphs, key=lambda key: (key.token_budget, -key.segment_slots)):
        # One pair of each kind for each path, in the smallest graph that holds one.
        if (key.path, SAME_TOTAL) in found:
            continue
        usable = session.usable(key)
        # Where items differ in which paths they have, more than the boundaries would differ.
        complete = [one for one in usable if all(one.spec.tokens_on(path) for path in session.manager.plan.paths)]
        for pair in find_look_alikes(complete or usable, key, has_segments=session.has_segments(key)):
            found.setdefault((key.path, pair.kind), (key, pair))
    if not found:
        raise SkipCheck("no graph holds two batches that could be confused")
    for key, pair in found.values():
        first, second = session.store.batch(pair.first), session.store.batch(pair.second)
        where = f"{graph_name(key)}, {pair.kind}"
        outputs, _ = session.execute(first, key)
        # A first batch that is wrong on its own is no stale metadata.
        if not session.book.compare(first, outputs, f"the first batch, {where}", name=EVERY_GRAPH):
            raise SkipCheck(f"the first of two batches differs from eager already ({where})")
        for name, probes in (("the second batch", second), ("the first batch again", first)):
            outputs, _ = session.execute(probes, key)
            session.book.compare(probes, outputs, f"{name}, {where}")
    return "; ".join(dict.fromkeys(pair.kind for _, pair in found.values()))


def every_graph(session: VerifySession) -> str:
    """Every captured graph gives eager's rows with a batch that fills it and with one that leaves it nearly empty."""
    unused: list[GraphKey] = []
    fills: list[float] = []
    keys = sorted(session.manager.graphs)
    for key in keys:
        usable = session.usable(key)
        if not usable:
            unused.append(key)
            continue
        for kind, batch in (("nearly full", session.fullest(key, usable)), ("nearly empty", usable[:1])):
            probes = session.store.batch(batch)
            outputs, plan = session.execute(probes, key)
            if key not in replayed_keys(plan):
                reason = plan.batches[0].runs[key.path].miss_reason
                session.book.fail(f"a batch within its limits went eager, {reason} ({graph_name(key)})")
            session.book.compare(probes, outputs, f"{graph_name(key)}, {kind}")
            fills.append(sum(one.spec.tokens_on(key.path) for one in batch) / key.token_budget)
    if not fills:
        raise SkipCheck(f"no size of this model fits any of the {len(unused)} graphs")
    note = f"; no size of this model fits {', '.join(map(graph_name, unused))}" if unused else ""
    return f"{len(keys) - len(unused)} graphs, {min(fills):.0%} to {max(fills):.0%} full{note}"


def order(session: VerifySession) -> str:
    """Outputs come in input order, whatever the packing sorts; swapped items swap outputs."""
    fitting = [candidate for candidate in session.sample if candidate.tokens <= session.largest_budgets[-1]]
    if not fitting:
        raise SkipCheck("no sampled size fits a graph")
    fitting.sort(key=lambda candidate: candidate.tokens)
    spread = {int(index) for index in np.linspace(0, len(fitting) - 1, ORDER_SIZES)}
    sizes: list[Candidate] = [fitting[index] for index in sorted(spread, reverse=True)]
    probes = session.store.batch([*sizes[1:], fitting[0], *sizes[:1], fitting[0]])
    twins = [index for index, probe in enumerate(probes) if probe.candidate is fitting[0]]
    first, second = twins[:2]
    ((apart, _),) = distances([(probes[first].reference, probes[second].reference)])
    if not apart > 2 * session.book.tolerance:
        session.book.fail(
            f"eager outputs of different pixels are only {apart:.3g} apart, so that no swap could be seen"
        )
    swapped = list(probes)
    swapped[first], swapped[second] = swapped[second], swapped[first]
    for name, call in (("mixed sizes", probes), ("two items swapped", swapped)):
        outputs, plan = session.execute(call)
        session.book.compare(call, outputs, f"{name}, {call_name(plan)}")
    return f"{len(probes)} items of {len({one.geometry for one in sizes})} sizes, mixed and with two swapped"


def multi_path(session: VerifySession) -> str:
    """A path that an item has no rows on is skipped; one path may go eager while another replays."""
    config = session.encoder.get_encoder_cudagraph_config()
    if not config.is_multi_path:
        raise SkipCheck("the model has one path")
    done = []
    for path, policy in config.paths.items():
        absent = [one for one in session.catalogue if not one.spec.tokens_on(path)]
        if policy.allow_zero_tokens and absent:
            _check_absent_path(session, path, absent[0])
            done.append(f"path {path!r} absent")
    complete = [one for one in session.catalogue if all(one.spec.tokens_on(path) for path in config.paths)]
    for path in config.paths:
        keys = [key for key in sorted(session.manager.graphs) if key.path == path]
        pairs = ((key, one) for key in keys for one in session.usable(key) if one in complete)
        key, candidate = next(pairs, (None, None))
        if key is None or candidate is None:
            continue
        probes = session.store.batch([candidate])
        outputs, plan = session.execute(probes, key)
        session.book.compare(probes, outputs, f"other paths eager, {graph_name(key)}")
        counters = count_calls([plan.batches])
        if (counters.hits, counters.misses, counters.partial_hits) != (0, 1, 1):
            session.book.fail(f"a partial replay counted as {counters.as_dict()} ({graph_name(key)})")
        done.append(f"only path {path!r} replayed")
    return "; ".join(done)


def _check_absent_path(session: VerifySession, path: str, candidate: Candidate) -> None:
    graphs = [graph for key, graph in session.manager.graphs.items() if key.path == path]
    before = [graph.replay_count for graph in graphs]
    probes = session.store.batch([candidate])
    outputs, plan = session.execute(probes)
    if before != [graph.replay_count for graph in graphs] or any(path in batch.runs for batch in plan.batches):
        session.book.fail(f"path {path!r} ran for {candidate.size}, which has no rows on it")
    session.book.compare(probes, outputs, f"path {path!r} absent, {call_name(plan)}")
