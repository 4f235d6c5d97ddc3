"""The documents of `plan` and of dry runs: what a run would do, and what packing does with a call or a workload."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from vitgraph.report.columns import Cell, Column, Table, TableSpec, count_text, misses_text, ms_text, share_text
from vitgraph.report.document import Document, Facts, Section, Text, section, sections
from vitgraph.report.views.compare import availability_facts
from vitgraph.report.views.conditions import budgets_of, limits_text, of_text
from vitgraph.report.views.graph_tables import GRAPH_KEY, PER_PATH, compact
from vitgraph.report.views.ranks import sharing_section

EXPECTED = TableSpec(
    "expected",
    "Expected replays by token budget",
    "a graph that would be replayed",
    (
        *GRAPH_KEY,
        Column("replays", "integer", "replays", "replays of one round", "Replays"),
        Column("items", "integer", "items", "items in those replays", "Items"),
        Column("tokens", "integer", "tokens", "output tokens of those items", "Tokens"),
        Column("waste", "number", "share", "rows of the replays that were padding", "Waste"),
        Column(
            "break_even_tokens", "integer", "tokens", "fewest tokens of one image faster so", "One image faster from"
        ),
    ),
)
BATCHES = TableSpec(
    "batches",
    "",
    "a batch and path",
    (
        Column("items", "text", "", "places of its items in the call", "Items"),
        Column("tokens", "integer", "tokens", "output tokens on the path", "Tokens"),
        Column("graph", "text", "", "token budget and slots of its graph, or `eager`", "Graph"),
        Column("waste", "number", "share", "rows of the graph that are padding", "Waste"),
        Column("replay_ms", "number", "ms", "predicted time", "Predicted ms"),
        Column("why", "text", "", "why it is not replayed", "Why not"),
    ),
)
_TWO_PATHS = TableSpec(
    "two_paths",
    "Two paths against one monolithic graph, expected",
    "a figure",
    (
        Column("figure", "text", "", "what is compared", " "),
        Column("graph", "text", "", "a graph for each path", "Two paths"),
        Column("monolithic", "text", "", "one graph of both paths", "Monolithic"),
    ),
)


def dry_run_document(description: Mapping[str, Any]) -> Document:
    """What a run would do.

    Args:
        description: `PreparedBench.describe()`, with the `backends` of a comparison.
    """
    settings, resolved, expected = (description[name] for name in ("settings", "resolved", "expected"))
    model, graph = settings["model"], settings["graph"]
    per_call = settings.get("bench", {}).get("requests_per_call", 1)
    what = (
        model.get("attn_backend") or "auto",
        "blocks compiled" if model.get("compile") else "blocks not compiled",
        f"{graph['packing']} packing",
        budgets_of(resolved["token_budgets"]),
        f"{count_text(per_call, 'request')} a call",
    )
    backends = description.get("backends")
    return Document(
        name="vitgraph, dry run",
        title=f"{model['model']} ({resolved['architecture']}, {resolved['config_source']})",
        what=tuple(map(str, what)),
        sections=sections(
            section("What would run", Facts.of(_plan_facts(description))),
            section("", _path_table(expected), _expected_table(expected["per_budget"])),
            _monolithic_section(resolved, expected),
            sharing_section(description["sharing"]),
            section("Backends", availability_facts(backends)) if backends else None,
            section("", *(Text(f"note: {warning}") for warning in description["warnings"])),
        ),
        tables=(EXPECTED.table(map(_expected_row, expected["per_budget"])),),
    )


def _plan_facts(description: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    resolved, workload, expected = (description[name] for name in ("resolved", "workload", "expected"))
    yield (
        "Workload",
        f"{workload['name']}: {of_text(workload['requests'], workload['requests_brought'], 'request')}, "
        f"{of_text(workload['items'], workload['items_brought'], 'item')}, "
        f"{count_text(workload['videos'], 'video')}, {len(workload['skipped'])} skipped",
    )
    for path, budgets in resolved["token_budgets"].items():
        yield f"Budgets ({path})", ", ".join(map(str, budgets))
    limits = resolved["max_vision_items_per_batch"], resolved["max_frames_per_batch"]
    yield "Items / frames a replay", limits_text(*limits)
    yield "Graphs to capture", str(resolved["graphs"])
    yield "Packing", description["settings"]["graph"]["packing"]
    yield from _counter_facts(expected)


def _counter_facts(expected: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    rate = f" ({share_text(expected['hit_rate'])})" if expected["hit_rate"] is not None else ""
    yield "Expected hits", f"{expected['hits']:,} of {expected['items']:,} items{rate}"
    misses = expected["misses_by_reason"].items()
    yield "Expected misses", ", ".join(f"{name.replace('_', ' ')}: {count}" for name, count in misses) or "none"
    waste = expected["waste"]
    yield "Expected waste", "–" if waste is None else f"{share_text(waste)} of the replayed rows"


def _path_table(counts: Mapping[str, Any]) -> Table | None:
    """What is done on each encoder path; None for a model with one."""
    paths = counts.get("per_path", [])
    if all(row["path"] == "default" for row in paths):
        return None
    rows = (
        {**row, "tokens": row["tokens_replayed"], "budget_tokens": row["budget_tokens_replayed"], "series": "graph"}
        for row in paths
    )
    return PER_PATH.table(rows).without_empty("replay_ms")


def _expected_row(row: Mapping[str, Any]) -> dict[str, Any]:
    return {**row, "axis_key": "x".join(map(str, row.get("axis_key", ())))}


def _expected_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    found = [_expected_row(row) for row in rows]
    has_times = any("break_even_tokens" in row for row in rows)
    if has_times:
        never = Cell("never")
        found = [row | {"break_even_tokens": row.get("break_even_tokens") or never} for row in found]
    return compact(EXPECTED.table(found)).without_empty("break_even_tokens")


def _monolithic_section(resolved: Mapping[str, Any], expected: Mapping[str, Any]) -> Section | None:
    """What is expected of the monolithic graphs, beside the two paths."""
    if "monolithic" not in expected:
        return None
    planned, own = resolved["monolithic"], expected["monolithic"]
    (budgets,) = planned["token_budgets"].values()
    rows = [
        ("Graphs to capture", str(resolved["graphs"]), str(planned["graphs"])),
        *((f"Expected {name}", f"{expected[name]:,}", f"{own[name]:,}") for name in ("hits", "misses", "replays")),
        ("Rows computed", f"{expected['budget_tokens_replayed']:,}", f"{own['budget_tokens_replayed']:,}"),
        ("Expected waste", share_text(expected["waste"]), share_text(own["waste"])),
    ]
    table = _TWO_PATHS.table(dict(zip(("figure", "graph", "monolithic"), row, strict=True)) for row in rows)
    text = (
        f"Monolithic graphs: {planned['max_crops']} crops and {planned['item_tokens']} rows an image, budgets "
        f"{', '.join(map(str, budgets))}"
    )
    return section("", table, Text(text))


def explanation_document(data: Mapping[str, Any], sharing: Mapping[str, Any] | None = None) -> Document:
    """What packing does with one call (`explain_plan`) or with a workload (`explain_workload`)."""
    counts = data["counts"]
    outcome = (
        f"{data['policy']}: {count_text(counts['hits'], 'hit')}, {misses_text(counts['misses'])}, {_refused_text(data)}"
        f"{count_text(counts['replays'], 'replay')}, waste {share_text(counts['waste'])}"
    )
    batches = _batch_table(data["batches"]) if "batches" in data else _expected_table(counts["per_budget"])
    return Document(
        name="vitgraph plan",
        title=f"{data['policy']} packing",
        what=(outcome,),
        sections=sections(
            section("", batches, _path_table(counts)),
            section("", *map(Text, _miss_lines(data)), *_prediction(data["predicted"])),
            sharing_section(sharing),
        ),
        tables=(EXPECTED.table(map(_expected_row, counts["per_budget"])),),
    )


def _refused_text(data: Mapping[str, Any]) -> str:
    """How many of the workload's items were left out; empty where none was."""
    workload = data.get("workload") or {}
    refused = len(workload.get("skipped", ()))
    return f"{refused} refused of {count_text(workload['items_brought'], 'item')}, " if refused else ""


def ranks_documents(data: Mapping[str, Any]) -> Iterable[Document]:
    """What each rank would do with its share, and what the sharing costs.

    Args:
        data: `sharing`, and one entry a rank: `rank`, `items` of the one call, and its `explanation`.
    """
    for entry in data["ranks"]:
        items = "" if entry["items"] is None else f": items {', '.join(map(str, entry['items'])) or 'none'}"
        title = f"rank {entry['rank']}{items}"
        if entry["explanation"] is None:
            yield Document("vitgraph plan", title, ("no items",))
        else:
            yield replace(explanation_document(entry["explanation"]), title=title)
    sharing = data["sharing"]
    imbalance = Text(f"Pixel rows of the heaviest rank over the mean: {sharing['input_imbalance']:.3f}")
    title = f"sharing among {sharing['ranks']} ranks"
    yield Document("vitgraph plan", title, sections=sections(section("", imbalance), sharing_section(sharing)))


def _batch_table(batches: Sequence[Mapping[str, Any]]) -> Table:
    rows = []
    for batch in batches:
        for number, run in enumerate(batch["runs"]):
            graph = "eager" if run["token_budget"] is None else f"{run['token_budget']} / {run['segment_slots']}"
            first = (
                {"items": ", ".join(map(str, batch["items"])), "replay_ms": batch["replay_ms"]} if not number else {}
            )
            rows.append(
                {
                    "items": "",
                    **first,
                    "tokens": run["tokens"],
                    "graph": graph if run["path"] == "default" else f"{run['path']} {graph}",
                    "waste": run["waste"],
                    "why": run["miss_text"] or "",
                }
            )
    return BATCHES.table(rows).without_empty("replay_ms", "why")


def _miss_lines(data: Mapping[str, Any]) -> Iterable[str]:
    for row in data.get("misses", ()):
        sizes = f", {row['smallest_tokens']} to {row['largest_tokens']} tokens" if "smallest_tokens" in row else ""
        share = f" ({share_text(row['share'])})" if "share" in row else ""
        yield f"Misses: {count_text(row['items'], 'item')}{share}{sizes}: {row['text']}"


def _prediction(predicted: Mapping[str, Any] | None) -> Iterable[Text]:
    if predicted is None:
        yield Text("No predicted times: no calibration was given.", "dim")
        return
    if "graph_ms" in predicted:
        yield Text(f"Predicted {ms_text(predicted['graph_ms'])} ms, eager {ms_text(predicted['eager_ms'])} ms.")
    else:
        graph, eager = predicted["graph"], predicted["eager"]
        yield Text(
            f"Predicted mean {ms_text(graph['mean_ms'])} ms, P99 {ms_text(graph['p99_ms'])} ms; eager "
            f"{ms_text(eager['mean_ms'])} and {ms_text(eager['p99_ms'])} ms; "
            f"{share_text(predicted['slower_than_eager_share'])} of the requests slower than eager."
        )
    yield Text(predicted["error_text"], "dim")
