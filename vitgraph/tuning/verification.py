"""Measures tuned settings on the device: against eager, the automatic list, the documented nine budgets, the oracle.

Every strategy meets the same calls, one after the other in turning order. The oracle is, for each call, the faster of
eager and an exact-size graph replayed alone, which no manager can beat.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from vitgraph.bench.calls import CallInputs, EncoderCall
from vitgraph.bench.engine import Progress
from vitgraph.bench.runner import BenchRunner
from vitgraph.bench.timing import CallTimer
from vitgraph.environment import read_gpu_state, validity_problems
from vitgraph.graphs.manager import EncoderCudaGraphManager, reserve_together
from vitgraph.models.base import EncoderInputs
from vitgraph.models.encoder import VisionEncoder
from vitgraph.planning.budgets import BudgetPlan, GraphKey
from vitgraph.planning.packing import PackedBatch
from vitgraph.stats import (
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

EAGER, EAGER_REPEAT, ORACLE, EXACT = "eager", "eager_repeat", "oracle", "exact_graph"
TUNED, AUTOMATIC = "tuned", "automatic"


@dataclass(slots=True)
class _Strategy:
    """Graphs with the packing that they are used with."""

    name: str
    manager: EncoderCudaGraphManager
    policy: str


@dataclass(slots=True)
class _Measured:
    """Times in milliseconds by strategy: one list a call, one entry a round."""

    times: dict[str, list[list[float]]] = field(default_factory=dict)

    def per_request(self, name: str, calls: Sequence[EncoderCall], done: int) -> FloatArray:
        """One value a request: its call's mean over the rounds, over the call's requests."""
        means = [
            float(np.mean(rounds)) / call.requests for rounds, call in zip(self.times[name][:done], calls, strict=False)
        ]
        return np.repeat(means, [call.requests for call in calls[:done]])


def sample_calls(calls: Sequence[EncoderCall], most: int, seed: int) -> list[EncoderCall]:
    """At most `most` of the calls, drawn without replacement, in their order; all of them where there are fewer."""
    if len(calls) <= most:
        return list(calls)
    picks = np.sort(np.random.default_rng(seed).choice(len(calls), size=most, replace=False))
    return [calls[int(pick)] for pick in picks]


def verify_tuning(
    encoder: VisionEncoder,
    calls: Sequence[EncoderCall],
    result: TuneResult,
    *,
    max_calls: int = 100,
    rounds: int = 2,
    seed: int = 0,
    time_limit_s: float = 240.0,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measures the tuned settings and their baselines, and stores the answer in `result.data["measured"]`.

    Args:
        encoder: The encoder, on the device that the profile was measured on.
        calls: The calls of the workload.
        result: What `tune_budgets` found.
        max_calls: Calls to measure, drawn at random; each is run in every strategy.
        rounds: Times that each is measured.
        seed: Seed of the draw and of the pixels.
        time_limit_s: When to stop measuring further calls; those measured in every round and strategy count.
        progress: Told of every step.

    Returns:
        `strategies` (latency, gain over eager, share of requests slower, memory, capture, prediction), `closed` (share
        of the way from the automatic list to the oracle), `rows` (one a call), and what was left out.
    """
    chosen = sample_calls(calls, max_calls, seed)
    run = _Verification(encoder, chosen, result, seed, progress)
    started = time.perf_counter()
    before = read_gpu_state(encoder.device)
    try:
        with torch.inference_mode():
            run.capture()
            done = run.measure(rounds, lambda: time.perf_counter() - started > time_limit_s)
        answer = run.report(done)
    finally:
        run.clear()
    answer["problems"] = validity_problems([before, read_gpu_state(encoder.device)])
    answer["elapsed_s"] = time.perf_counter() - started
    result.data["measured"] = answer
    return answer


class _Verification:
    """One verification in progress."""

    def __init__(
        self,
        encoder: VisionEncoder,
        calls: list[EncoderCall],
        result: TuneResult,
        seed: int,
        progress: Progress | None,
    ) -> None:
        self.encoder, self.calls, self.result, self.progress = encoder, calls, result, progress
        self.cost: TargetCost = result.tuned.cost
        self.paths = tuple(encoder.get_encoder_cudagraph_config().paths)
        self.strategies = [
            _Strategy(name, EncoderCudaGraphManager(encoder, plan), policy)
            for name, (plan, policy) in result.tuned.plans.items()
        ]
        self.exact = EncoderCudaGraphManager(encoder, self._exact_plan())
        self.inputs = CallInputs(encoder, calls, seed)
        self.timer = CallTimer(encoder.device)
        self.eager = BenchRunner(encoder, self.exact, self.inputs)
        self.measured = _Measured()

    def _managers(self) -> list[EncoderCudaGraphManager]:
        return [*(strategy.manager for strategy in self.strategies), self.exact]

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
        most = max(len(call.items) for call in self.calls)
        segments = max(sum(spec.segments for spec in call.specs) for call in self.calls)
        plans = self.result.tuned.plans
        return BudgetPlan(
            path_budgets={path: values for path, values in budgets.items() if values},
            max_items=most,
            max_frames=segments,
            slot_tiers={key: tuple(sorted(slots)) for key, slots in sizes.items()},
            axes=plans[TUNED][0].axes,
            segment_free_paths=frozenset(facts.segment_free_paths),
        )

    # -- device --------------------------------------------------------------------------------------------------------

    def capture(self) -> None:
        """Captures every strategy's graphs; they live side by side, so that the measuring can alternate."""
        reserve_together(self._managers())
        for manager in self._managers():
            if self.progress is not None:
                self.progress.phase("capturing graphs", len(manager.plan.graph_keys()))
            manager.capture(lambda done, total, key: self.progress.step() if self.progress is not None else None)

    def clear(self) -> None:
        """Releases all graphs; not before the last of them has been replayed, since they share reservations."""
        for manager in self._managers():
            manager.clear()

    def _runs(self, call: EncoderCall, mm_kwargs: EncoderInputs) -> dict[str, Callable[[], object]]:
        runs: dict[str, Callable[[], object]] = {
            EAGER: lambda: self.eager.run_eager(mm_kwargs),
            EAGER_REPEAT: lambda: self.eager.run_eager(mm_kwargs),
        }
        for strategy in self.strategies:
            plan = call_plan(self._pack(strategy, call), call.specs, self.paths)
            runs[strategy.name] = partial(strategy.manager.execute_planned, mm_kwargs, plan)
        return runs

    def _pack(self, strategy: _Strategy, call: EncoderCall) -> list[PackedBatch]:
        """The strategy's packing, without graphs that did not fit the device's memory."""
        batches = self.cost.pack(call.specs, strategy.manager.plan, strategy.policy)
        kept = []
        for batch in batches:
            keys = {path: run.key for path, run in batch.runs.items() if run.key in strategy.manager.graphs}
            if len(keys) == len([run for run in batch.runs.values() if run.key is not None]):
                kept.append(batch)
            else:
                kept.append(forced_batch(batch.items, call.specs, self.paths, _present(keys)))
        return kept

    def measure(self, rounds: int, is_late: Callable[[], bool]) -> int:
        """Measures call by call, all rounds and strategies of one before the next; returns how many were measured."""
        if self.progress is not None:
            self.progress.phase("measuring", len(self.calls))
        gc.collect()
        gc.disable()
        done = 0
        try:
            for call in self.calls:
                if done and is_late():
                    break
                self._measure_call(call, rounds, done)
                done += 1
                if self.progress is not None:
                    self.progress.step()
        finally:
            gc.enable()
        return done

    def _measure_call(self, call: EncoderCall, rounds: int, number: int) -> None:
        mm_kwargs = self.inputs.make(call)
        runs = self._runs(call, mm_kwargs)
        names = list(runs)
        # Host metadata is cached by size: whoever came first would pay for the others.
        for run in runs.values():
            run()
        found: dict[str, list[float]] = {name: [] for name in (*names, EXACT)}
        for turn in range(rounds):
            start = (number + turn) % len(names)
            for name in [*names[start:], *names[:start]]:
                found[name].append(self.timer.time(runs[name]).wall_ms)
            found[EXACT].append(self._exact_ms(call, mm_kwargs))
        for name, values in found.items():
            self.measured.times.setdefault(name, []).append(values)

    def _exact_ms(self, call: EncoderCall, mm_kwargs: EncoderInputs) -> float:
        """The replays of graphs of exactly the call's size, alone."""
        total = 0.0
        for path in self.paths:
            key = self._exact_key(call, path)
            if key is None:
                continue
            batch = forced_batch(range(len(call.specs)), call.specs, self.paths, {path: key})
            self.exact.execute_planned(mm_kwargs, call_plan([batch], call.specs, self.paths))
            total += self.timer.time(self.exact.graphs[key].graph.replay).wall_ms
        return total

    def _exact_key(self, call: EncoderCall, path: str) -> GraphKey | None:
        tokens = sum(spec.tokens_on(path) for spec in call.specs)
        if not tokens:
            return None
        plan = self.exact.plan
        slots = plan.select_slots(path, tokens, sum(spec.segments for spec in call.specs))
        axis_key: tuple[int, ...] = ()
        for axis in plan.axes:
            axis_key += axis.covering_key(spec.axis_sizes[axis.name] for spec in call.specs) or ()
        return next((key for key in self.exact.graphs if key == GraphKey(path, tokens, slots or 0, axis_key)), None)

    # -- report --------------------------------------------------------------------------------------------------------

    def report(self, done: int) -> dict[str, Any]:
        calls = self.calls[:done]
        times = {name: self.measured.per_request(name, self.calls, done) for name in self.measured.times}
        times[ORACLE] = np.minimum(times[EAGER], times[EXACT])
        noise = request_noise_pct(times[EAGER], times[EAGER_REPEAT])
        strategies = {EAGER: self._latency(times[EAGER]), ORACLE: self._latency(times[ORACLE])}
        for strategy in self.strategies:
            strategies[strategy.name] = self._describe(strategy, calls, times, noise)
        base, tuned, oracle = times[AUTOMATIC], times[TUNED], times[ORACLE]
        return {
            "mode": "cuda" if self.exact.is_cuda else "cpu-replay",
            "manager": "vitgraph's; it stands in for the target's"
            if self.cost.target.name != VITGRAPH
            else "vitgraph's",
            "calls": done,
            "calls_left_out": len(self.calls) - done,
            "request_noise_pct": noise,
            "strategies": strategies,
            "closed": {
                "mean": closed_share(float(base.mean()), float(tuned.mean()), float(oracle.mean())),
                "median": closed_share(*(float(np.median(values)) for values in (base, tuned, oracle))),
            },
            "rows": [
                {
                    "call": call.index,
                    "requests": call.requests,
                    "items": len(call.items),
                    "tokens": call.tokens,
                    **{f"{name}_ms": float(np.mean(self.measured.times[name][place])) for name in self.measured.times},
                }
                for place, call in enumerate(calls)
            ],
        }

    @staticmethod
    def _latency(times: FloatArray) -> dict[str, Any]:
        summary = summarize(times)
        return {
            "n": summary.n,
            "mean_ms": summary.mean,
            "p50_ms": summary.p50,
            "p99_ms": summary.p99,
            "max_ms": summary.max,
            "is_p99_supported": summary.is_p99_supported,
        }

    def _describe(
        self, strategy: _Strategy, calls: Sequence[EncoderCall], times: Mapping[str, FloatArray], noise: float | None
    ) -> dict[str, Any]:
        own, eager = times[strategy.name], times[EAGER]
        mean, p99 = paired_mean_delta(eager, own), percentile_delta(eager, own, 99.0)
        slower = slower_than_eager(eager, own, noise)
        plan = strategy.manager.plan
        predicted = [self.cost.predict_call(call.specs, plan, strategy.policy) for call in calls]
        measured = [float(np.mean(rounds)) for rounds in self.measured.times[strategy.name][: len(calls)]]
        means = [found.graph_ms / call.requests for found, call in zip(predicted, calls, strict=True)]
        return {
            **self._latency(own),
            "mean_delta_pct": mean.delta_pct,
            "mean_ci95": list(mean.ci95) if mean.ci95 else None,
            "p99_delta_pct": p99.delta_pct,
            "slower_share": slower.share,
            "slower_over_2pct_share": slower.over_2pct_share,
            "graphs": len(strategy.manager.graphs),
            "dropped": len(strategy.manager.dropped),
            "memory_bytes": strategy.manager.pool_bytes + strategy.manager.buffer_bytes,
            "capture_s": sum(graph.capture_ms for graph in strategy.manager.graphs.values()) / 1e3,
            "predicted_mean_ms": float(np.mean(means)),
            "prediction_error": summarize_errors([p.graph_ms for p in predicted], measured).as_dict(),
        }


def _present(keys: Mapping[str, GraphKey | None]) -> dict[str, GraphKey]:
    return {path: key for path, key in keys.items() if key is not None}
