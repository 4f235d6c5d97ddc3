"""Measures random calls that no fit sees, on graphs whose budgets were not calibrated."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

import numpy as np

from vitgraph.graphs.manager import EncoderCudaGraphManager
from vitgraph.planning.budgets import BudgetPlan, BudgetSettings
from vitgraph.predict.profile import CalibrationProfile
from vitgraph.predict.targets import TARGETS, VITGRAPH, make_plan
from vitgraph.records.calibrate_result import EncoderFacts, HoldoutPoint, PlannedGraphs
from vitgraph.tuning.calibration_items import ItemCatalogue, SizedItem
from vitgraph.tuning.device_timing import DeviceTiming

BUDGETS = 8
LARGEST_BUDGET = 4096
LARGEST_ITEM = 3000
MOST_ITEMS = 4
VIDEO_FRAMES = 32
ITEM_COUNTS = (1, 1, 2, 3, 4)
VIDEO_EVERY = 8
PACKING = "greedy"
SHARE = 0.3
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
                graph, eager = timing.beside_eager(manager, items, share=SHARE)
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
    for place in rng.uniform(np.log(low), np.log(high), size=BUDGETS):
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
