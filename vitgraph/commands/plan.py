"""`vitgraph plan`: which items would go into which replay, on one GPU or on several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vitgraph.commands.shell import Shown, tell
from vitgraph.errors import InputError
from vitgraph.specs.asked import PlanSpec

if TYPE_CHECKING:
    from rich.console import Console

    from vitgraph.measure.preparation import PreparedBench
    from vitgraph.planning.items import EncoderItemSpec


def plan(spec: PlanSpec) -> Shown:
    """Show which items would go into which replay, with hits, misses and waste; needs no GPU.

    On several GPUs (--tensor-parallel-size), also which rank would get which items, and what sharing by cost changes.
    """
    from vitgraph.measure.preparation import workload_of
    from vitgraph.report.views.plan import explanation_document

    prepared = _prepare(spec)
    if spec.bench.parallel.ranks > 1:
        return _plan_ranks(spec, prepared)
    requests = [len(call.requests) for call in prepared.calls]
    data = _explain(spec, prepared, [call.specs for call in prepared.calls], requests)
    data["warnings"], data["workload"] = prepared.warnings, workload_of(prepared).model_dump(mode="json")
    for text in prepared.warnings if not spec.shell.json else ():
        tell(f"note: {text}")
    return Shown(data, explanation_document(data))


def _prepare(spec: PlanSpec) -> PreparedBench:
    """The workload, or the one call of `--items`, prepared as `bench` would."""
    from vitgraph.measure.preparation import prepare_bench
    from vitgraph.workloads.base import MediaItem, Workload, number_requests

    if not spec.items:
        return prepare_bench(spec.bench)
    items = tuple(MediaItem(*size) for size in spec.items)
    prepared = prepare_bench(spec.bench, Workload("items", number_requests([items])))
    if prepared.skipped:
        raise InputError(f"{prepared.source.name} does not take every item of the call: {prepared.skipped[0].reason}")
    return prepared


def _explain(
    spec: PlanSpec, prepared: PreparedBench, calls: Sequence[Sequence[EncoderItemSpec]], requests: Sequence[int] | None
) -> dict[str, Any]:
    from vitgraph.predict.find_profile import packing_cost
    from vitgraph.tuning.explain import explain_plan, explain_workload

    policy, cost = spec.bench.graph.packing, prepared.cost
    if cost is None and spec.bench.parallel.ranks > 1 and spec.bench.parallel.assignment == "cost":
        # What the items are shared by predicts each rank's replays too.
        cost = packing_cost(None, prepared.source)
    if spec.items:
        return explain_plan(calls[0], prepared.plan, policy, cost)
    return explain_workload(calls, prepared.plan, policy, cost, requests)


def _plan_ranks(spec: PlanSpec, prepared: PreparedBench) -> Shown:
    """What each rank would do with its share."""
    assert prepared.assign is not None, "several ranks have an assigner"
    ranks = spec.bench.parallel.ranks
    calls = [call.specs for call in prepared.calls]
    shared = [prepared.assign(specs, ranks) for specs in calls]
    explained: list[dict[str, Any]] = []
    for rank in range(ranks):
        parts = [tuple(specs[index] for index in shares[rank]) for specs, shares in zip(calls, shared, strict=True)]
        parts = [part for part in parts if part]
        found = _explain(spec, prepared, parts, None) if parts else None
        own = list(shared[0][rank]) if spec.items else None
        if found is not None and own is not None:
            # Items are numbered as in the call, not as in the share.
            for item in found["items"]:
                item["index"] = own[item["index"]]
            for batch in found["batches"]:
                batch["items"] = [own[index] for index in batch["items"]]
        explained.append({"rank": rank, "items": own, "explanation": found})
    data = {"sharing": prepared.sharing, "ranks": explained}

    def show_all(console: Console) -> None:
        from vitgraph.report.to_terminal import render
        from vitgraph.report.views.plan import ranks_documents

        for document in ranks_documents(data):
            render(document, console)
            console.print()

    return Shown(data, show_all)
