"""Prints how the calls of a run were shared among its ranks: a table for each mode, and what the ranks are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vitgraph.records import RunRecord
from vitgraph.report.terminal import new_table
from vitgraph.report.units import count_text, ms_text, number_text
from vitgraph.samples import EAGER, GRAPH, HF

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
        shared = entry.get("parallel")
        if shared is None:
            continue
        console.print()
        console.print(_mode_table(mode, shared))
        console.print(
            Text(
                f"Gather {ms_text(shared['gather_ms'])} ms once the last rank is there; the slowest rank encodes "
                f"{number_text(shared['time_imbalance'], 2)} times the mean of the ranks "
                f"(pixel rows {number_text(shared['input_imbalance'], 2)}, shared by {assignment})"
            )
        )
    for facts in ranks:
        for dropped in facts["dropped"]:
            console.print(
                Text(f"Rank {facts['rank']} could not capture budget {dropped['token_budget']}: {dropped['reason']}")
            )


def _mode_table(mode: str, shared: Mapping[str, Any]) -> Table:
    counts = ("items", "hits", "misses", "replays") if mode == GRAPH else ("items",)
    table = new_table(f"{_TITLES[mode]}, by rank (milliseconds a request)")
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
