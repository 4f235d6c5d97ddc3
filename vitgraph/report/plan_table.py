"""Prints what a run would do: resolved settings, graphs, and the packing that the workload would get."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from vitgraph.report.rank_table import render_sharing


def render_plan(description: Mapping[str, Any], console: Console) -> None:
    """Prints a `--dry-run` description.

    Args:
        description: `PreparedBench.describe()`.
        console: Where to print.
    """
    settings, resolved = description["settings"], description["resolved"]
    workload, expected = description["workload"], description["expected"]
    facts = Table.grid(padding=(0, 2))
    facts.add_row("model", f"{settings['model']['model']} ({resolved['architecture']}, {resolved['config_source']})")
    facts.add_row(
        "workload",
        f"{workload['name']}: {workload['requests']} requests, {workload['items']} items, "
        f"{workload['videos']} videos, {len(workload['skipped'])} skipped",
    )
    for path, budgets in resolved["token_budgets"].items():
        facts.add_row(f"budgets ({path})", ", ".join(map(str, budgets)))
    facts.add_row("items / frames a replay", _limits(resolved))
    facts.add_row("graphs to capture", str(resolved["graphs"]))
    facts.add_row("packing", settings["graph"]["packing"])
    rate = expected["hit_rate"]
    facts.add_row(
        "expected hits",
        f"{expected['hits']} of {expected['items']} items" + ("" if rate is None else f" ({rate:.1%})"),
    )
    facts.add_row("expected misses", ", ".join(f"{k}: {v}" for k, v in expected["misses_by_reason"].items()) or "none")
    waste = expected["waste"]
    facts.add_row("expected waste", "–" if waste is None else f"{waste:.1%} of the replayed rows")
    console.print(facts)
    if expected["per_budget"]:
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        for column in ("path", "budget", "slots", "replays", "items", "tokens", "waste"):
            table.add_column(column, justify="left" if column == "path" else "right")
        for row in expected["per_budget"]:
            table.add_row(
                row["path"],
                str(row["token_budget"]),
                str(row["segment_slots"]),
                str(row["replays"]),
                str(row["items"]),
                str(row["tokens"]),
                f"{row['waste']:.1%}",
            )
        console.print(table)
    render_sharing(description["sharing"], console)
    for warning in description["warnings"]:
        console.print(f"note: {warning}", markup=False)


def _limits(resolved: Mapping[str, Any]) -> str:
    frames = resolved["max_frames_per_batch"]
    return f"{resolved['max_vision_items_per_batch']} / {frames or 'image-only'}"
