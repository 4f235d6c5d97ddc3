"""Groups the items of one encoder call into replays: pure arithmetic, no device, no torch.

A batch must stay within the largest budget of every path, the item limit and the segment (frame) limit. What no
graph can hold becomes an eager batch with the reason. Policies:

- `greedy`: items sorted by output tokens, smallest first, packed while they fit.
- `greedy-defer`: as vLLM 0.33; an item whose own budget is at least the open batch's starts a new batch when the
  two budgets together are smaller than the budget of the union.
- `exact`: no padding; a replay happens only where the tokens equal a budget.
- `optimal`: the least predicted latency, eager included; it needs predicted times (`vitgraph.planning.optimal`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vitgraph.errors import UsageError
from vitgraph.planning.budgets import BudgetPlan, GraphKey, select_budget
from vitgraph.planning.items import VIDEO, EncoderItemSpec

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


def group_items(specs: Sequence[EncoderItemSpec], plan: BudgetPlan, policy: str) -> list[list[int]]:
    """Indices of `specs` grouped by `policy`; the order inside a group is the packing's, not the input's."""
    order = sorted(range(len(specs)), key=lambda index: specs[index].output_tokens)
    if policy == "exact":
        return _group_exact(specs, plan, order)
    if policy not in POLICIES:
        raise UsageError(f"unknown packing policy {policy!r}; known: {', '.join((*POLICIES, OPTIMAL))}")
    return _group_greedily(specs, plan, order, defer=policy == "greedy-defer")


def _group_greedily(
    specs: Sequence[EncoderItemSpec], plan: BudgetPlan, order: Sequence[int], *, defer: bool
) -> list[list[int]]:
    paths = list(plan.path_budgets.items())
    max_items, max_segments = plan.max_items, plan.max_segments
    groups: list[list[int]] = []
    open_group: list[int] = []
    open_tokens = [0] * len(paths)
    open_segments = 0
    for index in order:
        spec = specs[index]
        tokens = [spec.tokens_on(path) for path, _ in paths]
        fits = (
            open_group
            and len(open_group) < max_items
            and (max_segments is None or open_segments + spec.segments <= max_segments)
            and all(
                have + more <= budgets[-1] for have, more, (_, budgets) in zip(open_tokens, tokens, paths, strict=True)
            )
        )
        if fits and defer:
            fits = not _is_cheaper_apart(open_tokens, tokens, [budgets for _, budgets in paths])
        if not fits and open_group:
            groups.append(open_group)
            open_group, open_tokens, open_segments = [], [0] * len(paths), 0
        open_group.append(index)
        open_tokens = [have + more for have, more in zip(open_tokens, tokens, strict=True)]
        open_segments += spec.segments
    if open_group:
        groups.append(open_group)
    return groups


def _is_cheaper_apart(open_tokens: list[int], tokens: list[int], budgets: list[tuple[int, ...]]) -> bool:
    """True where, on some path, the item's budget >= the open batch's and both sum to less than the union's."""

    def budget_of(amount: int, path_budgets: tuple[int, ...]) -> int:
        return (select_budget(path_budgets, amount) or amount) if amount else 0

    for have, more, path_budgets in zip(open_tokens, tokens, budgets, strict=True):
        own, opened = budget_of(more, path_budgets), budget_of(have, path_budgets)
        if own >= opened and own + opened < budget_of(have + more, path_budgets):
            return True
    return False


def _group_exact(specs: Sequence[EncoderItemSpec], plan: BudgetPlan, order: Sequence[int]) -> list[list[int]]:
    """The whole call where its tokens equal a budget, else every item by itself."""
    segments = sum(spec.segments for spec in specs)
    if 1 < len(specs) <= plan.max_items and (plan.max_segments is None or segments <= plan.max_segments):
        totals = {path: sum(spec.tokens_on(path) for spec in specs) for path in plan.path_budgets}
        if all(total == 0 or total in plan.path_budgets[path] for path, total in totals.items()):
            return [list(order)]
    return [[index] for index in order]


def pack_items(
    specs: Sequence[EncoderItemSpec], plan: BudgetPlan, policy: str = "greedy", cost: PackingCost | None = None
) -> list[PackedBatch]:
    """Packs one call and selects a graph for every path of every batch.

    Args:
        specs: Items of the call, in input order.
        plan: Budgets, limits and axes.
        policy: One of `POLICIES`, or `optimal`.
        cost: Predicted times, for `optimal`.

    Returns:
        Batches in the order in which they are encoded; every item is in exactly one.

    Raises:
        UsageError: The policy is unknown, or `optimal` without predicted times.
    """
    if policy == OPTIMAL:
        if cost is None:
            raise UsageError("packing `optimal` weighs predicted times; pass --calibration, or use another policy")
        from vitgraph.planning.optimal import pack_optimally

        return pack_optimally(specs, plan, cost)
    batches = []
    for group in group_items(specs, plan, policy):
        members = tuple(sorted(group))
        chosen = [specs[index] for index in members]
        segments = sum(spec.segments for spec in chosen)
        batch = PackedBatch(members)
        for path, budgets in plan.path_budgets.items():
            on_path = tuple(index for index in members if specs[index].tokens_on(path))
            if on_path:
                tokens = sum(specs[index].tokens_on(path) for index in on_path)
                run = PathRun(tokens, segments, items=on_path)
                _select_graph(run, chosen, plan, path, budgets, policy == "exact")
                batch.runs[path] = run
        batches.append(batch)
    return batches


def _select_graph(
    run: PathRun,
    specs: Sequence[EncoderItemSpec],
    plan: BudgetPlan,
    path: str,
    budgets: Sequence[int],
    exact: bool,
) -> None:
    """Gives the run its graph, or the reason why it has none."""
    budget = select_budget(budgets, run.tokens)
    if plan.max_frames == 0 and any(spec.modality == VIDEO for spec in specs):
        run.miss_reason = VIDEO_DISABLED
    elif budget is None:
        run.miss_reason = TOO_MANY_TOKENS
    elif exact and budget != run.tokens:
        run.miss_reason = NOT_EXACT
    else:
        slots = plan.select_slots(path, budget, run.segments)
        axis_key: tuple[int, ...] = ()
        for axis in plan.axes:
            key = axis.covering_key(spec.axis_sizes[axis.name] for spec in specs)
            if key is None:
                run.miss_reason = AXIS_NOT_CAPTURED
                return
            axis_key += key
        if slots is None:
            run.miss_reason = TOO_MANY_FRAMES
        else:
            run.key = GraphKey(path, budget, slots, axis_key)


POLICIES = ("greedy", "greedy-defer", "exact")
OPTIMAL = "optimal"
