"""What a graph call is made of: replay time, GPU-busy time, launch gap, and the host's share."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import torch

from vitgraph.graphs.manager import EncoderCudaGraphManager
from vitgraph.measure.calls import CallInputs, EncoderCall
from vitgraph.measure.series import CallTimer, synchronize
from vitgraph.measure.trace import BusyTime, busy_time
from vitgraph.models.encoder import VisionEncoder
from vitgraph.planning.budgets import GraphKey
from vitgraph.planning.packing import pack_items
from vitgraph.records.series import CallOverhead, GraphFacts

Item = TypeVar("Item")

REPLAY_REPEATS = 20
REPLAY_LIMIT_MS = 300.0
"""A replay is repeated until one of these is reached: long ones vary little, and a dozen of them would take minutes."""

TRACE_REPEATS = 5
TRACE_LIMIT_MS = 300.0
"""A replay is traced as often as fits into this, once at least: a long one is read from one trace as well as from five,
and the profiler takes its time for every kernel."""

MOST_GRAPHS = 12
MOST_CALL_SHAPES = 4
MOST_HOST_CALLS = 100

REPLAYS_LIMIT_S = 12.0
CALL_OVERHEADS_LIMIT_S = 6.0
HOST_CALLS_LIMIT_S = 4.0
"""No further graph, call shape or call is taken on after these, of each manager; the first is, however long it takes.

The requests are measured by then: what only explains them must not keep the user of a slow tower waiting for minutes.
"""

HOST_STEPS = {
    "plan": "plan_call",
    "metadata": "_replay_values",
    "copy_in": "_copy_in",
    "replay": "_launch",
    "clone_out": "_clone_out",
    "eager": "_run_eagerly",
    "split": "_split_items",
}
"""Steps of a graph call, and the manager's method that does each."""


class Diagnosis:
    """What the graph calls of a manager, which lives on a GPU, are made of.

    Args:
        inputs: Makes the calls' pixels, outside the timing.
        calls: The measured calls of this process.
    """

    def __init__(self, manager: EncoderCudaGraphManager, inputs: CallInputs, calls: Sequence[EncoderCall]) -> None:
        self.manager, self.inputs, self.calls = manager, inputs, calls

    def facts(self, facts: GraphFacts, requests: int) -> Iterator[GraphFacts]:
        """What a record says of the graphs, again with each figure as soon as it is known."""
        for found in self.replay_facts(facts, requests):
            facts = found
            yield facts
        facts = facts.but(call_overheads=())
        for overhead in self.call_overheads():
            facts = facts.but(call_overheads=(*(facts.call_overheads or ()), overhead))
            yield facts
        yield facts.but(host_steps_ms=self.host_steps())

    def replay_facts(self, facts: GraphFacts, requests: int, most: int = MOST_GRAPHS) -> Iterator[GraphFacts]:
        """`facts` of replays alone, of up to `most` graphs."""
        times: dict[GraphKey, dict[str, Any]] = {}
        yield _with_replay_times(facts, times, requests)
        for key, found in self.replays(self.most_used_graphs(most)):
            times[key] = found
            yield _with_replay_times(facts, times, requests)

    def most_used_graphs(self, most: int = MOST_GRAPHS) -> dict[GraphKey, EncoderCall]:
        """Up to `most` graphs, the most used first, each with a call that leaves a batch of it in its buffers."""
        manager = self.manager
        uses: Counter[GraphKey] = Counter()
        last_use: dict[GraphKey, EncoderCall] = {}
        for call in self.calls:
            batches = manager.plan_call(call.shape_inputs()).batches if not call.has_images else []
            keys = [run.key for batch in batches for run in batch.runs.values() if run.key is not None]
            uses.update(keys)
            for key in keys:
                # After the call, the shared metadata is that of its last replay; graphs without any are always valid.
                if key == keys[-1] or not manager.graphs[key].writer.layout.nbytes:
                    last_use.setdefault(key, call)
        return {key: last_use[key] for key in sorted(last_use, key=lambda key: -uses[key])[:most]}

    @torch.inference_mode()
    def replays(self, graphs: Mapping[GraphKey, EncoderCall]) -> Iterator[tuple[GraphKey, dict[str, Any]]]:
        """Times graphs alone, each after a call that leaves a batch of it in its buffers, within `REPLAYS_LIMIT_S`.

        Yields:
            A graph, and its `replay_ms` (wall clock of one replay, median), `gpu_busy_ms` (the union of its kernels'
            intervals, from a profiler trace), `kernels`, and `launch_gap` (see `launch_gap`); all but the first are
            None where the profiler saw nothing.
        """
        manager = self.manager
        timer = CallTimer(manager.model.device)
        for key, call in within(REPLAYS_LIMIT_S, graphs.items()):
            manager.execute(self.inputs.make(call))
            graph = manager.graphs[key].graph
            replay_ms = timer.median_ms(graph.replay, REPLAY_REPEATS, REPLAY_LIMIT_MS)
            repeats = max(1, min(TRACE_REPEATS, int(TRACE_LIMIT_MS / replay_ms)))
            trace = busy_time(graph.replay, manager.model.device, repeats)
            yield (
                key,
                {
                    "replay_ms": replay_ms,
                    "gpu_busy_ms": trace.busy_ms if trace else None,
                    "kernels": trace.kernels if trace else None,
                    "launch_gap": launch_gap(replay_ms, trace) if trace else None,
                },
            )

    @torch.inference_mode()
    def call_overheads(self) -> Iterator[CallOverhead]:
        """Compares whole graph calls with their replays alone, for the most frequent call shapes that hit, within
        `CALL_OVERHEADS_LIMIT_S`.

        Yields:
            Of a shape, the whole call and its replays, each between two synchronisations.
        """
        manager = self.manager
        timer = CallTimer(manager.model.device)
        example = {call.items: call for call in self.calls if not call.has_images}
        frequency = Counter(call.items for call in self.calls if not call.has_images)
        plans = (
            (example[items], manager.plan_call(example[items].shape_inputs())) for items, _ in frequency.most_common()
        )
        hits = ((call, plan) for call, plan in plans if all(batch.is_hit for batch in plan.batches))
        for call, plan in within(CALL_OVERHEADS_LIMIT_S, islice(hits, MOST_CALL_SHAPES)):
            mm_kwargs = self.inputs.make(call)
            call_ms = timer.median_ms(partial(manager.execute, mm_kwargs), REPLAY_REPEATS, REPLAY_LIMIT_MS)
            replays, replays_ms = 0, 0.0
            for batch in plan.batches:
                selected = manager.model.select_encoder_cudagraph_items(mm_kwargs, batch.items)
                manager.execute(selected)
                for run in batch.runs.values():
                    if run.key is not None:
                        replay = manager.graphs[run.key].graph.replay
                        replays_ms += timer.median_ms(replay, REPLAY_REPEATS, REPLAY_LIMIT_MS)
                        replays += 1
            yield CallOverhead(
                items=len(call.items),
                tokens=call.tokens,
                replays=replays,
                call_ms=call_ms,
                replays_ms=replays_ms,
                overhead_ms=call_ms - replays_ms,
            )

    @torch.inference_mode()
    def host_steps(self) -> dict[str, float]:
        """Times what the host does in a graph call, step by step; on a GPU a step ends when its work is launched.

        The steps are timed from outside, for as long as this runs; a call that nobody times has no clock in it.

        Returns:
            Mean milliseconds a call of `plan` (looked up), `metadata` (looked up, with the rows of each batch),
            `copy_in` (pixels and metadata), `replay` (its launch), `clone_out`, `eager` (items that no graph holds;
            absent without any), `split` (rows into items), `other`, and `call`, their sum. `specs_new`, `packing_new`
            and `metadata_new` are what the first call of a combination of sizes computes, whose result `plan` and
            `metadata` look up later.
        """
        manager = self.manager
        candidates = [call for call in self.calls if not call.has_images] or list(self.calls)
        chosen = candidates[:: max(1, len(candidates) // MOST_HOST_CALLS)][:MOST_HOST_CALLS]
        seconds: defaultdict[str, float] = defaultdict(float)
        timed = 0
        for call in within(HOST_CALLS_LIMIT_S, chosen):
            timed += 1
            mm_kwargs = self.inputs.make(call)
            # The first run meets the sizes, so that the second finds everything made.
            manager.execute(mm_kwargs)
            synchronize(manager.model.device)
            with _timed_steps(manager, seconds):
                started = time.perf_counter()
                manager.execute(mm_kwargs)
                seconds["call"] += time.perf_counter() - started
            synchronize(manager.model.device)
            _time_new_sizes(manager, call, seconds)
        steps = {name: seconds[name] for name in HOST_STEPS if name in seconds}
        steps["other"] = seconds["call"] - sum(steps.values())
        order = (*steps, "call", "specs_new", "packing_new", "metadata_new")
        return {name: 1e3 * (seconds | steps)[name] / timed for name in order}


def _with_replay_times(facts: GraphFacts, times: Mapping[GraphKey, dict[str, Any]], requests: int) -> GraphFacts:
    """The facts with the times of some graphs, their means by use, and what a mean request spends on each path.

    The time of a path is left out unless each of its graphs was timed.
    """
    keys = [GraphKey(use.path, use.token_budget, use.segment_slots, use.axis_key) for use in facts.per_budget]
    uses = [use.but(**times.get(key, {})) for key, use in zip(keys, facts.per_budget, strict=True)]
    means: dict[str, float] = {}
    for name in ("replay_ms", "gpu_busy_ms", "launch_gap"):
        known = [(getattr(use, name), use.replays) for use in uses if use.launch_gap and getattr(use, name) is not None]
        if known:
            means[name] = float(np.average([value for value, _ in known], weights=[replays for _, replays in known]))

    def on_path(path: str) -> float | None:
        spent = [use.replay_ms and use.replays * use.replay_ms for use in uses if use.path == path]
        return None if None in spent or not requests else sum(filter(None, spent)) / requests

    per_path = tuple(path.but(replay_ms=on_path(path.path)) for path in facts.per_path)
    return facts.but(per_budget=tuple(uses), per_path=per_path, **means)


def within(limit_s: float, items: Iterable[Item]) -> Iterator[Item]:
    """The items until the time is over; the first in any case, however long it takes."""
    begun = time.perf_counter()
    for number, item in enumerate(items):
        if number and time.perf_counter() - begun > limit_s:
            return
        yield item


def launch_gap(replay_ms: float, trace: BusyTime) -> float:
    """Wall time of a replay over its GPU-busy time, at least 1.

    The wall time is the shorter of two that both err upwards: the replay's own, which was taken at other clocks than
    the busy time where the power limit binds, and the span of the trace, into which tracing puts gaps of its own.
    """
    wall_ms = replay_ms if trace.span_ms is None else min(replay_ms, trace.span_ms)
    return max(1.0, wall_ms / trace.busy_ms)


@contextmanager
def _timed_steps(manager: EncoderCudaGraphManager, seconds: defaultdict[str, float]) -> Iterator[None]:
    """Puts a clock around each step of one manager, and takes it away again."""

    def timed(step: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            started = time.perf_counter()
            try:
                return method(*arguments)
            finally:
                seconds[step] += time.perf_counter() - started

        return run

    for step, name in HOST_STEPS.items():
        setattr(manager, name, timed(step, getattr(manager, name)))
    try:
        yield
    finally:
        for name in HOST_STEPS.values():
            delattr(manager, name)


def _time_new_sizes(manager: EncoderCudaGraphManager, call: EncoderCall, seconds: defaultdict[str, float]) -> None:
    """What a call of sizes that were not met before costs more: item specs, packing, metadata."""
    model = manager.model
    assert isinstance(model, VisionEncoder)
    clocks = [time.perf_counter()]
    specs = [model.rule.item_spec(item) for item in call.items]
    clocks.append(time.perf_counter())
    batches = pack_items(specs, manager.plan, manager.policy, manager.cost)
    clocks.append(time.perf_counter())
    for batch in batches:
        for run in batch.runs.values():
            if run.key is not None:
                items = [call.items[index] for index in batch.items]
                model.compute_scalars(model.compute_metadata(items))
    clocks.append(time.perf_counter())
    for step, start, end in zip(("specs_new", "packing_new", "metadata_new"), clocks, clocks[1:], strict=False):
        seconds[step] += end - start
