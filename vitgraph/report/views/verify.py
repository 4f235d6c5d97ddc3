"""The document of a verification: one row a model, then every fault and where it was found."""

from __future__ import annotations

from collections.abc import Sequence

from vitgraph.records.attention_choices import choices_text
from vitgraph.records.kinds.verify import Check, VerifiedModel
from vitgraph.records.record import VerifyRecord
from vitgraph.report import say
from vitgraph.report.columns import Cell, Column, TableSpec, fields
from vitgraph.report.document import Document, Section, Text, Verdict, section, sections
from vitgraph.report.views.conditions import Ran, backend_text, compiled_text

_TONES = {"ok": "ok", "failed": "failed", "error": "failed", "skipped": "dim"}

MODELS = TableSpec(
    "models",
    columns=(
        Column("model", "text", "", "preset, row or architecture", "Model"),
        Column("status", "text", "", "how it ended", "Status", of=lambda row: _status(row["of"])),
        *fields(VerifiedModel, "of", max_rel_l2=("Rel. L2", say.error)),
        Column("graphs", "text", "graphs", "graphs captured, and how many did not fit", "Graphs"),
        *fields(VerifiedModel, "of", calls="Calls", items="Items", seconds=("Seconds", lambda s: say.number(s, 1))),
    ),
)
CHECKS = TableSpec(
    "checks",
    "",
    "a check of a model",
    (
        Column("model", "text", "", "preset, row or architecture"),
        Column("check", "text", "", "name of the check", "Check", of="of.name"),
        *fields(Check, "of", status="Status", max_rel_l2="", compared="", failures="", detail="What"),
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
    passed = sum(model.status == "ok" for model in models)
    verdict = Verdict("ok" if passed == len(models) else "failed", f"{passed} of {_count(models)} verified")
    checks = ({"model": name_of(model), "of": check} for model in models for check in model.checks)
    return Document(
        name="vitgraph verify",
        title=_count(models),
        what=tuple(dict.fromkeys(_setting(model) for model in models if model.tolerance is not None)),
        verdict=verdict if models else None,
        warning=Ran(record).warning,
        sections=sections(
            section("", MODELS.of({"model": name_of(one), "of": one, "graphs": _graphs(one)} for one in models)),
            *(_details(model, show_all) for model in models),
        ),
        tables=(CHECKS.of(checks),),
        command=record.command,
    )


def name_of(model: VerifiedModel) -> str:
    """What a report calls a model."""
    return str(model.preset or model.row or model.architecture)


def _count(models: Sequence[VerifiedModel]) -> str:
    return say.count(len(models), "encoder")


def _status(of: VerifiedModel | Check) -> Cell:
    return Cell(of.status, tone=_TONES[of.status])


def _graphs(model: VerifiedModel) -> str:
    return f"{model.graphs_captured}{f' (-{model.graphs_dropped})' if model.graphs_dropped else ''}"


def _details(model: VerifiedModel, show_all: bool) -> Section:
    rows = (
        {
            "check": check.name,
            "status": _status(check),
            "detail": f"{check.detail} (and {check.failures - 1} more)" if check.failures > 1 else check.detail,
        }
        for check in model.checks
        if show_all or check.status == "failed"
    )
    error = Text(f"Not verified: {model.error}", "failed") if model.error is not None else None
    return section(name_of(model), CHECKS.table(rows), error)


def _setting(model: VerifiedModel) -> str:
    """What the figures of a model hold for."""
    backend = backend_text(model.backend_requested, model.backend_used)
    ranks = f" on {model.ranks} ranks" if model.ranks > 1 else ""
    place = f"{model.dtype} on {model.device}, {backend}, {compiled_text(bool(model.compiled_blocks))}{ranks}"
    own = "" if model.own_error is None else f" (or 1.5 times eager's own from float32, {say.error(model.own_error)})"
    chosen = f"; attention: {choices_text(model.attn_choices)}" if model.attn_choices else ""
    return f"Relative L2 distance from eager of at most {model.tolerance:g}{own}; {place}{chosen}"
