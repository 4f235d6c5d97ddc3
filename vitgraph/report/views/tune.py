"""The documents of a tuning result: its settings beside the baselines, and the page of `vitgraph recommend`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from vitgraph.records.record import TuneRecord, VerifyRecord
from vitgraph.records.sections import choices_text, value_at
from vitgraph.records.series import Counters, GraphUse, Improvement
from vitgraph.records.stats import P99_MIN_SAMPLES
from vitgraph.records.tune_result import (
    AdvisedCalls,
    AgainstEager,
    Evaluation,
    GraphSettings,
    Measured,
    PredictedLatency,
    TuneResult,
)
from vitgraph.report import say
from vitgraph.report.columns import Cell, Table, column, fields, table_of
from vitgraph.report.document import Chart, Code, Document, Facts, Section, Text, Verdict, document, section
from vitgraph.report.draw import draw_pareto
from vitgraph.report.views.conditions import Ran, compiled_text, limits_text, misses_text
from vitgraph.report.views.graph_tables import GRAPH_KEY, budgets_chart, compact

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

PREDICTED = table_of(
    "predicted",
    column("name", "the strategy", " "),
    *fields(PredictedLatency, "latency", mean_ms="Mean", p50_ms="P50", p99_ms="P99"),
    column("improvement_pct", "improvement of the mean over eager", "Gain"),
    column("slower_share", "requests slower than eager", "Slower"),
    *fields(Evaluation, "of", graphs="Graphs", memory_bytes="Memory", capture_s=("Capture s", 1)),
    title="Predicted, ms a request",
    counts="requests",
)
SETTINGS = table_of(
    "settings",
    column("name", "`tuned`, a baseline, `runner_up` or `pareto`"),
    *fields(GraphSettings, "of.settings", packing="Packing"),
    column("limits", "items and frames a replay may hold", "Items / frames"),
    *fields(GraphSettings, "of.settings", "max_vision_items_per_batch", "max_frames_per_batch"),
    *fields(Evaluation, "of", graphs="Graphs"),
    column("budgets", "number and ends of the budgets", "Budgets"),
    *fields(Evaluation, "of", memory_bytes="Memory", capture_s=""),
    *fields(PredictedLatency, "latency", mean_ms="Mean", p50_ms="", p99_ms="P99"),
    *fields(AgainstEager, "of.against_eager", "improvement_pct"),
    column("slower_than_eager_share", "requests slower than eager", of="of.against_eager.slower_share"),
    column("token_budgets", "budgets, ascending", kind="text", unit="tokens"),
    one_row="settings that were scored",
    counts="requests",
    # Predicted bytes have a fraction; nine digits keep them exact to a few bytes.
    digits=9,
)
_FILE = replace(SETTINGS, columns=tuple(one for one in SETTINGS.columns if one.name not in ("limits", "budgets")))
BY_REQUESTS = table_of(
    "by_requests_per_call",
    *fields(AdvisedCalls, "own", requests_per_call="Requests a call", verdict=("Advice", say.words)),
    *fields(AdvisedCalls, "own", improvement_pct="Gain", slower_share="Slower"),
    column("list_improvement_pct", "gain of the one list", "One list", of="common.improvement_pct"),
    column("list_slower_share", "slower", "Slower with it", of="common.slower_share"),
    title="By requests a call",
    counts="requests",
)
BUDGETS = table_of(
    "budgets",
    *GRAPH_KEY,
    *fields(GraphUse, "key", replays="Replays", items="Items", tokens="", waste="Waste"),
    *fields(GraphUse, "key", break_even_tokens="One image faster from"),
    title="Budgets in use",
    one_row="a graph that is replayed",
    digits=9,
)


def tune_document(record: TuneRecord) -> Document:
    """The report of a tuning result."""
    result, ran = record.result, Ran(record)
    others = (("runner_up", result.runners_up), ("pareto", result.pareto))
    scored = [*_named(result), *((name, found) for name, every in others for found in every)]
    budgets = BUDGETS.of({"key": use} for use in result.by_budget)
    return document(
        "vitgraph tune-budgets",
        f"{ran.model}, {ran.workload}, for {result.target}, objective {result.objective}",
        section("", say.sentence(result.unseen.text), _by_requests_table(result)),
        section("", _predicted_table(result), Text(result.error_text, "dim")),
        _measured_section(result.measured) if result.measured else None,
        section("Settings", Facts.of(_setting_facts(result))),
        section("Runners-up", SETTINGS.of(_setting_row("runner_up", found) for found in result.runners_up)),
        section("", _shown_budgets(budgets) if budgets.rows else "No replay: every item is left to eager."),
        section("", *map(misses_text, result.misses), *(f"note: {note}" for note in result.notes)),
        section("Other traffic", *(row.text for row in result.other_traffic)),
        section("Charts", *_charts(record)),
        section("To paste", *_paste(result)),
        what=_what(ran, result),
        verdict=Verdict(_WORDS[result.verdict], say.sentence(result.verdict_text)),
        warning=ran.warning,
        tables=(_FILE.of(_setting_row(*row) for row in scored), budgets),
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
        gains = {field: value_at(found, f"against_eager.{field}") for field in ("improvement_pct", "slower_share")}
        rows.append({"name": NAMES[name], "latency": _latency_of(found), "of": found, **gains})
    few = any(row["latency"].requests is not None and row["latency"].requests < P99_MIN_SAMPLES for row in rows)
    return PREDICTED.of(rows, notes=(_TAIL_NOTE,) if few else ())


def _measured_section(measured: Measured) -> Section:
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
    gains = {"improvement_pct": "against_eager.mean.improvement_pct", "slower_share": "against_eager.slower.share"}
    table = PREDICTED.of(
        (
            {"name": NAMES.get(name, name), "latency": strategy.latency, "of": strategy}
            | {column: value_at(strategy, path) for column, path in gains.items()}
            for name, strategy in measured.strategies.items()
        ),
        name="measured",
        title=f"Measured, ms a request, on {say.count(measured.calls, 'call')}",
        notes=(_TAIL_NOTE,) if few else (),
    )
    return section("", table, *lines, *(Text(f"invalid: {problem}", "invalid") for problem in measured.problems))


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
    budgets = say.budgets(settings.token_budgets)
    return row | {
        "limits": limits_text(settings.max_vision_items_per_batch, settings.max_frames_per_batch),
        "budgets": f"{len(flat)}: {flat[0]} to {flat[-1]}" if flat else budgets,
        "token_budgets": budgets,
    }


def _shown_budgets(table: Table) -> Table:
    """The most used budgets."""
    most = sorted(table.rows, key=lambda row: -row["replays"])[:_BUDGETS_LISTED]
    never = {"break_even_tokens": Cell("never")}
    kept = (row if row["break_even_tokens"] is not None else {**row, **never} for row in table.rows if row in most)
    left = len(table.rows) - len(most)
    return compact(BUDGETS.filled(kept, notes=(f"and {left} more, used less",) if left else ()))


def _paste(result: TuneResult) -> Iterable[str | Code]:
    beyond = result.beyond_vllm
    if beyond is not None:
        yield (
            f"vLLM's manager lacks: {'; '.join(beyond.points)}. Its own best is predicted at "
            f"{say.ms(beyond.mean_ms)} ms, {say.pct(-beyond.loss_pct)} against these settings (positive = faster)."
        )
    if result.serve_line is None:
        yield (
            "Nothing to paste: no list for vLLM is sure to be faster than eager on these calls, and its encoder graphs "
            "are off unless they are turned on."
        )
    else:
        yield f"For {result.settings_for}."
        yield _pasted(result)


def _pasted(result: TuneResult) -> Code:
    return Code(f"--compilation-config '{result.compilation_config}'\n{result.serve_line}")


def _by_requests_table(result: TuneResult) -> Table:
    """The advice for each number of requests a call, and the one list that does best over all of them."""
    pairs = zip(result.by_requests_per_call, result.list_for_all, strict=True)
    return BY_REQUESTS.of({"own": own, "common": common} for own, common in pairs)


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
        outcome = f"{subtitle} · {result.hits:,} hits, {misses:,} misses, predicted"
        alt, title = "Replays and waste of each token budget", "Replays and waste by token budget"
        yield budgets_chart("tuned_budgets", alt, title, outcome, "Replays", Counters(per_budget=result.by_budget))


# -- the page of `recommend` -------------------------------------------------------------------------------------------

USE, OFF, MEASURE, DEPENDS, BROKEN = "use_graphs", "no_graphs", "measure_first", "depends", "incorrect"
_HEADLINES = {
    USE: ("faster", "Use encoder graphs"),
    OFF: ("same", "Leave encoder graphs off"),
    MEASURE: ("undecided", "Not sure enough to say"),
    DEPENDS: ("undecided", "It depends on how many requests are encoded together"),
    BROKEN: ("failed", "Do not use encoder graphs: a replay differs from eager"),
}
_UNSEEN = "on requests that the settings were not made for"


def advice_of(record: TuneRecord, verified: VerifyRecord | None) -> str:
    """What to do: what was measured, or else predicted; a wrong output outweighs both."""
    if verified is not None and any(model.status != "ok" for model in verified.result.models):
        return BROKEN
    return record.result.verdict


def recommendation(record: TuneRecord, verified: VerifyRecord | None) -> dict[str, Any]:
    """The answer in few keys, for scripts."""
    result, advice, gain = record.result, advice_of(record, verified), _measured_gain(record.result)
    return {
        "advice": advice,
        "is_measured": gain is not None,
        "improvement_pct": gain.improvement_pct if gain else result.unseen.improvement_pct,
        "ci95": gain.ci95 if gain else None,
        "compilation_config": result.compilation_config if advice == USE else None,
        "serve_line": result.serve_line if advice == USE else None,
        "profile": result.profile.label,
        "is_verified": None if verified is None else advice != BROKEN,
    }


def recommend_document(record: TuneRecord, verified: VerifyRecord | None, *, is_shipped: bool) -> Document:
    """The report of a recommendation: what to do and to paste, what it gains, how sure that is, what would change it.

    Args:
        verified: The comparison of replay with eager; None where none was made.
        is_shipped: The profile is one that comes with vitgraph.
    """
    result, advice, ran = record.result, advice_of(record, verified), Ran(record)
    word, headline = _HEADLINES[advice]
    gain, figure = _measured_gain(result), f"predicted {say.pct(result.unseen.improvement_pct)} {_UNSEEN}"
    if gain is not None:
        interval = say.ci95(gain.ci95, ", ") or ", too few calls for an interval"
        figure = f"measured {say.pct(gain.improvement_pct)}{interval} {_UNSEEN}"
    # The headline says already what to do.
    lead, _, why = result.verdict_text.partition(": ")
    reason = why if advice in (USE, OFF) and lead in ("use graphs", "leave graphs off") else result.verdict_text
    nothing = "Nothing to paste: encoder graphs are off in vLLM unless they are turned on."
    gains = Facts.of(_gain_facts(result)), f"For {result.settings_for}. Positive = faster than eager."
    return document(
        "vitgraph recommend",
        f"{ran.model}, {ran.workload}",
        section("Paste into vLLM", _pasted(result) if advice == USE else nothing),
        section("What it gains", *gains),
        section("How sure", Facts.of(_sure_facts(record, verified, is_shipped))),
        section(
            "What would change the answer",
            _by_requests_table(result),
            *(say.sentence(row.text) for row in result.other_traffic),
            *map(say.sentence, result.notes),
            "Another GPU, attention backend, dtype or vitgraph: run this again there.",
        ),
        what=(result.profile.environment.device, ran.measured),
        verdict=Verdict(word, headline, reason, figure),
        warning=ran.warning,
        command=record.command,
    )


def _measured_gain(result: TuneResult) -> Improvement | None:
    """What the settings were measured to gain over eager; None where nothing was measured."""
    tuned = result.measured.strategies.get("tuned") if result.measured else None
    return tuned.against_eager.mean if tuned and tuned.against_eager else None


def _gain_facts(result: TuneResult) -> Iterable[tuple[str, str | None]]:
    best, eager = result.best.against_eager, result.baselines.eager
    if best is not None:
        change, slower = f"{say.ms(eager.mean_ms)} → {say.ms(best.latency.mean_ms)}", say.share(best.slower_share)
        yield "Predicted", f"{change} ms a request, {slower} of the requests slower"
    for name, strategy in (result.measured.strategies if result.measured else {}).items():
        gain = strategy.against_eager.mean if strategy.against_eager else None
        more = f" ({say.pct(gain.improvement_pct)}{say.ci95(gain.ci95, ', ')})" if gain else ""
        yield f"Measured, {say.words(name)}", f"{say.ms(strategy.latency.mean_ms)} ms a request{more}"
    costs = say.count(result.best.graphs, "graph"), f"{say.number(result.best.capture_s, 1)} s of capturing"
    yield "Costs", ", ".join(costs)


def _sure_facts(
    record: TuneRecord, verified: VerifyRecord | None, is_shipped: bool
) -> Iterable[tuple[str, str | None]]:
    result, measured, used = record.result, record.result.measured, record.result.profile
    origin = "comes with vitgraph, measured on another machine" if is_shipped else "measured"
    yield "Profile", f"{used.label}, {origin} {used.created_at}"
    yield "Its error", result.error_text
    yield "Unseen requests", result.unseen.text
    if measured is None:
        yield "Measured here", "nothing: there is no GPU, and every figure is predicted"
    else:
        mode = "" if measured.mode == "cuda" else "; replayed on a CPU, which saves no launches"
        yield "Measured here", f"{measured.calls} of {say.count(measured.calls_of_workload, 'unseen call')}{mode}"
        yield "Why not", "; ".join(measured.problems)
    for model in verified.result.models if verified is not None else ():
        distance = "nothing compared" if model.max_rel_l2 is None else f"largest distance {model.max_rel_l2:.2g}"
        failed = f", failed: {', '.join(model.failed_checks)}" if model.failed_checks else ""
        yield "Replay against eager", f"{model.status}, {say.count(model.calls, 'random call')}, {distance}{failed}"
