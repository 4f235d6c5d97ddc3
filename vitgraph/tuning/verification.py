"""Measures tuned settings on the device: against eager, the automatic list, the documented nine budgets, the oracle.

Every strategy meets the same calls, one after the other in an order drawn anew each time. The oracle is, for each call,
the faster of eager and an exact-size graph replayed alone, which no manager can beat.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from vitgraph.bench.calls import CallInputs, EncoderCall
from vitgraph.bench.engine import Progress
from vitgraph.bench.runner import TOLERANCE, BenchRunner, relative_l2
from vitgraph.bench.timing import CallTimer
from vitgraph.environment import GpuState, read_gpu_state, validity_problems
from vitgraph.graphs.manager import CallPlan, EncoderCudaGraphManager, reserve_together
from vitgraph.models.base import EncoderInputs
from vitgraph.models.encoder import VisionEncoder
from vitgraph.planning.budgets import BudgetPlan, GraphKey
from vitgraph.planning.packing import PackedBatch
from vitgraph.stats import (
    P99_MIN_SAMPLES,
    FloatArray,
    paired_mean_delta,
    percentile_delta,
    request_noise_pct,
    slower_than_eager,
    summarize,
)
from vitgraph.tuning.device_timing import call_plan, forced_batch
from vitgraph.tuning.holdout import summarize_errors
from vitgraph.tuning.targets import VITGRAPH, TargetCost
from vitgraph.tuning.tune import TuneResult, closed_share

EAGER, EAGER_REPEAT, ORACLE = "eager", "eager_repeat", "oracle"
EXACT, EXACT_CALL = "exact_graph", "exact_call"
"""A graph of exactly the call's size: replayed alone, and as a whole call through the manager."""

TUNED, AUTOMATIC = "tuned", "automatic"

GOLDEN = (5**0.5 - 1) / 2
REPEAT_EVERY = 2
"""Eager is measured against itself on every so many-th call."""

ROUNDS_MS = 60.0
"""Calls are measured again only while that takes no longer; the noise of longer calls is a small share of them."""

CHECKED_CALLS = 6
CHECKPOINT_S = 15.0
FEWEST_CALLS = 8
RESAMPLES = 1000


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


class GraphShelf:
    """The graphs that verifications of one encoder have captured, side by side until the end.

    Strategies are measured in turn, so that all their graphs live at once; and a plan that several workloads share,
    like the automatic list, is captured once. Nothing is released in between: graphs share what libraries and attention
    backends reserve.

    Args:
        encoder: The encoder.
    """

    def __init__(self, encoder: VisionEncoder) -> None:
        self.encoder = encoder
        self._managers: list[EncoderCudaGraphManager] = []

    def manager(self, plan: BudgetPlan) -> EncoderCudaGraphManager:
        """The manager of a plan, with whatever graphs it has by now."""
        for manager in self._managers:
            if manager.plan == plan:
                return manager
        self._managers.append(EncoderCudaGraphManager(self.encoder, plan))
        return self._managers[-1]

    def clear(self) -> None:
        """Releases all graphs."""
        for manager in self._managers:
            manager.clear()
        self._managers.clear()

    @classmethod
    @contextmanager
    def of(cls, encoder: VisionEncoder) -> Iterator[GraphShelf]:
        """A shelf that is cleared at the end."""
        shelf = cls(encoder)
        try:
            yield shelf
        finally:
            shelf.clear()


@dataclass(slots=True)
class _Strategy:
    """Graphs with the packing that they are used with."""

    name: str
    manager: EncoderCudaGraphManager
    policy: str


@dataclass(slots=True)
class _Measured:
    """Times of one call in milliseconds, one entry a round; empty where a strategy was not run on it."""

    call: EncoderCall
    times: dict[str, list[float]] = field(default_factory=dict)

    def mean(self, name: str) -> float:
        """Mean over the rounds; NaN where there were none."""
        values = self.times.get(name)
        return float(np.mean(values)) if values else float("nan")


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
    run = _Verification(shelf, calls, result, rounds, seed, time_limit_s, progress)
    run.choose(max_calls)
    with torch.inference_mode():
        run.capture()
        run.measure(lambda: _checkpoint(run, result, checkpoint))
    result.data["measured"] = answer = run.report()
    return answer


def _checkpoint(run: _Verification, result: TuneResult, save: Callable[[], None] | None) -> None:
    result.data["measured"] = run.report()
    if save is not None:
        save()


class _Verification:
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
            _Strategy(name, shelf.manager(plan), policy) for name, (plan, policy) in result.tuned.plans.items()
        ]
        self.calls: list[EncoderCall] = []
        self.measured: list[_Measured] = []
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
        self.eager = BenchRunner(self.encoder, self.exact, self.inputs)

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

    def _pack(self, strategy: _Strategy, call: EncoderCall) -> list[PackedBatch]:
        return self.cost.pack(call.specs, strategy.manager.plan, strategy.policy)

    def _plan(self, strategy: _Strategy, call: EncoderCall) -> CallPlan:
        """The strategy's packing, without graphs that did not fit the device's memory."""
        kept = []
        for batch in self._pack(strategy, call):
            keys = {path: run.key for path, run in batch.runs.items() if run.key in strategy.manager.graphs}
            if len(keys) == len([run for run in batch.runs.values() if run.key is not None]):
                kept.append(batch)
            else:
                kept.append(forced_batch(batch.items, call.specs, self.paths, _present(keys)))
        return call_plan(kept, call.specs, self.paths)

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

    def _measure_call(self, call: EncoderCall, number: int) -> _Measured:
        mm_kwargs = self.inputs.make(call)
        runs: dict[str, Callable[[], object]] = {EAGER: partial(self.eager.run_eager, mm_kwargs)}
        # Libraries choose kernels when they first meet a size, and host metadata is kept by size: whoever came first
        # would pay for the others.
        expected = self.eager.run_eager(mm_kwargs)
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
        found = _Measured(call, {name: [] for name in (*runs, EXACT, EXACT_CALL)})
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

    def _warm_up(self, strategy: _Strategy, mm_kwargs: EncoderInputs, plan: CallPlan) -> None:
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
                plan = call_plan([batch], call.specs, self.paths)
                found.append(
                    (
                        partial(self.exact.execute_planned, mm_kwargs, plan),
                        partial(self.exact.load_planned, mm_kwargs, plan),
                        self.exact.graphs[key].graph.replay,
                    )
                )
        return found

    def _measure_exact(self, runs: Sequence[tuple[Callable[[], object], ...]], found: _Measured) -> None:
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

    # -- report --------------------------------------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        """What is known by now."""
        times = {name: self._per_call(name) for name in (EAGER, EXACT, *(s.name for s in self.strategies))}
        # Where the exact graph did not fit the memory, eager is all there is.
        times[ORACLE] = np.fmin(times[EAGER], times[EXACT])
        repeats = self._per_call(EAGER_REPEAT)
        paired = np.isfinite(repeats)
        noise = request_noise_pct(times[EAGER][paired], repeats[paired])
        strategies = {EAGER: self._latency(times[EAGER]), ORACLE: self._latency(times[ORACLE])}
        strategies[EAGER] |= self._prediction(EAGER, self.cost.model.eager_ms)
        for strategy in self.strategies:
            strategies[strategy.name] = self._describe(strategy, times, noise)
        problems = validity_problems(self.states)
        tolerance = TOLERANCE[self.encoder.dtype]
        if self.max_rel_l2 is not None and not self.max_rel_l2 <= tolerance:
            problems.append(f"replay and eager differ by {self.max_rel_l2:.3g} (relative L2, at most {tolerance:g})")
        return {
            "mode": "cuda" if self.exact.is_cuda else "cpu-replay",
            "manager": "vitgraph's; it stands in for the target's"
            if self.cost.target.name != VITGRAPH
            else "vitgraph's",
            "calls": len(self.measured),
            "calls_left_out": len(self.calls) - len(self.measured),
            "calls_of_workload": len(self.workload),
            "choice": "small and large calls in the workload's shares, by steps of the golden ratio over their ranks",
            "is_interrupted": self.is_interrupted,
            "max_rel_l2": self.max_rel_l2,
            "request_noise_pct": noise,
            "strategies": strategies,
            "closed": self._closed(times),
            "overhead_ms": self._overhead(),
            "rows": [self._row(measured) for measured in self.measured],
            "problems": problems,
            "elapsed_s": self.elapsed_s,
        }

    def _per_call(self, name: str) -> FloatArray:
        """One value a call, in milliseconds a request."""
        return np.array([measured.mean(name) / measured.call.requests for measured in self.measured])

    def _latency(self, times: FloatArray) -> dict[str, Any]:
        requests = [measured.call.requests for measured in self.measured]
        summary = summarize(np.repeat(times, requests))
        return {
            "n": summary.n,
            "mean_ms": summary.mean,
            "p50_ms": summary.p50,
            "p99_ms": summary.p99,
            "max_ms": summary.max,
            # The requests of a call have one latency, so that calls are what a tail consists of.
            "is_p99_supported": len(times) >= P99_MIN_SAMPLES,
        }

    def _describe(self, strategy: _Strategy, times: Mapping[str, FloatArray], noise: float | None) -> dict[str, Any]:
        own, eager = times[strategy.name], times[EAGER]
        mean, p99 = paired_mean_delta(eager, own), percentile_delta(eager, own, 99.0)
        slower = slower_than_eager(eager, own, noise)
        manager = strategy.manager
        return {
            **self._latency(own),
            "mean_delta_pct": mean.delta_pct,
            "mean_ci95": list(mean.ci95) if mean.ci95 else None,
            "p50_delta_pct": percentile_delta(eager, own, 50.0).delta_pct,
            "p99_delta_pct": p99.delta_pct,
            "p99_ci95": list(p99.ci95) if p99.ci95 else None,
            "slower_share": slower.share,
            "slower_over_2pct_share": slower.over_2pct_share,
            "graphs": len(manager.plan.graph_keys()),
            "graphs_captured": len(manager.graphs),
            "dropped": len(manager.dropped),
            "memory_bytes": manager.pool_bytes + manager.buffer_bytes,
            "capture_s": sum(graph.capture_ms for graph in manager.graphs.values()) / 1e3,
            **self._prediction(
                strategy.name,
                lambda specs: self.cost.predict_call(specs, manager.plan, strategy.policy).graph_ms,
            ),
        }

    def _prediction(self, name: str, predict: Callable[[Any], float]) -> dict[str, Any]:
        predicted = [predict(measured.call.specs) for measured in self.measured]
        means = [ms / measured.call.requests for ms, measured in zip(predicted, self.measured, strict=True)]
        return {
            "predicted_mean_ms": float(np.mean(means)) if means else None,
            "prediction_error": summarize_errors(predicted, [m.mean(name) for m in self.measured]).as_dict(),
        }

    def _closed(self, times: Mapping[str, FloatArray]) -> dict[str, Any]:
        """The share of the way closed, with 95 % intervals over resampled calls."""
        arms = np.stack([times[name] for name in (AUTOMATIC, TUNED, ORACLE)])
        if not arms.shape[1]:
            return {"mean": None, "median": None, "mean_ci95": None, "median_ci95": None}
        rng = np.random.default_rng(self.seed)
        picks = rng.integers(0, arms.shape[1], size=(RESAMPLES, arms.shape[1]))
        answer: dict[str, Any] = {}
        for name, statistic in (("mean", np.mean), ("median", np.median)):
            answer[name] = closed_share(*(float(value) for value in statistic(arms, axis=-1)))
            drawn = [closed_share(*(float(v) for v in column)) for column in statistic(arms[:, picks], axis=-1).T]
            known = [share for share in drawn if share is not None]
            answer[f"{name}_ci95"] = [float(v) for v in np.percentile(known, (2.5, 97.5))] if known else None
        return answer

    def _overhead(self) -> float | None:
        """What the manager adds to a replay, in the median: no list of budgets can close this part of the way."""
        added = self._per_call(EXACT_CALL) - self._per_call(EXACT)
        return float(np.nanmedian(added)) if np.isfinite(added).any() else None

    def _row(self, measured: _Measured) -> dict[str, Any]:
        call = measured.call
        return {
            "call": call.index,
            "requests": call.requests,
            "items": len(call.items),
            "tokens": call.tokens,
            **{f"{name}_ms": measured.mean(name) for name, values in measured.times.items() if values},
            "rounds": len(measured.times[EAGER]),
        }


def _present(keys: Mapping[str, GraphKey | None]) -> dict[str, GraphKey]:
    return {path: key for path, key in keys.items() if key is not None}
