"""What a verification of tuned settings has measured, and the answer that it amounts to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from vitgraph.graphs.manager import EncoderCudaGraphManager
from vitgraph.measure.calls import EncoderCall
from vitgraph.measure.environment import validity_problems
from vitgraph.predict.holdout import summarize_errors
from vitgraph.predict.targets import VITGRAPH
from vitgraph.records.kinds.tune import Closed, Measured, Strategy
from vitgraph.records.latency import Pair
from vitgraph.records.sample_table import PairedTimes, Sample
from vitgraph.records.stats import METRICS, FloatArray, Noise, request_noise_pct, summarize
from vitgraph.records.summary import Judge
from vitgraph.tuning.describe import closed_share

if TYPE_CHECKING:
    from vitgraph.tuning.judge import Verification

EAGER, EAGER_REPEAT, ORACLE = "eager", "eager_repeat", "oracle"
EXACT, EXACT_CALL = "exact_graph", "exact_call"
"""A graph of exactly the call's size: replayed alone, and as a whole call through the manager."""

TUNED, AUTOMATIC = "tuned", "automatic"

RESAMPLES = 1000


@dataclass(slots=True)
class StrategyGraphs:
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


class VerificationReport:
    """The answer of a verification, finished or under way.

    Args:
        run: The verification.
    """

    def __init__(self, run: Verification) -> None:
        self.run = run

    def measured(self) -> Measured:
        """What is known by now."""
        run = self.run
        times = {name: self._per_call(name) for name in (EAGER, EXACT, *(s.name for s in run.strategies))}
        # Where the exact graph did not fit the memory, eager is all there is.
        times[ORACLE] = np.fmin(times[EAGER], times[EXACT])
        requests = self._requests()
        repeats = self._per_call(EAGER_REPEAT)
        paired = np.isfinite(repeats)
        twice = times[EAGER][paired], repeats[paired], requests[paired]
        noise, request_noise = Noise.of(*twice), request_noise_pct(*twice)
        problems = self._problems()
        indexes = np.array([measured.call.index for measured in run.measured], dtype=np.int64)
        compared = PairedTimes(indexes, requests, run.rounds, times, 0)

        def against_eager(name: str) -> Pair:
            return Judge(compared, bool(problems)).pair(EAGER, name, noise, METRICS, request_noise)

        strategies = {
            EAGER: Strategy(
                latency=summarize(times[EAGER], requests), **self._predicted(EAGER, run.cost.model.eager_ms)
            ),
            ORACLE: Strategy(latency=summarize(times[ORACLE], requests)),
        }
        for graphs in run.strategies:
            latency = summarize(times[graphs.name], requests)
            strategies[graphs.name] = Strategy(
                latency=latency, against_eager=against_eager(graphs.name), **self._facts(graphs)
            )
        is_vitgraph = run.cost.target.name == VITGRAPH
        return Measured(
            mode="cuda" if run.exact.is_cuda else "cpu-replay",
            manager="vitgraph's" if is_vitgraph else "vitgraph's; it stands in for the target's",
            calls=len(run.measured),
            calls_left_out=len(run.calls) - len(run.measured),
            calls_of_workload=len(run.workload),
            choice="small and large calls in the workload's shares, by steps of the golden ratio over their ranks",
            is_interrupted=run.experiment.is_interrupted,
            max_rel_l2=run.max_rel_l2,
            request_noise_pct=request_noise,
            strategies=strategies,
            closed=self._closed(times),
            overhead_ms=self._overhead(),
            problems=tuple(problems),
            attn_choices=run.encoder.attention.choices() or None,  # type: ignore[arg-type]
            elapsed_s=run.elapsed_s,
        )

    def samples(self) -> list[Sample]:
        """Every timed call."""
        return [sample for measured in self.run.measured for sample in measured.samples()]

    def _problems(self) -> list[str]:
        """What makes the times invalid."""
        problems = validity_problems(self.run.experiment.gpu_states)
        if self.run.is_wrong:
            problems.append(f"replay and eager differ by {self.run.max_rel_l2:.3g} (relative L2), more than both round")
        return problems

    def _requests(self) -> npt.NDArray[np.int64]:
        """Requests of each call."""
        return np.array([len(measured.call.requests) for measured in self.run.measured], dtype=np.int64)

    def _per_call(self, name: str) -> FloatArray:
        """One value a call, in milliseconds a request."""
        return np.array([measured.mean(name) / len(measured.call.requests) for measured in self.run.measured])

    def _facts(self, graphs: StrategyGraphs) -> dict[str, Any]:
        manager, cost = graphs.manager, self.run.cost
        return {
            "graphs": len(manager.plan.graph_keys()),
            "graphs_captured": len(manager.graphs),
            "dropped": len(manager.dropped),
            "memory_bytes": manager.pool_bytes + manager.buffer_bytes,
            "capture_s": sum(graph.capture_ms for graph in manager.graphs.values()) / 1e3,
            **self._predicted(
                graphs.name, lambda specs: cost.predict_call(specs, manager.plan, graphs.policy).graph_ms
            ),
        }

    def _predicted(self, name: str, predict: Callable[[Any], float]) -> dict[str, Any]:
        predicted = [predict(measured.call.specs) for measured in self.run.measured]
        means = [ms / len(measured.call.requests) for ms, measured in zip(predicted, self.run.measured, strict=True)]
        return {
            "predicted_mean_ms": float(np.mean(means)) if means else None,
            "prediction_error": summarize_errors(predicted, [m.mean(name) for m in self.run.measured]),
        }

    def _closed(self, times: Mapping[str, FloatArray]) -> Closed:
        """The share of the way closed, with 95 % intervals over resampled calls."""
        arms = np.stack([times[name] for name in (AUTOMATIC, TUNED, ORACLE)])
        if not arms.shape[1]:
            return Closed()
        rng = np.random.default_rng(self.run.seed)
        picks = rng.integers(0, arms.shape[1], size=(RESAMPLES, arms.shape[1]))
        answer: dict[str, Any] = {}
        for name, statistic in (("mean", np.mean), ("median", np.median)):
            answer[name] = closed_share(*(float(value) for value in statistic(arms, axis=-1)))
            drawn = [closed_share(*(float(v) for v in column)) for column in statistic(arms[:, picks], axis=-1).T]
            known = [share for share in drawn if share is not None]
            answer[f"{name}_ci95"] = tuple(float(v) for v in np.percentile(known, (2.5, 97.5))) if known else None
        return Closed(**answer)

    def _overhead(self) -> float | None:
        """What the manager adds to a replay, in the median: no list of budgets can close this part of the way."""
        added = self._per_call(EXACT_CALL) - self._per_call(EXACT)
        return float(np.nanmedian(added)) if np.isfinite(added).any() else None
