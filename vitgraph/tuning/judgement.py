"""What a verification of tuned settings has measured, and the answer that it amounts to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from vitgraph.graphs.manager import EncoderCudaGraphManager
from vitgraph.measure.calls import EncoderCall
from vitgraph.measure.correctness import TOLERANCE
from vitgraph.measure.environment import validity_problems
from vitgraph.predict.holdout import summarize_errors
from vitgraph.predict.targets import VITGRAPH
from vitgraph.records.sample_table import Sample
from vitgraph.records.stats import (
    METRICS,
    P99_MIN_SAMPLES,
    FloatArray,
    count_slower,
    improvement,
    request_noise_pct,
    summarize,
)
from vitgraph.tuning.describe import closed_share

if TYPE_CHECKING:
    from vitgraph.tuning.judge import Verification

EAGER, EAGER_REPEAT, ORACLE = "eager", "eager_repeat", "oracle"
EXACT, EXACT_CALL = "exact_graph", "exact_call"
"""A graph of exactly the call's size: replayed alone, and as a whole call through the manager."""

TUNED, AUTOMATIC = "tuned", "automatic"

RESAMPLES = 1000


@dataclass(slots=True)
class Strategy:
    """Graphs with the packing that they are used with."""

    name: str
    manager: EncoderCudaGraphManager
    policy: str


@dataclass(slots=True)
class MeasuredCall:
    """Times of one call in milliseconds, one entry a round; empty where a strategy was not run on it."""

    call: EncoderCall
    times: dict[str, list[float]] = field(default_factory=dict)

    def mean(self, name: str) -> float:
        """Mean over the rounds; NaN where there were none."""
        values = self.times.get(name)
        return float(np.mean(values)) if values else float("nan")

    def samples(self) -> Iterator[Sample]:
        """Every timed call of it."""
        call = self.call
        for name, values in self.times.items():
            for number, wall_ms in enumerate(values):
                yield Sample(
                    call=call.index,
                    requests=tuple(call.requests),
                    series=name,
                    round=number,
                    position=0,
                    wall_ms=wall_ms,
                    items=len(call.items),
                    tokens=call.tokens,
                    input_rows=call.input_rows,
                )


def _negated(pct: float | None) -> float | None:
    """An improvement as the difference that these records hold, negative = faster."""
    return None if pct is None else 0.0 - pct


class VerificationReport:
    """The answer of a verification, finished or under way.

    Args:
        run: The verification.
    """

    def __init__(self, run: Verification) -> None:
        self.run = run

    def as_dict(self) -> dict[str, Any]:
        """What is known by now."""
        times = {name: self._per_call(name) for name in (EAGER, EXACT, *(s.name for s in self.run.strategies))}
        # Where the exact graph did not fit the memory, eager is all there is.
        times[ORACLE] = np.fmin(times[EAGER], times[EXACT])
        repeats = self._per_call(EAGER_REPEAT)
        paired = np.isfinite(repeats)
        requests = self._requests()
        noise = request_noise_pct(times[EAGER][paired], repeats[paired], requests[paired])
        strategies = {EAGER: self._latency(times[EAGER]), ORACLE: self._latency(times[ORACLE])}
        strategies[EAGER] |= self._prediction(EAGER, self.run.cost.model.eager_ms)
        for strategy in self.run.strategies:
            strategies[strategy.name] = self._describe(strategy, times, noise)
        problems = validity_problems(self.run.states)
        tolerance = TOLERANCE[self.run.encoder.dtype]
        if self.run.max_rel_l2 is not None and not self.run.max_rel_l2 <= tolerance:
            problems.append(
                f"replay and eager differ by {self.run.max_rel_l2:.3g} (relative L2, at most {tolerance:g})"
            )
        return {
            "mode": "cuda" if self.run.exact.is_cuda else "cpu-replay",
            "manager": "vitgraph's; it stands in for the target's"
            if self.run.cost.target.name != VITGRAPH
            else "vitgraph's",
            "calls": len(self.run.measured),
            "calls_left_out": len(self.run.calls) - len(self.run.measured),
            "calls_of_workload": len(self.run.workload),
            "choice": "small and large calls in the workload's shares, by steps of the golden ratio over their ranks",
            "is_interrupted": self.run.is_interrupted,
            "max_rel_l2": self.run.max_rel_l2,
            "request_noise_pct": noise,
            "strategies": strategies,
            "closed": self._closed(times),
            "overhead_ms": self._overhead(),
            "rows": [self._row(measured) for measured in self.run.measured],
            "samples": [sample for measured in self.run.measured for sample in measured.samples()],
            "problems": problems,
            "elapsed_s": self.run.elapsed_s,
        }

    def _requests(self) -> npt.NDArray[np.int64]:
        """Requests of each call."""
        return np.array([len(measured.call.requests) for measured in self.run.measured], dtype=np.int64)

    def _per_call(self, name: str) -> FloatArray:
        """One value a call, in milliseconds a request."""
        return np.array([measured.mean(name) / len(measured.call.requests) for measured in self.run.measured])

    def _latency(self, times: FloatArray) -> dict[str, Any]:
        summary = summarize(times, self._requests())
        return {
            "n": summary.n,
            "mean_ms": summary.mean,
            "p50_ms": summary.p50,
            "p99_ms": summary.p99,
            "max_ms": summary.max,
            # The requests of a call have one latency, so that calls are what a tail consists of.
            "is_p99_supported": len(times) >= P99_MIN_SAMPLES,
        }

    def _describe(self, strategy: Strategy, times: Mapping[str, FloatArray], noise: float | None) -> dict[str, Any]:
        own, eager = times[strategy.name], times[EAGER]
        requests = self._requests()
        mean, p50, p99 = (improvement(eager, own, metric, requests) for metric in METRICS)
        slower = count_slower(eager, own, noise, requests)
        manager = strategy.manager
        return {
            **self._latency(own),
            "mean_delta_pct": _negated(mean.improvement_pct),
            "mean_ci95": [_negated(end) for end in reversed(mean.ci95)] if mean.ci95 else None,
            "p50_delta_pct": _negated(p50.improvement_pct),
            "p99_delta_pct": _negated(p99.improvement_pct),
            "p99_ci95": [_negated(end) for end in reversed(p99.ci95)] if p99.ci95 else None,
            "slower_share": slower.share,
            "slower_over_2pct_share": slower.over_2pct_share,
            "graphs": len(manager.plan.graph_keys()),
            "graphs_captured": len(manager.graphs),
            "dropped": len(manager.dropped),
            "memory_bytes": manager.pool_bytes + manager.buffer_bytes,
            "capture_s": sum(graph.capture_ms for graph in manager.graphs.values()) / 1e3,
            **self._prediction(
                strategy.name,
                lambda specs: self.run.cost.predict_call(specs, manager.plan, strategy.policy).graph_ms,
            ),
        }

    def _prediction(self, name: str, predict: Callable[[Any], float]) -> dict[str, Any]:
        predicted = [predict(measured.call.specs) for measured in self.run.measured]
        means = [ms / len(measured.call.requests) for ms, measured in zip(predicted, self.run.measured, strict=True)]
        return {
            "predicted_mean_ms": float(np.mean(means)) if means else None,
            "prediction_error": summarize_errors(predicted, [m.mean(name) for m in self.run.measured]).as_dict(),
        }

    def _closed(self, times: Mapping[str, FloatArray]) -> dict[str, Any]:
        """The share of the way closed, with 95 % intervals over resampled calls."""
        arms = np.stack([times[name] for name in (AUTOMATIC, TUNED, ORACLE)])
        if not arms.shape[1]:
            return {"mean": None, "median": None, "mean_ci95": None, "median_ci95": None}
        rng = np.random.default_rng(self.run.seed)
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

    def _row(self, measured: MeasuredCall) -> dict[str, Any]:
        call = measured.call
        return {
            "call": call.index,
            "requests": len(call.requests),
            "items": len(call.items),
            "tokens": call.tokens,
            **{f"{name}_ms": measured.mean(name) for name, values in measured.times.items() if values},
            "rounds": len(measured.times[EAGER]),
        }
