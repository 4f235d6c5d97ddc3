"""Sections of the record of `bench` that no device is needed for."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

from vitgraph import __version__
from vitgraph.measure.preparation import PreparedBench, resolved_facts, workload_facts
from vitgraph.planning.accounting import GraphCounters
from vitgraph.records.samples import GRAPH, MONOLITHIC, SAMPLES_FILE


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


def empty_record(prepared: PreparedBench, command: Sequence[str]) -> dict[str, Any]:
    """The record of a run that has not begun: all that is decided without a device."""
    return {
        "schema_version": 1,
        "kind": "bench",
        "status": "error",
        "status_reason": "the run ended before it measured anything",
        "vitgraph_version": __version__,
        "created_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": list(command),
        "settings": prepared.spec.as_dict() | {"resolved": resolved_facts(prepared)},
        "environment": {},
        "workload": workload_facts(prepared),
        "summary": {},
        "comparison": {},
        "graph": _empty_graph(prepared, GraphCounters().as_dict()) | _empty_monolithic(prepared),
        "correctness": None,
        "samples_file": SAMPLES_FILE,
    }


def _empty_graph(prepared: PreparedBench, counters: dict[str, Any]) -> dict[str, Any]:
    return {
        "mode": None,
        "policy": prepared.spec.graph.packing,
        **counters,
        "captured": [],
        "dropped": [],
        "pool_bytes": None,
        "buffer_bytes": None,
        "capture_s": None,
        "launch_gap": None,
        "call_overheads": None,
        "host_steps_ms": None,
    }


def _empty_monolithic(prepared: PreparedBench) -> dict[str, Any]:
    """The section of the monolithic graphs, where the run measures them."""
    if prepared.monolithic is None:
        return {}
    return {"monolithic": _empty_graph(prepared, prepared.monolithic.describe_counters(GraphCounters()))}
