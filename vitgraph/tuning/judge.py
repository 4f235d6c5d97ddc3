"""Measures tuned settings on the device: against eager, the automatic list, the documented nine budgets, the oracle.

Every strategy meets the same calls, one after the other in an order drawn anew each time. The oracle is, for each call,
the faster of eager and an exact-size graph replayed alone, which no manager can beat.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from vitgraph.graphs.call_plan import CallPlan
from vitgraph.graphs.captured import reserve_together
from vitgraph.measure.calls import CallInputs, EncoderCall
from vitgraph.measure.correctness import relative_l2
from vitgraph.measure.environment import GpuState, read_gpu_state
from vitgraph.measure.progress import Progress
from vitgraph.measure.series import encode_eagerly
from vitgraph.measure.timing import CallTimer
from vitgraph.models.base import EncoderInputs
from vitgraph.models.encoder import VisionEncoder
from vitgraph.planning.budgets import BudgetPlan, GraphKey
from vitgraph.planning.packing import PackedBatch
from vitgraph.predict.targets import TargetCost
from vitgraph.tuning.device_timing import forced_batch
from vitgraph.tuning.graph_shelf import GraphShelf
from vitgraph.tuning.judgement import (
    EAGER,
    EAGER_REPEAT,
    EXACT,
    EXACT_CALL,
    TUNED,
    MeasuredCall,
    Strategy,
    VerificationReport,
)
from vitgraph.tuning.tune import TuneResult

GOLDEN = (5**0.5 - 1) / 2
REPEAT_EVERY = 2
"""Eager is measured against itself on every so many-th call."""

ROUNDS_MS = 60.0
"""Calls are measured again only while that takes no longer; the noise of longer calls is a small share of them."""

CHECKED_CALLS = 6
CHECKPOINT_S = 15.0
FEWEST_CALLS = 8


def representative(calls: Sequence[EncoderCall], seed: int) -> Iterator[EncoderCall]:
    """All calls in an order of which every beginning has small and large ones in the workload's shares.

    The calls, sorted by tokens, are visited in steps of the golden ratio: a measurement that is stopped early, or that
    can afford a few calls only, has still met the whole range of sizes.
    """
    ranked = sorted(calls, key=lambda call: (call.tokens, call.index))
    place = float(np.random.default_rng(seed).random())
    left = set(range(len(ranked)))
    while left:
        pick = int(place * len(ranked))
        if pick in left:
            left.remove(pick)
            yield ranked[pick]
        place = (place + GOLDEN) % 1.0


def verify_tuning(
    encoder: VisionEncoder,
    calls: Sequence[EncoderCall],
    result: TuneResult,
    *,
    max_calls: int = 100,
    rounds: int = 2,
    seed: int = 0,
    time_limit_s: float = 240.0,
    shelf: GraphShelf | None = None,
    checkpoint: Callable[[], None] | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measures the tuned settings and their baselines, and stores the answer in `result.data["measured"]`.

    A stop by the user ends the measuring; what was measured until then is reported.

    Args:
        encoder: The encoder, on the device that the profile was measured on.
        calls: The calls of the workload.
        result: What `tune_budgets` found.
        max_calls: Calls to measure at most, small and large ones in the workload's shares.
        rounds: Times that a short call is measured in each strategy; long ones are measured once.
        seed: Seed of the choice, of the orders and of the pixels.
        time_limit_s: For capturing and measuring: as many calls are chosen as are predicted to fit, and none is begun
            later.
        shelf: Graphs of earlier verifications of this encoder; None captures everything, and releases it in the end.
        checkpoint: Called now and then, when `result` has been brought up to date.
        progress: Told of every step.

    Returns:
        `strategies` (latency, gain over eager, share of requests slower, memory, capture, prediction), `closed` (share
        of the way from the automatic list to the oracle, with intervals), `rows` (one a call), and what was left out.
    """
    if shelf is None:
        with GraphShelf.of(encoder) as own:
            return verify_tuning(
                encoder,
                calls,
                result,
                max_calls=max_calls,
                rounds=rounds,
                seed=seed,
                time_limit_s=time_limit_s,
                shelf=own,
                checkpoint=checkpoint,
                progress=progress,
            )
    run = Verification(shelf, calls, result, rounds, seed, time_limit_s, progress)
    run.choose(max_calls)
    with torch.inference_mode():
        run.capture()
        run.measure(lambda: _checkpoint(run, result, checkpoint))
    result.data["measured"] = answer = VerificationReport(run).as_dict()
    return answer


def _checkpoint(run: Verification, result: TuneResult, save: Callable[[], None] | None) -> None:
    result.data["measured"] = VerificationReport(run).as_dict()
    if save is not None:
        save()


class Verification:
    """One verification in progress."""

    def __init__(
        self,
        shelf: GraphShelf,
        calls: Sequence[EncoderCall],
        result: TuneResult,
        rounds: int,
        seed: int,
        time_limit_s: float,
        progress: Progress | None,
    ) -> None:
        self.encoder, self.shelf, self.progress = shelf.encoder, shelf, progress
        self.workload, self.result = calls, result
        self.rounds, self.seed, self.time_limit_s = rounds, seed, time_limit_s
        self.cost: TargetCost = result.tuned.cost
        self.paths = tuple(self.encoder.get_encoder_cudagraph_config().paths)
        self.strategies = [
            Strategy(name, shelf.manager(plan), policy) for name, (plan, policy) in result.tuned.plans.items()
        ]
        self.calls: list[EncoderCall] = []
        self.measured: list[MeasuredCall] = []
        self.timer = CallTimer(self.encoder.device)
        self.states: list[GpuState | None] = [read_gpu_state(self.encoder.device)]
        self.max_rel_l2: float | None = None
        self.is_interrupted = False
        self._rng = np.random.default_rng(seed)
        self._started = time.perf_counter()

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self._started

    # -- what to measure -----------------------------------------------------------------------------------------------

    def choose(self, most: int) -> None:
        """Takes as many calls as are predicted to be captured and measured in time; a few in any case."""
        spent_s = 0.0
        used: set[tuple[str, GraphKey]] = set()
        for call in representative(self.workload, self.seed):
            new = {
                (strategy.name, key)
                for strategy in self.strategies
                for key in self._keys(self._pack(strategy, call))
                if key not in strategy.manager.graphs
            } - used
            budgets = [key.token_budget for _, key in new] + [call.tokens]
            spent_s += float(self.cost.model.capture_ms(np.array(budgets)).sum()) / 1e3 + self._predicted_s(call)
            if len(self.calls) >= most or (len(self.calls) >= FEWEST_CALLS and spent_s > self.time_limit_s):
                break
            used |= new
            self.calls.append(call)
        self.exact = self.shelf.manager(self._exact_plan())
        self.inputs = CallInputs(self.encoder, self.calls, self.seed)

    def _predicted_s(self, call: EncoderCall) -> float:
        """Time to measure a call in every strategy; the first eager run is not counted among its rounds."""
        eager = self.cost.model.eager_ms(call.specs)
        graphs = [
            self.cost.predict_call(call.specs, strategy.manager.plan, strategy.policy).graph_ms
            for strategy in self.strategies
        ]
        rounds = self._rounds_of(eager)
        return (eager * (1 + rounds * (1 + 1 / REPEAT_EVERY)) + rounds * (sum(graphs) + 2 * min(graphs))) / 1e3

    def _rounds_of(self, eager_ms: float) -> int:
        return int(np.clip(ROUNDS_MS // eager_ms, 1, self.rounds))

    def _exact_plan(self) -> BudgetPlan:
        """A graph of every call's size, with exactly its segments as slots."""
        facts = self.cost.model.profile.encoder
        sizes: dict[tuple[str, int], set[int]] = {}
        for call in self.calls:
            for path in self.paths:
                tokens = sum(spec.tokens_on(path) for spec in call.specs)
                if tokens:
                    slots = sum(spec.segments for spec in call.specs)
                    if path in facts.segment_free_paths:
                        slots = max(1, tokens // facts.min_tokens_per_segment)
                    sizes.setdefault((path, tokens), set()).add(slots)
        budgets = {path: tuple(sorted(tokens for name, tokens in sizes if name == path)) for path in self.paths}
        return BudgetPlan(
            path_budgets={path: values for path, values in budgets.items() if values},
            max_items=max(len(call.items) for call in self.calls),
            max_frames=max(sum(spec.segments for spec in call.specs) for call in self.calls),
            slot_tiers={key: tuple(sorted(slots)) for key, slots in sizes.items()},
            axes=self.result.tuned.plans[TUNED][0].axes,
            segment_free_paths=frozenset(facts.segment_free_paths),
        )

    @staticmethod
    def _keys(batches: Iterable[PackedBatch]) -> set[GraphKey]:
        return {run.key for batch in batches for run in batch.runs.values() if run.key is not None}

    # -- device --------------------------------------------------------------------------------------------------------

    def capture(self) -> None:
        """Captures the graphs that the calls meet, and of every plan the largest, which decides its memory."""
        reserve_together([*(strategy.manager for strategy in self.strategies), self.exact])
        wanted = [(self.exact, {key for call in self.calls for key in self._exact_keys(call).values()})]
        for strategy in self.strategies:
            used = {key for call in self.calls for key in self._keys(self._pack(strategy, call))}
            wanted.append((strategy.manager, used | set(strategy.manager.plan.graph_keys()[:1])))
        for manager, keys in wanted:
            if self.progress is not None:
                self.progress.phase("capturing graphs", len(keys))
            manager.capture_some(keys, lambda done, total, key: self.progress.step() if self.progress else None)

    def _pack(self, strategy: Strategy, call: EncoderCall) -> list[PackedBatch]:
        return self.cost.pack(call.specs, strategy.manager.plan, strategy.policy)

    def _plan(self, strategy: Strategy, call: EncoderCall) -> CallPlan:
        """The strategy's packing, without graphs that did not fit the device's memory."""
        kept = []
        for batch in self._pack(strategy, call):
            keys = {path: run.key for path, run in batch.runs.items() if run.key in strategy.manager.graphs}
            if len(keys) == len([run for run in batch.runs.values() if run.key is not None]):
                kept.append(batch)
            else:
                kept.append(forced_batch(batch.items, call.specs, self.paths, _present(keys)))
        return CallPlan.of(kept, call.specs, self.paths)

    def measure(self, checkpoint: Callable[[], None]) -> None:
        """Measures call by call, all rounds and strategies of one before the next."""
        if self.progress is not None:
            self.progress.phase("measuring", len(self.calls))
        gc.collect()
        gc.disable()
        saved_s = self.elapsed_s
        try:
            for number, call in enumerate(self.calls):
                if number and self.elapsed_s > self.time_limit_s:
                    break
                self.measured.append(self._measure_call(call, number))
                if self.progress is not None:
                    self.progress.step()
                if self.elapsed_s > saved_s + CHECKPOINT_S:
                    self.states.append(read_gpu_state(self.encoder.device))
                    checkpoint()
                    saved_s = self.elapsed_s
        except KeyboardInterrupt:
            self.is_interrupted = True
        finally:
            gc.enable()
            self.states.append(read_gpu_state(self.encoder.device))

    def _measure_call(self, call: EncoderCall, number: int) -> MeasuredCall:
        mm_kwargs = self.inputs.make(call)
        runs: dict[str, Callable[[], object]] = {EAGER: partial(encode_eagerly, self.encoder, mm_kwargs)}
        # Libraries choose kernels when they first meet a size, and host metadata is kept by size: whoever came first
        # would pay for the others.
        expected = encode_eagerly(self.encoder, mm_kwargs)
        for strategy in self.strategies:
            plan = self._plan(strategy, call)
            self._warm_up(strategy, mm_kwargs, plan)
            runs[strategy.name] = partial(strategy.manager.execute_planned, mm_kwargs, plan)
        if number < CHECKED_CALLS:
            self._check(expected, runs[TUNED]())
        del expected
        exact = self._exact_runs(call, mm_kwargs)
        for _, load, _ in exact:
            load()
        if number % REPEAT_EVERY == 0:
            runs[EAGER_REPEAT] = runs[EAGER]
        found = MeasuredCall(call, {name: [] for name in (*runs, EXACT, EXACT_CALL)})
        rounds = self._rounds_of(self.cost.model.eager_ms(call.specs))
        names = [*runs, EXACT]
        for _ in range(rounds):
            for place in self._rng.permutation(len(names)):
                name = names[int(place)]
                if name != EXACT:
                    found.times[name].append(self.timer.time(runs[name]).wall_ms)
                else:
                    self._measure_exact(exact, found)
        return found

    def _warm_up(self, strategy: Strategy, mm_kwargs: EncoderInputs, plan: CallPlan) -> None:
        if len(plan.batches) == 1:
            # All of it in one replay, or all of it eager as before: nothing is met for the first time on the device.
            strategy.manager.load_planned(mm_kwargs, plan)
        else:
            strategy.manager.execute_planned(mm_kwargs, plan)

    def _check(self, expected: Sequence[torch.Tensor], found: Any) -> None:
        for reference, value in zip(expected, found, strict=True):
            distance = relative_l2(value, reference)
            # A NaN must stay: it compares with nothing.
            if self.max_rel_l2 is None or not distance <= self.max_rel_l2:
                self.max_rel_l2 = distance

    def _exact_runs(self, call: EncoderCall, mm_kwargs: EncoderInputs) -> list[tuple[Callable[[], object], ...]]:
        """For each path: the whole call, what loads the graph, and its replay alone."""
        found: list[tuple[Callable[[], object], ...]] = []
        for path, key in self._exact_keys(call).items():
            if key in self.exact.graphs:
                batch = forced_batch(range(len(call.specs)), call.specs, self.paths, {path: key})
                plan = CallPlan.of([batch], call.specs, self.paths)
                found.append(
                    (
                        partial(self.exact.execute_planned, mm_kwargs, plan),
                        partial(self.exact.load_planned, mm_kwargs, plan),
                        self.exact.graphs[key].graph.replay,
                    )
                )
        return found

    def _measure_exact(self, runs: Sequence[tuple[Callable[[], object], ...]], found: MeasuredCall) -> None:
        if not runs:
            return
        # What the manager adds is a share of short calls only.
        if len(runs) == 1 and self.cost.model.eager_ms(found.call.specs) <= ROUNDS_MS:
            found.times[EXACT_CALL].append(self.timer.time(runs[0][0]).wall_ms)
        total = 0.0
        for _, load, replay in runs:
            load()
            total += self.timer.time(replay).wall_ms
        found.times[EXACT].append(total)

    def _exact_keys(self, call: EncoderCall) -> dict[str, GraphKey]:
        plan, keys = self.exact.plan, {}
        axis_key: tuple[int, ...] = ()
        for axis in plan.axes:
            axis_key += axis.covering_key(spec.axis_sizes[axis.name] for spec in call.specs) or ()
        for path in self.paths:
            tokens = sum(spec.tokens_on(path) for spec in call.specs)
            if tokens:
                slots = plan.select_slots(path, tokens, sum(spec.segments for spec in call.specs))
                keys[path] = GraphKey(path, tokens, slots or 0, axis_key)
        return keys


def _present(keys: Mapping[str, GraphKey | None]) -> dict[str, GraphKey]:
    return {path: key for path, key in keys.items() if key is not None}
