"""Settings of a command from a YAML file: which options its keys name, what they may hold, what flags replace.

The order is defaults, then the file, then what was given on the command line.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Protocol, get_args, get_type_hints

from vitgraph.errors import UsageError

CONFIG_OPTION = "config"
_NOT_SETTINGS = frozenset({CONFIG_OPTION, "help"})

_MAPPINGS = frozenset(
    {"compilation_config", "mm_processor_kwargs", "random_mm_bucket_config", "random_mm_limit_mm_per_prompt"}
)
"""Text options whose text is JSON; a file may hold the mapping itself."""

_LISTS = frozenset({"token_budgets"})
"""Text options whose text is a list with commas; a file may hold the list itself."""

_FIELDS_OF_COMPILATION_CONFIG = {
    "token_budgets": "encoder_cudagraph_token_budgets",
    "max_vision_items_per_batch": "encoder_cudagraph_max_vision_items_per_batch",
    "max_frames_per_batch": "encoder_cudagraph_max_frames_per_batch",
}

_KIND_NAMES: Mapping[type, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text (in quotes where YAML would read something else)",
    Path: "a path",
}


class CommandContext(Protocol):
    """The part of a click or Typer context that is read here."""

    @property
    def command(self) -> Any:
        """The command that runs."""

    def get_parameter_source(self, name: str) -> Any:
        """Where a parameter's value came from."""


@dataclass(frozen=True, slots=True)
class Setting:
    """An option that a file may set.

    Attributes:
        parameter: Name of the command function's parameter.
        option: The option as typed on the command line.
        kind: `bool`, `int`, `float`, `str` or `Path`.
        is_repeatable: The option may be given several times, and takes a list.
    """

    parameter: str
    option: str
    kind: type
    is_repeatable: bool = False


def with_config_file(context: CommandContext, path: Path | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a command with a file's settings put where no flag was given.

    Args:
        context: The command's context; says what was given on the command line.
        path: The YAML file; None changes nothing.
        options: Values by parameter name, as the command got them.

    Returns:
        Values by parameter name.

    Raises:
        UsageError: The file cannot be read, or a key or a value in it is not what the command takes.
    """
    if path is None:
        return dict(options)
    settings = command_settings(context.command)
    given = {name for name in options if _is_given(context, name)}
    found = {name: value for name, value in read_config(path, settings).items() if name not in given}
    if "compilation_config" in given:
        for name in _named_in_compilation_config(options["compilation_config"]):
            found.pop(name, None)
    return {**options, **found}


def command_settings(command: Any) -> dict[str, Setting]:
    """What a file may set for a click or Typer command: each option by its names, with underscores."""
    kinds = get_type_hints(command.callback)
    settings: dict[str, Setting] = {}
    for parameter in command.params:
        names = [name for name in getattr(parameter, "opts", ()) if name.startswith("--")]
        if not names or parameter.name not in kinds or parameter.name in _NOT_SETTINGS:
            continue
        annotated = [kind for kind in get_args(kinds[parameter.name]) or (kinds[parameter.name],) if kind != NoneType]
        setting = Setting(parameter.name, names[0], annotated[0], bool(getattr(parameter, "multiple", False)))
        for name in names:
            settings[_plain(name)] = setting
    return settings


def read_config(path: Path, settings: Mapping[str, Setting]) -> dict[str, Any]:
    """Reads a file of settings.

    Args:
        path: A YAML mapping; keys are option names without the leading dashes, with underscores or dashes.
        settings: What may be set, by option name with underscores.

    Returns:
        Values by parameter name, converted to what the command line gives. A key without a value (null) is left out.

    Raises:
        UsageError: See `with_config_file`.
    """
    values: dict[str, Any] = {}
    for key, value in _read_mapping(path).items():
        setting = settings.get(_plain(key)) if isinstance(key, str) else None
        if setting is None:
            raise UsageError(f"{path}: unknown key {key!r}; {_near(str(key), settings)}")
        if setting.parameter in values:
            raise UsageError(f"{path}: {key!r} sets {setting.option} a second time; name each option once")
        values[setting.parameter] = _convert(path, key, setting, value)
    return {name: value for name, value in values.items() if value is not None}


def _read_mapping(path: Path) -> dict[Any, Any]:
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}; {_files_near(path)}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--config {path} is not UTF-8 text; name a YAML file of options") from error
    try:
        _refuse_repeated_keys(path, yaml.compose(text, Loader=yaml.SafeLoader))
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UsageError(f"--config {path} is not valid YAML: {' '.join(str(error).split())}") from error
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
        if key.value in lines:
            raise UsageError(f"{path}:{line}: {key.value!r} was set in line {lines[key.value]}; name each option once")
        lines[key.value] = line


def _convert(path: Path, key: str, setting: Setting, value: Any) -> Any:
    if value is None:
        return None
    if setting.is_repeatable:
        values = value if isinstance(value, list) else [value]
        return [_convert_one(path, key, setting, entry) for entry in values]
    return _convert_one(path, key, setting, value)


def _convert_one(path: Path, key: str, setting: Setting, value: Any) -> Any:
    if setting.parameter in _MAPPINGS and isinstance(value, dict):
        return json.dumps(value)
    if setting.parameter in _LISTS and not isinstance(value, str):
        numbers = value if isinstance(value, list) else [value]
        if all(isinstance(number, int) and not isinstance(number, bool) for number in numbers):
            return ",".join(map(str, numbers))
    takes = {float: (int, float), Path: (str,)}.get(setting.kind, (setting.kind,))
    if not isinstance(value, takes) or (isinstance(value, bool) and setting.kind is not bool):
        kind = "a list of integers" if setting.parameter in _LISTS else _KIND_NAMES.get(setting.kind, "text")
        if setting.parameter in _MAPPINGS:
            kind = "a mapping or its JSON text"
        raise UsageError(f"{path}: {key} is {value!r}; {setting.option} takes {kind}")
    return setting.kind(value)


def _named_in_compilation_config(text: str) -> list[str]:
    """Options whose values a `--compilation-config` given as a flag names; the file's must not win over it."""
    from vitgraph.specs import parse_compilation_config

    fields = parse_compilation_config(text)
    return [name for name, field in _FIELDS_OF_COMPILATION_CONFIG.items() if field in fields]


def _is_given(context: CommandContext, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and not source.name.startswith("DEFAULT")


def _plain(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


def _near(key: str, settings: Mapping[str, Setting]) -> str:
    near = difflib.get_close_matches(_plain(key), settings, n=3)
    if near:
        return f"near: {', '.join(near)}"
    return f"known: {', '.join(settings)}"


def _files_near(path: Path) -> str:
    files: Sequence[str] = ()
    if path.parent.is_dir():
        files = sorted(file.name for file in path.parent.iterdir() if file.suffix in (".yaml", ".yml"))
    near = difflib.get_close_matches(path.name, files, n=3)
    return f"near: {', '.join(near)}" if near else "name a YAML file of options"
