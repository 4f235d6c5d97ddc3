"""Settings of a command from a YAML file: which options its keys name, and what they may hold."""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitgraph.errors import UsageError
from vitgraph.reading import is_folder, parse_yaml, read_text
from vitgraph.specs.fields import Option, read_named

NOT_IN_FILES = frozenset({"config", "debug"})

OPTIONS_FILE = "options.json"

MOST_BYTES = 1_000_000
"""A file of settings is a page; a device or a pipe has no end."""


def read_config(path: Path, options: Mapping[str, Option]) -> dict[str, Any]:
    """Reads a file of settings.

    Args:
        path: A YAML mapping; keys are option names without the leading dashes, with underscores or dashes.

    Returns:
        Values of fields by key. A key without a value (null) is left out.

    Raises:
        UsageError: The file cannot be read, or a key or a value in it is not what the command takes.
    """
    allowed = {key: entry for key, entry in options.items() if key not in NOT_IN_FILES}
    return read_named(str(path), read_mapping(path, "--config", "`num_prompts: 100`"), allowed)


def read_mapping(path: Path, option: str, example: str) -> dict[Any, Any]:
    """The mapping in a YAML or JSON file.

    Raises:
        UsageError: It cannot be read, or holds something else, or a key twice.
    """
    import yaml

    def failure(text: str) -> UsageError:
        return UsageError(f"{option}: {text}; {_files_near(path)}")

    text = read_text(path, most=MOST_BYTES, failure=failure)
    values = parse_yaml(text, str(path), failure=failure)
    _refuse_repeated_keys(path, yaml.compose(text, Loader=yaml.SafeLoader))
    if not isinstance(values, dict) or not values:
        raise UsageError(
            f"{option} {path} holds {'nothing' if not values else f'a {type(values).__name__}'}; it must be a mapping "
            f"from names to values, for example {example}"
        )
    return values


def command_of_options(command: str, options: Mapping[str, Any], folder: Path) -> list[str]:
    """The command line of a process of its own that runs a command; its options are a config file in its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / OPTIONS_FILE
    file.write_text(json.dumps(options, indent=1), encoding="utf-8")
    return [sys.executable, "-m", "vitgraph", command, "--config", str(file)]


def _refuse_repeated_keys(path: Path, node: Any) -> None:
    """YAML's loader keeps the last of two equal keys without a word."""
    lines: dict[str, int] = {}
    for key, _ in getattr(node, "value", ()) if getattr(node, "id", None) == "mapping" else ():
        line = key.start_mark.line + 1
        if not isinstance(key.value, str):
            continue
        if key.value in lines:
            raise UsageError(f"{path}:{line}: {key.value!r} was set in line {lines[key.value]}; name each option once")
        lines[key.value] = line


def _files_near(path: Path) -> str:
    files: list[str] = []
    if is_folder(path.parent):
        files = sorted(file.name for file in path.parent.iterdir() if file.suffix in (".yaml", ".yml"))
    found = difflib.get_close_matches(path.name, files, n=3)
    return f"near: {', '.join(found)}" if found else "name a YAML file of options"
