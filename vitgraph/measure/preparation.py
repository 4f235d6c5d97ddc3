"""What a bench run will do, decided before a device is touched: calls, graphs, who encodes what, and their facts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from vitgraph import __version__
from vitgraph.measure.calls import EncoderCall, common_size, make_calls
from vitgraph.measure.setup import (
    AUTO_BACKEND,
    MonolithicBench,
    check_model,
    engine_notes,
    plan_graphs,
    plan_monolithic,
    planning_warnings,
    resolve_source,
)
from vitgraph.models.registry import ModelSource
from vitgraph.planning.accounting import GraphCounters, GraphUse, count_calls, waste_of
from vitgraph.planning.budgets import DEFAULT_PATH, BudgetPlan, EncoderItemSpec
from vitgraph.planning.packing import pack_items
from vitgraph.predict.assignment import (
    Assigner,
    assignment_effect,
    imbalance_of,
    input_loads,
    share_by_cost,
    share_by_size,
)
from vitgraph.predict.cost_model import CostModel
from vitgraph.predict.engine_calls import replay_workload
from vitgraph.predict.profile import find_profile
from vitgraph.predict.targets import TargetCost, packing_cost
from vitgraph.records.sections import Resolved
from vitgraph.records.sections import SkippedItem as SkippedSection
from vitgraph.records.sections import Workload as WorkloadSection
from vitgraph.specs.asked import BenchSpec
from vitgraph.specs.parts import MONOLITHIC_BASELINE, GraphSpec, ModelSpec
from vitgraph.specs.tools import WorkloadCallsSpec
from vitgraph.specs.values import call_shares
from vitgraph.workloads.base import CallMix, SkippedItem, Workload, grouping_of
from vitgraph.workloads.registry import build_workload

EAGER_ALONE = "graphs are switched off (--enforce-eager, or cudagraph_mm_encoder false): eager alone is measured"

HIGH_WASTE = 0.4
"""Waste to warn of. Budgets that double, as automatic ones do, waste a quarter to a third of their rows."""

MOST_EFFECT_CALLS = 200
"""Calls, spread over the workload, on which assignments of items to ranks are predicted."""

MOST_PACKED_CALLS = 100
"""Calls that are packed to predict the waste to warn of, since `optimal` packing can take seconds for a hundred."""


@dataclass(slots=True)
class PreparedBench:
    """A bench that was planned without touching a device.

    Attributes:
        calls: Encoder calls of the measured requests.
        warmups: Encoder calls of the warm-ups.
        skipped: Items left out, by the workload and by the processor.
        plan: Which graphs will exist.
        warnings: What the user should know first.
        cost: Predicted times of the calibration that was given, for packing.
        assign: Which rank encodes what; None in one process.
        sharing: How the calls are shared, for `--dry-run`; None in one process.
        monolithic: The monolithic graphs that are measured too; None without them.
    """

    spec: BenchSpec
    source: ModelSource
    workload: Workload
    calls: list[EncoderCall]
    warmups: list[EncoderCall]
    skipped: list[SkippedItem]
    plan: BudgetPlan
    warnings: list[str] = field(default_factory=list)
    cost: TargetCost | None = None
    assign: Assigner | None = None
    sharing: dict[str, Any] | None = None
    monolithic: MonolithicBench | None = None

    @property
    def is_eager_alone(self) -> bool:
        """Nothing is captured, as asked."""
        return self.spec.graph.enforce_eager

    def expected_counters(self, calls: Sequence[EncoderCall] | None = None) -> GraphCounters:
        """Hits, misses and waste that the packing predicts; exact unless a graph does not fit in memory."""
        if self.is_eager_alone:
            return GraphCounters()
        policy = self.spec.graph.packing
        parts = [part for call in (self.calls if calls is None else calls) for part in self._packed_parts(call)]
        return count_calls([pack_items(part, self.plan, policy, self.cost) for part in parts])

    def _packed_parts(self, call: EncoderCall) -> list[Sequence[EncoderItemSpec]]:
        """What is packed together of a call: each rank's share, or all of it."""
        if self.assign is None:
            return [call.specs]
        return [[call.specs[index] for index in share] for share in self.assign(call.specs, self.spec.parallel.ranks)]

    def describe(self) -> dict[str, Any]:
        """Resolved settings, plan and expected packing, for `--dry-run`."""
        expected = self.expected_counters().as_dict()
        if self.monolithic is not None:
            counters = self.monolithic.expected_counters(self.calls, self.spec.graph.packing)
            expected["monolithic"] = self.monolithic.describe_counters(counters)
        return {
            "settings": self.spec.as_dict(),
            "resolved": resolved_bench(self).model_dump(mode="json"),
            "workload": workload_of(self).model_dump(mode="json"),
            "expected": expected,
            "sharing": self.sharing,
            "warnings": self.warnings,
        }


def prepare_bench(spec: BenchSpec, workload: Workload | None = None, *, runs: bool = True) -> PreparedBench:
    """Everything that can be decided and refused before a device is touched; imports no torch.

    Args:
        workload: Requests that are there already; None builds those of the settings.
        runs: The tower runs here, and is not only predicted.
    """
    source = resolve_source(spec.model)
    check_model(source, spec.model, runs=runs)
    workload = build_workload(spec.workload) if workload is None else workload
    rule = source.rule()
    workload = arrived(workload, spec, source)
    of_calls = spec.run.requests_per_call
    calls, refused = make_calls(workload.requests, rule, grouping_of(of_calls, workload.requests, spec.workload.seed))
    of_warmups = CallMix(call_shares(of_calls or "1"), spec.workload.seed)
    warmups, _ = make_calls(workload.warmups, rule, of_warmups) if workload.warmups else ([], [])
    plan = plan_graphs(rule, spec.graph, [item for call in calls for item in call.specs])
    warnings = planning_warnings(plan, spec.graph, [len(call.items) for call in calls])
    if spec.graph.enforce_eager:
        plan, warnings = replace(plan, path_budgets={}), [EAGER_ALONE]
    has_videos = any(media.frames > 1 for call in calls for media in call.media)
    warnings += engine_notes(source, spec.graph, has_videos=has_videos)
    skipped = [*workload.skipped, *refused]
    warnings += refusal_notes(source.name, calls, skipped)
    cost = packing_cost(spec.graph.calibration, source) if spec.graph.calibration is not None else None
    prepared = PreparedBench(spec, source, workload, calls, warmups, skipped, plan, warnings, cost)
    if spec.run.baseline == MONOLITHIC_BASELINE:
        prepared.monolithic = plan_monolithic(spec, source.name, rule, plan, [*calls, *warmups])
        warnings += prepared.monolithic.notes
    if spec.parallel.ranks > 1:
        prepared.assign, assigning_cost = choose_assigner(spec, source)
        items = [call.specs for call in calls]
        prepared.sharing = describe_sharing(items, spec.parallel.ranks, prepared.assign, assigning_cost)
        warnings += sharing_notes(prepared.sharing)
    some_calls = calls[:: max(1, -(-len(calls) // MOST_PACKED_CALLS))]
    warnings += _waste_notes(prepared.expected_counters(some_calls))
    return prepared


def choose_assigner(spec: BenchSpec, source: ModelSource) -> tuple[Assigner, CostModel | None]:
    """Who encodes what, by `--dp-assignment`, with the cost model behind it.

    Raises:
        UsageError: It goes by cost, and there is no calibration of the model.
    """
    if spec.parallel.assignment == "size":
        return share_by_size, None
    cost = CostModel(find_profile(spec.graph.calibration, source))
    return partial(share_by_cost, cost), cost


def describe_sharing(
    calls: Sequence[Sequence[EncoderItemSpec]], ranks: int, assign: Assigner, cost: CostModel | None
) -> dict[str, Any]:
    """How the calls would be shared, for `--dry-run`: idle ranks, imbalance, and what assigning by cost changes."""
    shared = [assign(specs, ranks) for specs in calls]
    loads = [input_loads(specs, shares) for specs, shares in zip(calls, shared, strict=True)]
    chosen = calls[:: max(1, len(calls) // MOST_EFFECT_CALLS)][:MOST_EFFECT_CALLS]
    return {
        "ranks": ranks,
        "calls_with_idle_ranks": sum(not all(shares) for shares in shared),
        "input_imbalance": sum(imbalance_of(each) for each in loads) / len(loads) if loads else None,
        "by_cost": assignment_effect(chosen, ranks, cost) if cost is not None else None,
    }


def sharing_notes(described: Mapping[str, Any]) -> list[str]:
    """The description in words."""
    ranks, idle = described["ranks"], described["calls_with_idle_ranks"]
    notes = [f"{ranks} ranks share the items of each call; the heaviest has {described['input_imbalance']:.3f} times "
             "the mean of the pixel rows"]  # fmt: skip
    if idle:
        notes.append(f"{idle} calls have fewer items than ranks, so some ranks only take part in their gather")
    by_cost = described["by_cost"]
    if by_cost is not None:
        slowest, imbalance = by_cost["predicted_slowest_ms"], by_cost["predicted_imbalance"]
        notes.append(
            f"sharing by cost instead of size changes {by_cost['changed_calls']} of {by_cost['calls']} calls; "
            f"predicted slowest rank {slowest['size']:.3f} ms by size, {slowest['cost']:.3f} ms by cost (imbalance "
            f"{imbalance['size']:.3f} and {imbalance['cost']:.3f})"
        )
    return notes


def refusal_notes(model: str, calls: Sequence[EncoderCall], skipped: Sequence[SkippedItem]) -> list[str]:
    """Says which items of the workload take part in nothing that is counted."""
    if not skipped:
        return []
    brought = sum(len(call.items) for call in calls) + len(skipped)
    return [
        f"{len(skipped)} of {brought} items of the workload cannot be read or are refused by the processor of {model}, "
        f"and take part in no figure; first {skipped[0].source}: {skipped[0].reason}"
    ]


def arrived(workload: Workload, spec: BenchSpec | WorkloadCallsSpec, source: ModelSource) -> Workload:
    """The workload as an engine would call the encoder for it where requests arrive at a rate, else as it is.

    Raises:
        UsageError: No calibration says how long the encoder takes.
    """
    asked = spec.traffic
    if asked.request_rate is None:
        return workload
    cost = CostModel(find_profile(spec.graph.calibration, source))
    tokens, seed = spec.graph.max_num_batched_tokens, spec.workload.seed
    return replay_workload(workload, source.rule(), cost.eager_ms, asked, tokens, seed)


def _waste_notes(counters: GraphCounters) -> list[str]:
    """Says so where the graphs of the budget that is used most will hold much padding."""
    # A budget may be captured with several segment slots; the rows that it computes are the same.
    budgets: dict[tuple[str, int], GraphUse] = {}
    for key, use in counters.use.items():
        whole = budgets.setdefault((key.path, key.token_budget), GraphUse())
        whole.replays += use.replays
        whole.items += use.items
        whole.tokens += use.tokens
    if not budgets:
        return []
    (path, budget), most = max(budgets.items(), key=lambda pair: pair[1].items)
    waste = waste_of(most.tokens, budget * most.replays)
    if waste is None or waste <= HIGH_WASTE:
        return []
    of_path = "" if path == DEFAULT_PATH else f" of path {path}"
    return [
        f"token budget {budget}{of_path} will be used most, with {most.tokens / most.replays:.0f} of its rows filled: "
        f"{waste:.0%} is padding, so its graphs compute {1 / (1 - waste):.1f} times the rows of eager and may well be "
        "slower. Give smaller --token-budgets, nearer to the items' sizes, or let `vitgraph tune-budgets` choose them"
    ]


def workload_of(prepared: PreparedBench) -> WorkloadSection:
    """What a record says of the requests."""
    workload = prepared.workload
    tokens = [tokens for call in prepared.calls for tokens in call.tokens_per_request]
    items = [media for call in prepared.calls for media in call.media]
    return WorkloadSection(
        name=workload.name,
        fingerprint=workload.fingerprint(),
        requests=sum(len(call.requests) for call in prepared.calls),
        calls=len(prepared.calls),
        items=len(items),
        requests_brought=len(workload.requests),
        items_brought=len(items) + len(prepared.skipped),
        images=sum(media.frames == 1 for media in items),
        videos=sum(media.frames > 1 for media in items),
        skipped=tuple(SkippedSection(source=item.source, reason=item.reason) for item in prepared.skipped),
        provenance=dict(workload.provenance),
        tokens_per_request={f"p{q}": float(np.percentile(tokens, q)) for q in (5, 25, 50, 75, 95, 99)},
    )


def shared_facts(prepared: PreparedBench) -> dict[str, Any]:
    """What must be equal on all ranks, by name, in few words."""
    source, plan = prepared.source, prepared.plan
    return {
        "vitgraph": __version__,
        "model": f"{source.name} ({source.architecture}, {source.config_source})",
        "workload": f"{prepared.workload.fingerprint()} of {len(prepared.calls)} calls",
        "graphs": f"{plan.path_budgets}, {len(plan.graph_keys())} of them",
    }


def resolved_of(model: ModelSpec, graph: GraphSpec, source: ModelSource, plan: BudgetPlan, **more: Any) -> Resolved:
    """What settings came to."""
    return Resolved(
        model=model.model,
        architecture=source.architecture,
        row=source.row.name,
        config_source=source.config_source,
        revision=model.revision,
        load_format=model.load_format,
        processor=dict(model.mm_processor_kwargs),
        dtype=model.dtype,
        attn_backend=None if model.attn_backend == AUTO_BACKEND else model.attn_backend,
        compile=model.compile,
        packing=graph.packing,
        token_budgets=dict(plan.path_budgets),
        max_vision_items_per_batch=plan.max_items,
        max_frames_per_batch=plan.max_frames,
        slot_tiers=graph.slot_tiers,
        video_pruning_rate=graph.video_pruning_rate,
        graphs=len(plan.graph_keys()),
        **more,
    )


def resolved_bench(prepared: PreparedBench) -> Resolved:
    """What the settings of a bench came to."""
    spec, monolithic = prepared.spec, prepared.monolithic
    return resolved_of(
        spec.model,
        spec.graph,
        prepared.source,
        prepared.plan,
        requests_per_call=common_size(prepared.calls),
        rounds=spec.run.rounds,
        ranks=spec.parallel.ranks,
        assignment=spec.parallel.assignment if spec.parallel.ranks > 1 else None,
        monolithic=None if monolithic is None else monolithic.resolved(),
    )
