"""The documents of `doctor`, `models` and `verify`, and the README's matrix: what can run here, and what is right."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from vitgraph.records.record import VerifyRecord
from vitgraph.records.results import Check, VerifiedModel
from vitgraph.records.sections import choices_text
from vitgraph.report import say
from vitgraph.report.columns import Cell, Row, column, fields, table_of, texts
from vitgraph.report.document import Document, Facts, Section, Text, Verdict, document, section
from vitgraph.report.markup import markdown_row
from vitgraph.report.views.conditions import Ran, backend_text, compiled_text

# -- doctor ------------------------------------------------------------------------------------------------------------

LIBRARIES = table_of("libraries", *texts(name="Library", installed="Installed", wanted="Wanted", fits="Fits"))
BACKENDS = table_of(
    "backends_here",
    *texts(name="Attention backend", runs="Runs", graphs="Graphs", head_widths="Head widths", why="Why not"),
)


def doctor_document(facts: Mapping[str, Any]) -> Document:
    """What a machine can run."""
    problem, can_run = facts["backends_problem"], facts["can_run"]
    word, headline = ("ok", f"Can run: {can_run[0]}") if can_run else ("failed", "Can run: nothing; see below")
    backends = BACKENDS.filled(_backends(facts["backends"] or ()))
    unknown = Text(f"Attention backends could not be examined: {problem}", "failed") if problem else None
    return document(
        "vitgraph doctor",
        str(facts["platform"]),
        section("", *(Text(f"Advice: {line}", "warning") for line in facts["advice"])),
        section("Machine", Facts.of(_machine(facts))),
        section("Libraries", LIBRARIES.filled(map(_library, facts["libraries"]))),
        section("Attention backends", backends, unknown),
        verdict=Verdict(word, headline, lines=tuple(f"Can run: {line}" for line in can_run[1:])),
    )


def _machine(facts: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    hub, memory = facts["hub"], facts["memory"]
    yield "vitgraph", f"{facts['vitgraph']}, Python {facts['python']}"
    yield "System", str(facts["platform"])
    sizes = (say.size(memory[f"{name}_bytes"]) for name in ("available", "total"))
    yield "Host", f"{facts['cpu_count']} CPUs, {' of '.join(sizes)} memory available"
    yield "torch", _torch(facts)
    yield "Driver", str(facts["driver"] or say.NO_VALUE)
    for gpu in facts["gpus"]:
        yield f"GPU {gpu['index']}", _gpu(gpu)
    answer = "answers" if hub["reachable"] else f"is not reachable: {hub['reason']}"
    yield "Hub", f"{hub['endpoint']} {answer}"


def _torch(facts: Mapping[str, Any]) -> str:
    if facts["torch"] is None:
        return str(facts["torch_problem"])
    toolkit = [f"{name} {facts[key]}" for name, key in (("CUDA", "cuda"), ("HIP", "hip")) if facts[key]]
    built = ", ".join([facts["torch"], *toolkit])
    return f"{built}; {facts['torch_problem']}" if facts["torch_problem"] else built


def _gpu(gpu: Mapping[str, Any]) -> str:
    parts = [
        f"{gpu['name']}, compute capability {gpu['compute_capability']}",
        f"{say.size(gpu['free_bytes'])} of {say.size(gpu['total_bytes'])} free",
    ]
    if gpu["throttled_by"] is None:
        return "; ".join([*parts, "clocks unknown without nvidia-smi"])
    parts += [
        f"SM clock {say.number(gpu['sm_clock_mhz'], 0)} of {say.number(gpu['max_sm_clock_mhz'], 0)} MHz",
        f"{say.number(gpu['power_draw_w'], 0)} of {say.number(gpu['power_limit_w'], 0)} W",
        f"{say.number(gpu['temperature_c'], 0)} °C",
        f"throttled by {', '.join(gpu['throttled_by'])}" if gpu["throttled_by"] else "not throttled",
        f"other processes on it: {gpu['other_processes']}",
    ]
    return "; ".join(parts)


def _library(row: Mapping[str, Any]) -> Row:
    fits = {True: Cell("yes"), False: Cell("no", tone="failed"), None: None}[row["fits"]]
    wanted = "optional" if row["wanted"] is None else row["wanted"] or "any"
    return {"name": row["name"], "installed": row["installed"] or say.NO_VALUE, "wanted": wanted, "fits": fits}


def _backends(rows: Iterable[Mapping[str, Any]]) -> Iterable[Row]:
    for row in rows:
        reason = row["unavailable_reason"]
        runs = Cell("no", tone="dim") if reason else Cell("yes", tone="ok")
        graphs = "yes" if row["is_capture_safe"] else "no"
        yield {**row, "runs": runs, "graphs": graphs, "why": reason or ""}
        # Where the backend has none, its own reason is enough.
        for version, why in (row["generations"] or {}).items() if reason is None else ():
            named = {"name": f"  generation {version}", "runs": "no" if why else "yes", "why": why or ""}
            yield {"graphs": "", "head_widths": "", **named}


# -- models ------------------------------------------------------------------------------------------------------------

LEGEND = (
    "Verified: replay compared with eager by `vitgraph verify` (random weights, bfloat16), with the largest relative "
    "L2 distance between the two; it says nothing of speed."
)
MATRIX_BEGIN = "<!-- matrix: generated by `vitgraph models --markdown` -->"
MATRIX_END = "<!-- end of matrix -->"
UNTESTED_HARDWARE = ("Blackwell", "Ampere", "MI300X", "MI350X / MI355X")
"""Hardware of the published matrix that nobody has run this on."""

Entry = Mapping[str, Any]

_FACTS = {
    "image": "Image",
    "video": "Video",
    "paths": "Budgets from",
    "axes": "Capture axes",
    "verified": "Verified on",
}
ROWS = table_of("models", *texts(row="Row", tower="Tower", **_FACTS))


def models_document(entries: Sequence[Entry]) -> Document:
    """One row a supported row of models, and its models, class and presets beneath."""
    rows = [{"tower": entry["tower"], **_row(entry)} for entry in entries]
    named = []
    for one in entries:
        facts = (("class", one["encoder"].split(":")[1]), ("presets", ", ".join(one["presets"])))
        named.append(section(f"{one['row']}: {one['models']}", Facts.of(facts)))
    table = ROWS.filled(rows, notes=(LEGEND,))
    return document(
        "vitgraph models", f"{say.count(len(entries), 'row')} of supported models", section("", table), *named
    )


def _row(entry: Entry) -> dict[str, str]:
    paths = [f"{path} {minimum}" for path, minimum in entry["paths"].items()]
    verified = (
        f"{run['device']} {run['backend']}{', compiled' if run['compiled'] else ''}, "
        f"max distance {run['max_rel_l2']:.1%}"
        for run in entry["verified"]
    )
    return {
        "row": entry["row"],
        **{medium: "✓" if entry[medium] else say.NO_VALUE for medium in ("image", "video")},
        "paths": ", ".join(paths) if len(paths) > 1 else str(next(iter(entry["paths"].values()))),
        "axes": ", ".join(f"{name} × {keys}" for name, keys in entry["axes"].items()) or say.NO_VALUE,
        "verified": "; ".join(verified) or "untested",
    }


def families_markdown(entries: Sequence[Entry]) -> str:
    """One line a kind of tower, for the README, between the markers."""
    rows = []
    for tower, group in groupby(entries, key=itemgetter("tower")):
        models, verified = zip(*((entry["models"], bool(entry["verified"])) for entry in group), strict=True)
        rows.append([tower, ", ".join(models), str(len(models)), f"{sum(verified)} of {len(models)}"])
    return _markdown(("Tower", "Models", "Rows", "Verified on Hopper"), rows)


def matrix_markdown(entries: Sequence[Entry]) -> str:
    """The compatibility matrix as Markdown, between its markers."""
    titles = (*list(_FACTS.values())[:-1], "Verified on Hopper")
    rows = []
    for entry in entries:
        cells, names = _row(entry), ", ".join(f"`{name}`" for name in entry["architectures"])
        untested = ["untested"] * len(UNTESTED_HARDWARE)
        rows.append([names, entry["models"], *(cells[name] for name in _FACTS), *untested])
    return _markdown(("Architecture", "Models", *titles, *UNTESTED_HARDWARE), rows, "", LEGEND)


def _markdown(headers: Sequence[str], rows: Iterable[Sequence[str]], *after: str) -> str:
    lines = (markdown_row(headers), "|---" * len(headers) + "|", *map(markdown_row, rows))
    return "\n".join([MATRIX_BEGIN, *lines, *after, MATRIX_END])


# -- verify ------------------------------------------------------------------------------------------------------------

_TONES = {"ok": "ok", "failed": "failed", "error": "failed", "skipped": "dim"}

MODELS = table_of(
    "models",
    column("model", "preset, row or architecture", "Model", of=lambda model: name_of(model)),
    column("status", "how it ended", "Status", of=lambda model: _status(model)),
    *fields(VerifiedModel, max_rel_l2=("Rel. L2", say.error)),
    column(
        "graphs",
        "graphs captured, and how many did not fit",
        "Graphs",
        of=lambda one: f"{one.graphs_captured}{f' (-{one.graphs_dropped})' if one.graphs_dropped else ''}",
        kind="text",
    ),
    *fields(VerifiedModel, calls="Calls", items="Items", seconds=("Seconds", 1)),
)
CHECKS = table_of(
    "checks",
    column("model", "preset, row or architecture"),
    column("check", "name of the check", "Check", of="of.name"),
    *fields(Check, "of", status="Status", max_rel_l2="", compared="", failures="", detail="What"),
    one_row="a check of a model",
)


def verify_document(record: VerifyRecord) -> Document:
    """The report of a verification: every check of one model; of several only those that failed."""
    models, count = record.result.models, say.count(len(record.result.models), "encoder")
    passed = sum(model.status == "ok" for model in models)
    verdict = Verdict("ok" if passed == len(models) else "failed", f"{passed} of {count} verified")
    checks = ({"model": name_of(model), "of": check} for model in models for check in model.checks)
    return document(
        "vitgraph verify",
        count,
        section("", MODELS.of(models)),
        *(_checks(model, len(models) == 1) for model in models),
        what=tuple(dict.fromkeys(_setting(model) for model in models if model.tolerance is not None)),
        verdict=verdict if models else None,
        warning=Ran(record).warning,
        tables=(CHECKS.of(checks),),
        command=record.command,
    )


def name_of(model: VerifiedModel) -> str:
    """What a report calls a model."""
    return str(model.preset or model.row or model.architecture)


def _status(of: VerifiedModel | Check) -> Cell:
    return Cell(of.status, tone=_TONES[of.status])


def _checks(model: VerifiedModel, show_all: bool) -> Section:
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
    return section(name_of(model), CHECKS.filled(rows), error)


def _setting(model: VerifiedModel) -> str:
    """What the figures of a model hold for."""
    backend = backend_text(model.backend_requested, model.backend_used)
    ranks = f" on {model.ranks} ranks" if model.ranks > 1 else ""
    place = f"{model.dtype} on {model.device}, {backend}, {compiled_text(bool(model.compiled_blocks))}{ranks}"
    own = "" if model.own_error is None else f" (or 1.5 times eager's own from float32, {say.error(model.own_error)})"
    chosen = f"; attention: {choices_text(model.attn_choices)}" if model.attn_choices else ""
    return f"Relative L2 distance from eager of at most {model.tolerance:g}{own}; {place}{chosen}"
