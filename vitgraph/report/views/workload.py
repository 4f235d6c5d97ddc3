"""The documents of a workload: what it is made of, the trace that was saved of it, and an engine's calls of it."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from vitgraph.report import say
from vitgraph.report.columns import Row, column, table_of
from vitgraph.report.document import Chart, Code, Document, Section, Text, document, section
from vitgraph.report.draw import draw_calls, draw_distribution, draw_sizes

_QUANTILES = ("min", "p5", "p25", "p50", "p75", "p95", "p99", "max", "mean")
_LISTED = 5
_BAR = 30
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_MOST_BARS = 12
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
    facts: Mapping[str, Any],
    sizes: Mapping[tuple[int, int, int], int] | None = None,
    tokens: Mapping[str, Sequence[int]] | None = None,
) -> Document:
    """The report of a workload.

    Args:
        facts: `WorkloadFacts.facts`.
        sizes: How many items have each (width, height, frames), for the chart; None draws none.
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
        section("Charts", *_charts(name, sizes or {}, tokens or {})),
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


def call_facts(sizes: Sequence[int], items: Sequence[int]) -> dict[str, Any]:
    """How many calls have how many requests and items; the largest sizes are one row."""
    counts = Counter(sizes)
    ordered, total = sorted(counts), sum(sizes)
    groups = [[size] for size in ordered[:_MOST_BARS]] + [group for group in [ordered[_MOST_BARS:]] if group]
    rows = []
    for group in groups:
        name = f"{group[0]} to {group[-1]}" if len(group) > 1 else str(group[0])
        calls, requests = sum(counts[size] for size in group), sum(size * counts[size] for size in group)
        shares = {"share": calls / len(sizes), "of_requests": requests / total}
        rows.append({"requests": name, "calls": calls, **shares})
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
