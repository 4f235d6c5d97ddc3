"""Measures a cost profile of one encoder on one device: replays, eager runs, whole calls, copies, captures, memory.

Everything is measured with the manager and the timer that the bench uses. The order is from small to large, so that a
run that is short of time has measured what gains live on, and says what it left out.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from vitgraph.graphs.manager import EncoderCudaGraphManager, forced_batch
from vitgraph.measure.environment import read_gpu_state, snapshot, validity_problems
from vitgraph.measure.experiment import without_collection
from vitgraph.measure.progress import Progress, SilentProgress
from vitgraph.models.encoder import VisionEncoder
from vitgraph.planning.budgets import BudgetPlan, GraphKey
from vitgraph.predict.cost_model import CostModel
from vitgraph.predict.doubt import host_problems, predicted_holdout
from vitgraph.predict.profile import CalibrationProfile, ProfileError, check_profile
from vitgraph.predict.targets import encoder_facts
from vitgraph.records.calibrate_result import CallPoint, CapturePoint, MemoryPoint, ReplayPoint
from vitgraph.records.sections import Encoder
from vitgraph.tuning.calibration_items import DEFAULT_SLOTS, CalibrationPlan, ItemCatalogue, SizedItem
from vitgraph.tuning.device_timing import PASSES, DeviceTiming, measure_holdout
from vitgraph.tuning.host_watch import Call, EagerSweeps, HostWatch, layer_timer

STAGES = (1024, 4096)
"""Budgets are captured in stages, each with a manager of its own, so that a stop after one leaves a usable profile."""

BATCH_ITEMS = (2, 4, 8, 16, 32, 64)
PARTIAL_FILLS = (2, 4)
EAGER_TOTALS = (512, 2048, 4096)
EAGER_ITEMS = (2, 4, 8, 16)
EAGER_FRAMES = (8, 32)
COPY_TOKENS = (256, 1024, 4096)
CALLS_EVERY, LARGEST_CALL = 3, 4096
MISSES_EVERY = 6
FEWEST_EAGER = 8
FEWEST_BUDGETS = 4
"""Eager calls, and budgets of each path, that are timed however late it is: a cost model is made of them."""

REPLAY_SHARE, EAGER_SHARE = 0.5, 0.75
"""Shares of the time limit by which the replays, and then the eager calls, stop; the rest is for the held-out calls."""

FURTHER_SWEEP = 0.4
"""Share of the usual time that sweeps beside the main one spend on an eager call: a slow host shows in few repeats."""

LAST_SWEEP_SHARE = 0.05
"""Share of the time limit that the held-out calls leave to a last sweep, where the host's eager times have moved."""


def calibrate(
    encoder: VisionEncoder,
    *,
    max_tokens: int,
    model: Mapping[str, Any],
    ran: Encoder | None = None,
    budgets: Sequence[int] | None = None,
    slots: Sequence[int] = DEFAULT_SLOTS,
    holdout_calls: int = 36,
    time_limit_s: float = 90.0,
    seed: int = 0,
    progress: Progress | None = None,
) -> CalibrationProfile:
    """Measures a profile.

    A stop by the user ends the measuring; what was measured until then is the profile, which says so, where it is
    enough for a cost model.

    Args:
        encoder: The encoder, on the device to measure.
        max_tokens: Most output tokens of a call.
        model: `name`, `row`, `weights` and `tower` of the profile.
        ran: What ran, for the record.
        budgets: Budgets to measure on every path; None takes a grid up to `max_tokens`.
        holdout_calls: Random calls to check the model with.
        time_limit_s: When to stop taking on more; what was left out is noted.

    Raises:
        CaptureError: The encoder cannot be captured on its device.
        ProfileError: The time was too short for a profile.
        KeyboardInterrupt: The user stopped it before there was enough.
    """
    facts, catalogue = encoder_facts(encoder.rule), ItemCatalogue(encoder.rule, max_tokens)
    profile = CalibrationProfile(
        **model,
        environment=snapshot(encoder.device).but(encoder=ran),
        encoder=facts,
        max_tokens=max_tokens,
        created_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )
    plan = CalibrationPlan.of(catalogue, facts, budgets, slots)
    run = _Calibration(encoder, profile, plan, time_limit_s, seed, progress or SilentProgress())
    before = read_gpu_state(encoder.device)
    with torch.inference_mode(), without_collection():
        try:
            run.measure(holdout_calls)
        except KeyboardInterrupt as stop:
            profile.stopped = "stopped by the user; the points until then are kept"
            profile.eager = run.sweeps.points()
            try:
                check_profile(profile)
            except ProfileError:
                raise stop from None
    if ran is not None:
        profile.environment = profile.environment.but(encoder=ran.but(**encoder.attention.facts()))
    profile.notes += validity_problems([before, read_gpu_state(encoder.device)])
    profile.holdout = predicted_holdout(CostModel(profile))
    profile.elapsed_s = run.elapsed_s
    return profile


class _Calibration:
    """One calibration in progress."""

    def __init__(
        self,
        encoder: VisionEncoder,
        profile: CalibrationProfile,
        plan: CalibrationPlan,
        time_limit_s: float,
        seed: int,
        progress: Progress,
    ) -> None:
        self.encoder, self.profile, self.plan = encoder, profile, plan
        self.facts, self.catalogue = plan.facts, plan.catalogue
        self.timing = DeviceTiming(encoder, seed)
        self.sweeps = EagerSweeps(self.timing.eager)
        self.host = HostWatch(layer_timer(encoder.device))
        self._traced: Call | None = None
        self._told: set[str] = set()
        self.seed = seed
        self.progress = progress
        self._time_limit_s = time_limit_s
        self._started = time.perf_counter()

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self._started

    def _is_late(self, share: float) -> bool:
        return self.elapsed_s > share * self._time_limit_s

    def _look(self) -> None:
        """A step, between which and the next the host is looked at."""
        self.host.look()
        self.progress.step()

    def _tell_of_host(self) -> list[str]:
        """Keeps how the host is, tells the user at once what is wrong with it, and returns all of that."""
        self.profile.host = self.host.check(self.sweeps.fastest_ms(self._traced))
        problems = host_problems(self.profile.host) | ({"moved": note} if (note := self.sweeps.note()) else {})
        for kind, text in problems.items():
            if kind not in self._told:
                self.progress.note(text)
            self._told.add(kind)
        return list(problems.values())

    def measure(self, holdout_calls: int) -> None:
        bounds = [0, *(bound for bound in STAGES if bound < self.profile.max_tokens), self.profile.max_tokens]
        for low, high in pairwise(bounds):
            stage = {path: [b for b in grid if low < b <= high] for path, grid in self.plan.budgets.items()}
            stage = {path: grid for path, grid in stage.items() if grid}
            if not stage:
                continue
            if self.profile.replays and self._is_late(REPLAY_SHARE):
                self.profile.notes.append(f"no replays above {low} tokens: the time was up")
                break
            is_first = not self.profile.replays
            self._measure_stage(stage)
            if is_first:
                self._sweep_early()
        calls = self._measure_eager()
        copied = {item.spec.output_tokens: item for item in map(self.catalogue.image, COPY_TOKENS) if item is not None}
        self.profile.copies = [self.timing.copies(item) for item in copied.values()]
        has_moved = self.sweeps.movement_ms() is not None
        self._tell_of_host()
        self.progress.phase("measuring calls that the fit does not see", holdout_calls * PASSES)
        measure_holdout(
            self.profile,
            self.timing,
            self.catalogue,
            calls=holdout_calls,
            seed=self.seed,
            is_late=lambda: self._is_late(1.0 - LAST_SWEEP_SHARE if has_moved else 1.0),
            is_slowed=self.host.is_slowed,
            tick=self.progress.step,
        )
        if has_moved:
            self._sweep_last()
        self.profile.eager = self.sweeps.points(calls)
        self.profile.notes += self._tell_of_host()

    # -- replays -------------------------------------------------------------------------------------------------------

    def _measure_stage(self, stage: Mapping[str, list[int]]) -> None:
        tiers = {(path, budget): self.plan.tiers(path, budget) for path, grid in stage.items() for budget in grid}
        graphs = BudgetPlan(
            path_budgets={path: tuple(grid) for path, grid in stage.items()},
            max_items=max(BATCH_ITEMS),
            max_frames=max((1, *self.plan.slots)),
            slot_tiers=tiers,
            axes=self.facts.axes,
            segment_free_paths=frozenset(self.facts.segment_free_paths),
        )
        manager = EncoderCudaGraphManager(self.encoder, graphs)
        self.progress.phase(
            f"capturing budgets up to {max(max(grid) for grid in stage.values())}", len(graphs.graph_keys())
        )
        try:
            manager.capture(lambda done, total, key: self.progress.step())
            self._note_captures(manager)
            self.progress.phase("timing replays", len(tiers))
            # By budget, so that a stop leaves every path with the small ones.
            for (path, budget), levels in sorted(tiers.items(), key=lambda tier: tier[0][1]):
                if self._is_late(REPLAY_SHARE) and self._has_enough_replays():
                    self.profile.notes.append(f"no replays of {budget} tokens and more were timed: the time was up")
                    break
                for axis_key in {key.axis_key for key in manager.graphs if key.path == path}:
                    self._measure_budget(manager, GraphKey(path, budget, levels[0], axis_key))
                self.progress.step()
            self._measure_calls(manager, graphs)
        finally:
            manager.clear()

    def _has_enough_replays(self) -> bool:
        """Whether every path has replays of so many budgets that a cost model can be made of them."""
        found: dict[str, set[int]] = {}
        for point in self.profile.replays:
            found.setdefault(point.path, set()).add(point.token_budget)
        return all(len(found.get(path, ())) >= FEWEST_BUDGETS for path in self.facts.path_minimums)

    def _note_captures(self, manager: EncoderCudaGraphManager) -> None:
        captured = list(manager.graphs.values())
        for graph in captured:
            key = graph.key
            self.profile.captures.append(
                CapturePoint(key.path, key.token_budget, key.segment_slots, graph.capture_ms, graph.buffer_bytes)
            )
        self.profile.memory.append(
            MemoryPoint(
                max_budget=captured[0].key.token_budget,
                graphs=len(captured),
                pool_bytes=manager.pool_bytes,
                first_pool_bytes=captured[0].pool_bytes,
                buffer_bytes=manager.buffer_bytes,
            )
        )
        for dropped in manager.dropped:
            self.profile.notes.append(f"budget {dropped.key.token_budget} was dropped: {dropped.reason}")

    def _measure_budget(self, manager: EncoderCudaGraphManager, key: GraphKey) -> None:
        """One budget: a full batch at every slot level; at some, other batches in the same graph."""
        levels = self.plan.tiers(key.path, key.token_budget)
        batches = [(levels[0], self.catalogue.fill(key.path, key.token_budget))]
        batches += [(level, batches[0][1]) for level in levels[1:]]
        if key.token_budget in self.plan.slot_budgets[key.path]:
            batches += [(levels[0], self.catalogue.fill(key.path, key.token_budget // part)) for part in PARTIAL_FILLS]
            batches += self._many_segments(key, levels)
        for slots, batch in batches:
            graph = GraphKey(key.path, key.token_budget, slots, key.axis_key)
            if not batch or graph not in manager.graphs or not self.timing.covers(graph, batch):
                continue
            timed = self.timing.replay(manager, graph, batch)
            specs = tuple(item.spec for item in batch)
            self.profile.replays.append(ReplayPoint(key.path, key.axis_key, key.token_budget, slots, specs, timed))

    def _many_segments(self, key: GraphKey, levels: Sequence[int]) -> list[tuple[int, list[SizedItem]]]:
        """Batches of several images, and videos, each in the fewest slots that hold them."""
        wanted = [self.catalogue.fill(key.path, key.token_budget, items=count) for count in BATCH_ITEMS]
        for segments in (8, 32):
            clip = self.catalogue.video(key.token_budget, segments)
            wanted.append([clip] if clip is not None else [])
        found = []
        for batch in wanted:
            segments = sum(item.spec.segments for item in batch)
            slots = next((level for level in levels if level >= segments), None)
            if batch and slots is not None and sum(item.spec.tokens_on(key.path) for item in batch) <= key.token_budget:
                found.append((slots, batch))
        return found

    # -- calls and eager -----------------------------------------------------------------------------------------------

    def _measure_calls(self, manager: EncoderCudaGraphManager, plan: BudgetPlan) -> None:
        """Whole calls beside their replays alone: one image, several images in a replay, and two replays."""
        if self.facts.is_multi_path:
            return
        usable = [(key, levels) for key, levels in plan.slot_tiers.items() if key[1] <= LARGEST_CALL]
        for (path, budget), levels in usable[::CALLS_EVERY]:
            if self.profile.calls and self._is_late(REPLAY_SHARE):
                return
            batches = [(levels[0], self.catalogue.fill(path, budget))]
            if len(levels) > 1:
                batches += self._many_segments(GraphKey(path, budget, levels[0]), levels)
            for slots, batch in batches:
                keys = [k for k in manager.graphs if (k.path, k.token_budget, k.segment_slots) == (path, budget, slots)]
                key = next((key for key in keys if batch and self.timing.covers(key, batch)), None)
                if key is not None:
                    alone = self.timing.replay(manager, key, batch).ms
                    for replays in (1, 2) if len(batch) == 1 else (1,):
                        self.profile.calls.append(self._call(manager, key, batch, replays, alone * replays))

    def _call(
        self, manager: EncoderCudaGraphManager, key: GraphKey, batch: Sequence[SizedItem], replays: int, parts_ms: float
    ) -> CallPoint:
        """A call of `replays` equal batches, each replayed on the same graph."""
        items = list(batch) * replays
        specs = [item.spec for item in items]
        size = len(batch)
        groups = [
            forced_batch(range(start, start + size), specs, self.timing.paths, {key.path: key})
            for start in range(0, len(items), size)
        ]
        return CallPoint(tuple(specs), replays, 0, self.timing.call(manager, groups, items), parts_ms)

    def _eager_calls(self, budgets: Sequence[int], largest: int) -> list[Call]:
        """One image over the budgets; several images, and videos, up to the largest."""
        path = next(iter(self.facts.path_minimums))
        calls = [self.catalogue.fill(path, budget) for budget in budgets]
        for total in (total for total in EAGER_TOTALS if total <= largest):
            calls += [self.catalogue.fill(path, total, items=count) for count in EAGER_ITEMS]
            for segments in EAGER_FRAMES:
                clip = self.catalogue.video(total, segments)
                calls.append([clip] if clip is not None else [])
        return list({tuple(item.geometry for item in call): call for call in calls if call}.values())

    def _sweep_early(self) -> None:
        """Short eager calls, long before the rest of them: the host may be slower or faster then."""
        budgets = self.plan.budgets[next(iter(self.facts.path_minimums))]
        calls = self._eager_calls(budgets, max(budgets, default=0))
        self.progress.phase("timing short eager calls, which are timed again later")
        self.sweeps.sweep(
            "early",
            sorted(calls, key=lambda call: sum(item.spec.output_tokens for item in call)),
            is_late=lambda: self._is_late(REPLAY_SHARE),
            tick=self._look,
            share=FURTHER_SWEEP,
            ends_device_bound=True,
        )
        self.profile.eager = self.sweeps.points(calls)
        self._traced = next(iter(self.sweeps.host_bound()), None)
        # What runs in compiled blocks is launched in another way, of which there is no reference.
        if self._traced is not None and not self.profile.is_compiled:
            self.host.take_trace(self.timing.trace(self._traced))
        self._tell_of_host()

    def _measure_eager(self) -> list[Call]:
        """Eager runs over the measured sizes, some of them through the manager too; returns the calls."""
        path = next(iter(self.facts.path_minimums))
        budgets = sorted({point.token_budget for point in self.profile.replays if point.path == path})
        calls = self._eager_calls(budgets, max(point.token_budget for point in self.profile.replays))
        self.progress.phase("timing eager calls", len(calls))
        self.sweeps.sweep(
            "main",
            calls,
            is_late=lambda: len(self.sweeps) >= FEWEST_EAGER and self._is_late(EAGER_SHARE),
            tick=self._look,
        )
        self.profile.eager = self.sweeps.points(calls)
        if left_out := len(calls) - len(self.profile.eager):
            self.profile.notes.append(f"the time was up: eager calls left out: {left_out}")
        manager = EncoderCudaGraphManager(self.encoder, BudgetPlan(dict.fromkeys(self.timing.paths, ()), 1, 0, {}))
        for call in calls[::MISSES_EVERY]:
            if any(not point.replays for point in self.profile.calls) and self._is_late(EAGER_SHARE):
                break
            specs = [item.spec for item in call]
            missed = forced_batch(range(len(call)), specs, self.timing.paths, {})
            through, alone = self.timing.beside_eager(manager, call, [missed])
            self.profile.calls.append(CallPoint(tuple(specs), 0, len(call), through, alone.ms))
            self.sweeps.add("beside misses", call, alone)
        return calls

    def _sweep_last(self) -> None:
        """Once more, so that a call is likely to have met the host undisturbed at least once."""
        calls = self.sweeps.host_bound()
        self.progress.phase("timing short eager calls again, since the host's times have moved", len(calls))
        self.sweeps.sweep("last", calls, is_late=lambda: self._is_late(1.0), tick=self._look, share=FURTHER_SWEEP)
