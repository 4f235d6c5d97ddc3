"""Measures tuned settings on the device: against eager, the automatic list, the documented nine budgets, the oracle.

Every strategy is a series of one experiment. The oracle is, for each call, the faster of eager and an exact-size graph
replayed alone, which no manager can beat.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial

import numpy as np
import torch

from vitgraph.graphs.capture import reserve_together
from vitgraph.graphs.manager import CallPlan, EncoderCudaGraphManager, forced_batch
from vitgraph.measure.calls import CallInputs, EncoderCall
from vitgraph.measure.correctness import item_limits, relative_l2, worst
from vitgraph.measure.experiment import Control, Experiment
from vitgraph.measure.progress import Progress, SilentProgress
from vitgraph.measure.series import (
    CallTime,
    CallTimer,
    Series,
    eager_series,
    encode_eagerly,
    expect_calls,
    graph_series,
)
from vitgraph.models.base import EncoderInputs
from vitgraph.models.encoder import VisionEncoder
from vitgraph.planning.budgets import BudgetPlan, EncoderItemSpec, GraphKey
from vitgraph.planning.packing import PackedBatch, pack_items
from vitgraph.predict.targets import TargetCost
from vitgraph.records.sample_table import Sample
from vitgraph.records.tune_result import Measured
from vitgraph.tuning.advice import Advice
from vitgraph.tuning.describe import EXACT, EXACT_CALL, measured_answer
from vitgraph.tuning.objective import EAGER, TUNED

GOLDEN = (5**0.5 - 1) / 2
REPEAT_EVERY = 2
"""Eager is measured against itself in every so many-th turn."""

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


class ExactGraph(Series):
    """A graph of exactly the call's size on each path, replayed alone."""

    def __init__(self, manager: EncoderCudaGraphManager, paths: Sequence[str]) -> None:
        super().__init__(EXACT, manager.execute, manager)
        self._graphs, self._paths = manager, paths

    def keys(self, call: EncoderCall) -> dict[str, GraphKey]:
        """The graph of a call on each of its paths, whether it could be captured or not."""
        plan, keys = self._graphs.plan, {}
        axis_key = plan.axis_key(call.specs) or ()
        for path in self._paths:
            tokens = sum(spec.tokens_on(path) for spec in call.specs)
            if tokens:
                slots = plan.select_slots(path, tokens, sum(spec.segments for spec in call.specs))
                keys[path] = GraphKey(path, tokens, slots or 0, axis_key)
        return keys

    def meet(self, call: EncoderCall, inputs: EncoderInputs) -> None:
        """Plans the replays of the call that is timed next, and fills what is kept by size."""
        captured = {path: key for path, key in self.keys(call).items() if key in self._graphs.graphs}
        batches = [
            forced_batch(range(len(call.specs)), call.specs, self._paths, {path: key}) for path, key in captured.items()
        ]
        plans = [CallPlan.of([batch], call.specs, self._paths) for batch in batches]
        self.plans = list(zip(captured.values(), plans, strict=True))
        for _, plan in self.plans:
            self._graphs.load_planned(inputs, plan)

    def time(self, timer: CallTimer, inputs: EncoderInputs) -> CallTime | None:
        """The replays of all paths, each between two synchronisations; loading them is not timed."""
        total = 0.0
        for key, plan in self.plans:
            self._graphs.load_planned(inputs, plan)
            total += timer.time(self._graphs.graphs[key].graph.replay).wall_ms
        return CallTime(total, None) if self.plans else None

    def batches(self, call: EncoderCall) -> Sequence[PackedBatch]:
        return [batch for _, plan in self.plans for batch in plan.batches]


class ExactCall(Series):
    """The same as a whole call through the manager; what that adds is a share of short calls with one path only."""

    def __init__(self, exact: ExactGraph, is_short: Callable[[EncoderInputs], bool]) -> None:
        super().__init__(EXACT_CALL, exact.encode, exact.manager)
        self._exact, self._is_short = exact, is_short

    def time(self, timer: CallTimer, inputs: EncoderInputs) -> CallTime | None:
        plans = self._exact.plans
        if len(plans) != 1 or not self._is_short(inputs) or self.manager is None:
            return None
        return timer.time(partial(self.manager.execute_planned, inputs, plans[0][1]))

    def batches(self, call: EncoderCall) -> Sequence[PackedBatch]:
        return self._exact.batches(call)


class Verification:
    """Measures tuned settings and their baselines.

    Args:
        encoder: The encoder, on the device that the profile was measured on.
        rounds: Times that a short call is measured in each strategy; long ones are measured once.
        time_limit_s: For capturing and measuring: as many calls are chosen as are predicted to fit, and none is begun
            later.
    """

    def __init__(
        self,
        encoder: VisionEncoder,
        calls: Sequence[EncoderCall],
        advice: Advice,
        *,
        rounds: int = 2,
        seed: int = 0,
        time_limit_s: float = 240.0,
        progress: Progress | None = None,
    ) -> None:
        self.encoder, self.progress = encoder, progress or SilentProgress()
        self.workload, self.advice, self.tuned = calls, advice, advice.tuned
        self.rounds, self.seed, self.time_limit_s = rounds, seed, time_limit_s
        self.cost: TargetCost = advice.tuned.cost
        self.paths = tuple(encoder.get_encoder_cudagraph_config().paths)
        self.managers = {
            name: EncoderCudaGraphManager(encoder, plan, policy=policy, cost=self.cost)
            for name, (plan, policy) in advice.tuned.plans.items()
        }
        self.calls: list[EncoderCall] = []
        self.max_rel_l2: float | None = None
        self.is_wrong = False
        self.samples: list[Sample] = []
        self._made: tuple[EncoderCall, EncoderInputs] | None = None
        self._started = time.perf_counter()

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self._started

    def run(self, max_calls: int = 100, checkpoint: Callable[[], object] = lambda: None) -> Measured:
        """What was measured and what was left out, which the advice takes in.

        A stop by the user ends the measuring; what was measured until then is reported.

        Args:
            max_calls: Calls to measure at most, small and large ones in the workload's shares.
            checkpoint: Called now and then, when the advice has been brought up to date.
        """
        self.choose(max_calls)
        try:
            with torch.inference_mode():
                self.capture()
                self.measure(checkpoint)
            return self._report()
        finally:
            self.release()

    def _report(self) -> Measured:
        measured = measured_answer(self)
        self.advice.samples = list(self.samples)
        self.advice.take(measured)
        return measured

    # -- what to measure -----------------------------------------------------------------------------------------------

    def choose(self, most: int) -> None:
        """Takes as many calls as are predicted to be captured and measured in time; a few in any case."""
        spent_s = 0.0
        used: set[tuple[str, GraphKey]] = set()
        for call in representative(self.workload, self.seed):
            new = {(name, key) for name, manager in self.managers.items() for key in _keys(manager, call)} - used
            budgets = [key.token_budget for _, key in new] + [call.tokens]
            spent_s += float(self.cost.model.capture_ms(np.array(budgets)).sum()) / 1e3 + self._predicted_s(call)
            if len(self.calls) >= most or (len(self.calls) >= FEWEST_CALLS and spent_s > self.time_limit_s):
                break
            used |= new
            self.calls.append(call)
        self.exact = EncoderCudaGraphManager(self.encoder, self._exact_plan())
        self._exact = ExactGraph(self.exact, self.paths)
        self._inputs = CallInputs(self.encoder, self.calls, self.seed)
        encoder, eager_ms = self.encoder, self.cost.model.eager_ms
        series = [
            eager_series(encoder),
            *(graph_series(manager, name) for name, manager in self.managers.items()),
            self._exact,
            ExactCall(
                self._exact, lambda inputs: eager_ms(encoder.get_encoder_cudagraph_item_specs(inputs)) <= ROUNDS_MS
            ),
        ]
        self.experiment = Experiment(series, self.make, CallTimer(encoder.device), encoder.device)

    def _predicted_s(self, call: EncoderCall) -> float:
        """Time to measure a call in every strategy; the first eager run is not counted among its rounds."""
        eager = self.cost.model.eager_ms(call.specs)
        graphs = [self.graph_ms(manager, call.specs) for manager in self.managers.values()]
        rounds = self._rounds_of(eager)
        return (eager * (1 + rounds * (1 + 1 / REPEAT_EVERY)) + rounds * (sum(graphs) + 2 * min(graphs))) / 1e3

    def graph_ms(self, manager: EncoderCudaGraphManager, specs: Sequence[EncoderItemSpec]) -> float:
        """What a manager is predicted to take for a call."""
        return self.cost.predict_call(specs, manager.plan, manager.policy).graph_ms

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
            axes=self.tuned.plans[TUNED][0].axes,
            segment_free_paths=frozenset(facts.segment_free_paths),
        )

    # -- device --------------------------------------------------------------------------------------------------------

    def capture(self) -> None:
        """Captures the graphs that the calls meet, and of every plan the largest, which decides its memory."""
        expect_calls(self.encoder, self.managers.values(), self.calls)
        reserve_together([*self.managers.values(), self.exact])
        wanted = [(self.exact, {key for call in self.calls for key in self._exact.keys(call).values()})]
        for manager in self.managers.values():
            used = {key for call in self.calls for key in _keys(manager, call)}
            wanted.append((manager, used | set(manager.plan.graph_keys()[:1])))
        for manager, keys in wanted:
            self.progress.phase("capturing graphs", len(keys))
            manager.capture_some(keys, lambda done, total, key: self.progress.step())

    def release(self) -> None:
        """Releases all graphs."""
        for manager in (*self.managers.values(), self.exact):
            # After a device error even releasing fails, and that error is on its way already.
            with suppress(RuntimeError):
                manager.clear()

    def make(self, call: EncoderCall) -> EncoderInputs:
        """The inputs of a call, made once for all of its rounds."""
        if self._made is None or self._made[0] is not call:
            self._made = call, self._inputs.make(call)
        return self._made[1]

    def measure(self, checkpoint: Callable[[], object]) -> None:
        """Measures call by call, all rounds and strategies of one before the next."""
        self.progress.phase("measuring", len(self.calls))
        steps = len(self.calls) * self.rounds
        self.experiment.measure(
            self._schedule(checkpoint),
            steps,
            lambda timed: self.samples.extend(timed.samples()),
            control=Control([EAGER], REPEAT_EVERY),
        )

    def _schedule(self, checkpoint: Callable[[], object]) -> Iterator[tuple[EncoderCall, int]]:
        saved_s = self.elapsed_s
        for number, call in enumerate(self.calls):
            if number and self.elapsed_s > self.time_limit_s:
                return
            self._meet(call, is_checked=number < CHECKED_CALLS)
            for round_index in range(self._rounds_of(self.cost.model.eager_ms(call.specs))):
                yield call, round_index
            self.progress.step()
            if self.elapsed_s > saved_s + CHECKPOINT_S:
                self._report()
                checkpoint()
                saved_s = self.elapsed_s

    def _meet(self, call: EncoderCall, *, is_checked: bool) -> None:
        """Runs a call untimed: libraries choose kernels when they first meet a size, and host metadata is kept by size.

        Whoever came first would pay for the others.
        """
        inputs = self.make(call)
        expected = encode_eagerly(self.encoder, inputs)
        for name, manager in self.managers.items():
            plan = manager.plan_call(inputs)
            if len(plan.batches) == 1 and not (is_checked and name == TUNED):
                # One replay, or all of it eager as before: nothing is met for the first time on the device.
                manager.load_planned(inputs, plan)
                continue
            outputs = manager.execute(inputs)
            if is_checked and name == TUNED:
                distances = [relative_l2(*pair) for pair in zip(outputs, expected, strict=True)]
                self.max_rel_l2 = worst([self.max_rel_l2, *distances])
                limits = item_limits(self.encoder, inputs, expected, distances)
                self.is_wrong |= not all(one <= limit for one, limit in zip(distances, limits, strict=True))
        self._exact.meet(call, inputs)


def _keys(manager: EncoderCudaGraphManager, call: EncoderCall) -> set[GraphKey]:
    """The graphs that a manager will replay for a call."""
    batches = pack_items(call.specs, manager.plan, manager.policy, manager.cost)
    return {run.key for batch in batches for run in batch.runs.values() if run.key is not None}
