"""The documents of `plan` and of dry runs: what a run would do, and what packing does with a call or a workload."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from vitgraph.records.graph_facts import Counters
from vitgraph.report import say
from vitgraph.report.columns import Column, Row, Table, TableSpec, texts
from vitgraph.report.document import Document, Facts, Section, Text, section, sections
from vitgraph.report.views.compare import availability_facts
from vitgraph.report.views.conditions import budgets_of, compiled_text, limits_text, of_text
from vitgraph.report.views.graph_tables import counter_facts, per_budget_table, replayed_table, shown_paths, sides_of
from vitgraph.report.views.ranks import sharing_section

BATCHES = TableSpec(
    "batches",
    columns=(
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
    columns=texts(figure=" ", graph="Two paths", monolithic="Monolithic"),
)


def dry_run_document(description: Mapping[str, Any]) -> Document:
    """What a run would do.

    Args:
        description: `PreparedBench.describe()`, with the `backends` of a comparison.
    """
    settings, resolved, expected = (description[name] for name in ("settings", "resolved", "expected"))
    model, graph, counters = settings["model"], settings["graph"], _counters(expected)
    workload, backends = description["workload"], description.get("backends")
    what = (
        str(model.get("attn_backend") or "auto"),
        compiled_text(bool(model.get("compile"))),
        f"{graph['packing']} packing",
        budgets_of(resolved["token_budgets"]),
        f"{say.count(workload['requests'], 'request')} in {say.count(workload['calls'], 'call')}",
    )
    expectation = (Facts.of(counter_facts(counters, graph["packing"])), *_use_tables(counters))
    return Document(
        name="vitgraph, dry run",
        title=f"{model['model']} ({resolved['architecture']}, {resolved['config_source']})",
        what=tuple(filter(None, what)),
        sections=sections(
            section("What would run", Facts.of(_plan_facts(resolved, workload))),
            section("Expected", *expectation) if resolved["graphs"] else None,
            _monolithic_section(resolved, counters, expected.get("monolithic")),
            sharing_section(description["sharing"]),
            section("Backends", availability_facts(backends)) if backends else None,
            section("", *(Text(f"note: {warning}") for warning in description["warnings"])),
        ),
        tables=(per_budget_table(sides_of(counters)),),
    )


def _plan_facts(resolved: Mapping[str, Any], workload: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    yield (
        "Workload",
        f"{workload['name']}: {of_text(workload['requests'], workload['requests_brought'], 'request')}, "
        f"{of_text(workload['items'], workload['items_brought'], 'item')}, "
        f"{say.count(workload['videos'], 'video')}, {len(workload['skipped'])} skipped",
    )
    for path, budgets in resolved["token_budgets"].items():
        yield f"Budgets ({path})", ", ".join(map(str, budgets))
    limits = resolved["max_vision_items_per_batch"], resolved["max_frames_per_batch"]
    yield "Items / frames a replay", limits_text(*limits)
    yield "Graphs to capture", str(resolved["graphs"])


def _counters(counts: Mapping[str, Any]) -> Counters:
    """Counters as records have them."""
    return Counters.model_validate({name: value for name, value in counts.items() if name in Counters.model_fields})


def _use_tables(counters: Counters) -> tuple[Table | None, Table]:
    return shown_paths(counters), replayed_table(sides_of(counters))


def _monolithic_section(
    resolved: Mapping[str, Any], counters: Counters, expected: Mapping[str, Any] | None
) -> Section | None:
    """What is expected of the monolithic graphs, beside the two paths."""
    if expected is None:
        return None
    planned, sides = resolved["monolithic"], (counters, _counters(expected))
    (budgets,) = planned["token_budgets"].values()
    counted = (("hits", "hits"), ("misses", "misses"), ("replays", "replays"), ("rows", "budget_tokens_replayed"))
    rows = [
        ("Graphs to capture", str(resolved["graphs"]), str(planned["graphs"])),
        *((f"Expected {name}", *(f"{getattr(side, field):,}" for side in sides)) for name, field in counted),
        ("Expected waste", *(say.share(side.waste) for side in sides)),
    ]
    table = _TWO_PATHS.table(dict(zip(("figure", "graph", "monolithic"), row, strict=True)) for row in rows)
    text = (
        f"Monolithic graphs: {planned['max_crops']} crops and {planned['item_tokens']} rows an image, budgets "
        f"{', '.join(map(str, budgets))}"
    )
    return section("", table, Text(text))


def explanation_document(data: Mapping[str, Any], sharing: Mapping[str, Any] | None = None) -> Document:
    """What packing does with one call (`explain_plan`) or with a workload (`explain_workload`)."""
    counts, workload = _counters(data["counts"]), data.get("workload") or {}
    refused = len(workload.get("skipped", ()))
    outcome = (
        say.count(counts.hits, "hit"),
        say.count(counts.misses, "miss", "misses"),
        f"{refused} refused of {say.count(workload['items_brought'], 'item')}" if refused else "",
        say.count(counts.replays, "replay"),
        f"waste {say.share(counts.waste)}",
    )
    paths, used = _use_tables(counts)
    batches = (
        BATCHES.table(_batch_rows(data["batches"])).without_empty("replay_ms", "why") if "batches" in data else used
    )
    return Document(
        name="vitgraph plan",
        title=f"{data['policy']} packing",
        what=(f"{data['policy']}: {', '.join(filter(None, outcome))}",),
        sections=sections(
            section("", batches, paths),
            section("", *map(Text, _miss_lines(data)), *_prediction(data["predicted"])),
            sharing_section(sharing),
        ),
        tables=(per_budget_table(sides_of(counts)),),
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
            yield Document("vitgraph plan", title, ("no items",))
        else:
            yield replace(explanation_document(entry["explanation"]), title=title)
    sharing = data["sharing"]
    imbalance = Text(f"Pixel rows of the heaviest rank over the mean: {sharing['input_imbalance']:.3f}")
    title = f"sharing among {sharing['ranks']} ranks"
    yield Document("vitgraph plan", title, sections=sections(section("", imbalance), sharing_section(sharing)))


def _batch_rows(batches: Sequence[Mapping[str, Any]]) -> Iterable[Row]:
    for batch in batches:
        first = {"items": ", ".join(map(str, batch["items"])), "replay_ms": batch["replay_ms"]}
        for number, run in enumerate(batch["runs"]):
            graph = "eager" if run["token_budget"] is None else f"{run['token_budget']} / {run['segment_slots']}"
            path = "" if run["path"] == "default" else f"{run['path']} "
            kept = {"tokens": run["tokens"], "waste": run["waste"], "why": run["miss_text"] or ""}
            yield {"graph": f"{path}{graph}", **kept, **({"items": ""} if number else first)}


def _miss_lines(data: Mapping[str, Any]) -> Iterable[str]:
    for row in data.get("misses", ()):
        sizes = f", {row['smallest_tokens']} to {row['largest_tokens']} tokens" if "smallest_tokens" in row else ""
        share = f" ({say.share(row['share'])})" if "share" in row else ""
        yield f"Misses: {say.count(row['items'], 'item')}{share}{sizes}: {row['text']}"


def _prediction(predicted: Mapping[str, Any] | None) -> Iterable[Text]:
    if predicted is None:
        yield Text("No predicted times: no calibration was given.", "dim")
        return
    if "graph_ms" in predicted:
        yield Text(f"Predicted {say.ms(predicted['graph_ms'])} ms, eager {say.ms(predicted['eager_ms'])} ms.")
    else:
        graph, eager = predicted["graph"], predicted["eager"]
        yield Text(
            f"Predicted mean {say.ms(graph['mean_ms'])} ms, P99 {say.ms(graph['p99_ms'])} ms; eager "
            f"{say.ms(eager['mean_ms'])} and {say.ms(eager['p99_ms'])} ms; "
            f"{say.share(predicted['slower_than_eager_share'])} of the requests slower than eager."
        )
    yield Text(predicted["error_text"], "dim")
