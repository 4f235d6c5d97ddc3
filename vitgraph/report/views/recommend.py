"""The page of `vitgraph recommend`: what to do and to paste, what it gains, how sure that is, what would change it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vitgraph.records.kinds.tune import TuneResult
from vitgraph.records.latency import Improvement
from vitgraph.records.record import TuneRecord, VerifyRecord
from vitgraph.report import say
from vitgraph.report.document import Code, Document, Facts, Text, Verdict, section, sections, sentence
from vitgraph.report.views.conditions import Ran
from vitgraph.report.views.tune import by_requests_table

USE, OFF, MEASURE, DEPENDS, BROKEN = "use_graphs", "no_graphs", "measure_first", "depends", "incorrect"
_HEADLINES = {
    USE: ("faster", "Use encoder graphs"),
    OFF: ("same", "Leave encoder graphs off"),
    MEASURE: ("undecided", "Not sure enough to say"),
    DEPENDS: ("undecided", "It depends on how many requests are encoded together"),
    BROKEN: ("failed", "Do not use encoder graphs: a replay differs from eager"),
}


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
    """The report of a recommendation.

    Args:
        record: The tuning.
        verified: The comparison of replay with eager; None where none was made.
        is_shipped: The profile is one that comes with vitgraph.
    """
    result, advice, ran = record.result, advice_of(record, verified), Ran(record)
    word, headline = _HEADLINES[advice]
    pasted = f"--compilation-config '{result.compilation_config}'\n{result.serve_line}" if advice == USE else None
    nothing = Text("Nothing to paste: encoder graphs are off in vLLM unless they are turned on.")
    return Document(
        name="vitgraph recommend",
        title=f"{ran.model}, {ran.workload}",
        what=(result.profile.environment.device, ran.measured),
        verdict=Verdict(word, headline, result.verdict_text, _figure(result)),
        warning=ran.warning,
        sections=sections(
            section("Paste into vLLM", Code(pasted) if pasted else nothing),
            section(
                "What it gains",
                Facts.of(_gain_facts(result)),
                Text(f"For {result.settings_for}. Positive = faster than eager."),
            ),
            section("How sure", Facts.of(_sure_facts(record, verified, is_shipped))),
            section(
                "What would change the answer",
                by_requests_table(result),
                *(Text(sentence(row.text)) for row in result.other_traffic),
                *(Text(sentence(note)) for note in result.notes),
                Text("Another GPU, attention backend, dtype or vitgraph: run this again there."),
            ),
        ),
        command=record.command,
    )


def _measured_gain(result: TuneResult) -> Improvement | None:
    """What the settings were measured to gain over eager; None where nothing was measured."""
    tuned = result.measured.strategies.get("tuned") if result.measured else None
    return tuned.against_eager.mean if tuned and tuned.against_eager else None


def _figure(result: TuneResult) -> str:
    gain = _measured_gain(result)
    if gain is None:
        return f"predicted {say.pct(result.unseen.improvement_pct)} on requests that the settings were not made for"
    interval = f", 95% CI {say.interval(gain.ci95)}" if gain.ci95 else ", too few calls for an interval"
    return f"measured {say.pct(gain.improvement_pct)}{interval} on requests that the settings were not made for"


def _gain_facts(result: TuneResult) -> Iterable[tuple[str, str | None]]:
    best, eager = result.best.against_eager, result.baselines.eager
    if best is not None:
        yield (
            "Predicted",
            (
                f"{say.ms(eager.mean_ms)} → {say.ms(best.latency.mean_ms)} ms a request, "
                f"{say.share(best.slower_share)} of the requests slower"
            ),
        )
    for name, strategy in (result.measured.strategies if result.measured else {}).items():
        gain = strategy.against_eager.mean if strategy.against_eager else None
        ends = f", 95% CI {say.interval(gain.ci95)}" if gain and gain.ci95 else ""
        more = f" ({say.pct(gain.improvement_pct)}{ends})" if gain else ""
        yield f"Measured, {name.replace('_', ' ')}", f"{say.ms(strategy.latency.mean_ms)} ms a request{more}"
    yield (
        "Costs",
        f"{say.count(result.best.graphs, 'graph')}, {say.number(result.best.capture_s, 1)} s of capturing",
    )


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
