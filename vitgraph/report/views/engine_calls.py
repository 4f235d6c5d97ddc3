"""The document of the calls that an engine makes of a workload."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from vitgraph.report.charts import BLUE, bar_labels, new_axes, new_figure
from vitgraph.report.columns import Column, TableSpec, count_text, share_text
from vitgraph.report.document import Chart, Code, Document, Text, section, sections

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_BARS = 12

CALLS = TableSpec(
    "calls",
    "",
    "a number of requests a call",
    (
        Column("requests", "text", "requests", "requests of a call", "Requests a call"),
        Column("calls", "integer", "calls", "calls with so many", "Calls"),
        Column("share", "number", "share", "their share of the calls", "Share", share_text),
        Column(
            "of_requests", "number", "share", "share of the requests that are in such calls", "Of requests", share_text
        ),
    ),
    "calls",
)


def call_facts(sizes: Sequence[int], items: Sequence[int]) -> dict[str, Any]:
    """How many calls have how many requests and items; the largest sizes are one row."""
    counts = Counter(sizes)
    kept = sorted(counts)[:MOST_BARS]
    rows: list[dict[str, Any]] = [
        {"requests": str(size), "calls": counts[size], "weight": size * counts[size]} for size in kept
    ]
    rest = [size for size in counts if size > kept[-1]]
    if rest:
        calls, weight = sum(counts[size] for size in rest), sum(size * counts[size] for size in rest)
        rows.append({"requests": f"{min(rest)} to {max(rest)}", "calls": calls, "weight": weight})
    total = sum(sizes)
    for row in rows:
        row |= {"share": row["calls"] / len(sizes), "of_requests": row.pop("weight") / total}
    return {
        "calls": len(sizes),
        "requests": total,
        "items": sum(items),
        "mean_requests_per_call": total / len(sizes),
        "median_items_per_call": float(np.median(items)),
        "sizes": rows,
    }


def calls_document(facts: Mapping[str, Any]) -> Document:
    """What was written, how many requests the calls have, and how to run them.

    Args:
        facts: `call_facts` of the calls, with `path`, `name` and `provenance`.
    """
    command = shlex.join(["vitgraph", "bench", "--dataset-name", "trace", "--dataset-path", str(facts["path"])])
    engine, rate = facts["provenance"].get("engine"), facts["provenance"].get("request_rate")
    split = facts["provenance"].get("requests_split_over_calls")
    notes = [f"Arrivals: {rate} requests a second; {engine}." if engine else "", ""]
    if split:
        notes[1] = f"{count_text(split, 'part')} of requests whose items are in several calls count as requests."
    return Document(
        name="vitgraph workload calls",
        title=f"saved {facts['path']}",
        what=(
            count_text(facts["calls"], "call"),
            count_text(facts["requests"], "request"),
            f"{facts['mean_requests_per_call']:.2f} requests a call in the mean",
        ),
        sections=sections(
            section("", *(Text(note, "dim") for note in notes if note), CALLS.table(facts["sizes"])),
            section("", Text("Run them with:"), Code(command)),
            section("Charts", Chart("calls", "Requests a call", partial(draw_calls, facts))),
        ),
        tables=(CALLS.table(facts["sizes"]),),
    )


def draw_calls(facts: Mapping[str, Any]) -> Figure:
    """Share of the calls with so many requests, a row a number."""
    rows = facts["sizes"]
    subtitle = f"{facts['name']} · {facts['calls']:,} calls of {facts['requests']:,} requests"
    figure = new_figure("Requests a call", subtitle, 1.6 + 0.32 * len(rows))
    (axes,) = new_axes(figure)
    places = np.arange(len(rows))[::-1]
    bars = axes.barh(places, [100 * row["share"] for row in rows], height=0.7, color=BLUE)
    bar_labels(axes, bars, [f"{row['calls']:,}" for row in rows])
    axes.set(yticks=places, yticklabels=[row["requests"] for row in rows], xlabel="Share of the calls (%)")
    axes.set_ylabel("Requests a call")
    return figure
