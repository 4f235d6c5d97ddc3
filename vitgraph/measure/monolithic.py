"""What `bench --baseline monolithic` measures: one graph of both paths of a two-path model, on the same calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from vitgraph.errors import BudgetError, UsageError
from vitgraph.measure.calls import EncoderCall
from vitgraph.measure.setup import plan_graphs
from vitgraph.models.geometry import GeometryRule
from vitgraph.models.monolithic import MonolithicRule
from vitgraph.models.registry import ROWS
from vitgraph.models.two_path import GLOBAL, LOCAL, TwoPathRule
from vitgraph.planning.accounting import GraphCounters, waste_of
from vitgraph.planning.budgets import BudgetPlan
from vitgraph.planning.packing import pack_items
from vitgraph.records.sections import MonolithicPlan
from vitgraph.specs.asked import BenchSpec


@dataclass(frozen=True, slots=True)
class MonolithicBench:
    """The monolithic side of a run, planned without touching a device.

    Attributes:
        rule: Rows of an item in the monolithic graph.
        most_crops: The most crops of any item of the workload; those above the graph's are encoded eagerly.
    """

    rule: MonolithicRule
    plan: BudgetPlan
    most_crops: int

    def expected_counters(self, calls: Sequence[EncoderCall], policy: str) -> GraphCounters:
        """Hits, misses and waste that the packing predicts; exact unless a graph does not fit in memory."""
        counters = GraphCounters()
        for call in calls:
            specs = [self.rule.item_spec(item) for item in call.items]
            counters.add(pack_items(specs, self.plan, policy), call.item_tokens)
        return counters

    @property
    def notes(self) -> list[str]:
        """What a user should know before anything is captured."""
        captured = self.rule.max_crops
        if self.most_crops <= captured:
            return []
        return [
            f"an image of the workload has {self.most_crops} crops, the monolithic graph {captured}; images with more "
            f"than {captured} run eagerly in monolithic mode"
        ]

    def resolved(self) -> MonolithicPlan:
        """What the settings came to."""
        return MonolithicPlan(
            max_crops=self.rule.max_crops,
            item_tokens=self.rule.item_tokens,
            token_budgets=dict(self.plan.path_budgets),
            max_vision_items_per_batch=self.plan.max_items,
            graphs=len(self.plan.graph_keys()),
        )

    def describe_counters(self, counters: GraphCounters) -> dict[str, Any]:
        """The counters in the shape of run.json, with the rows of either path inside the graph as `parts`."""
        return {**counters.as_dict(), "parts": self._parts(counters)}

    def _parts(self, counters: GraphCounters) -> list[dict[str, Any]]:
        view, crop = (self.rule.inner.path_tokens[path] for path in (GLOBAL, LOCAL))
        places = sum(use.replays * (key.token_budget // self.rule.item_tokens) for key, use in counters.use.items())
        views = view * sum(use.items for use in counters.use.values())
        rows = {
            GLOBAL: (views, places * view),
            LOCAL: (counters.tokens_replayed - views, places * self.rule.max_crops * crop),
        }
        return [
            {
                "path": path,
                "tokens_replayed": used,
                "budget_tokens_replayed": computed,
                "waste": waste_of(used, computed),
            }
            for path, (used, computed) in rows.items()
        ]


def plan_monolithic(
    spec: BenchSpec, model: str, rule: GeometryRule, two_paths: BudgetPlan, calls: Sequence[EncoderCall]
) -> MonolithicBench:
    """Plans the monolithic graphs that the two paths' graphs are compared with.

    They get what the two paths get: budgets that double from one item up to the two paths' largest, and their limit of
    items.

    Raises:
        UsageError: The model has one path.
        BudgetError: The largest budget does not hold one item.
    """
    if not isinstance(rule, TwoPathRule):
        known = ", ".join(row.models for row in ROWS if issubclass(row.encoder_class().rule_class, TwoPathRule))
        raise UsageError(
            f"--baseline monolithic puts the two paths of a model into one graph, but {model} has one path; use a "
            f"model with a global and a local path ({known}), or --baseline eager"
        )
    items = {item for call in calls for item in call.items}
    most = max(rule.checked_crops(item).crops for item in items)
    monolithic = MonolithicRule(rule, spec.run.monolithic_crops or max(most, 1))
    largest = max(budgets[-1] for budgets in two_paths.path_budgets.values())
    if largest < monolithic.item_tokens:
        view, crop = rule.path_tokens[GLOBAL], rule.path_tokens[LOCAL]
        raise BudgetError(
            f"the largest token budget is {largest}, but every image takes {monolithic.item_tokens} rows of a "
            f"monolithic graph ({view} of its global view and {monolithic.max_crops} crops of {crop}); use a budget of "
            f"{monolithic.item_tokens} or more, or fewer --monolithic-crops"
        )
    graph = replace(
        spec.graph,
        token_budgets=(),
        max_vision_items_per_batch=min(two_paths.max_items, largest // monolithic.item_tokens),
        max_model_len=largest,
        max_num_batched_tokens=largest,
    )
    return MonolithicBench(monolithic, plan_graphs(monolithic, graph, []), most)
