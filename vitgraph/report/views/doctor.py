"""The document of `doctor`: what a machine can run, and why not the rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from vitgraph.report.columns import NO_VALUE, Cell, Column, Row, TableSpec, bytes_text, number_text
from vitgraph.report.document import Document, Facts, Text, Verdict, section, sections

YES, NO = "yes", "no"

LIBRARIES = TableSpec(
    "libraries",
    "",
    "a library",
    (
        Column("library", "text", "", "its name", "Library"),
        Column("installed", "text", "", "version that is installed", "Installed"),
        Column("wanted", "text", "", "versions that are wanted", "Wanted"),
        Column("fits", "text", "", "whether it fits", "Fits"),
    ),
)
BACKENDS = TableSpec(
    "backends_here",
    "",
    "an attention backend",
    (
        Column("backend", "text", "", "its name", "Attention backend"),
        Column("runs", "text", "", "whether it runs here", "Runs"),
        Column("graphs", "text", "", "whether it can be captured", "Graphs"),
        Column("head_widths", "text", "", "head widths that it takes", "Head widths"),
        Column("why", "text", "", "why it does not run", "Why not"),
    ),
)


def doctor_document(facts: Mapping[str, Any]) -> Document:
    """What a machine can run.

    Args:
        facts: What `doctor` examined.
    """
    problem = facts["backends_problem"]
    can_run = facts["can_run"]
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
    sizes = (bytes_text(memory[f"{name}_bytes"]) for name in ("available", "total"))
    yield "Host", f"{facts['cpu_count']} CPUs, {' of '.join(sizes)} memory available"
    yield "torch", _torch(facts)
    yield "Driver", str(facts["driver"] or NO_VALUE)
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
        f"{bytes_text(gpu['free_bytes'])} of {bytes_text(gpu['total_bytes'])} free",
    ]
    if gpu["throttled_by"] is None:
        return "; ".join([*parts, "clocks unknown without nvidia-smi"])
    parts += [
        f"SM clock {number_text(gpu['sm_clock_mhz'], 0)} of {number_text(gpu['max_sm_clock_mhz'], 0)} MHz",
        f"{number_text(gpu['power_draw_w'], 0)} of {number_text(gpu['power_limit_w'], 0)} W",
        f"{number_text(gpu['temperature_c'], 0)} °C",
        f"throttled by {', '.join(gpu['throttled_by'])}" if gpu["throttled_by"] else "not throttled",
        f"other processes on it: {gpu['other_processes']}",
    ]
    return "; ".join(parts)


def _library(row: Mapping[str, Any]) -> Row:
    fits = {True: YES, False: NO, None: NO_VALUE}[row["fits"]]
    return {
        "library": row["name"],
        "installed": row["installed"] or NO_VALUE,
        "wanted": "optional" if row["wanted"] is None else row["wanted"] or "any",
        "fits": Cell(fits, tone="failed" if row["fits"] is False else ""),
    }


def _backends(rows: Iterable[Mapping[str, Any]]) -> Iterable[Row]:
    for row in rows:
        reason = row["unavailable_reason"]
        yield {
            "backend": row["name"],
            "runs": Cell(NO if reason else YES, tone="dim" if reason else "ok"),
            "graphs": YES if row["is_capture_safe"] else NO,
            "head_widths": row["head_widths"],
            "why": reason or "",
        }
        generations = row["generations"] or {}
        # Where the backend has none, its own reason is enough.
        for version, why in generations.items() if reason is None else ():
            yield {
                "backend": f"  generation {version}",
                "runs": NO if why else YES,
                "graphs": "",
                "head_widths": "",
                "why": why or "",
            }
