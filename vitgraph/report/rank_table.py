"""Prints how the calls of a run were shared among its ranks: a table for each mode, and what the ranks are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vitgraph.records.bench_record import RunRecord
from vitgraph.records.compare_record import CompareRecord
from vitgraph.records.samples import EAGER, GRAPH, HF
from vitgraph.report.terminal import new_table
from vitgraph.report.units import count_text, ms_text, number_text

_TITLES = {EAGER: "Eager", GRAPH: "Graph", HF: "Transformers"}


def render_ranks(record: RunRecord, console: Console) -> None:
    """Prints the ranks' part of a record; nothing for a run of one process.

    Args:
        record: A loaded or fresh record.
        console: Where to print.
    """
    ranks = record["environment"].get("ranks", [])
    if not ranks:
        return
    assignment = record["settings"]["parallel"]["assignment"]
    for mode, entry in record["summary"].items():
        if "parallel" in entry:
            _render_mode(_TITLES[mode], mode, entry["parallel"], assignment, console)
    for facts in ranks:
        for dropped in facts["dropped"]:
            console.print(
                Text(f"Rank {facts['rank']} could not capture budget {dropped['token_budget']}: {dropped['reason']}")
            )


def render_sharing(sharing: Mapping[str, Any] | None, console: Console) -> None:
    """Prints what assigning by cost changes against vLLM's load balance by size, as predicted; nothing without a cost.

    Args:
        sharing: `PreparedBench.sharing`.
        console: Where to print.
    """
    by_cost = (sharing or {}).get("by_cost")
    if sharing is None or by_cost is None:
        return
    table = new_table(f"Predicted for {count_text(by_cost['calls'], 'call')} on {sharing['ranks']} ranks")
    table.add_column("Assignment")
    for name in ("Slowest rank ms", "over the mean", "Pixel rows over the mean"):
        table.add_column(name, justify="right")
    for assignment, label in (("size", "size, as vLLM"), ("cost", "cost")):
        imbalance, rows = by_cost["predicted_imbalance"][assignment], by_cost["input_imbalance"][assignment]
        slowest = ms_text(by_cost["predicted_slowest_ms"][assignment])
        table.add_row(label, slowest, number_text(imbalance, 3), number_text(rows, 3))
    console.print()
    console.print(table)
    before, after = (by_cost["predicted_slowest_ms"][assignment] for assignment in ("size", "cost"))
    gain = f"{100 * (1 - after / before):+.1f}%" if before else "nothing"
    console.print(
        Text(
            f"Sharing by cost gives some rank other items in {by_cost['changed_calls']} of {by_cost['calls']} calls; "
            f"the slowest rank gains {gain} (positive = faster)"
        )
    )


def render_compared_ranks(record: CompareRecord, console: Console) -> None:
    """Prints the ranks' part of a backend comparison; nothing for a run of one process."""
    assignment = record["settings"].get("parallel", {}).get("assignment")
    for row in record.rows:
        for mode, shared in row.get("parallel", {}).items():
            _render_mode(f"{row['requested']}, {mode}", mode, shared, assignment, console)


def _render_mode(title: str, mode: str, shared: Mapping[str, Any], assignment: str | None, console: Console) -> None:
    console.print()
    console.print(_mode_table(title, mode, shared))
    console.print(
        Text(
            f"Gather {ms_text(shared['gather_ms'])} ms once the last rank is there; the slowest rank encodes "
            f"{number_text(shared['time_imbalance'], 2)} times the mean of the ranks "
            f"(pixel rows {number_text(shared['input_imbalance'], 2)}, shared by {assignment})"
        )
    )


def _mode_table(title: str, mode: str, shared: Mapping[str, Any]) -> Table:
    counts = ("items", "hits", "misses", "replays") if mode == GRAPH else ("items",)
    table = new_table(f"{title}, by rank (milliseconds a request)")
    for name in ("Rank", "Encode", "Wait", "Whole", *(count.capitalize() for count in counts), "Without items"):
        table.add_column(name, justify="right")
    for rank in shared["ranks"]:
        table.add_row(
            str(rank["rank"]),
            *(ms_text(rank[name]) for name in ("encode_ms", "wait_ms", "wall_ms")),
            *(str(rank[name]) for name in counts),
            count_text(rank["idle_calls"], "call"),
        )
    return table
