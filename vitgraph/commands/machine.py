"""`vitgraph doctor` and `vitgraph import`: what this machine can run, and what another server was set to."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from vitgraph.commands import options as opt

app = typer.Typer()


@app.command()
def doctor(json_output: opt.JsonOutput = False) -> None:
    """Show what this machine can run and why not the rest: GPU, libraries, attention backends, hub, memory, clocks.

    Exits with 0 unless nothing can run.
    """
    from vitgraph.cli import reported_errors

    with reported_errors():
        from rich.console import Console

        from vitgraph.commands.doctor import examine
        from vitgraph.report.doctor_table import render_doctor

        facts = examine()
        if json_output:
            typer.echo(json.dumps(facts, indent=1))
        else:
            render_doctor(facts, Console())
        if not facts["can_run"]:
            raise typer.Exit(1)


@app.command("import")
def import_line(
    line: Annotated[
        str,
        typer.Argument(
            help="A `vllm serve` or SGLang command in quotes, the JSON of --compilation-config, or - (stdin)."
        ),
    ],
    json_output: opt.JsonOutput = False,
) -> None:
    """Say the encoder settings of a vLLM or SGLang command line as options of vitgraph."""
    from vitgraph.cli import reported_errors

    with reported_errors():
        from vitgraph.commands.import_settings import import_settings

        settings = import_settings(sys.stdin.read() if line == "-" else line)
        if json_output:
            typer.echo(json.dumps(settings.as_dict(), indent=1))
            return
        typer.echo(settings.command())
        for note in settings.notes:
            typer.echo(f"note: {note}", err=True)
        if settings.left_out:
            typer.echo(f"left out: {', '.join(settings.left_out)}", err=True)
