"""The documents of `doctor` and `models`, and the README's matrix: what a machine can run, and which models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from vitgraph.report import say
from vitgraph.report.columns import Cell, Row, TableSpec, texts
from vitgraph.report.document import Document, Facts, Section, Text, Verdict, section, sections
from vitgraph.report.to_markdown import row as markdown_row

# -- doctor ------------------------------------------------------------------------------------------------------------

LIBRARIES = TableSpec("libraries", columns=texts(name="Library", installed="Installed", wanted="Wanted", fits="Fits"))
BACKENDS = TableSpec(
    "backends_here",
    columns=texts(name="Attention backend", runs="Runs", graphs="Graphs", head_widths="Head widths", why="Why not"),
)


def doctor_document(facts: Mapping[str, Any]) -> Document:
    """What a machine can run.

    Args:
        facts: What `doctor` examined.
    """
    problem, can_run = facts["backends_problem"], facts["can_run"]
    word, headline = ("ok", f"Can run: {can_run[0]}") if can_run else ("failed", "Can run: nothing; see below")
    return Document(
        name="vitgraph doctor",
        title=str(facts["platform"]),
        verdict=Verdict(word, headline, lines=tuple(f"Can run: {line}" for line in can_run[1:])),
        sections=sections(
            section("", *(Text(f"Advice: {line}", "warning") for line in facts["advice"])),
            section("Machine", Facts.of(_machine(facts))),
            section("Libraries", LIBRARIES.table(map(_library, facts["libraries"]))),
            section(
                "Attention backends",
                BACKENDS.table(_backends(facts["backends"] or ())),
                Text(f"Attention backends could not be examined: {problem}", "failed") if problem else None,
            ),
        ),
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
    fits = {True: "yes", False: "no", None: say.NO_VALUE}[row["fits"]]
    return {
        "name": row["name"],
        "installed": row["installed"] or say.NO_VALUE,
        "wanted": "optional" if row["wanted"] is None else row["wanted"] or "any",
        "fits": Cell(fits, tone="failed" if row["fits"] is False else ""),
    }


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
ROWS = TableSpec("models", columns=texts(tower="Tower", row="Row", **_FACTS))


def models_document(entries: Sequence[Entry]) -> Document:
    """One row a supported row of models, and its models, class and presets beneath.

    Args:
        entries: The facts of each, from the model catalog.
    """
    rows: list[dict[str, str]] = []
    for tower, group in groupby(entries, key=itemgetter("tower")):
        rows += [{"tower": "" if place else tower, **_row(entry)} for place, entry in enumerate(group)]
    return Document(
        name="vitgraph models",
        title=f"{say.count(len(entries), 'row')} of supported models",
        sections=sections(section("", ROWS.table(rows, notes=(LEGEND,))), *map(_details, entries)),
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


def _details(entry: Entry) -> Section:
    facts = Facts.of((("class", entry["encoder"].split(":")[1]), ("presets", ", ".join(entry["presets"]))))
    return section(f"{entry['row']}: {entry['models']}", facts)


def families_markdown(entries: Sequence[Entry]) -> str:
    """One line a kind of tower, for the README, between the markers."""
    rows = []
    for tower, group in groupby(entries, key=itemgetter("tower")):
        found = list(group)
        verified = sum(1 for entry in found if entry["verified"])
        models = ", ".join(entry["models"] for entry in found)
        rows.append([tower, models, str(len(found)), f"{verified} of {len(found)}"])
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
