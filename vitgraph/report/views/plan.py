"""The documents of `plan` and of dry runs: what a run would do, and what packing does with a call or a workload."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from vitgraph.records.graph_facts import Counters
from vitgraph.report import say
from vitgraph.report.columns import Row, column, table_of, texts
from vitgraph.report.document import Document, Facts, Section, Text, document, section
from vitgraph.report.views import graph_tables
from vitgraph.report.views.conditions import budgets_of, compiled_text, limits_text, misses_text, of_text
from vitgraph.report.views.ranks import sharing_section

BATCHES = table_of(
    "batches",
    *texts(items="Items"),
    column("tokens", "output tokens on the path", "Tokens"),
    *texts(graph="Graph"),
    column("waste", "rows of the graph that are padding", "Waste"),
    column("replay_ms", "predicted time", "Predicted ms"),
    *texts(why="Why not"),
)


def dry_run_document(description: Mapping[str, Any]) -> Document:
    """What a run would do.

    Args:
        description: `PreparedBench.describe()`, with the `backends` of a comparison.
    """
    settings, resolved, expected = (description[name] for name in ("settings", "resolved", "expected"))
    model, packing, counters = settings["model"], settings["graph"]["packing"], _counters(expected)
    workload = description["workload"]
    # Those that can run on this device come first.
    found = sorted(description.get("backends") or (), key=lambda row: bool(row["unavailable_reason"]))
    reasons = ((str(row["name"]), row["unavailable_reason"]) for row in found)
    backends = ((name, f"unavailable: {reason}" if reason else "available") for name, reason in reasons)
    facts = (
        Facts.of(graph_tables.counter_facts(counters, packing)),
        graph_tables.shown_paths(counters),
        graph_tables.replayed_table(counters),
    )
    return document(
        "vitgraph, dry run",
        f"{model['model']} ({resolved['architecture']}, {resolved['config_source']})",
        section("What would run", Facts.of(_plan_facts(resolved, workload))),
        section("Expected", *facts) if resolved["graphs"] else None,
        _monolithic_section(resolved, counters, expected["monolithic"]) if expected.get("monolithic") else None,
        sharing_section(description["sharing"]),
        section("Backends", Facts.of(backends)),
        section("", *(f"note: {warning}" for warning in description["warnings"])),
        what=(
            str(model.get("attn_backend") or "auto"),
            compiled_text(model.get("compile")),
            f"{packing} packing",
            *filter(None, [budgets_of(resolved["token_budgets"])]),
            f"{say.count(workload['requests'], 'request')} in {say.count(workload['calls'], 'call')}",
        ),
        tables=(graph_tables.per_budget_table(counters),),
    )


def _plan_facts(resolved: Mapping[str, Any], workload: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    counts = (of_text(workload[name], workload[f"{name}_brought"], name[:-1]) for name in ("requests", "items"))
    videos = say.count(workload["videos"], "video")
    yield "Workload", f"{workload['name']}: {', '.join(counts)}, {videos}, {len(workload['skipped'])} skipped"
    for path, budgets in resolved["token_budgets"].items():
        yield f"Budgets ({path})", ", ".join(map(str, budgets))
    limits = resolved["max_vision_items_per_batch"], resolved["max_frames_per_batch"]
    yield "Items / frames a replay", limits_text(*limits)
    yield "Graphs to capture", str(resolved["graphs"])


def _counters(counts: Mapping[str, Any]) -> Counters:
    """Counters as records have them."""
    return Counters.model_validate({name: value for name, value in counts.items() if name in Counters.model_fields})


def _monolithic_section(resolved: Mapping[str, Any], counters: Counters, expected: Mapping[str, Any]) -> Section:
    """What is expected of the monolithic graphs, beside the two paths."""
    planned, sides = resolved["monolithic"], (counters, _counters(expected))
    (budgets,) = planned["token_budgets"].values()
    counted = (("hits", "hits"), ("misses", "misses"), ("replays", "replays"), ("rows", "budget_tokens_replayed"))
    rows = [
        ("Graphs to capture", str(resolved["graphs"]), str(planned["graphs"])),
        *((f"Expected {name}", *(f"{getattr(side, field):,}" for side in sides)) for name, field in counted),
        ("Expected waste", *map(graph_tables.FIGURES["Waste"], sides)),
    ]
    named = (dict(zip(("figure", "graph", "monolithic"), row, strict=True)) for row in rows)
    table = graph_tables.TWO_PATHS.filled(named, title=f"{graph_tables.TWO_PATHS.title}, expected").without("eager")
    crops = f"{planned['max_crops']} crops and {planned['item_tokens']} rows an image"
    return section("", table, f"Monolithic graphs: {crops}, budgets {', '.join(map(str, budgets))}")


def explanation_document(data: Mapping[str, Any]) -> Document:
    """What packing does with one call (`explain_plan`) or with a workload (`explain_workload`)."""
    counts, workload = _counters(data["counts"]), data.get("workload") or {}
    batches = graph_tables.replayed_table(counts)
    refused = len(workload.get("skipped", ()))
    outcome = say.joined(
        say.count(counts.hits, "hit"),
        say.count(counts.misses, "miss", "misses"),
        f"{refused} refused of {say.count(workload['items_brought'], 'item')}" if refused else "",
        say.count(counts.replays, "replay"),
        f"waste {say.share(counts.waste)}",
    )
    if "batches" in data:
        batches = BATCHES.filled(_batch_rows(data["batches"])).without_empty("replay_ms", "why")
    return document(
        "vitgraph plan",
        f"{data['policy']} packing",
        section("", batches, graph_tables.shown_paths(counts)),
        section("", *map(misses_text, data.get("misses", ())), *_prediction(data["predicted"])),
        what=(f"{data['policy']}: {outcome}",),
        tables=(graph_tables.per_budget_table(counts),),
    )


def ranks_documents(data: Mapping[str, Any]) -> Iterable[Document]:
    """What each rank would do with its share, and what the sharing costs.

    Args:
        data: `sharing`, and one entry a rank: `rank`, `items` of the one call, and its `explanation`.
    """
    for entry in data["ranks"]:
        items = "" if entry["items"] is None else f": items {', '.join(map(str, entry['items'])) or 'none'}"
        title = f"rank {entry['rank']}{items}"
        if entry["explanation"] is None:
            yield document("vitgraph plan", title, what=("no items",))
        else:
            yield replace(explanation_document(entry["explanation"]), title=title)
    sharing = data["sharing"]
    imbalance = f"Pixel rows of the heaviest rank over the mean: {sharing['input_imbalance']:.3f}"
    title = f"sharing among {sharing['ranks']} ranks"
    yield document("vitgraph plan", title, section("", imbalance), sharing_section(sharing))


def _batch_rows(batches: Sequence[Mapping[str, Any]]) -> Iterable[Row]:
    for batch in batches:
        first = {"items": ", ".join(map(str, batch["items"])), "replay_ms": batch["replay_ms"]}
        for number, run in enumerate(batch["runs"]):
            graph = "eager" if run["token_budget"] is None else f"{run['token_budget']} / {run['segment_slots']}"
            kept = {"tokens": run["tokens"], "waste": run["waste"], "why": run["miss_text"] or ""}
            yield {"graph": f"{say.path(run['path'])}{graph}", **kept, **({"items": ""} if number else first)}


def _prediction(predicted: Mapping[str, Any] | None) -> Iterable[Text | str]:
    if predicted is None:
        yield Text("No predicted times: no calibration was given.", "dim")
        return
    if "graph_ms" in predicted:
        yield f"Predicted {say.ms(predicted['graph_ms'])} ms, eager {say.ms(predicted['eager_ms'])} ms."
    else:
        graph, eager = predicted["graph"], predicted["eager"]
        yield (
            f"Predicted mean {say.ms(graph['mean_ms'])} ms, P99 {say.ms(graph['p99_ms'])} ms; eager "
            f"{say.ms(eager['mean_ms'])} and {say.ms(eager['p99_ms'])} ms; "
            f"{say.share(predicted['slower_than_eager_share'])} of the requests slower than eager."
        )
    yield Text(predicted["error_text"], "dim")
