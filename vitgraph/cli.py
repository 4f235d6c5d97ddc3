"""The command line: the Typer app, one line a command; heavy modules are imported inside the commands."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from vitgraph import __version__
from vitgraph.commands.machine import doctor, import_line, models
from vitgraph.commands.measure import bench, compare_backends, plan, profile, profiled_call, verify
from vitgraph.commands.options import add_command
from vitgraph.commands.shell import first_look
from vitgraph.commands.sweep import sweep
from vitgraph.commands.tools import calls, convert, export, inspect, make
from vitgraph.commands.tuning import calibrate, recommend, tune_budgets

app = typer.Typer(
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Decide how to run a vision-language model's vision encoder: CUDA Graphs at token budgets against eager.",
)
workload = typer.Typer(
    no_args_is_help=True, help="Inspect workloads, make random ones, convert images and logs to traces."
)


def _show_version(value: bool) -> None:
    if value:
        print(f"vitgraph {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """See the commands below; each has its own --help."""


add_command(app, "recommend", recommend)
add_command(app, "bench", bench, first_look)
add_command(app, "tune-budgets", tune_budgets)
add_command(app, "compare-backends", compare_backends, first_look)
add_command(app, "calibrate", calibrate, first_look)
add_command(app, "verify", verify)
add_command(app, "plan", plan)
add_command(app, "profile", profile, profiled_call)
add_command(app, "sweep", sweep)
add_command(app, "export", export)
add_command(app, "models", models)
add_command(app, "doctor", doctor)
add_command(app, "import", import_line)
add_command(workload, "inspect", inspect)
add_command(workload, "make", make)
add_command(workload, "convert", convert)
add_command(workload, "calls", calls)
app.add_typer(workload, name="workload")


def run() -> None:
    """Runs the command line of this process, alone or as one of several ranks."""
    if "RANK" in os.environ:
        from vitgraph.commands.on_ranks import main_of_rank

        main_of_rank(app)
    else:
        app()
