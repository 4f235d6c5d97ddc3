"""The document of a calibration: the replay curve, empty slots, overheads, memory, and the cost model's error."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from vitgraph.report import say
from vitgraph.report.columns import Column, TableSpec
from vitgraph.report.document import Document, Facts, Text, section, sections

CURVE = TableSpec(
    "curve",
    "",
    "a token budget",
    (
        Column("token_budget", "integer", "tokens", "the budget", "Budget", str),
        Column("segment_slots", "integer", "segments", "its segment slots", "Slots"),
        Column("tokens", "integer", "tokens", "output tokens of the batch in it", "Tokens"),
        Column("replay_ms", "number", "ms", "wall time of a replay", "Replay ms"),
        Column("eager_ms", "number", "ms", "the same batch run eagerly", "Eager ms"),
        Column("eager_low_ms", "number", "ms", "its 10th percentile", "Eager P10"),
        Column("eager_high_ms", "number", "ms", "its 90th percentile", "Eager P90"),
    ),
    "calls",
)


def calibrate_document(summary: Mapping[str, Any]) -> Document:
    """The report of a calibration.

    Args:
        summary: `vitgraph.predict.profile_summary.describe_profile`.
    """
    return Document(
        name="vitgraph calibrate",
        title=str(summary["label"]),
        what=(f"measured {summary['created_at']} in {say.number(summary['elapsed_s'], 0)} s",),
        sections=sections(
            section("Replay and eager by budget", CURVE.table(summary["curve"])),
            section("What a call costs beside it", Facts.of(_facts(summary))),
            section(
                "",
                Text(summary["error_text"]),
                *(Text(f"measure it first: {doubt}") for doubt in summary["doubts"]),
                *(Text(f"note: {note}") for note in summary["notes"]),
            ),
        ),
        tables=(CURVE.table(summary["curve"]),),
    )


def _facts(summary: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    small, large = summary["empty_slots_budgets"]
    levels = [
        f"{row['slots']:g}: +{say.ms(row['at_small_budget_ms'])} ms at {small:g} tokens, "
        f"+{say.ms(row['at_large_budget_ms'])} ms at {large:g}"
        for row in summary["empty_slots"]
        if row["slots"]
    ]
    yield "Empty slots", "; ".join(levels) or "not measured"
    cost = summary["overheads"]
    yield (
        "Manager",
        f"{say.ms(cost['call_ms'])} ms a call, {say.ms(cost['replay_ms'])} a replay, "
        f"{say.ms(cost['item_ms'])} an item, {say.ms(1e3 * cost['token_ms'])} a thousand tokens, "
        f"{say.ms(cost['miss_ms'])} an eager call",
    )
    for row in summary["memory"]:
        sizes = f"pool {say.size(row['pool_bytes'])}, buffers {say.size(row['buffer_bytes'])}"
        yield f"Budgets up to {row['max_budget']}", f"{sizes}, {say.count(row['graphs'], 'graph')}"
    yield "Attention", summary["attention"]
    host = summary["host"] or {}
    if host.get("launch_us") is not None:
        usual = f"usual hosts: {host['reference_launch_us']:.0f}"
        yield "Host", f"{host['launch_us']:.0f} µs a kernel of short eager calls ({usual})"
    yield "Capture", f"{say.number(summary['capture_ms'], 0)} ms a graph"
