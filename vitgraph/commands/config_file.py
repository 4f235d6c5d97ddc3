"""Settings of a command from a YAML file: which options its keys name, and what they may hold."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitgraph.errors import UsageError
from vitgraph.reading import is_folder, parse_yaml, read_text
from vitgraph.specs.fields import SpecOption
from vitgraph.specs.values import near

NOT_IN_FILES = frozenset({"config", "debug"})

MOST_BYTES = 1_000_000
"""A file of settings is a page; a device or a pipe has no end."""

_KIND_NAMES: Mapping[type, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text (in quotes where YAML would read something else)",
    Path: "a path",
}


def read_config(path: Path, options: Mapping[str, SpecOption]) -> dict[str, Any]:
    """Reads a file of settings.

    Args:
        path: A YAML mapping; keys are option names without the leading dashes, with underscores or dashes.
        options: What may be set, by key.

    Returns:
        Values of fields by key. A key without a value (null) is left out.

    Raises:
        UsageError: The file cannot be read, or a key or a value in it is not what the command takes.
    """
    settings = {_plain(name): key for key, entry in options.items() if key not in NOT_IN_FILES for name in entry.names}
    values: dict[str, Any] = {}
    for name, value in _read_mapping(path).items():
        key = settings.get(_plain(name)) if isinstance(name, str) else None
        if key is None:
            raise UsageError(f"{path}: unknown key {name!r}; {near(_plain(str(name)), settings)}")
        if key in values:
            raise UsageError(f"{path}: {name!r} sets {options[key].names[0]} a second time; name each option once")
        values[key] = value
    return {key: _convert(path, options[key], value) for key, value in values.items() if value is not None}


def _read_mapping(path: Path) -> dict[Any, Any]:
    import yaml

    def failure(text: str) -> UsageError:
        return UsageError(f"--config: {text}; {_files_near(path)}")

    text = read_text(path, most=MOST_BYTES, failure=failure)
    values = parse_yaml(text, str(path), failure=failure)
    _refuse_repeated_keys(path, yaml.compose(text, Loader=yaml.SafeLoader))
    if not isinstance(values, dict) or not values:
        raise UsageError(
            f"--config {path} holds {'nothing' if not values else f'a {type(values).__name__}'}; it must be a mapping "
            "from option names to values, for example `num_prompts: 100`"
        )
    return values


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


def _convert(path: Path, entry: SpecOption, value: Any) -> Any:
    if entry.option.parse is not None:
        if isinstance(value, bool):
            raise UsageError(f"{path}: {entry.key} is {value!r}; {entry.names[0]} is no switch")
        try:
            return entry.read(value)
        except UsageError as error:
            raise UsageError(f"{path}: {entry.key}: {error}") from error
    if entry.option.is_repeatable:
        return tuple(_convert_one(path, entry, each) for each in (value if isinstance(value, list) else [value]))
    return entry.read(_convert_one(path, entry, value))


def _convert_one(path: Path, entry: SpecOption, value: Any) -> Any:
    takes = {float: (int, float), Path: (str,)}.get(entry.kind, (entry.kind,))
    if not isinstance(value, takes) or (isinstance(value, bool) and entry.kind is not bool):
        kind = _KIND_NAMES.get(entry.kind, "text")
        raise UsageError(f"{path}: {entry.key} is {value!r}; {entry.names[0]} takes {kind}")
    return entry.kind(value)


def _plain(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


def _files_near(path: Path) -> str:
    files: list[str] = []
    if is_folder(path.parent):
        files = sorted(file.name for file in path.parent.iterdir() if file.suffix in (".yaml", ".yml"))
    found = difflib.get_close_matches(path.name, files, n=3)
    return f"near: {', '.join(found)}" if found else "name a YAML file of options"
