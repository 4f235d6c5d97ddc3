"""Groups the items of one encoder call into replays: pure arithmetic, no device, no torch.

A batch must stay within the largest budget of every path, the item limit and the segment (frame) limits, and its items
must have a key of every capture axis in common. An item that no graph holds alone is judged alone: it is a batch of its
own with its own reason, and the others are packed as if it were not there. Policies:

- `greedy`: items sorted by output tokens, smallest first, packed while they fit.
- `greedy-defer`: as vLLM 0.33; an item whose own budget is at least the open batch's starts a new batch when the two
  budgets together are smaller than the budget of the union. As there, an item above the largest budget of some path
  ends the open batch.
- `exact`: no padding; a replay happens only where the tokens equal a budget.
- `optimal`: the least predicted latency, eager included; it needs predicted times (`vitgraph.planning.optimal`).

All of them mix images and videos in a replay. vLLM 0.33 does not: its calls are of consecutive items of one modality.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vitgraph.errors import UsageError
from vitgraph.planning.budgets import VIDEO, BudgetPlan, EncoderItemSpec, GraphKey, select_budget

if TYPE_CHECKING:
    from vitgraph.planning.graph_tables import PackingCost

TOO_MANY_TOKENS = "too_many_tokens"
TOO_MANY_FRAMES = "too_many_frames"
AXIS_NOT_CAPTURED = "axis_not_captured"
NOT_EXACT = "not_exact"
NOT_CAPTURED = "not_captured"
VIDEO_DISABLED = "video_disabled"
EAGER_IS_FASTER = "eager_is_faster"
"""Of an item that a graph could hold and whose eager run is predicted to be faster."""


@dataclass(slots=True)
class PathRun:
    """What one path of a batch does: replay a graph (`key`), or run eagerly (`miss_reason`).

    Attributes:
        tokens: Output rows of the batch on the path; paths with none are absent from the batch.
        segments: Attention segments of the batch.
        key: The graph to replay, or None.
        miss_reason: Why no graph is replayed, or None.
        items: Items of the batch that have rows on the path, in input order.
    """

    tokens: int
    segments: int
    key: GraphKey | None = None
    miss_reason: str | None = None
    items: tuple[int, ...] = ()


@dataclass(slots=True)
class PackedBatch:
    """Items that are encoded together.

    Attributes:
        items: Indices into the call's items, in input order.
        runs: What each non-empty path does.
    """

    items: tuple[int, ...]
    runs: dict[str, PathRun] = field(default_factory=dict)

    @property
    def is_hit(self) -> bool:
        """True where every non-empty path replays a graph."""
        return all(run.key is not None for run in self.runs.values())

    @property
    def miss_reason(self) -> str | None:
        """Reason of the first path that runs eagerly, or None for a hit."""
        return next((run.miss_reason for run in self.runs.values() if run.key is None), None)

    def miss_reason_of(self, item: int) -> str | None:
        """Reason of the first path that runs the item eagerly; None where every path that it is on is replayed."""
        return next((run.miss_reason for run in self.runs.values() if run.key is None and item in run.items), None)


def miss_reason_on(spec: EncoderItemSpec, plan: BudgetPlan, path: str) -> str | None:
    """Why no graph of `path` holds the item alone, or None where one does or the item has no rows there."""
    tokens = spec.tokens_on(path)
    if not tokens:
        return None
    if plan.max_frames == 0 and spec.modality == VIDEO:
        return VIDEO_DISABLED
    budget = select_budget(plan.path_budgets[path], tokens)
    if budget is None:
        return TOO_MANY_TOKENS
    if plan.axis_key([spec]) is None:
        return AXIS_NOT_CAPTURED
    most = plan.segment_limit(spec.modality == VIDEO)
    if most is not None and spec.segments > most:
        return TOO_MANY_FRAMES
    return TOO_MANY_FRAMES if plan.select_slots(path, budget, spec.segments) is None else None


def is_held(spec: EncoderItemSpec, plan: BudgetPlan) -> bool:
    """True where every path that the item has rows on has a graph that holds it."""
    return all(miss_reason_on(spec, plan, path) is None for path in plan.paths)


def group_items(specs: Sequence[EncoderItemSpec], plan: BudgetPlan, policy: str) -> list[list[int]]:
    """Indices of `specs` grouped by `policy`; the order inside a group is the packing's, not the input's."""
    if policy not in POLICIES:
        raise UsageError(f"unknown packing policy {policy!r}; known: {', '.join((*POLICIES, OPTIMAL))}")
    order = sorted(range(len(specs)), key=lambda index: specs[index].output_tokens)
    alone = {index for index in order if not is_held(specs[index], plan)}
    defer = policy == "greedy-defer"
    if defer:
        alone -= {index for index in alone if _is_too_large(specs[index], plan)}
    held = [index for index in order if index not in alone]
    groups = _group_exact(specs, plan, held) if policy == "exact" else _group_greedily(specs, plan, held, defer=defer)
    return groups + [[index] for index in order if index in alone]


def _is_too_large(spec: EncoderItemSpec, plan: BudgetPlan) -> bool:
    return any(miss_reason_on(spec, plan, path) == TOO_MANY_TOKENS for path in plan.paths)


class _OpenGroup:
    """A group that items are added to while the plan allows it."""

    def __init__(self, plan: BudgetPlan) -> None:
        self.plan = plan
        self.items: list[int] = []
        self.chosen: list[EncoderItemSpec] = []
        self.tokens = dict.fromkeys(plan.paths, 0)
        self.segments = 0
        self.has_video = False

    def takes(self, spec: EncoderItemSpec) -> bool:
        """True where the item can join what is in the group."""
        most = self.plan.segment_limit(self.has_video or spec.modality == VIDEO)
        return (
            len(self.items) < self.plan.max_items
            and (most is None or self.segments + spec.segments <= most)
            and all(
                have + spec.tokens_on(path) <= self.plan.path_budgets[path][-1] for path, have in self.tokens.items()
            )
            and (not self.plan.axes or self.plan.axis_key([*self.chosen, spec]) is not None)
        )

    def add(self, index: int, spec: EncoderItemSpec) -> None:
        self.items.append(index)
        self.chosen.append(spec)
        self.tokens = {path: have + spec.tokens_on(path) for path, have in self.tokens.items()}
        self.segments += spec.segments
        self.has_video |= spec.modality == VIDEO


def _group_greedily(
    specs: Sequence[EncoderItemSpec], plan: BudgetPlan, order: Sequence[int], *, defer: bool
) -> list[list[int]]:
    groups: list[_OpenGroup] = []
    for index in order:
        spec = specs[index]
        if not groups or not groups[-1].takes(spec) or (defer and _is_cheaper_apart(groups[-1], spec)):
            groups.append(_OpenGroup(plan))
        groups[-1].add(index, spec)
    return [group.items for group in groups]


def _is_cheaper_apart(group: _OpenGroup, spec: EncoderItemSpec) -> bool:
    """True where, on some path, the item's budget >= the open batch's and both sum to less than the union's."""

    def budget_of(amount: int, path: str) -> int:
        return (select_budget(group.plan.path_budgets[path], amount) or amount) if amount else 0

    for path, have in group.tokens.items():
        more = spec.tokens_on(path)
        own, opened = budget_of(more, path), budget_of(have, path)
        if own >= opened and own + opened < budget_of(have + more, path):
            return True
    return False


def _group_exact(specs: Sequence[EncoderItemSpec], plan: BudgetPlan, order: Sequence[int]) -> list[list[int]]:
    """All items together where their tokens equal a budget, else every item by itself."""
    whole = _OpenGroup(plan)
    for index in order:
        if not whole.takes(specs[index]):
            break
        whole.add(index, specs[index])
    is_exact = all(total == 0 or total in plan.path_budgets[path] for path, total in whole.tokens.items())
    return [whole.items] if len(whole.items) == len(order) > 1 and is_exact else [[index] for index in order]


def pack_items(
    specs: Sequence[EncoderItemSpec], plan: BudgetPlan, policy: str = "greedy", cost: PackingCost | None = None
) -> list[PackedBatch]:
    """Packs one call and selects a graph for every path of every batch.

    Args:
        specs: Items of the call, in input order.
        policy: One of `POLICIES`, or `optimal`.

    Returns:
        Batches in the order in which they are encoded; every item is in exactly one.

    Raises:
        UsageError: The policy is unknown, or `optimal` without predicted times.
    """
    if policy == OPTIMAL:
        if cost is None:
            raise UsageError(
                "packing `optimal` weighs predicted times; give a calibration (--calibration), or use another policy"
            )
        from vitgraph.planning.optimal import pack_optimally

        return pack_optimally(specs, plan, cost)
    is_exact = policy == "exact"
    return [make_batch(specs, sorted(group), plan, is_exact) for group in group_items(specs, plan, policy)]


def make_batch(
    specs: Sequence[EncoderItemSpec],
    members: Sequence[int],
    plan: BudgetPlan,
    is_exact: bool = False,
    eager_paths: Sequence[str] = (),
) -> PackedBatch:
    """A batch of items with the graph of every path, or the reason why it has none.

    Args:
        members: Indices of its items, ascending; of several items the same paths have graphs that hold them together.
        is_exact: Whether only a budget of exactly the tokens is replayed.
        eager_paths: Paths that are predicted to be faster eagerly.
    """
    batch = PackedBatch(tuple(members))
    segments = sum(specs[index].segments for index in members)
    for path in plan.paths:
        on_path = tuple(index for index in members if specs[index].tokens_on(path))
        if on_path:
            tokens = sum(specs[index].tokens_on(path) for index in on_path)
            run = batch.runs[path] = PathRun(tokens, segments, items=on_path)
            run.miss_reason = miss_reason_on(specs[members[0]], plan, path)
            budget = select_budget(plan.path_budgets[path], tokens)
            if run.miss_reason is None and is_exact and budget != tokens:
                run.miss_reason = NOT_EXACT
            if run.miss_reason is None and path in eager_paths:
                run.miss_reason = EAGER_IS_FASTER
            if run.miss_reason is None:
                axis_key = plan.axis_key([specs[index] for index in members])
                slots = None if budget is None else plan.select_slots(path, budget, segments)
                assert budget is not None and slots is not None and axis_key is not None
                run.key = GraphKey(path, budget, slots, axis_key)
    return batch


POLICIES = ("greedy", "greedy-defer", "exact")
OPTIMAL = "optimal"
