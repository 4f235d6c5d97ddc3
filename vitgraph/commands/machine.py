"""`vitgraph doctor`, `import` and `models`: what runs here, what another server was set to, what is supported."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from vitgraph.commands.shell import Shown, tell
from vitgraph.specs.tools import DoctorSpec, ImportSpec, ModelsSpec

if TYPE_CHECKING:
    from rich.console import Console


def doctor(spec: DoctorSpec) -> Shown:
    """Show what this machine can run and why not the rest: GPU, libraries, attention backends, hub, memory, clocks.

    Exits with 0 unless nothing can run.
    """
    from vitgraph.commands.examine import examine
    from vitgraph.errors import VitgraphError
    from vitgraph.report.views.machine import doctor_document

    facts = examine()
    failure = None if facts["can_run"] else VitgraphError("nothing can run here; the lines above say what to install")
    return Shown(facts, doctor_document(facts), failure=failure)


def import_line(spec: ImportSpec) -> Shown:
    """Say the encoder settings of a vLLM or SGLang command line as options of vitgraph."""
    from vitgraph.commands.import_settings import import_settings
    from vitgraph.report.say import clean

    settings = import_settings(sys.stdin.read() if spec.line == "-" else spec.line)

    def render(console: Console) -> None:
        # Not through the console, which would break the line.
        print(clean(settings.command()))
        for note in settings.notes:
            tell(f"note: {note}")
        if settings.left_out:
            tell(f"left out: {', '.join(settings.left_out)}")

    return Shown(settings.as_dict(), render)


def models(spec: ModelsSpec) -> Shown:
    """List the supported models, their presets, and what was verified where."""
    from vitgraph.models.catalog import catalog
    from vitgraph.report.to_terminal import render as show
    from vitgraph.report.views.machine import families_markdown, matrix_markdown, models_document

    entries = [entry.as_dict() for entry in catalog()]

    def render(console: Console) -> None:
        if spec.markdown:
            print(families_markdown(entries), matrix_markdown(entries), sep="\n\n")
        else:
            show(models_document(entries), console)

    return Shown(entries, render)
