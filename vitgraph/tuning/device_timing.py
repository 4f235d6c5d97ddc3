"""Times replays, eager runs and whole calls of chosen batches on one device, with the bench's timer and manager; and
measures random calls that no fit sees, on graphs whose budgets were not calibrated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from operator import attrgetter

import numpy as np
import torch

from vitgraph.graphs.manager import CallPlan, EncoderCudaGraphManager, forced_batch
from vitgraph.measure.series import CallTimer, encode_eagerly
from vitgraph.measure.trace import BusyTime, busy_time
from vitgraph.models.base import EncoderInputs
from vitgraph.models.encoder import VisionEncoder
from vitgraph.planning.budgets import BudgetPlan, BudgetSettings, GraphKey
from vitgraph.planning.packing import PackedBatch
from vitgraph.predict.profile import CalibrationProfile
from vitgraph.predict.targets import TARGETS, VITGRAPH, make_plan
from vitgraph.records.calibrate_result import CopyPoint, EncoderFacts, HoldoutPoint, PlannedGraphs, Timing
from vitgraph.tuning.calibration_items import ItemCatalogue, SizedItem

SECONDS_A_POINT = 0.25
FEWEST_REPEATS, MOST_REPEATS = 3, 7
LONG_S = 0.15
"""From this time on a measurement is repeated once only."""

BUILT = 1.3
"""A long first run that took this multiple of the second built a kernel, and does not count."""

TRACED_CALLS = 3


class DeviceTiming:
    """Times batches of one encoder."""

    def __init__(self, encoder: VisionEncoder, seed: int) -> None:
        self.encoder = encoder
        self.paths = tuple(encoder.get_encoder_cudagraph_config().paths)
        self._seed = seed
        self._timer = CallTimer(encoder.device)
        self._pool: dict[str, torch.Tensor] = {}

    def inputs(self, batch: Sequence[SizedItem]) -> EncoderInputs:
        """The call's inputs with random pixels; the pool grows to the largest call."""
        needed: dict[str, int] = {}
        for item in batch:
            for name, rows in self.encoder.rule.pixel_rows(item.geometry).items():
                needed[name] = needed.get(name, 0) + rows
        if any(name not in self._pool or rows > len(self._pool[name]) for name, rows in needed.items()):
            known = {name: len(rows) for name, rows in self._pool.items()}
            grown = {name: max(needed.get(name, 0), known.get(name, 0)) for name in {*needed, *known}}
            self._pool = self.encoder.random_pixels(grown, self._seed)
        return self.encoder.make_inputs([item.geometry for item in batch], self._pool)

    def repeat(self, *calls: Callable[[], object], share: float = 1.0) -> list[Timing]:
        """Times calls in turn, as often as their time allows.

        The first run of each is not counted, except where it is long: there the noise of a first run is a small share,
        and one more run is enough.

        Args:
            share: Share of `SECONDS_A_POINT` to spend; the fewest repeats are made in any case.
        """

        def run_all() -> list[float]:
            return [self._timer.time(call).wall_ms for call in calls]

        first = run_all()
        rows = [first, run_all()] if sum(first) > LONG_S * 1e3 * len(calls) else []
        # A first run may also be long because a kernel was built in it, which says nothing of the call.
        if rows and sum(first) > BUILT * sum(rows[1]):
            rows = [rows[1], run_all()]
        mean_s = sum(rows[-1] if rows else first) / len(calls) / 1e3
        if mean_s <= LONG_S:
            repeats = max(FEWEST_REPEATS, min(MOST_REPEATS, int(share * SECONDS_A_POINT / max(mean_s, 1e-6))))
            rows = [run_all() for _ in range(repeats)]
        low, middle, high = np.percentile(np.array(rows), (10, 50, 90), axis=0)
        return [Timing(float(m), float(a), float(b), len(rows)) for a, m, b in zip(low, middle, high, strict=True)]

    def replay(self, manager: EncoderCudaGraphManager, key: GraphKey, batch: Sequence[SizedItem]) -> Timing:
        """One graph replayed alone, with the batch in its buffers."""
        forced = forced_batch(range(len(batch)), [item.spec for item in batch], self.paths, {key.path: key})
        manager.execute_planned(self.inputs(batch), self._plan([forced], batch))
        return self.repeat(manager.graphs[key].graph.replay)[0]

    def call(
        self, manager: EncoderCudaGraphManager, batches: Sequence[PackedBatch], items: Sequence[SizedItem]
    ) -> Timing:
        """A whole call through the manager, packed in a given way."""
        inputs, plan = self.inputs(items), self._plan(batches, items)
        return self.repeat(lambda: manager.execute_planned(inputs, plan))[0]

    def eager(self, items: Sequence[SizedItem], share: float = 1.0) -> Timing:
        """A call run eagerly as a whole, timed in a share of the usual time."""
        inputs = self.inputs(items)
        return self.repeat(lambda: encode_eagerly(self.encoder, inputs), share=share)[0]

    def beside_eager(
        self,
        manager: EncoderCudaGraphManager,
        items: Sequence[SizedItem],
        batches: Sequence[PackedBatch] | None = None,
        share: float = 1.0,
    ) -> tuple[Timing, Timing]:
        """A call through the manager, packed as given or else by the manager, and eagerly, in turn."""
        inputs = self.inputs(items)
        plan = manager.plan_call(inputs) if batches is None else self._plan(batches, items)
        graph, eager = self.repeat(
            lambda: manager.execute_planned(inputs, plan), lambda: encode_eagerly(self.encoder, inputs), share=share
        )
        return graph, eager

    def _plan(self, batches: Sequence[PackedBatch], items: Sequence[SizedItem]) -> CallPlan:
        return CallPlan.of(list(batches), [item.spec for item in items], self.paths)

    def trace(self, items: Sequence[SizedItem]) -> BusyTime | None:
        """What a profiler trace says of an eager call; None where there is no GPU to trace."""
        inputs = self.inputs(items)
        return busy_time(lambda: encode_eagerly(self.encoder, inputs), self.encoder.device, TRACED_CALLS)

    def copies(self, item: SizedItem) -> CopyPoint:
        """Moving one item's pixels in, clearing their place, and cloning its output rows."""
        tokens = item.spec.output_tokens
        pixels = self.inputs([item]).pixels
        places = {name: torch.empty_like(rows) for name, rows in pixels.items()}
        width = self.encoder.get_encoder_cudagraph_config().output_width
        rows = torch.zeros(tokens, width, dtype=self.encoder.dtype, device=self.encoder.device)

        def copy_in() -> None:
            for name, source in pixels.items():
                places[name].copy_(source)

        def clear() -> None:
            for place in places.values():
                place.zero_()

        found = self.repeat(copy_in, clear, rows.clone)
        return CopyPoint(tokens, *(time.ms for time in found))

    def covers(self, key: GraphKey, batch: Sequence[SizedItem]) -> bool:
        """Whether the graph's capture-axis values are enough for every item."""
        axes = self.encoder.get_encoder_cudagraph_config().axes
        return all(
            need <= have
            for item in batch
            for need, have in zip(chain(*(item.spec.axis_sizes[axis.name] for axis in axes)), key.axis_key, strict=True)
        )


HOLDOUT_BUDGETS = 8
LARGEST_BUDGET = 4096
LARGEST_ITEM = 3000
MOST_ITEMS = 4
VIDEO_FRAMES = 32
ITEM_COUNTS = (1, 1, 2, 3, 4)
VIDEO_EVERY = 8
PACKING = "greedy"
HOLDOUT_SHARE = 0.3
"""Of the usual time, spent on each call in each mode and pass: many calls tell more than many repeats."""

PASSES, MOST_PASSES = 2, 10
"""Times that all calls are gone through, and that those are which a slowed host has met every time: what something else
does to a call is no error of the model, whose own eager times are the fastest of several sweeps too."""

FEWEST_CALLS = 6
"""Calls that are measured however late it is: a model without a known error is of no use."""


def measure_holdout(
    profile: CalibrationProfile,
    timing: DeviceTiming,
    catalogue: ItemCatalogue,
    *,
    calls: int,
    seed: int,
    is_late: Callable[[], bool],
    is_slowed: Callable[[], bool],
    tick: Callable[[], None],
) -> None:
    """Captures random budgets, and measures random calls in graph and eager mode; keeps the fastest pass of each.

    Args:
        profile: Takes the calls as they are measured, and the graphs that they meet.
    """
    if calls == 0:
        return
    rng = np.random.default_rng(seed)
    plan = _random_plan(catalogue, profile.encoder, rng)
    profile.holdout_plans = [PlannedGraphs.of(plan)]
    manager = EncoderCudaGraphManager(timing.encoder, plan)
    try:
        manager.capture()
        drawn = [_random_call(catalogue, rng, number) for number in range(calls)]
        slowed = dict(enumerate(drawn))
        for passed in range(MOST_PASSES):
            for number, items in list(enumerate(drawn) if passed < PASSES else slowed.items()):
                if is_late() and (passed or number >= FEWEST_CALLS):
                    return
                was_slowed = is_slowed()
                graph, eager = timing.beside_eager(manager, items, share=HOLDOUT_SHARE)
                if not (was_slowed or is_slowed()):
                    slowed.pop(number, None)
                if passed:
                    before = profile.holdout[number]
                    graph, eager = (
                        min(pair, key=attrgetter("ms")) for pair in ((before.graph, graph), (before.eager, eager))
                    )
                point = HoldoutPoint(tuple(item.spec for item in items), 0, PACKING, graph, eager)
                profile.holdout[number : number + 1] = [point]
                if passed < PASSES:
                    tick()
    finally:
        manager.clear()


def _random_plan(catalogue: ItemCatalogue, facts: EncoderFacts, rng: np.random.Generator) -> BudgetPlan:
    low = max(min(facts.path_minimums.values()), catalogue.min_tokens)
    high = min(LARGEST_BUDGET, catalogue.max_tokens)
    budgets = set()
    for place in rng.uniform(np.log(low), np.log(high), size=HOLDOUT_BUDGETS):
        image = catalogue.image(int(np.exp(place)) + 1)
        size = image.spec.output_tokens if image is not None else low
        # Where images have few sizes, budgets are filled by several of them.
        budgets.add(max(low, size * max(1, int(np.exp(place)) // size)))
    frames = min(VIDEO_FRAMES, facts.max_frames_per_video) if catalogue.videos else 0
    ordered = tuple(sorted(budgets))
    settings = BudgetSettings(ordered, min(MOST_ITEMS, ordered[0]), frames, PACKING)
    return make_plan(TARGETS[VITGRAPH], facts, settings)


def _random_call(catalogue: ItemCatalogue, rng: np.random.Generator, number: int) -> list[SizedItem]:
    high = min(LARGEST_ITEM, catalogue.max_tokens)
    if catalogue.videos and number % VIDEO_EVERY == VIDEO_EVERY - 1:
        fitting = [video for video in catalogue.videos if video.spec.output_tokens <= high]
        return [fitting[int(rng.integers(len(fitting)))]] if fitting else [catalogue.images[0]]
    items: list[SizedItem] = []
    room = catalogue.max_tokens
    for _ in range(int(rng.choice(ITEM_COUNTS))):
        tokens = int(np.exp(rng.uniform(np.log(catalogue.min_tokens), np.log(high)))) + 1
        image = catalogue.image(min(tokens, room))
        if image is not None:
            items.append(image)
            room -= image.spec.output_tokens
    return items or [catalogue.images[0]]
