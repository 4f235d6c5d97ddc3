"""Packing once more, as plainly as it can be said: every graph is tried, every limit asked. Slow, for tests alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from vitgraph.planning.budgets import (
    IMAGE,
    VIDEO,
    BudgetPlan,
    BudgetSettings,
    CaptureAxis,
    EncoderItemSpec,
    GraphKey,
    plan_budgets,
)
from vitgraph.planning.packing import PackedBatch

Specs = Sequence[EncoderItemSpec]


def tokens_of(specs: Specs, path: str) -> int:
    return sum(spec.tokens_on(path) for spec in specs)


def graph_for(specs: Specs, plan: BudgetPlan, path: str) -> GraphKey | None:
    """The smallest graph of the path that holds the items."""
    held = []
    for place, key in enumerate(reversed(plan.graph_keys())):
        if key.path != path or key.token_budget < tokens_of(specs, path):
            continue
        if path not in plan.segment_free_paths and key.segment_slots < sum(spec.segments for spec in specs):
            continue
        start, covers = 0, True
        for axis in plan.axes:
            part = key.axis_key[start : start + len(axis.keys[0])]
            start += len(part)
            covers &= all(
                have >= need for spec in specs for have, need in zip(part, spec.axis_sizes[axis.name], strict=True)
            )
        if covers:
            order = [axis.keys.index(key.axis_key[:2]) for axis in plan.axes]
            held.append((key.token_budget, key.segment_slots, order, place, key))
    return min(held)[-1] if held else None


def keeps_limits(specs: Specs, plan: BudgetPlan) -> bool:
    """Whether a replay may hold the items, whichever graph it is."""
    segments = sum(spec.segments for spec in specs)
    if len(specs) > plan.max_items:
        return False
    if any(spec.modality == VIDEO for spec in specs):
        return 0 < plan.max_frames >= segments
    return set(plan.paths) <= plan.segment_free_paths or segments <= max(plan.max_items, plan.max_frames)


def reason_alone(spec: EncoderItemSpec, plan: BudgetPlan, path: str) -> str | None:
    """Why the item alone is eager on a path, or None."""
    if spec.tokens_on(path) == 0 or (keeps_limits([spec], plan) and graph_for([spec], plan, path)):
        return None
    if spec.modality == VIDEO and plan.max_frames == 0:
        return "video_disabled"
    if spec.tokens_on(path) > max(plan.path_budgets[path]):
        return "too_many_tokens"
    bare = replace(spec, segments=1, modality=IMAGE)
    return "too_many_frames" if graph_for([bare], plan, path) else "axis_not_captured"


def fits_together(specs: Specs, plan: BudgetPlan) -> bool:
    return keeps_limits(specs, plan) and all(
        graph_for(specs, plan, path) for path in plan.paths if tokens_of(specs, path)
    )


def plain_groups(specs: Specs, plan: BudgetPlan, policy: str) -> list[tuple[int, ...]]:
    """Items by batch, in the order of the batches."""
    order = sorted(range(len(specs)), key=lambda place: (specs[place].output_tokens, place))
    alone = [place for place in order if any(reason_alone(specs[place], plan, path) for path in plan.paths)]
    if policy == "greedy-defer":  # as vLLM: an item of too many tokens ends the batch before it
        alone = [
            place
            for place in alone
            if all(reason_alone(specs[place], plan, path) != "too_many_tokens" for path in plan.paths)
        ]
    held = [place for place in order if place not in alone]
    groups: list[list[int]] = []
    for place in held:
        together = [specs[other] for other in groups[-1]] if groups else []
        if (
            together
            and fits_together([*together, specs[place]], plan)
            and not (policy == "greedy-defer" and is_deferred(together, specs[place], plan))
        ):
            groups[-1].append(place)
        else:
            groups.append([place])
    if policy == "exact":
        chosen = [specs[place] for place in held]
        is_exact = all(tokens_of(chosen, path) in (0, *plan.path_budgets[path]) for path in plan.paths)
        groups = [held] if held and is_exact and fits_together(chosen, plan) else [[place] for place in held]
    return [tuple(sorted(group)) for group in groups] + [(place,) for place in alone]


def is_deferred(together: Specs, spec: EncoderItemSpec, plan: BudgetPlan) -> bool:
    def budget(tokens: int, path: str) -> int:
        return min([b for b in plan.path_budgets[path] if b >= tokens], default=tokens) if tokens else 0

    for path in plan.paths:
        own, opened = budget(spec.tokens_on(path), path), budget(tokens_of(together, path), path)
        if own >= opened and own + opened < budget(tokens_of([*together, spec], path), path):
            return True
    return False


def expected_runs(
    specs: Specs, plan: BudgetPlan, members: Sequence[int], policy: str
) -> dict[str, tuple[GraphKey | None, str | None]]:
    """Graph or reason of each path of a batch."""
    chosen = [specs[place] for place in members]
    runs: dict[str, tuple[GraphKey | None, str | None]] = {}
    for path in plan.paths:
        if tokens_of(chosen, path):
            reason = reason_alone(chosen[0], plan, path)
            if reason is None and policy == "exact" and tokens_of(chosen, path) not in plan.path_budgets[path]:
                reason = "not_exact"
            runs[path] = (None if reason else graph_for(chosen, plan, path), reason)
    return runs


def check_packing(specs: Specs, plan: BudgetPlan, policy: str, batches: Sequence[PackedBatch]) -> None:
    """Compares a packing with the plain one; an optimal one is held to the limits and its reasons.

    Raises:
        AssertionError: They differ.
    """
    assert sorted(place for batch in batches for place in batch.items) == list(range(len(specs)))
    found = [(batch.items, {path: (run.key, run.miss_reason) for path, run in batch.runs.items()}) for batch in batches]
    if policy != "optimal":
        groups = plain_groups(specs, plan, policy)
        assert found == [(group, expected_runs(specs, plan, group, policy)) for group in groups]
    for members, runs in found:
        chosen = [specs[place] for place in members]
        for path, (key, reason) in runs.items():
            if key is None:
                own = {reason_alone(spec, plan, path) for spec in chosen if spec.tokens_on(path)}
                assert own == {reason} or (own == {None} and reason in ("not_exact", "eager_is_faster"))
            else:
                assert keeps_limits(chosen, plan) and key == graph_for(chosen, plan, path)
    for batch in batches:
        for path, run in batch.runs.items():
            assert run.items == tuple(place for place in batch.items if specs[place].tokens_on(path))
            assert run.tokens == tokens_of(specs_of(specs, run.items), path) > 0


def specs_of(specs: Specs, places: Sequence[int]) -> list[EncoderItemSpec]:
    return [specs[place] for place in places]


# -- random calls ------------------------------------------------------------------------------------------------------


def random_call(drawn: random.Random) -> tuple[list[EncoderItemSpec], BudgetPlan]:
    """A call of up to twelve items with a plan: one path with videos, one with a capture axis, or two paths."""
    kind = drawn.choice(("videos", "axis", "two paths"))
    count = drawn.choice((0, 1, 2, 3, 5, 8, 12))
    budgets = tuple(sorted(drawn.sample(range(8, 600), drawn.randint(1, 5))))
    items, frames = drawn.randint(1, min(8, budgets[0])), drawn.choice((0, 1, 4, 20))
    if kind == "two paths":
        minimums = {"global": drawn.randint(1, 40), "local": drawn.randint(1, 40)}
        plan = plan_budgets(
            BudgetSettings((budgets[0], max(600, *budgets)), items, 0),
            path_minimums=minimums,
            segment_free_paths=frozenset(minimums),
        )
        return [two_path_image(drawn, minimums) for _ in range(count)], plan
    axes = (CaptureAxis("grid", ((2, 8), (8, 2))),) if kind == "axis" else ()
    plan = plan_budgets(BudgetSettings(budgets, items, frames), axes=axes)
    return [one_path_item(drawn, bool(axes)) for _ in range(count)], plan


def two_path_image(drawn: random.Random, minimums: dict[str, int]) -> EncoderItemSpec:
    tokens = {"global": minimums["global"], "local": minimums["local"] * drawn.choice((0, 1, 2, 6, 30))}
    return EncoderItemSpec(IMAGE, 1, sum(tokens.values()), 1, tokens)


def one_path_item(drawn: random.Random, has_axis: bool) -> EncoderItemSpec:
    sizes = {"grid": (drawn.randint(1, 10), drawn.randint(1, 9))} if has_axis else {}
    if drawn.random() < 0.3:
        frames = drawn.randint(1, 9)
        return EncoderItemSpec(VIDEO, 4, frames * drawn.randint(1, 60), frames, axis_sizes=sizes)
    return EncoderItemSpec(IMAGE, 4, drawn.randint(1, 700), axis_sizes=sizes)
