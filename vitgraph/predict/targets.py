"""Whose manager the settings are for: what vitgraph's and vLLM's managers cost, hold in memory and can express."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from vitgraph.planning.budgets import BudgetPlan, BudgetSettings, EncoderItemSpec, plan_budgets, resolve_budget_settings
from vitgraph.planning.graph_tables import ITEMS, TOKENS, FloatArray, IntArray
from vitgraph.planning.packing import OPTIMAL, PackedBatch, pack_items
from vitgraph.predict.cost_model import CostModel, item_features
from vitgraph.predict.fitting import nonnegative_least_squares, nonnegative_line
from vitgraph.predict.profile import CalibrationProfile, find_profile
from vitgraph.records.calibrate_result import EncoderFacts

if TYPE_CHECKING:
    from vitgraph.models.geometry import GeometryRule
    from vitgraph.models.registry import ModelSource

VITGRAPH, VLLM = "vitgraph", "vllm"

SEED_BUDGETS = (512, 1024, 1536, 2048, 2560, 3072, 3584, 4096, 4864)
SEED_ITEMS = 8
"""The nine budgets and eight items that vLLM's documentation measures with, a baseline that people paste:
https://github.com/vllm-project/vllm/blob/main/docs/design/cuda_graphs_multimodal.md"""

VLLM_CALL_MS = 0.30
VLLM_REPLAY_MS = 0.38
"""What vLLM 0.33's manager spends outside a call's replays: once a call, and for each replay. Measured on one H200 with
that manager around Qwen3-VL-30B-A3B's tower: 0.68 ms for a call of one replay, 1.45 ms for one of three. It is host
work, so that it does not come with the profile, and results that use it say so."""

VLLM_OVERHEAD_SOURCE = (
    f"vLLM 0.33's manager: {VLLM_CALL_MS:g} ms a call and {VLLM_REPLAY_MS:g} ms a replay, measured on one H200 host; "
    "copies and clears from the profile"
)


DOUBT = 0.01
"""Share by which replays must be predicted faster than eager, where either could be taken: a margin against errors of
prediction that was chosen, not measured."""


@dataclass(frozen=True, slots=True)
class Target:
    """What a manager can express.

    Attributes:
        name: `vitgraph` or `vllm`.
        policies: Packing policies that it has, the simplest first.
        has_slot_tiers: A budget is captured at several segment-slot counts.
        shares_buffers: All budgets share one set of buffers.
        joins_misses: All misses of a call run in one eager call, instead of one a batch.
    """

    name: str
    policies: tuple[str, ...]
    has_slot_tiers: bool
    shares_buffers: bool
    joins_misses: bool


TARGETS = {
    VITGRAPH: Target(VITGRAPH, ("greedy", "greedy-defer", "exact", OPTIMAL), True, True, True),
    VLLM: Target(VLLM, ("greedy-defer",), False, False, False),
}


def encoder_facts(rule: GeometryRule, items: Sequence[EncoderItemSpec] = ()) -> EncoderFacts:
    """What planning needs to know of a rule's encoder, with no more keys of its capture axes than some items need."""
    config = rule.graph_config()
    return EncoderFacts(
        path_minimums={path: policy.min_token_budget for path, policy in config.paths.items()},
        segment_free_paths=tuple(path for path, policy in config.paths.items() if not policy.has_segments),
        modalities=config.modalities,
        min_tokens_per_segment=config.min_tokens_per_segment,
        max_frames_per_video=config.max_frames_per_video,
        axes=tuple(axis.for_items(items) for axis in config.axes) if items else config.axes,
    )


def make_plan(target: Target, facts: EncoderFacts, settings: BudgetSettings) -> BudgetPlan:
    """The graphs that a target's manager captures for some settings.

    Raises:
        BudgetError: Items above the smallest budget.
    """
    plan = plan_budgets(
        settings,
        path_minimums=facts.path_minimums if facts.is_multi_path else None,
        min_tokens_per_segment=facts.min_tokens_per_segment,
        axes=facts.axes,
        segment_free_paths=frozenset(facts.segment_free_paths),
    )
    slots = plan.max_segments
    if target.has_slot_tiers or slots is None:
        return plan
    with_segments = {key: (slots,) for key in plan.slot_tiers if key[0] not in plan.segment_free_paths}
    return replace(plan, slot_tiers={**plan.slot_tiers, **with_segments})


def automatic_settings(target: Target, facts: EncoderFacts, max_call_tokens: int, has_videos: bool) -> BudgetSettings:
    """What the manager does when nothing is set: doubling budgets, as many items as fit."""
    resolved = resolve_budget_settings(
        (min(facts.path_minimums.values()), max_call_tokens),
        video_limit_per_prompt=int(has_videos),
        max_frames_per_video=facts.max_frames_per_video,
    )
    return replace(resolved, packing=target.policies[0])


def seed_settings(target: Target, facts: EncoderFacts, has_videos: bool) -> BudgetSettings:
    """The nine budgets of vLLM's documentation; frames as that manager would set them."""
    frames = SEED_ITEMS * facts.max_frames_per_video if has_videos else 0
    return BudgetSettings(SEED_BUDGETS, SEED_ITEMS, frames, target.policies[0])


@dataclass(frozen=True, slots=True)
class ManagerOverheads:
    """What a manager adds to replays and eager runs, in milliseconds.

    Attributes:
        call_ms: Once a call that has a replay.
        replay_ms: For each replay.
        item_ms: For each replayed item.
        token_ms: For each real output row of a replay: copies in and out.
        budget_token_ms: For each row of a replayed budget: clearing.
        miss_ms: Once a call that is eager as a whole.
    """

    call_ms: float = 0.0
    replay_ms: float = 0.0
    item_ms: float = 0.0
    token_ms: float = 0.0
    budget_token_ms: float = 0.0
    miss_ms: float = 0.0


def fit_overheads(target: Target, profile: CalibrationProfile) -> ManagerOverheads:
    """Overheads of a target: vitgraph's from the profile's calls, vLLM's as measured with its manager."""
    if target.name == VLLM:
        tokens = [point.tokens for point in profile.copies]
        copy_in, clear, clone_out = (
            float(nonnegative_line(tokens, [getattr(point, name) for point in profile.copies])[1])
            for name in ("copy_in_ms", "clear_ms", "clone_out_ms")
        )
        return ManagerOverheads(
            call_ms=VLLM_CALL_MS,
            replay_ms=VLLM_REPLAY_MS,
            token_ms=2 * copy_in + clone_out,
            budget_token_ms=clear,
            miss_ms=VLLM_CALL_MS,
        )
    hits = [point for point in profile.calls if point.replays and not point.misses]
    features = [[1.0, point.replays, len(point.items), sum(s.output_tokens for s in point.items)] for point in hits]
    added = np.array([point.time.ms - point.parts_ms for point in hits])
    # A difference of two times is as uncertain as they are: those of long calls say little of what a call adds.
    weights = np.array([1.0 / point.parts_ms for point in hits])
    call, each_replay, item, token = nonnegative_least_squares(np.array(features).reshape(-1, 4), added, weights)
    misses = [point.time.ms - point.parts_ms for point in profile.calls if not point.replays]
    miss = max(0.0, float(np.median(misses))) if misses else 0.0
    return ManagerOverheads(float(call), float(each_replay), float(item), float(token), 0.0, miss)


@dataclass(frozen=True, slots=True)
class CallPrediction:
    """One call's predicted latency.

    Attributes:
        graph_ms: Through the manager.
        eager_ms: Run eagerly as a whole.
        batches: How it is packed.
        replay_ms: For each batch, its replays; None where all of it is eager.
    """

    graph_ms: float
    eager_ms: float
    batches: list[PackedBatch]
    replay_ms: list[float | None]


class TargetCost:
    """A cost model with a manager around it; gives `optimal` packing its costs.

    Args:
        doubt: Share by which a packing with replays must be predicted faster than eager for `optimal` to take it:
            predictions have errors, and a close call that is lost makes a request slower than it needs to be.
    """

    def __init__(self, model: CostModel, target: Target, doubt: float = 0.0) -> None:
        self.model = model
        self.target = target
        self.doubt = doubt
        self.overheads = fit_overheads(target, model.profile)

    # -- PackingCost ---------------------------------------------------------------------------------------------------

    def item_features(self, specs: Sequence[EncoderItemSpec], path: str) -> FloatArray:
        return item_features(specs, path)

    def group_ms(
        self, path: str, axis_key: tuple[int, ...], budgets: IntArray, slots: IntArray, features: FloatArray
    ) -> FloatArray:
        added = self.overheads
        own = added.replay_ms + added.item_ms * features[..., ITEMS] + added.token_ms * features[..., TOKENS]
        clears = added.budget_token_ms * np.asarray(budgets)
        return self.model.replay[path].replay_ms(axis_key, budgets, slots, features) + own + clears

    def eager_parts(self, path: str, features: FloatArray) -> tuple[FloatArray, FloatArray]:
        return self.model.eager_parts(path, features)

    def join_ms(self, replays_ms: FloatArray, host_ms: FloatArray, device_ms: FloatArray) -> FloatArray:
        added = np.where(np.asarray(replays_ms) > 0, self.overheads.call_ms, self.overheads.miss_ms)
        return self.model.join_ms(replays_ms, host_ms, device_ms) + added

    def doubted_ms(self, calls_ms: FloatArray, eager_ms: FloatArray) -> FloatArray:
        """Latencies of calls where predictions may be off by `doubt`; what is eager as a whole cannot lose to eager."""
        is_eager = np.isclose(calls_ms, eager_ms + self.overheads.miss_ms, rtol=1e-9)
        return np.where(is_eager, calls_ms, calls_ms * (1.0 + self.doubt))

    # -- whole calls ---------------------------------------------------------------------------------------------------

    def predict_call(self, specs: Sequence[EncoderItemSpec], plan: BudgetPlan, policy: str) -> CallPrediction:
        """Predicts one call."""
        batches = pack_items(specs, plan, policy, self)
        replay_ms: list[float | None] = []
        missed: dict[str, list[FloatArray]] = defaultdict(list)
        for batch in batches:
            times = []
            for path, run in batch.runs.items():
                features = item_features([specs[index] for index in batch.items], path).sum(axis=0)
                if run.key is None:
                    missed[path].append(features)
                    continue
                sizes = np.array(run.key.token_budget), np.array(run.key.segment_slots)
                times.append(float(self.group_ms(path, run.key.axis_key, *sizes, features)))
            replay_ms.append(sum(times) if times else None)
        runs = {path: [np.sum(found, axis=0)] if self.target.joins_misses else found for path, found in missed.items()}
        parts = [self.eager_parts(path, features) for path, found in runs.items() for features in found]
        host, device = (np.array(total) for total in np.reshape(parts, (-1, 2)).sum(axis=0))
        graph_ms = float(self.join_ms(np.array(sum(filter(None, replay_ms))), host, device))
        return CallPrediction(graph_ms, self.model.eager_ms(specs), batches, replay_ms)

    # -- what the graphs take ------------------------------------------------------------------------------------------

    def graph_count(self, plan: BudgetPlan) -> int:
        """Graphs to capture."""
        return len(plan.axis_keys) * sum(map(len, plan.slot_tiers.values()))

    def memory_bytes(self, plan: BudgetPlan) -> float:
        """Predicted bytes of pool and buffers."""
        budgets = np.array([budget for values in plan.path_budgets.values() for budget in values], dtype=np.int64)
        if self.target.shares_buffers:
            return self.model.shared_bytes(int(budgets.max()), self.graph_count(plan))
        return self.model.separate_bytes(budgets)

    def capture_s(self, plan: BudgetPlan) -> float:
        """Predicted seconds to capture all graphs."""
        budgets = np.array([budget for (_, budget), tiers in plan.slot_tiers.items() for _ in tiers])
        return float(self.model.capture_ms(budgets).sum()) * len(plan.axis_keys) / 1e3


def packing_cost(calibration: str | None, source: ModelSource) -> TargetCost:
    """Predicted times of vitgraph's own manager under a profile, for the packing policy `optimal`."""
    return TargetCost(CostModel(find_profile(calibration, source)), TARGETS[VITGRAPH], DOUBT)
