"""The document of a verification: one row a model, then every fault and where it was found."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vitgraph.records.kinds.verify import VerifiedModel
from vitgraph.records.record import VerifyRecord
from vitgraph.report.columns import NO_VALUE, Cell, Column, Table, TableSpec, count_text, error_text, number_text
from vitgraph.report.document import Document, Section, Text, Verdict, section, sections
from vitgraph.report.views.conditions import warning_of

_TONES = {"ok": "ok", "failed": "failed", "error": "failed", "skipped": "dim"}

MODELS = TableSpec(
    "models",
    "",
    "a model",
    (
        Column("model", "text", "", "preset, row or architecture", "Model"),
        Column("status", "text", "", "`ok`, `failed`, or `error` where it could not be verified", "Status"),
        Column("max_rel_l2", "number", "ratio", "largest relative L2 distance from eager", "Rel. L2", error_text),
        Column("graphs", "text", "graphs", "graphs captured, and how many did not fit", "Graphs"),
        Column("calls", "integer", "calls", "random calls compared", "Calls"),
        Column("items", "integer", "items", "items encoded by the graph path", "Items"),
        Column("seconds", "number", "s", "wall time", "Seconds", lambda s: number_text(s, 1)),
    ),
)
CHECKS = TableSpec(
    "checks",
    "",
    "a check of a model",
    (
        Column("model", "text", "", "preset, row or architecture"),
        Column("check", "text", "", "name of the check", "Check"),
        Column("status", "text", "", "`ok`, `failed`, `skipped` or `error`", "Status"),
        Column("max_rel_l2", "number", "ratio", "largest relative L2 distance that it found"),
        Column("compared", "integer", "outputs", "outputs that it compared"),
        Column("failures", "integer", "faults", "faults that it found"),
        Column("detail", "text", "", "what it did, why it was skipped, or its first fault", "What"),
    ),
)


def verify_document(record: VerifyRecord, *, show_checks: bool | None = None) -> Document:
    """The report of a verification.

    Args:
        record: The record.
        show_checks: List every check of every model; None does so where there is one model. Checks that failed are
            always listed.
    """
    models = record.result.models
    show_all = len(models) == 1 if show_checks is None else show_checks
    settings = tuple(dict.fromkeys(_setting(model) for model in models if model.tolerance is not None))
    return Document(
        name="vitgraph verify",
        title=count_text(len(models), "encoder"),
        what=settings,
        verdict=_verdict(models) if models else None,
        warning=warning_of(record),
        sections=sections(
            section("", MODELS.table(_model_row(model) for model in models)),
            *(_details(model, show_all) for model in models),
        ),
        tables=(CHECKS.table(_check_rows(models)),),
        command=record.command,
    )


def name_of(model: VerifiedModel) -> str:
    """What a report calls a model."""
    return str(model.preset or model.row or model.architecture)


def _verdict(models: Sequence[VerifiedModel]) -> Verdict:
    passed = sum(model.status == "ok" for model in models)
    word = "ok" if passed == len(models) else "failed"
    return Verdict(word, f"{passed} of {count_text(len(models), 'encoder')} verified")


def _model_row(model: VerifiedModel) -> dict[str, object]:
    dropped = f" (-{model.graphs_dropped})" if model.graphs_dropped else ""
    return {
        "model": name_of(model),
        "status": Cell(model.status, tone=_TONES[model.status]),
        "graphs": f"{model.graphs_captured}{dropped}",
        **{name: getattr(model, name) for name in ("max_rel_l2", "calls", "items", "seconds")},
    }


def _check_rows(models: Sequence[VerifiedModel]) -> Iterable[dict[str, object]]:
    for model in models:
        for check in model.checks:
            kept = {name: getattr(check, name) for name in ("status", "max_rel_l2", "compared", "failures", "detail")}
            yield {"model": name_of(model), "check": check.name, **kept}


def _details(model: VerifiedModel, show_all: bool) -> Section | None:
    listed = [check for check in model.checks if show_all or check.status == "failed"]
    if not listed and model.error is None:
        return None
    rows = (
        {
            "check": check.name,
            "status": Cell(check.status, tone=_TONES[check.status]),
            "detail": f"{check.detail} (and {check.failures - 1} more)" if check.failures > 1 else check.detail,
        }
        for check in listed
    )
    error = Text(f"Not verified: {model.error}", "failed") if model.error is not None else None
    return section(name_of(model), Table(CHECKS, tuple(rows)), error)


def _setting(model: VerifiedModel) -> str:
    """What the figures of a model hold for."""
    requested, used = model.backend_requested, model.backend_used or NO_VALUE
    backend = used if requested in (None, used) else f"{used} (asked for {requested})"
    compiled = "blocks compiled" if model.compiled_blocks else "blocks not compiled"
    ranks = f" on {model.ranks} ranks" if model.ranks > 1 else ""
    place = f"{model.dtype} on {model.device}, {backend}, {compiled}{ranks}"
    return f"Relative L2 distance from eager of at most {model.tolerance:g}; {place}"
