"""Sections of the record of `bench` that no device is needed for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vitgraph.measure.preparation import PreparedBench, resolved_of, workload_facts
from vitgraph.planning.accounting import GraphCounters
from vitgraph.records.draft import Draft
from vitgraph.records.sample_table import GRAPH, MONOLITHIC
from vitgraph.records.store import SAMPLES_FILE


def correctness_facts(found: Mapping[str, float | None], checked: int, tolerance: float) -> dict[str, Any]:
    """The `correctness` section: what was compared before anything was timed.

    Args:
        found: Largest distance from eager of each series that was compared.
        checked: Calls that were compared.
        tolerance: Largest distance that passes.
    """
    measured = [distance for distance in found.values() if distance is not None]
    status = "ok" if all(distance <= tolerance for distance in measured) else "incorrect"
    facts = {
        "checked": checked,
        "max_rel_l2": found.get(GRAPH),
        "tolerance": tolerance,
        "status": status if measured else "unchecked",
    }
    return facts | ({"monolithic_max_rel_l2": found[MONOLITHIC]} if MONOLITHIC in found else {})


def replay_ms_of_path(path: str, per_budget: Sequence[Mapping[str, Any]], requests: int) -> float | None:
    """Time that a mean request spends in the replays of a path; None unless each of its graphs was timed alone."""
    graphs = [row for row in per_budget if row["path"] == path]
    times = [row.get("replay_ms") for row in graphs]
    if not requests or None in times:
        return None
    return sum(row["replays"] * time_ms for row, time_ms in zip(graphs, times, strict=True)) / requests


def new_draft(prepared: PreparedBench, command: Sequence[str]) -> Draft:
    """The record of a run that has not begun: all that is decided without a device."""
    draft = Draft(
        "bench",
        command,
        prepared.spec.as_dict(),
        resolved=resolved_of(prepared),
        workload=workload_facts(prepared),
        samples_file=SAMPLES_FILE,
    )
    draft.result = {"graph": {"policy": prepared.spec.graph.packing}}
    if prepared.monolithic is not None:
        counters = prepared.monolithic.describe_counters(GraphCounters())
        draft.result["monolithic"] = {"policy": prepared.spec.graph.packing, **counters}
    return draft
