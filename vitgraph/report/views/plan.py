"""The documents of `plan`, of dry runs and of workloads: what a run would do, and what it would be given."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from vitgraph.records.series import Counters
from vitgraph.report import say
from vitgraph.report.columns import Row, column, table_of, texts
from vitgraph.report.document import Chart, Code, Document, Facts, Section, Text, document, section
from vitgraph.report.draw import draw_calls, draw_distribution, draw_sizes
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
            slots = say.count(run["segment_slots"] or 0, "slot")
            graph = "eager" if run["token_budget"] is None else f"{run['token_budget']} ({slots})"
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


_QUANTILES = ("min", "p5", "p25", "p50", "p75", "p95", "p99", "max", "mean")
_LISTED = 5
_BAR = 30
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_QUANTITIES = (
    ("items a request", "items_per_request", 0),
    ("width, px", "width", 0),
    ("height, px", "height", 0),
    ("megapixels", "megapixels", 2),
    ("width / height", "aspect_ratio", 2),
    ("frames a video", "frames_per_video", 0),
)
_TOKEN_QUANTITIES = (
    ("tokens an item", "tokens_per_item", 0),
    ("tokens a request", "tokens_per_request", 0),
    ("segments an item", "segments_per_item", 0),
)
"""Each with its name in the facts and its decimals."""

DISTRIBUTIONS = table_of(
    "distributions",
    column("quantity", "what is distributed", " "),
    *(column(name, f"{name} of it", name, str, kind="number", unit="") for name in _QUANTILES),
    one_row="a quantity",
    counts="items",
)
HISTOGRAM = table_of(
    "histogram",
    column("tokens", "a range of output tokens", "Tokens", kind="text"),
    column("items", "items in it", "Items"),
    column("share", "share of the items", "Share"),
    column("bar", "the same as a bar", " "),
    counts="items",
)
CALLS = table_of(
    "calls",
    column("requests", "requests of a call", "Requests a call", kind="text"),
    column("calls", "calls with so many", "Calls"),
    column("share", "their share of the calls", "Share"),
    column("of_requests", "share of the requests that are in such calls", "Of requests", unit="share"),
    one_row="a number of requests a call",
    counts="calls",
)


def workload_document(
    facts: Mapping[str, Any], sizes: Mapping[tuple[int, int, int], int], tokens: Mapping[str, Sequence[int]]
) -> Document:
    """The report of a workload.

    Args:
        facts: `WorkloadFacts.facts`.
        sizes: How many items have each (width, height, frames), for the chart; none draw none.
        tokens: Output tokens of every item, by model; for the chart.
    """
    name, statement = str(facts["name"]), facts["provenance"].get("statement")
    rows = [*_distributions(facts, _QUANTITIES)]
    for model in facts["models"]:
        rows += _distributions(model, _TOKEN_QUANTITIES, f", {model['model']}")
    quantities = DISTRIBUTIONS.filled(_distributions(facts, _QUANTITIES, is_shown=True))
    return document(
        "vitgraph workload",
        name,
        section("", Text(str(statement), "dim") if statement else None, quantities, _common(facts)),
        section("", *_left_out(facts["skipped"])),
        *(_model_section(model) for model in facts["models"]),
        section("Charts", *_charts(name, sizes, tokens)),
        what=(
            *(say.count(facts[f"{noun}s"], noun) for noun in ("request", "image", "video")),
            f"{len(facts['skipped'])} left out",
            say.count(facts["distinct_sizes"], "distinct size"),
            f"fingerprint {facts['fingerprint']}",
        ),
        tables=(DISTRIBUTIONS.filled(rows),),
    )


def saved_trace_document(facts: Mapping[str, Any]) -> Document:
    """What was written as a trace, what was left out, and how to replay it.

    Args:
        facts: `path`, `requests`, `items`, `videos`, `fingerprint`, `skipped` and `provenance` of the workload.
    """
    without = facts["provenance"].get("lines_without_size")
    named = f"{say.count(without, 'line')} of {facts['provenance']['lines']} named no size" if without else ""
    items = f"{say.count(facts['items'], 'item')} ({say.count(facts['videos'], 'video')})"
    return document(
        "vitgraph workload",
        f"saved {facts['path']}",
        section("", Text(named, "warning") if named else None, *_left_out(facts["skipped"])),
        section("", "Replay it with:", _bench_of(facts)),
        what=(say.count(facts["requests"], "request"), items, f"fingerprint {facts['fingerprint']}"),
    )


def _bench_of(facts: Mapping[str, Any]) -> Code:
    return Code(shlex.join(["vitgraph", "bench", "--dataset-name", "trace", "--dataset-path", str(facts["path"])]))


def _distributions(
    facts: Mapping[str, Any], quantities: Sequence[tuple[str, str, int]], suffix: str = "", is_shown: bool = False
) -> Iterable[Row]:
    """A row a quantity; for readers only those that there are, with few decimals."""
    for name, key, decimals in quantities:
        values = {column: facts[key].get(column) for column in _QUANTILES}
        if facts[key]["n"] or not is_shown:
            shown = {column: _figure(value, decimals, column) for column, value in values.items()}
            yield {"quantity": f"{name}{suffix}", **(shown if is_shown else values)}


def _figure(value: Any, decimals: int, column: str) -> str:
    if not say.is_number(value):
        return say.NO_VALUE
    # A percentile of whole numbers may lie between two of them; the mean nearly always does.
    places = decimals if decimals or float(value).is_integer() or (column != "mean" and value >= 100) else 1
    return f"{value:.{places}f}"


def _common(facts: Mapping[str, Any]) -> str:
    parts = []
    for size in facts["common_sizes"][:_LISTED]:
        frames = "" if size["frames"] == 1 else f"x{size['frames']}"
        parts.append(f"{size['width']}x{size['height']}{frames} ({say.share(size['share'])})")
    return f"Most frequent: {', '.join(parts)}"


def _left_out(skipped: Sequence[Mapping[str, Any]]) -> Iterable[Text]:
    for item in skipped[:_LISTED]:
        yield Text(f"Left out: {item['source']}: {item['reason']}", "warning")
    if len(skipped) > _LISTED:
        yield Text(f"Left out: {len(skipped) - _LISTED} more; --json names all", "warning")


def _model_section(model: Mapping[str, Any]) -> Section:
    title = f"Output tokens with {model['model']} ({model['row']})"
    refused = None
    if model["refused"]:
        count = say.count(sum(model["refused"].values()), "item")
        refused = Text(f"{count} not taken, for example: {next(iter(model['refused']))}", "warning")
    if not model["tokens_per_item"]["n"]:
        return section(title, refused, "The model takes none of the items.")
    common = ", ".join(f"{one['tokens']} ({say.share(one['share'])})" for one in model["common_tokens"][:_LISTED])
    text = f"{say.count(model['distinct_tokens'], 'distinct count')}; most frequent: {common}"
    table = DISTRIBUTIONS.filled(_distributions(model, _TOKEN_QUANTITIES, is_shown=True))
    return section(title, refused, table, text, HISTOGRAM.filled(_histogram_rows(model["histogram"])))


def _histogram_rows(histogram: Sequence[Mapping[str, int]]) -> Iterable[Row]:
    counts = [entry["items"] for entry in histogram]
    for entry in histogram:
        low, high, items = entry["low"], entry["high"], entry["items"]
        name = f"{low}" if low == high else f"{low}–{high}"
        yield {"tokens": name, "items": items, "share": items / sum(counts), "bar": _bar(items / max(counts) * _BAR)}


def _bar(length: float) -> str:
    eighths = round(length * 8) or (1 if length else 0)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def _charts(
    name: str, sizes: Mapping[tuple[int, int, int], int], tokens: Mapping[str, Sequence[int]]
) -> Iterable[Chart]:
    if sizes:
        title = f"{name} · {say.count(sum(sizes.values()), 'item')}"
        yield Chart("sizes", "Height over width of the items", partial(draw_sizes, title, sizes))
    series = {model.rsplit("/", 1)[-1]: np.asarray(of, dtype=np.float64) for model, of in tokens.items() if of}
    if series:
        of = ("Output tokens of an item", name, "Output tokens of an item", "items", series, "")
        yield Chart("tokens", "Cumulative share of items over their output tokens", partial(draw_distribution, *of))


# -- the calls of an engine --------------------------------------------------------------------------------------------


def calls_document(facts: Mapping[str, Any]) -> Document:
    """What was written, how many requests the calls have, and how to run them.

    Args:
        facts: `calls`, `requests`, `mean_requests_per_call`, `sizes`, `path`, `name` and `provenance` of the calls.
    """
    names = ("engine", "request_rate", "requests_split_over_calls")
    engine, rate, split = (facts["provenance"].get(name) for name in names)
    arrivals = f"Arrivals: {rate} requests a second; {engine}."
    parts = f"{say.count(split or 0, 'part')} of requests whose items are in several calls count as requests."
    notes = (Text(note, "dim") for note, is_said in ((arrivals, engine), (parts, split)) if is_said)
    table = CALLS.filled(facts["sizes"])
    return document(
        "vitgraph workload calls",
        f"saved {facts['path']}",
        section("", *notes, table),
        section("", "Run them with:", _bench_of(facts)),
        section("Charts", Chart("calls", "Requests a call", partial(draw_calls, facts))),
        what=(
            say.count(facts["calls"], "call"),
            say.count(facts["requests"], "request"),
            f"{facts['mean_requests_per_call']:.2f} requests a call in the mean",
        ),
        tables=(table,),
    )
