"""The document of a tuning result: verdict, latencies beside the baselines, settings, budgets, what to paste."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from vitgraph.records.kinds.tune import Evaluation, Measured, PredictedLatency, Strategy, TuneResult
from vitgraph.records.record import TuneRecord
from vitgraph.records.stats import P99_MIN_SAMPLES
from vitgraph.report.charts_of_bars import draw_budgets
from vitgraph.report.charts_of_times import Setting, draw_pareto
from vitgraph.report.columns import (
    Cell,
    Column,
    Table,
    TableSpec,
    budgets_text,
    bytes_text,
    count_text,
    ms_text,
    number_text,
    pct_text,
    share_text,
)
from vitgraph.report.document import Chart, Code, Document, Facts, Section, Text, Verdict, section, sections, sentence
from vitgraph.report.views.conditions import (
    backend_of,
    compiled_of,
    limits_text,
    measured_of,
    model_of,
    per_call_of,
    warning_of,
    workload_of,
)
from vitgraph.report.views.graph_tables import GRAPH_KEY, Sides, budget_uses, compact

NAMES = {
    "tuned": "tuned",
    "automatic": "automatic list",
    "seed_nine": "vLLM's nine",
    "eager": "eager",
    "oracle": "oracle",
}
_WORDS = {"use_graphs": "faster", "no_graphs": "same", "measure_first": "undecided", "depends": "undecided"}
_BUDGETS_LISTED = 24
_TAIL_NOTE = f"Below {P99_MIN_SAMPLES} requests a P99 is nearly the maximum."


def _latency_columns() -> tuple[Column, ...]:
    return (
        Column("name", "text", "", "the strategy", " "),
        Column("mean_ms", "number", "ms", "mean", "Mean"),
        Column("p50_ms", "number", "ms", "median", "P50"),
        Column("p99_ms", "number", "ms", "99th percentile", "P99"),
        Column("improvement_pct", "number", "%", "improvement of the mean over eager", "Gain"),
        Column("slower_share", "number", "share", "requests slower than eager", "Slower"),
        Column("graphs", "integer", "graphs", "graphs that it takes", "Graphs"),
        Column("memory_bytes", "number", "bytes", "their memory", "Memory", bytes_text),
        Column("capture_s", "number", "s", "time of their captures", "Capture s", lambda s: number_text(s, 1)),
    )


PREDICTED = TableSpec("predicted", "Predicted, ms a request", "a strategy", _latency_columns(), "requests")
MEASURED = TableSpec("measured", "Measured, ms a request", "a strategy", _latency_columns(), "requests")
SETTINGS = TableSpec(
    "settings",
    "",
    "settings that were scored",
    (
        Column("name", "text", "", "`tuned`, a baseline, `runner_up` or `pareto`"),
        Column("packing", "text", "", "packing policy", "Packing"),
        Column("limits", "text", "", "items and frames a replay may hold", "Items / frames"),
        Column("max_vision_items_per_batch", "integer", "items", "items that a replay may hold"),
        Column("max_frames_per_batch", "integer", "frames", "video frames that a replay may hold; 0 for images only"),
        Column("graphs", "integer", "graphs", "graphs that they take", "Graphs"),
        Column("budgets", "text", "", "number and ends of the budgets", "Budgets"),
        Column("memory_bytes", "number", "bytes", "memory of the graphs, predicted", "Memory", bytes_text),
        Column("capture_s", "number", "s", "time of the captures, predicted"),
        Column("mean_ms", "number", "ms", "mean latency of a request, predicted", "Mean"),
        Column("p50_ms", "number", "ms", "median, predicted"),
        Column("p99_ms", "number", "ms", "99th percentile, predicted", "P99"),
        Column("improvement_pct", "number", "%", "improvement of the mean over eager, positive = faster"),
        Column("slower_than_eager_share", "number", "share", "requests that are slower than eager"),
        Column("token_budgets", "text", "tokens", "budgets, ascending"),
    ),
    "requests",
    # Predicted bytes have a fraction; nine digits keep them exact to a few bytes.
    digits=9,
)
_FILE_COLUMNS = tuple(column for column in SETTINGS.columns if column.name not in ("limits", "budgets"))
BY_REQUESTS = TableSpec(
    "by_requests_per_call",
    "By requests a call",
    "a number of requests a call",
    (
        Column("requests_per_call", "integer", "requests", "requests that are encoded together", "Requests a call"),
        Column("verdict", "text", "", "whether graphs pay there", "Advice"),
        Column("improvement_pct", "number", "%", "gain over eager of the list made for such calls", "Gain"),
        Column("slower_share", "number", "share", "requests that it makes slower than eager", "Slower"),
        Column("list_improvement_pct", "number", "%", "gain of the one list that does best over all", "One list"),
        Column("list_slower_share", "number", "share", "requests that this one makes slower", "Slower with it"),
    ),
    "requests",
)
BUDGETS = TableSpec(
    "budgets",
    "Budgets in use",
    "a graph that is replayed",
    (
        *GRAPH_KEY,
        Column("replays", "integer", "replays", "replays over the workload, predicted", "Replays"),
        Column("items", "integer", "items", "items in them", "Items"),
        Column("tokens", "integer", "tokens", "output tokens of those items"),
        Column("waste", "number", "share", "rows of the replays that are padding", "Waste"),
        Column(
            "break_even_tokens",
            "integer",
            "tokens",
            "fewest tokens of one image from which on a replay is no slower than eager; empty where it never is",
            "One image faster from",
        ),
    ),
    digits=9,
)


def tune_document(record: TuneRecord) -> Document:
    """The report of a tuning result."""
    result = record.result
    return Document(
        name="vitgraph tune-budgets",
        title=f"{model_of(record)}, {workload_of(record)}, for {result.target}, objective {result.objective}",
        what=_what(record),
        verdict=Verdict(_WORDS[result.verdict], sentence(result.verdict_text)),
        warning=warning_of(record),
        sections=sections(
            section("", Text(sentence(result.unseen.text)), by_requests_table(result)),
            section("", _predicted_table(result), Text(result.error_text, "dim")),
            _measured_section(result.measured),
            section("Settings", Facts.of(_setting_facts(result))),
            section("Runners-up", _runners_up(result)),
            _budget_section(result),
            section("", *(Text(line) for line in _misses(result)), *(Text(f"note: {note}") for note in result.notes)),
            section("Other traffic", *(Text(row.text) for row in result.other_traffic)),
            section("Charts", *_charts(record)),
            _paste_section(result),
        ),
        tables=tune_tables(result),
        command=record.command,
    )


def _what(record: TuneRecord) -> tuple[str, ...]:
    result = record.result
    used, best = result.profile, result.best.settings
    device = used.environment.device
    encoder = used.environment.encoder
    backend = encoder.attn_backend if encoder else backend_of(record)
    compiled = "blocks compiled" if encoder and encoder.compiled_blocks else compiled_of(record)
    flat = best.token_budgets if isinstance(best.token_budgets, tuple) else ()
    budgets = f"{count_text(len(flat), 'budget')} {flat[0]} to {flat[-1]}" if flat else ""
    found = (
        device,
        backend,
        compiled,
        f"{best.packing} packing",
        budgets,
        per_call_of(record.resolved) if record.resolved else None,
        measured_of(record),
        f"calibration {used.label}, {used.created_at}",
    )
    return tuple(part for part in found if part)


# -- latencies ---------------------------------------------------------------------------------------------------------


def _named(result: TuneResult) -> Iterable[tuple[str, Evaluation | PredictedLatency]]:
    """The tuned settings and what they are compared with, by name."""
    yield "tuned", result.best
    for name in ("automatic", "seed_nine", "eager", "oracle"):
        found: Evaluation | PredictedLatency | None = getattr(result.baselines, name)
        if found is not None:
            yield name, found


def _latency_of(found: Evaluation | PredictedLatency) -> PredictedLatency:
    """Over the whole workload where that is known, else as the search scored it."""
    if isinstance(found, PredictedLatency):
        return found
    return found.against_eager.latency if found.against_eager else found.latency


def _predicted_table(result: TuneResult) -> Table:
    rows = []
    few = False
    for name, found in _named(result):
        latency = _latency_of(found)
        few |= latency.requests is not None and latency.requests < P99_MIN_SAMPLES
        row: dict[str, Any] = {"name": NAMES[name]}
        row |= {field: getattr(latency, field) for field in ("mean_ms", "p50_ms", "p99_ms")}
        if isinstance(found, Evaluation):
            row |= {field: getattr(found, field) for field in ("graphs", "memory_bytes", "capture_s")}
            against = found.against_eager
            row |= {field: getattr(against, field, None) for field in ("improvement_pct", "slower_share")}
        rows.append(row)
    return Table(PREDICTED, tuple(rows), notes=(_TAIL_NOTE,) if few else ())


def _measured_section(measured: Measured | None) -> Section | None:
    if measured is None:
        return None
    rows = [_strategy_row(name, strategy) for name, strategy in measured.strategies.items()]
    noise = measured.request_noise_pct
    threshold = "not known from so few repeats" if noise is None else f"{number_text(noise, 1)}%"
    closed = measured.closed
    lines = [
        f"Closed from the automatic list to the oracle: mean {share_text(closed.mean)}, median "
        f"{share_text(closed.median)}; slower = beyond the noise of a request, {threshold}."
    ]
    tuned = measured.strategies.get("tuned")
    error = tuned.prediction_error if tuned else None
    if tuned and error and error.median_pct is not None:
        lines.append(
            f"Predicted mean {ms_text(tuned.predicted_mean_ms)} ms, measured {ms_text(tuned.latency.mean_ms)} ms; "
            f"median error of a call {number_text(error.median_pct, 1)}%, P90 {number_text(error.p90_pct, 1)}%."
        )
    few = any(not strategy.latency.p99_supported for strategy in measured.strategies.values())
    title = f"{MEASURED.title}, on {count_text(measured.calls, 'call')}"
    table = Table(MEASURED, tuple(rows), title, notes=(_TAIL_NOTE,) if few else ())
    problems = (Text(f"invalid: {problem}", "invalid") for problem in measured.problems)
    return section("", table, *map(Text, lines), *problems)


def _strategy_row(name: str, strategy: Strategy) -> dict[str, Any]:
    against = strategy.against_eager
    return {
        "name": NAMES.get(name, name),
        **{field: getattr(strategy.latency, field) for field in ("mean_ms", "p50_ms", "p99_ms")},
        "improvement_pct": against.mean.improvement_pct if against else None,
        "slower_share": against.slower.share if against and against.slower else None,
        **{field: getattr(strategy, field) for field in ("graphs", "memory_bytes", "capture_s")},
    }


# -- settings ----------------------------------------------------------------------------------------------------------


def _setting_facts(result: TuneResult) -> Iterable[tuple[str, str]]:
    best, search = result.best.settings, result.search
    count = (
        sum(map(len, best.token_budgets.values())) if isinstance(best.token_budgets, dict) else len(best.token_budgets)
    )
    yield "Budgets", f"{count}: {budgets_text(best.token_budgets).replace(' ', ', ')}"
    yield "Items / frames a replay", limits_text(best.max_vision_items_per_batch, best.max_frames_per_batch)
    yield "Packing", best.packing
    yield "Hits", f"{result.hits:,} of {result.items:,} items, waste {share_text(result.waste)}"
    how = "all settings tried" if search.is_exhaustive else "exact list" if search.is_exact else "best found"
    yield "Search", f"{how}, {count_text(search.evaluations, 'evaluation')}"


def _setting_row(name: str, found: Evaluation | PredictedLatency) -> dict[str, Any]:
    latency = _latency_of(found)
    row: dict[str, Any] = {"name": name}
    row |= {field: getattr(latency, field) for field in ("mean_ms", "p50_ms", "p99_ms")}
    if isinstance(found, PredictedLatency):
        return row
    settings, against = found.settings, found.against_eager
    row |= {field: getattr(settings, field) for field in ("packing", *_LIMITS)}
    row |= {field: getattr(found, field) for field in ("graphs", "memory_bytes", "capture_s")}
    flat = settings.token_budgets if isinstance(settings.token_budgets, tuple) else ()
    return row | {
        "limits": limits_text(settings.max_vision_items_per_batch, settings.max_frames_per_batch),
        "budgets": f"{len(flat)}: {flat[0]} to {flat[-1]}" if flat else budgets_text(settings.token_budgets),
        "token_budgets": budgets_text(settings.token_budgets),
        "improvement_pct": against.improvement_pct if against else None,
        "slower_than_eager_share": against.slower_share if against else None,
    }


_LIMITS = ("max_vision_items_per_batch", "max_frames_per_batch")


def _runners_up(result: TuneResult) -> Table:
    return SETTINGS.table(_setting_row("runner_up", found) for found in result.runners_up)


def tune_tables(result: TuneResult) -> tuple[Table, ...]:
    """The tidy tables: every scored setting, and the budgets in use."""
    rows = [_setting_row(name, found) for name, found in _named(result)]
    rows += [_setting_row("runner_up", found) for found in result.runners_up]
    rows += [_setting_row("pareto", found) for found in result.pareto]
    spec = TableSpec(SETTINGS.name, "", SETTINGS.one_row, _FILE_COLUMNS, SETTINGS.counts, SETTINGS.digits)
    return spec.table(rows), budget_table(result)


def budget_table(result: TuneResult) -> Table:
    """The graphs that are replayed."""
    return BUDGETS.table(
        {
            **{column.name: getattr(use, column.name) for column in BUDGETS.columns},
            "axis_key": "x".join(map(str, use.axis_key)),
        }
        for use in result.by_budget
    )


def _budget_section(result: TuneResult) -> Section:
    if not result.by_budget:
        return section("", Text("No replay: every item is left to eager."))
    table = budget_table(result)
    most = sorted(table.rows, key=lambda row: -row["replays"])[:_BUDGETS_LISTED]
    never = Cell("never")
    rows = (
        {**row, "break_even_tokens": never if row["break_even_tokens"] is None else row["break_even_tokens"]}
        for row in table.rows
        if row in most
    )
    left = len(table.rows) - len(most)
    notes = (f"and {left} more, used less",) if left else ()
    return section("", compact(Table(BUDGETS, tuple(rows), notes=notes)))


def _misses(result: TuneResult) -> Iterable[str]:
    for miss in result.misses:
        sizes = f"{miss.smallest_tokens} to {miss.largest_tokens} tokens"
        yield f"Misses: {count_text(miss.items, 'item')} ({share_text(miss.share)}), {sizes}: {miss.text}"


def _paste_section(result: TuneResult) -> Section:
    beyond, lines = result.beyond_vllm, []
    if beyond is not None:
        lines.append(
            f"vLLM's manager lacks: {'; '.join(beyond.points)}. Its own best is predicted at "
            f"{ms_text(beyond.mean_ms)} ms, {pct_text(-beyond.loss_pct)} against these settings (positive = faster)."
        )
    if result.serve_line is None:
        lines.append("Nothing to paste: no list for vLLM is sure to be faster than eager on these calls.")
        return section("To paste", *map(Text, lines))
    if result.vllm.verdict == "no_graphs":
        lines.append("For vLLM: no encoder graphs, its manager would not be faster than eager on this traffic.")
    paste = f"--compilation-config '{result.compilation_config}'\n{result.serve_line}"
    return section("To paste", *map(Text, lines), Code(paste))


def by_requests_table(result: TuneResult) -> Table | None:
    """The advice for each number of requests a call, and the one list that does best over all of them."""
    rows = [
        {
            "requests_per_call": row.requests_per_call,
            "verdict": row.verdict.replace("_", " "),
            "improvement_pct": row.improvement_pct,
            "slower_share": row.slower_share,
            "list_improvement_pct": common.improvement_pct,
            "list_slower_share": common.slower_share,
        }
        for row, common in zip(result.by_requests_per_call, result.list_for_all, strict=True)
    ]
    return Table(BY_REQUESTS, tuple(rows)) if rows else None


# -- charts ------------------------------------------------------------------------------------------------------------


def _charts(record: TuneRecord) -> Iterable[Chart]:
    result = record.result
    subtitle = f"{workload_of(record)} · {result.profile.label}"
    named = {NAMES[name]: _setting(found) for name, found in _named(result) if isinstance(found, Evaluation)}
    eager, doubt = result.baselines.eager.mean_ms, (result.error.eager.median_pct or 0.0) / 100
    ends = (eager, eager * (1 - doubt), eager * (1 + doubt))
    found = [_setting(one) for one in result.pareto]
    draw = partial(draw_pareto, subtitle, found, named, ends, result.baselines.oracle.mean_ms)
    yield Chart("pareto", "Predicted mean latency over graphs and over their memory", draw)
    if result.by_budget:
        sides: Sides = {"": _Uses(result.by_budget)}  # type: ignore[dict-item]
        misses = sum(miss.items for miss in result.misses)
        outcome = f"{result.hits:,} hits, {misses:,} misses, predicted"
        uses = budget_uses(sides, "Replays")
        bars = partial(draw_budgets, "Replays and waste by token budget", f"{subtitle} · {outcome}", "Replays", uses)
        yield Chart("tuned_budgets", "Replays and waste of each token budget", bars)


class _Uses:
    """Graphs in use, as a series of graphs holds them."""

    def __init__(self, per_budget: Any) -> None:
        self.per_budget = per_budget


def _setting(found: Evaluation) -> Setting:
    return Setting(found.graphs, found.memory_bytes, found.latency.mean_ms)
