"""Sections of the record of `bench` that no device is needed for."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vitgraph import __version__
from vitgraph.measure.preparation import PreparedBench, resolved_facts, workload_facts
from vitgraph.planning.accounting import GraphCounters
from vitgraph.records.samples import SAMPLES_FILE

if TYPE_CHECKING:
    from vitgraph.measure.runner import BenchOutcome


def correctness_facts(outcome: BenchOutcome, tolerance: float) -> dict[str, Any]:
    """The `correctness` section: what was compared before anything was timed."""
    distances = [outcome.max_rel_l2, outcome.monolithic_max_rel_l2]
    measured = [distance for distance in distances if distance is not None]
    status = "ok" if all(distance <= tolerance for distance in measured) else "incorrect"
    found = {
        "checked": outcome.checked_calls,
        "max_rel_l2": outcome.max_rel_l2,
        "tolerance": tolerance,
        "status": status if measured else "unchecked",
    }
    if outcome.monolithic_max_rel_l2 is not None:
        found["monolithic_max_rel_l2"] = outcome.monolithic_max_rel_l2
    return found


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
