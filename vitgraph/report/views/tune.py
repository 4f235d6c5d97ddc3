"""The document of a tuning result: verdict, latencies beside the baselines, settings, budgets, what to paste."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from vitgraph.records.attention_choices import choices_text
from vitgraph.records.graph_facts import Counters, GraphUse
from vitgraph.records.kinds.tune import (
    AdvisedCalls,
    AgainstEager,
    Evaluation,
    GraphSettings,
    Measured,
    PredictedLatency,
    Strategy,
    TuneResult,
)
from vitgraph.records.record import TuneRecord
from vitgraph.records.stats import P99_MIN_SAMPLES
from vitgraph.report import say
from vitgraph.report.charts_of_bars import draw_budgets
from vitgraph.report.charts_of_times import draw_pareto
from vitgraph.report.columns import Cell, Column, Table, TableSpec, fields
from vitgraph.report.document import Chart, Code, Document, Facts, Section, Text, Verdict, section, sections, sentence
from vitgraph.report.views.conditions import Ran, compiled_text, limits_text
from vitgraph.report.views.graph_tables import GRAPH_KEY, budget_uses, compact, sides_of

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

PREDICTED = TableSpec(
    "predicted",
    "Predicted, ms a request",
    columns=(
        Column("name", "text", "", "the strategy", " "),
        *fields(PredictedLatency, "latency", mean_ms="Mean", p50_ms="P50", p99_ms="P99"),
        Column("improvement_pct", "number", "%", "improvement of the mean over eager", "Gain"),
        Column("slower_share", "number", "share", "requests slower than eager", "Slower"),
        *fields(Evaluation, "of", graphs="Graphs", memory_bytes="Memory"),
        *fields(Evaluation, "of", capture_s=("Capture s", lambda s: say.number(s, 1))),
    ),
    counts="requests",
)
MEASURED = replace(PREDICTED, name="measured", title="Measured, ms a request")
SETTINGS = TableSpec(
    "settings",
    "",
    "settings that were scored",
    (
        Column("name", "text", "", "`tuned`, a baseline, `runner_up` or `pareto`"),
        *fields(GraphSettings, "of.settings", packing="Packing"),
        Column("limits", "text", "", "items and frames a replay may hold", "Items / frames"),
        *fields(GraphSettings, "of.settings", "max_vision_items_per_batch", "max_frames_per_batch"),
        *fields(Evaluation, "of", graphs="Graphs"),
        Column("budgets", "text", "", "number and ends of the budgets", "Budgets"),
        *fields(Evaluation, "of", memory_bytes="Memory", capture_s=""),
        *fields(PredictedLatency, "latency", mean_ms="Mean", p50_ms="", p99_ms="P99"),
        *fields(AgainstEager, "of.against_eager", "improvement_pct"),
        Column(
            "slower_than_eager_share",
            "number",
            "share",
            "requests slower than eager",
            of="of.against_eager.slower_share",
        ),
        Column("token_budgets", "text", "tokens", "budgets, ascending"),
    ),
    "requests",
    # Predicted bytes have a fraction; nine digits keep them exact to a few bytes.
    digits=9,
)
_FILE = replace(SETTINGS, columns=tuple(one for one in SETTINGS.columns if one.name not in ("limits", "budgets")))
BY_REQUESTS = TableSpec(
    "by_requests_per_call",
    "By requests a call",
    columns=(
        *fields(AdvisedCalls, "own", requests_per_call="Requests a call"),
        *fields(AdvisedCalls, "own", verdict=("Advice", lambda word: str(word).replace("_", " "))),
        *fields(AdvisedCalls, "own", improvement_pct="Gain", slower_share="Slower"),
        Column("list_improvement_pct", "number", "%", "gain of the one list", "One list", of="common.improvement_pct"),
        Column("list_slower_share", "number", "share", "slower", "Slower with it", of="common.slower_share"),
    ),
    counts="requests",
)
BUDGETS = TableSpec(
    "budgets",
    "Budgets in use",
    "a graph that is replayed",
    (
        *GRAPH_KEY,
        *fields(GraphUse, "key", replays="Replays", items="Items", tokens="", waste="Waste"),
        *fields(GraphUse, "key", break_even_tokens="One image faster from"),
    ),
    digits=9,
)


def tune_document(record: TuneRecord) -> Document:
    """The report of a tuning result."""
    result, ran = record.result, Ran(record)
    misses = (
        f"Misses: {say.count(miss.items, 'item')} ({say.share(miss.share)}), {miss.smallest_tokens} to "
        f"{miss.largest_tokens} tokens: {miss.text}"
        for miss in result.misses
    )
    return Document(
        name="vitgraph tune-budgets",
        title=f"{ran.model}, {ran.workload}, for {result.target}, objective {result.objective}",
        what=_what(ran, result),
        verdict=Verdict(_WORDS[result.verdict], sentence(result.verdict_text)),
        warning=ran.warning,
        sections=sections(
            section("", Text(sentence(result.unseen.text)), by_requests_table(result)),
            section("", _predicted_table(result), Text(result.error_text, "dim")),
            _measured_section(result.measured),
            section("Settings", Facts.of(_setting_facts(result))),
            section("Runners-up", SETTINGS.of(_setting_row("runner_up", found) for found in result.runners_up)),
            _budget_section(result),
            section("", *map(Text, misses), *(Text(f"note: {note}") for note in result.notes)),
            section("Other traffic", *(Text(row.text) for row in result.other_traffic)),
            section("Charts", *_charts(record)),
            _paste_section(result),
        ),
        tables=tune_tables(result),
        command=record.command,
    )


def _what(ran: Ran, result: TuneResult) -> tuple[str, ...]:
    used, best = result.profile, result.best.settings
    encoder = used.environment.encoder
    flat = best.token_budgets if isinstance(best.token_budgets, tuple) else ()
    found = (
        used.environment.device,
        encoder.attn_backend if encoder else ran.backend,
        compiled_text(True) if encoder and encoder.compiled_blocks else ran.compiled,
        f"{best.packing} packing",
        f"{say.count(len(flat), 'budget')} {flat[0]} to {flat[-1]}" if flat else "",
        ran.per_call,
        ran.measured,
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
    rows: list[dict[str, Any]] = []
    for name, found in _named(result):
        against = getattr(found, "against_eager", None)
        gains = {field: getattr(against, field, None) for field in ("improvement_pct", "slower_share")}
        rows.append({"name": NAMES[name], "latency": _latency_of(found), "of": found, **gains})
    few = any(row["latency"].requests is not None and row["latency"].requests < P99_MIN_SAMPLES for row in rows)
    return PREDICTED.of(rows, notes=(_TAIL_NOTE,) if few else ())


def _measured_section(measured: Measured | None) -> Section | None:
    if measured is None:
        return None
    noise, closed = measured.request_noise_pct, measured.closed
    threshold = "not known from so few repeats" if noise is None else f"{say.number(noise, 1)}%"
    lines = [
        f"Closed from the automatic list to the oracle: mean {say.share(closed.mean)}, median "
        f"{say.share(closed.median)}; slower = beyond the noise of a request, {threshold}."
    ]
    tuned = measured.strategies.get("tuned")
    error = tuned.prediction_error if tuned else None
    if tuned and error and error.median_pct is not None:
        lines.append(
            f"Predicted mean {say.ms(tuned.predicted_mean_ms)} ms, measured {say.ms(tuned.latency.mean_ms)} ms; "
            f"median error of a call {say.number(error.median_pct, 1)}%, P90 {say.number(error.p90_pct, 1)}%."
        )
    if measured.attn_choices:
        lines.append(f"Attention: {choices_text(measured.attn_choices)}.")
    few = any(not strategy.latency.p99_supported for strategy in measured.strategies.values())
    table = MEASURED.of(
        (_strategy_row(name, strategy) for name, strategy in measured.strategies.items()),
        title=f"{MEASURED.title}, on {say.count(measured.calls, 'call')}",
        notes=(_TAIL_NOTE,) if few else (),
    )
    problems = (Text(f"invalid: {problem}", "invalid") for problem in measured.problems)
    return section("", table, *map(Text, lines), *problems)


def _strategy_row(name: str, strategy: Strategy) -> dict[str, Any]:
    against = strategy.against_eager
    return {
        "name": NAMES.get(name, name),
        "latency": strategy.latency,
        "improvement_pct": against.mean.improvement_pct if against else None,
        "slower_share": against.slower.share if against and against.slower else None,
        "of": strategy,
    }


# -- settings ----------------------------------------------------------------------------------------------------------


def _setting_facts(result: TuneResult) -> Iterable[tuple[str, str]]:
    best, search = result.best.settings, result.search
    lists = best.token_budgets.values() if isinstance(best.token_budgets, dict) else [best.token_budgets]
    yield "For", result.settings_for
    yield "Budgets", f"{sum(map(len, lists))}: {say.budgets(best.token_budgets).replace(' ', ', ')}"
    yield "Items / frames a replay", limits_text(best.max_vision_items_per_batch, best.max_frames_per_batch)
    yield "Packing", best.packing
    yield "Hits", f"{result.hits:,} of {result.items:,} items, waste {say.share(result.waste)}"
    how = "all settings tried" if search.is_exhaustive else "exact list" if search.is_exact else "best found"
    yield "Search", f"{how}, {say.count(search.evaluations, 'evaluation')}"


def _setting_row(name: str, found: Evaluation | PredictedLatency) -> dict[str, Any]:
    row = {"name": name, "latency": _latency_of(found), "of": found}
    if isinstance(found, PredictedLatency):
        return row
    settings = found.settings
    flat = settings.token_budgets if isinstance(settings.token_budgets, tuple) else ()
    return row | {
        "limits": limits_text(settings.max_vision_items_per_batch, settings.max_frames_per_batch),
        "budgets": f"{len(flat)}: {flat[0]} to {flat[-1]}" if flat else say.budgets(settings.token_budgets),
        "token_budgets": say.budgets(settings.token_budgets),
    }


def tune_tables(result: TuneResult) -> tuple[Table, ...]:
    """The tidy tables: every scored setting, and the budgets in use."""
    others = (("runner_up", result.runners_up), ("pareto", result.pareto))
    rows = [*_named(result), *((name, found) for name, every in others for found in every)]
    return _FILE.of(_setting_row(*row) for row in rows), _budget_table(result)


def _budget_table(result: TuneResult) -> Table:
    return BUDGETS.of({"key": use} for use in result.by_budget)


def _budget_section(result: TuneResult) -> Section:
    if not result.by_budget:
        return section("", Text("No replay: every item is left to eager."))
    rows = _budget_table(result).rows
    most = sorted(rows, key=lambda row: -row["replays"])[:_BUDGETS_LISTED]
    never = {"break_even_tokens": Cell("never")}
    kept = (row if row["break_even_tokens"] is not None else {**row, **never} for row in rows if row in most)
    left = len(rows) - len(most)
    notes = (f"and {left} more, used less",) if left else ()
    return section("", compact(BUDGETS.table(kept, notes=notes)))


def _paste_section(result: TuneResult) -> Section:
    beyond, lines = result.beyond_vllm, []
    if beyond is not None:
        lines.append(
            f"vLLM's manager lacks: {'; '.join(beyond.points)}. Its own best is predicted at "
            f"{say.ms(beyond.mean_ms)} ms, {say.pct(-beyond.loss_pct)} against these settings (positive = faster)."
        )
    if result.serve_line is None:
        lines.append(
            "Nothing to paste: no list for vLLM is sure to be faster than eager on these calls, and its encoder graphs "
            "are off unless they are turned on."
        )
        return section("To paste", *map(Text, lines))
    lines.append(f"For {result.settings_for}.")
    paste = f"--compilation-config '{result.compilation_config}'\n{result.serve_line}"
    return section("To paste", *map(Text, lines), Code(paste))


def by_requests_table(result: TuneResult) -> Table:
    """The advice for each number of requests a call, and the one list that does best over all of them."""
    pairs = zip(result.by_requests_per_call, result.list_for_all, strict=True)
    return BY_REQUESTS.of({"own": own, "common": common} for own, common in pairs)


# -- charts ------------------------------------------------------------------------------------------------------------


def _charts(record: TuneRecord) -> Iterable[Chart]:
    result = record.result
    subtitle = f"{Ran(record).workload} · {result.profile.label}"
    named = {NAMES[name]: found for name, found in _named(result) if isinstance(found, Evaluation)}
    eager, doubt = result.baselines.eager.mean_ms, (result.error.eager.median_pct or 0.0) / 100
    ends = (eager, eager * (1 - doubt), eager * (1 + doubt))
    draw = partial(draw_pareto, subtitle, result.pareto, named, ends, result.baselines.oracle.mean_ms)
    yield Chart("pareto", "Predicted mean latency over graphs and over their memory", draw)
    if result.by_budget:
        misses = sum(miss.items for miss in result.misses)
        outcome = f"{result.hits:,} hits, {misses:,} misses, predicted"
        uses = budget_uses(sides_of(Counters(per_budget=result.by_budget)), "Replays")
        bars = partial(draw_budgets, "Replays and waste by token budget", f"{subtitle} · {outcome}", "Replays", uses)
        yield Chart("tuned_budgets", "Replays and waste of each token budget", bars)
