"""The answer that measurements of tuned settings amount to, finished or under way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from vitgraph.measure.environment import validity_problems
from vitgraph.planning.budgets import EncoderItemSpec
from vitgraph.predict.doubt import summarize_errors
from vitgraph.predict.targets import VITGRAPH
from vitgraph.records.sample_table import PairedTimes, Samples
from vitgraph.records.stats import METRICS, FloatArray, Judge, noise_of, summarize
from vitgraph.records.tune_result import Closed, Measured, Strategy
from vitgraph.tuning.describe import closed_share
from vitgraph.tuning.objective import AUTOMATIC, EAGER, ORACLE, TUNED

if TYPE_CHECKING:
    from vitgraph.tuning.judge import Verification

EXACT, EXACT_CALL = "exact_graph", "exact_call"
"""A graph of exactly the call's size: replayed alone, and as a whole call through the manager."""

RESAMPLES = 1000


def measured_answer(run: Verification) -> Measured:
    """What is known by now of a verification; calls count that were measured in every strategy."""
    samples = Samples.of(run.samples)
    paired = samples.paired([EAGER, *run.managers])
    times, requests = paired.times, paired.requests
    exact = _beside(samples, EXACT, paired)
    # Where the exact graph did not fit the memory, eager is all there is.
    times[ORACLE] = np.fmin(times[EAGER], exact)
    noise, request_noise = noise_of(samples, [EAGER], 0)
    problems = validity_problems(run.experiment.gpu_states)
    if run.is_wrong:
        problems.append(f"replay and eager differ by {run.max_rel_l2:.3g} (relative L2), more than both round")

    judge = Judge(paired, bool(problems))
    by_index = {call.index: call for call in run.calls}
    specs = [by_index[int(index)].specs for index in paired.calls]

    def predicted(name: str, predict: Callable[[Sequence[EncoderItemSpec]], float]) -> dict[str, Any]:
        expected = [predict(items) for items in specs]
        return {
            "predicted_mean_ms": float(np.mean(expected / requests)) if specs else None,
            "prediction_error": summarize_errors(expected, list(times[name] * requests)),
        }

    more: dict[str, dict[str, Any]] = {EAGER: predicted(EAGER, run.cost.model.eager_ms), ORACLE: {}}
    for name, manager in run.managers.items():
        more[name] = {
            "against_eager": judge.pair(EAGER, name, noise, METRICS, request_noise),
            "graphs": len(manager.plan.graph_keys()),
            "graphs_captured": len(manager.graphs),
            "dropped": len(manager.dropped),
            "memory_bytes": manager.pool_bytes + manager.buffer_bytes,
            "capture_s": sum(graph.capture_ms for graph in manager.graphs.values()) / 1e3,
            **predicted(name, partial(run.graph_ms, manager)),
        }
    added = _beside(samples, EXACT_CALL, paired) - exact
    return Measured(
        mode="cuda" if run.exact.is_cuda else "cpu-replay",
        manager="vitgraph's" if run.cost.target.name == VITGRAPH else "vitgraph's; it stands in for the target's",
        calls=len(requests),
        calls_left_out=len(run.calls) - len(requests),
        calls_of_workload=len(run.workload),
        choice="small and large calls in the workload's shares, by steps of the golden ratio over their ranks",
        is_interrupted=run.experiment.is_interrupted,
        max_rel_l2=run.max_rel_l2,
        request_noise_pct=request_noise,
        strategies={name: Strategy(latency=summarize(times[name], requests), **facts) for name, facts in more.items()},
        closed=_closed(times, run.seed),
        # What the manager adds to a replay: no list of budgets can close this part of the way.
        overhead_ms=float(np.nanmedian(added)) if np.isfinite(added).any() else None,
        problems=tuple(problems),
        attn_choices=run.encoder.attention.choices() or None,  # type: ignore[arg-type]
        elapsed_s=run.elapsed_s,
    )


def _beside(samples: Samples, name: str, paired: PairedTimes) -> FloatArray:
    """Times of a series that not every call has, one for each of some calls; NaN where it has none."""
    some = samples.paired([name])
    known = dict(zip(some.calls.tolist(), some.times[name], strict=True))
    return np.array([known.get(index, np.nan) for index in paired.calls.tolist()])


def _closed(times: Mapping[str, FloatArray], seed: int) -> Closed:
    """The share of the way closed, with 95 % intervals over resampled calls."""
    arms = np.stack([times[name] for name in (AUTOMATIC, TUNED, ORACLE)])
    if not arms.shape[1]:
        return Closed()
    picks = np.random.default_rng(seed).integers(0, arms.shape[1], size=(RESAMPLES, arms.shape[1]))
    answer: dict[str, Any] = {}
    for name, statistic in (("mean", np.mean), ("median", np.median)):
        answer[name] = closed_share(*(float(value) for value in statistic(arms, axis=-1)))
        drawn = [closed_share(*(float(v) for v in column)) for column in statistic(arms[:, picks], axis=-1).T]
        known = [share for share in drawn if share is not None]
        answer[f"{name}_ci95"] = tuple(float(v) for v in np.percentile(known, (2.5, 97.5))) if known else None
    return Closed(**answer)
