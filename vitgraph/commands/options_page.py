"""The reference page of all commands' options and of the exit statuses: `vitgraph --options-page`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer
import typer.main

from vitgraph.commands.options import documented_options
from vitgraph.errors import EXIT_STATUSES
from vitgraph.specs.fields import Spec, SpecOption

_KINDS = {"str": "text", "int": "integer", "float": "number", "bool": "switch", "Path": "path"}


def specs_of_commands(app: typer.Typer) -> dict[str, type[Spec]]:
    """The spec class of every command by its name, in the order of the help."""
    return dict(_walk(typer.main.get_command(app), ""))


def _walk(command: Any, name: str) -> Iterator[tuple[str, type[Spec]]]:
    for part, inner in getattr(command, "commands", {}).items():
        yield from _walk(inner, f"{name} {part}".strip())
    if not hasattr(command, "commands"):
        yield name, getattr(command.callback, "__wrapped__", command.callback).spec


def options_page(app: typer.Typer) -> str:
    """The page, in Markdown."""
    lines = [
        "# Options",
        "",
        "Made from the fields of the specs by `vitgraph --options-page`. Every option is a key of the",
        "YAML file that `--config` names, too (without the dashes, with underscores); flags win over the file.",
    ]
    for name, spec in specs_of_commands(app).items():
        lines += ["", f"## vitgraph {name}", "", "| option | takes | default | |", "|---|---|---|---|"]
        lines += [_row(entry, default) for entry, default in documented_options(spec)]
    lines += ["", "## Exit statuses", "", "| status | meaning |", "|---|---|"]
    lines += [f"| {status} | {meaning} |" for status, meaning in EXIT_STATUSES.items()]
    return "\n".join(lines) + "\n"


def _row(entry: SpecOption, default: str) -> str:
    kind = _KINDS.get(getattr(entry.kind, "__name__", ""), "two paths")
    several = ", repeatable" if entry.option.is_repeatable else ""
    names = ", ".join(f"`{name}`" for name in entry.names)
    help_text = entry.option.help.replace("|", "\\|")
    return f"| {names} | {kind}{several} | {default and f'`{default}`'} | {help_text} |"
