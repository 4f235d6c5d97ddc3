"""Drills over many replays: poisoned memory, aliasing, random packings, counters, static buffers, release."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch

from vitgraph.graphs.capture import BudgetGraphMetadata
from vitgraph.planning.budgets import GraphKey
from vitgraph.verify.probes import Candidate, Probe, encode_eagerly
from vitgraph.verify.session import SkipCheck, VerifySession, call_name, distances, graph_name

RANDOM_POLICIES = ("greedy", "greedy", "greedy-defer", "exact")
"""Packing policies of the random calls, an equal share each."""

MEMORY_TOLERANCE_BYTES = 32 << 20

POISON_BYTE = 0xFF
"""Two, four or eight such bytes are NaN in bfloat16, float16, float32 and float64, and -1 as an integer."""


def small_large_small(session: VerifySession) -> str:
    """A small batch gives the same rows after every larger graph, with the pool full of NaN before each replay."""
    keys = [key for key in sorted(session.manager.graphs) if session.usable(key)]
    segments = pool_segments(session.manager.graphs.values(), session.device)
    exact, rounds, poisoned = True, 0, 0
    for path in session.manager.plan.paths:
        of_path = [key for key in keys if key.path == path]
        if not of_path:
            continue
        canary_key = of_path[0]
        canary = session.store.batch(session.usable(canary_key)[-1:])
        # Of each larger budget, the graph with the most slots.
        larger = list({key.token_budget: key for key in of_path[1:]}.values())
        for key in larger or of_path:
            large = session.store.batch(session.fullest(key, session.usable(key)))
            results = []
            for name, used, probes in (
                ("before", canary_key, canary),
                ("large", key, large),
                ("after", canary_key, canary),
            ):
                poisoned = poison_memory(segments, session.device)
                rows = {name: ends[-1] for name, ends in session.store.inputs(probes).row_offsets.items()}
                poison_graph_buffers(session.manager.graphs[used], rows)
                outputs, _ = session.execute(probes, used)
                where = f"{name}, {graph_name(used)}, around {graph_name(key)}"
                session.book.compare(probes, outputs, where, finite=session.book.under_way)
                results.append([output.clone() for output in outputs])
            rounds += 1
            exact &= _same_after(session, results[0], results[2], key)
    if not rounds:
        raise SkipCheck("no sampled size fits a graph")
    same = "bit for bit the same" if exact else f"the same within {session.book.tolerance:g}, not bit for bit"
    pool = f", {poisoned / 2**20:.1f} MiB of graph pool poisoned" if segments else ", outputs and inputs poisoned"
    return f"{rounds} rounds, {same}{pool}"


def _same_after(session: VerifySession, before: list[torch.Tensor], after: list[torch.Tensor], key: GraphKey) -> bool:
    if all(torch.equal(first, third) for first, third in zip(before, after, strict=True)):
        return True
    for distance, _ in distances(zip(after, before, strict=True)):
        if not distance <= session.book.tolerance:
            session.book.fail(f"a small batch changed by {distance:.3g} after a replay of {graph_name(key)}")
    return False


def aliasing(session: VerifySession) -> str:
    """Results share no memory with a graph, and later replays leave them as they are."""
    graphs = session.manager.graphs
    static = {
        tensor.untyped_storage().data_ptr()
        for graph in graphs.values()
        for tensor in (*graph.input_buffers.values(), graph.output_buffer)
    }
    segments = pool_segments(graphs.values(), session.device)
    kept: list[tuple[str, torch.Tensor, torch.Tensor]] = []
    # The cheapest size of each budget interval and the cheapest above them, so that every way of running occurs.
    light: dict[int, Candidate] = {}
    for candidate in sorted(session.sample, key=lambda one: one.flops):
        light.setdefault(int(np.searchsorted(session.largest_budgets, candidate.tokens)), candidate)
    probes = session.store.batch(light.values())
    # A call with one replay returns that replay's copy; one with several, a buffer of its own.
    for call in (probes[:1], probes):
        outputs, plan = session.execute(call)
        for index, output in enumerate(outputs):
            place = f"item {index} ({call[index].candidate.size}), {call_name(plan)}"
            address = output.data_ptr()
            in_pool = any(start <= address < start + nbytes for start, nbytes in segments)
            if in_pool or output.untyped_storage().data_ptr() in static:
                session.book.fail(f"the result lies in a graph's own memory: {place}")
            kept.append((place, output, output.clone()))
    for key in sorted(graphs):
        usable = session.usable(key)
        if usable:
            session.execute(session.store.batch(usable[:1]), key)
    for place, output, copy in kept:
        if not torch.equal(output, copy):
            session.book.fail(f"a later replay changed the result: {place}")
    return f"{len(kept)} results kept over replays of {len(graphs)} graphs"


def random_packings(session: VerifySession) -> str:
    """Random calls of images and videos, by every packing policy, give each item what eager gives it alone."""
    probes = _random_probes(session)
    before = session.items, session.counters.hits
    policies: Counter[str] = Counter()
    original = session.manager.policy
    try:
        for index in range(session.calls):
            policy = RANDOM_POLICIES[index * len(RANDOM_POLICIES) // session.calls]
            if not policies[policy]:
                session.use_policy(policy)
            # The first call of each policy is large, so that every way of running occurs in it.
            call = _draw_call(session, probes, index, is_large=not policies[policy])
            policies[policy] += 1
            outputs, plan = session.execute(call)
            where = f"call {index} of seed {session.seed}, {policy}, {call_name(plan)}"
            session.book.compare(call, outputs, where)
            if len(call) > 1 and index % session.effort.whole_call_every == 0:
                whole = encode_eagerly(session.encoder, session.store.inputs(call))
                session.book.compare(call, whole, f"eager, whole call; {where}")
            session.random_calls += 1
    finally:
        session.use_policy(original)
    items, hits = session.items - before[0], session.counters.hits - before[1]
    shares = ", ".join(f"{name} {count}" for name, count in policies.items())
    return f"{session.calls} calls ({shares}) of {items} items, {hits} of them hits"


def _random_probes(session: VerifySession) -> list[Probe]:
    """One probe of each sampled size, and more of the cheapest ones until a call of the most items can be drawn."""
    probes = session.store.batch(session.sample)
    cheapest = sorted(session.sample, key=lambda one: one.flops)[: max(1, len(session.sample) // 2)]
    copy = 1
    while len(probes) < 2 * session.manager.plan.max_items:
        probes += [session.store.get(candidate, copy) for candidate in cheapest]
        copy += 1
    return probes


def _draw_call(session: VerifySession, probes: list[Probe], index: int, *, is_large: bool) -> list[Probe]:
    """The random call number `index`, a pure function of the session's seed; a large one has as many items as any."""
    rng = np.random.default_rng([session.seed, index])
    shares, multiples = zip(*session.effort.call_sizes, strict=True)
    wanted = 2 * session.manager.plan.max_items
    if is_large:
        limit = session.effort.large_call * session.largest_budgets[-1]
    else:
        wanted = int(rng.integers(1, wanted + 1))
        limit = multiples[int(rng.choice(len(shares), p=shares))] * session.call_unit
    room = limit or float("inf")
    call: list[Probe] = []
    for position in rng.permutation(len(probes)):
        probe = probes[int(position)]
        if len(call) < wanted and probe.candidate.tokens <= room:
            call.append(probe)
            room -= probe.candidate.tokens
    return call or [min(probes, key=lambda probe: probe.candidate.flops)]


def counters(session: VerifySession) -> str:
    """Hits and misses add up to items, and each graph was replayed as often as the plans say."""
    counted = session.counters
    if counted.items != session.items or counted.hits + counted.misses != session.items:
        session.book.fail(f"{counted.hits} hits and {counted.misses} misses were counted of {session.items} items")
    for key, graph in session.manager.graphs.items():
        if graph.replay_count != session.replays[key]:
            session.book.fail(
                f"{graph.replay_count} replays ran, {session.replays[key]} were planned ({graph_name(key)})"
            )
    if not session.replays:
        session.book.fail("not one graph was replayed")
    reasons = ", ".join(f"{name} {count}" for name, count in sorted(counted.misses_by_reason.items()))
    return f"{session.items} items: {counted.hits} hits, {counted.misses} misses ({reasons or 'no reason needed'})"


def static_buffers(session: VerifySession) -> str:
    """After a large and a small replay the inputs hold the small batch, cleared past it, at their old addresses."""
    graphs = session.manager.graphs
    for path in session.manager.plan.paths:
        usable = {key: session.usable(key) for key in sorted(graphs) if key.path == path}
        keys = [key for key, sizes in usable.items() if sizes]
        for key in dict.fromkeys(keys[:1] + keys[-1:]):
            session.execute(session.store.batch(session.fullest(key, usable[key])), key)
            probes = session.store.batch(usable[key][:1])
            session.execute(probes, key)
            _check_inputs(session, key, probes)
    for key, graph in graphs.items():
        if graph.current_pointers() != graph.pointers:
            session.book.fail(f"a buffer moved after the capture ({graph_name(key)})")
    return f"{len(graphs)} graphs, {session.manager.buffer_bytes / 2**20:.1f} MiB shared"


def _check_inputs(session: VerifySession, key: GraphKey, probes: list[Probe]) -> None:
    graph = session.manager.graphs[key]
    values = session.encoder.prepare_encoder_cudagraph_replay_buffers(session.store.inputs(probes), key)
    for name, rows in values.pixels.items():
        buffer, used = graph.input_buffers[name], rows.num_rows
        if not torch.equal(buffer[:used], rows.materialize()):
            session.book.fail(f"{name} does not hold the batch's rows ({graph_name(key)})")
        elif buffer[used:].any():
            session.book.fail(f"{name} holds an older batch past row {used} ({graph_name(key)})")
    layout = graph.writer.layout
    expected = layout.host_views(np.zeros(layout.nbytes, dtype=np.uint8))
    layout.write(expected, values.metadata)
    for name, value in expected.items():
        if not np.array_equal(graph.input_buffers[name].cpu().numpy(), value):
            session.book.fail(f"{name} is not this batch's, padded ({graph_name(key)})")


def memory_returned(session: VerifySession) -> str:
    """`clear()` gives the memory back, a second one is harmless, and capturing again works."""
    manager = session.manager
    is_cuda = session.device.type == "cuda"
    owned = manager.buffer_bytes, manager.pool_bytes
    held = _settled_bytes(session.device)
    buffers = [
        weakref.ref(tensor)
        for graph in manager.graphs.values()
        for tensor in (*graph.input_buffers.values(), graph.output_buffer)
    ]
    manager.clear()
    _expect_cleared(session)
    baseline = _settled_bytes(session.device)
    if any(reference() is not None for reference in buffers):
        # Cycles may hold them for now, which is no leak.
        gc.collect()
    alive = sum(reference() is not None for reference in buffers)
    if alive:
        session.book.fail(f"{alive} of {len(buffers)} static buffers are still referenced after clear()")
    # Buffers may share a segment with tensors that live on, so they are looked for among the allocated bytes.
    for name, was, now, bytes_owned in zip(("buffers", "pool"), held, baseline, owned, strict=True):
        if is_cuda and was - now < bytes_owned - MEMORY_TOLERANCE_BYTES:
            session.book.fail(f"clear() returned {was - now} of {bytes_owned} bytes of the {name}")
    manager.clear()
    plan = manager.plan
    if not is_cuda:
        # Recording costs a CPU as much as encoding, and there is no pool to measure.
        manager.plan = replace(plan, path_budgets={path: budgets[:1] for path, budgets in plan.path_budgets.items()})
    manager.capture()
    recaptured = len(manager.graphs)
    for key in sorted(manager.graphs)[:1]:
        for candidate in session.usable(key)[:1]:
            probes = session.store.batch([candidate])
            outputs, _ = session.execute(probes, key)
            if not session.book.total_failures:
                session.book.compare(probes, outputs, f"captured again, {graph_name(key)}")
            del outputs
    manager.clear()
    manager.plan = plan
    _expect_cleared(session)
    after = _settled_bytes(session.device)
    for name, now, was in zip(("allocated", "reserved"), after, baseline, strict=True):
        if now - was > MEMORY_TOLERANCE_BYTES:
            session.book.fail(f"{now - was} bytes stay {name} after capturing again and clear()")
    return f"{recaptured} graphs captured again" + (
        f", {(held[1] - baseline[1]) / 2**20:.0f} MiB back" if is_cuda else ""
    )


def _expect_cleared(session: VerifySession) -> None:
    manager = session.manager
    if manager.graphs or manager.buffer_bytes or manager.pool_bytes:
        session.book.fail(
            f"{len(manager.graphs)} graphs and {manager.buffer_bytes} buffer bytes are left after clear()"
        )


def _settled_bytes(device: torch.device) -> tuple[int, int]:
    """Bytes allocated and reserved once nothing is pending or collectable; zeros on a CPU."""
    if device.type != "cuda":
        return 0, 0
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)


# -- poison: what a replay must not depend on is filled with NaN ------------------------------------------------------


def pool_segments(graphs: Iterable[BudgetGraphMetadata], device: torch.device) -> list[tuple[int, int]]:
    """Address and bytes of every segment of the graphs' private pools; empty on a CPU."""
    if device.type != "cuda":
        return []
    pools = {tuple(graph.graph.pool()) for graph in graphs if isinstance(graph.graph, torch.cuda.CUDAGraph)}
    return [
        (segment["address"], segment["total_size"])
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == (device.index or 0) and tuple(segment["segment_pool_id"]) in pools
    ]


def poison_memory(segments: Iterable[tuple[int, int]], device: torch.device) -> int:
    """Fills raw device memory with NaN; returns the bytes.

    A replay writes every intermediate before it reads it, so nothing of a pool may matter between two replays.
    """
    total = 0
    for address, nbytes in segments:
        array = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 3}
        # Raw memory that torch wraps without a copy.
        torch.as_tensor(SimpleNamespace(__cuda_array_interface__=array), device=device).fill_(POISON_BYTE)
        total += nbytes
    return total


def poison_graph_buffers(graph: BudgetGraphMetadata, pixel_rows: Mapping[str, int]) -> None:
    """Fills with NaN the output of a graph, its metadata, and the pixel rows (`pixel_rows` of each buffer) that its
    next replay brings anew.

    Pixel rows past those stay: clearing stale ones is the manager's contract, which counts what it wrote.
    """
    graph.output_buffer.view(torch.uint8).fill_(POISON_BYTE)
    for name, buffer in graph.input_buffers.items():
        rows = pixel_rows.get(name, len(buffer)) if name in graph.pixel_capacity else len(buffer)
        buffer[:rows].view(torch.uint8).fill_(POISON_BYTE)
