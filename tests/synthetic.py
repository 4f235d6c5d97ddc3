"""A machine whose times are formulas, and the calibration profile that measuring it would give. Nothing is measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from vitgraph.planning.budgets import (
    DEFAULT_PATH,
    IMAGE,
    VIDEO,
    BudgetPlan,
    BudgetSettings,
    EncoderItemSpec,
    plan_budgets,
)
from vitgraph.planning.packing import pack_items
from vitgraph.predict.cost_model import CostModel
from vitgraph.predict.profile import CalibrationProfile
from vitgraph.predict.targets import TARGETS, VITGRAPH, TargetCost
from vitgraph.records.calibrate_result import (
    CallPoint,
    CapturePoint,
    CopyPoint,
    EagerPoint,
    EncoderFacts,
    HoldoutPoint,
    MemoryPoint,
    PlannedGraphs,
    ReplayPoint,
    Timing,
)
from vitgraph.records.sections import Encoder, Environment

BUDGETS = (64, 96, 128, 196, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384)
SLOT_BUDGETS = (256, 1024, 4096)
SLOTS = (8, 64, 256)


def image(tokens: int) -> EncoderItemSpec:
    """An image of that many tokens, four patches each."""
    return EncoderItemSpec(IMAGE, 4 * tokens, tokens)


def video(frames: int, tokens_per_frame: int) -> EncoderItemSpec:
    tokens = frames * tokens_per_frame
    return EncoderItemSpec(VIDEO, 4 * tokens, tokens, frames)


@dataclass(frozen=True)
class Machine:
    """Times in milliseconds of an encoder that obeys formulas.

    Attributes:
        floor, per_token, per_pair: A replay of budget B with one image of t tokens takes
            floor + per_token * B + per_pair * t**2.
        per_slot: Cost of an empty segment slot.
        launch: Host time of an eager run.
        call, replay_overhead: What the manager adds to a call and to each replay.
        padded: Replaces the cost of the padded rows, as a function of the budget.
    """

    floor: float = 1.4
    per_token: float = 0.0115
    per_pair: float = 1.8e-6
    per_slot: float = 0.002
    launch: float = 18.0
    call: float = 0.2
    replay_overhead: float = 0.05
    padded: Callable[[float], float] | None = field(default=None)

    def replay(self, budget: int, slots: int, items: Sequence[EncoderItemSpec]) -> float:
        rows = self.padded(budget) if self.padded else self.floor + self.per_token * budget
        pairs = sum(item.output_tokens**2 / item.segments for item in items)
        return rows + self.per_pair * pairs + self.per_slot * (slots - sum(item.segments for item in items))

    def device(self, items: Sequence[EncoderItemSpec]) -> float:
        tokens, segments = sum(i.output_tokens for i in items), sum(i.segments for i in items)
        return self.replay(tokens, segments, items)

    def eager(self, items: Sequence[EncoderItemSpec]) -> float:
        return max(self.launch, self.device(items))

    def graph_call(self, replays: Sequence[tuple[int, int, Sequence[EncoderItemSpec]]]) -> float:
        """A call of replays only: (budget, slots, items) each."""
        return self.call + sum(self.replay_overhead + self.replay(*replay) for replay in replays)


def timing(ms: float) -> Timing:
    return Timing(ms, ms, ms, 1)


def synthetic_profile(
    machine: Machine | None = None, *, budgets: Sequence[int] = BUDGETS, noise: float = 0.0, seed: int = 0
) -> CalibrationProfile:
    """What `calibrate` would write for the machine."""
    machine = machine or Machine()
    rng = np.random.default_rng(seed)

    def measured(ms: float) -> Timing:
        return timing(ms * float(np.exp(rng.normal(0.0, noise))) if noise else ms)

    def replay(budget: int, slots: int, items: Sequence[EncoderItemSpec]) -> ReplayPoint:
        time = measured(machine.replay(budget, slots, items))
        return ReplayPoint(DEFAULT_PATH, (), budget, slots, tuple(items), time)

    replays = [replay(budget, 1, [image(budget)]) for budget in budgets]
    for budget in (b for b in SLOT_BUDGETS if b in budgets):
        replays += [replay(budget, slots, [image(budget)]) for slots in SLOTS]
        replays += [replay(budget, 8, [image(budget // n)] * n) for n in (1, 2, 4, 8)]
        replays += [replay(budget, 1, [image(budget // part)]) for part in (2, 4)]
    calls = [[image(tokens)] for tokens in budgets]
    calls += [[image(tokens // n)] * n for tokens in budgets if tokens >= 256 for n in (2, 4)]
    pieces = [(call, [(sum(i.output_tokens for i in call), len(call), call)]) for call in calls]
    pieces += [(call + call, [(call[0].output_tokens, 1, call)] * 2) for call in calls[: len(budgets)]]
    plan = plan_of((100, 300, 900, 2500), 4)
    holdout = [_held_out(machine, plan, rng, measured) for _ in range(24)]
    return CalibrationProfile(
        name="synthetic",
        row="qwen3_vl",
        environment=Environment(
            device="synthetic device",
            device_type="cuda",
            encoder=Encoder(dtype="none", attn_backend="formulas"),
        ),
        encoder=EncoderFacts({DEFAULT_PATH: min(budgets)}, (), (IMAGE, VIDEO), 1, 384),
        max_tokens=max(budgets),
        replays=replays,
        eager=[EagerPoint(tuple(call), measured(machine.eager(call))) for call in calls],
        calls=[
            CallPoint(
                tuple(call), len(parts), 0, timing(machine.graph_call(parts)), sum(machine.replay(*p) for p in parts)
            )
            for call, parts in pieces
        ],
        copies=[CopyPoint(tokens, 1e-5 * tokens, 5e-6 * tokens, 1e-5 * tokens) for tokens in (256, 1024, 4096)],
        captures=[CapturePoint(DEFAULT_PATH, budget, 1, 60.0 + 0.02 * budget, 40_000 * budget) for budget in budgets],
        memory=[
            MemoryPoint(top, 10, 30_000 * top + 9 * 2**20, 30_000 * top, 40_000 * top)
            for top in (budgets[len(budgets) // 2], budgets[-1])
        ],
        holdout=holdout,
        holdout_plans=[PlannedGraphs.of(plan)],
        notes=["made of formulas for tests; nothing here was measured"],
        is_synthetic=True,
        created_at="2026-01-01T00:00:00+00:00",
    )


def two_path_cost(launch: float) -> TargetCost:
    """Predicted times of a model of the paths `global` and `local`, each of which is the synthetic machine."""
    profile = synthetic_profile(Machine(launch=launch))
    paths = ("global", "local")
    eager = [
        replace(point, items=tuple(replace(s, path_output_tokens={"global": s.output_tokens}) for s in point.items))
        for point in profile.eager
    ]
    return TargetCost(
        CostModel(
            profile.but(
                encoder=replace(profile.encoder, path_minimums=dict.fromkeys(paths, 64)),
                replays=[replace(point, path=path) for path in paths for point in profile.replays],
                eager=eager,
                holdout=[],
                holdout_plans=[],
                calls=[],
            )
        ),
        TARGETS[VITGRAPH],
    )


def _held_out(
    machine: Machine, plan: BudgetPlan, rng: np.random.Generator, measured: Callable[[float], Timing]
) -> HoldoutPoint:
    """A random call that fits its graphs, and what the machine takes for it."""
    items = [image(int(tokens)) for tokens in rng.integers(64, 600, size=int(rng.integers(1, 5)))]
    replays = []
    for batch in pack_items(items, plan, "greedy"):
        key = batch.runs[DEFAULT_PATH].key
        assert key is not None
        replays.append((key.token_budget, key.segment_slots, [items[index] for index in batch.items]))
    return HoldoutPoint(
        tuple(items), 0, "greedy", measured(machine.graph_call(replays)), measured(machine.eager(items))
    )


def plan_of(budgets: Sequence[int], max_items: int = 1, max_frames: int = 0) -> BudgetPlan:
    return plan_budgets(BudgetSettings(tuple(budgets), max_items, max_frames))


def with_facts(profile: CalibrationProfile, facts: EncoderFacts) -> CalibrationProfile:
    """The same machine under an encoder of other paths, axes and limits; each path replays as the only one did."""
    if facts.path_minimums.keys() != profile.encoder.path_minimums.keys():
        replays = [
            replace(point, path=path, items=tuple(_on_path(item, path) for item in point.items))
            for path in facts.path_minimums
            for point in profile.replays
        ]
        some_path = next(iter(facts.path_minimums))
        eager = [replace(p, items=tuple(_on_path(item, some_path) for item in p.items)) for p in profile.eager]
        profile = profile.but(replays=replays, eager=eager)
    return profile.but(encoder=facts, holdout=[])


def _on_path(item: EncoderItemSpec, path: str) -> EncoderItemSpec:
    return replace(item, path_output_tokens={path: item.output_tokens})
