"""Prints what a run would do: resolved settings, graphs, and the packing that the workload would get."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from vitgraph.report.console import cell_table, print_paths
from vitgraph.report.paths_view import MONOLITHIC_TITLE
from vitgraph.report.rank_table import render_sharing
from vitgraph.report.units import share_text
from vitgraph.report.views.conditions import of_text


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
        f"{workload['name']}: {of_text(workload['requests'], workload['requests_brought'], 'request')}, "
        f"{of_text(workload['items'], workload['items_brought'], 'item')}, "
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
    print_paths(expected, console)
    if "monolithic" in expected:
        _print_monolithic(resolved["monolithic"], resolved["graphs"], expected, console)
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


def _print_monolithic(planned: Mapping[str, Any], graphs: int, expected: Mapping[str, Any], console: Console) -> None:
    """What is expected of the monolithic graphs, beside the two paths."""
    own = expected["monolithic"]
    (budgets,) = planned["token_budgets"].values()
    rows = [
        ("graphs to capture", str(graphs), str(planned["graphs"])),
        *((f"expected {name}", str(expected[name]), str(own[name])) for name in ("hits", "misses", "replays")),
        ("rows computed", f"{expected['budget_tokens_replayed']:,}", f"{own['budget_tokens_replayed']:,}"),
        ("expected waste", share_text(expected["waste"]), share_text(own["waste"])),
    ]
    console.print(cell_table(MONOLITHIC_TITLE, ("", "Two paths", "Monolithic"), rows))
    console.print(
        f"Monolithic graphs: {planned['max_crops']} crops and {planned['item_tokens']} rows an image, budgets "
        f"{', '.join(map(str, budgets))}"
    )


def _limits(resolved: Mapping[str, Any]) -> str:
    frames = resolved["max_frames_per_batch"]
    return f"{resolved['max_vision_items_per_batch']} / {frames or 'image-only'}"
