"""Makes a command of a function that takes a spec: its options, its config file, its `--help` and its part of the
reference page come from the fields.

The order is defaults, what the command chooses for this machine, the file, and the flags.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import json
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Optional, get_type_hints

import typer
import typer.core
import typer.main

from vitgraph.commands.shell import Shown, reported_errors, show, tell, told
from vitgraph.errors import UsageError
from vitgraph.reading import is_folder, parse_json, parse_yaml, read_text
from vitgraph.report.say import clean
from vitgraph.specs.fields import ChooseDefaults, Option, Spec, make_spec, options_of, read_named, read_values
from vitgraph.specs.values import IgnoredSetting

CONFIG_NAMES = ("--compilation-config", "-cc", "-O")
_CONFIG = CONFIG_NAMES[0]
SHAPING = ("--hf-overrides", "--media-io-kwargs", "--mm-process-config")
"""Options of servers that are not read, and yet may change what the encoder is given or is."""


class CommandOfHabit(typer.core.TyperCommand):
    """A command that takes the options of `vllm bench mm-processor`, each used or ignored with a word."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        flags = {name: bool(getattr(each, "is_flag", False)) for each in self.params for name in each.opts}
        words, ignored = as_here(args, flags)
        others = [name for name in ignored if name not in SHAPING]
        if others:
            tell(f"note: {', '.join(others)} shape no encoder; ignored")
        for name in sorted({*ignored} - {*others}):
            tell(f"note: {unread_note(name)}")
        try:
            rest: list[str] = super().parse_args(ctx, words)
        except Exception as error:
            if hasattr(error, "message"):
                # It quotes what was given, which may hold what a terminal would obey.
                error.message = clean(error.message)
            raise
        return rest

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Prints the help; a name that is too long for its column goes on in the next line, where Typer cuts it off."""
        from typer import rich_utils

        class Whole(rich_utils.OptionHighlighter):
            def __call__(self, text: Any) -> Any:
                found = super().__call__(text)
                found.overflow = "fold"
                return found

        rich_utils.highlighter = Whole()
        super().format_help(ctx, formatter)


def unread_note(name: str) -> str:
    """What is said of an option of a server that is not read, although it may matter."""
    return f"{name} is not read, though it may change what the encoder gets: give that as options, or sizes to match"


@cache
def _options_of_vllm() -> Mapping[str, list[str]]:
    text = (resources.files("vitgraph.commands") / "vllm-options.json").read_text(encoding="utf-8")
    found: Mapping[str, list[str]] = json.loads(text)
    return found


def as_here(args: Sequence[str], flags: Mapping[str, bool]) -> tuple[list[str], list[str]]:
    """A command line in this program's spelling.

    Args:
        flags: The command's options, and whether each takes no value.

    Returns:
        The words, and the options of vLLM that were left out.
    """
    words: list[str] = []
    ignored: list[str] = []
    config: dict[str, Any] = {}
    rest = list(args)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-") or word == "-":
            words.append(word)
            continue
        name, is_set, value = word.partition("=")
        head, is_dotted, key = name.partition(".")
        head = head.replace("_", "-")
        if head in CONFIG_NAMES and is_dotted and _CONFIG in flags:
            set_field(config, key, value if is_set else rest.pop(0) if rest else "")
        elif head in flags:
            words.append(head + is_dotted + key + is_set + value)
            if not is_set and not flags[head] and rest:
                words.append(rest.pop(0))
        elif _CONFIG in flags and (taken := values_in_vllm(head)) is not None:
            ignored.append(head)
            while not is_set and rest and taken and not rest[0].startswith("--"):
                rest.pop(0)
                taken -= 1
        else:
            words.append(word)
    return words + _config_words(words, config), ignored


def values_in_vllm(name: str) -> int | None:
    """How many words an option of vLLM may take; None for one that it does not have."""
    known = _options_of_vllm()
    if name in known["switches"] or name.replace("--no-", "--", 1) in known["switches"]:
        return 0
    return 1 if name in known["values"] else 10**6 if name in known["lists"] else None


def set_field(config: dict[str, Any], key: str, text: str) -> None:
    """One field of the dotted spelling; a name that ends in + adds to a list."""
    value = dotted_value(text)
    key = key.replace("-", "_")
    if key.endswith("+"):
        config.setdefault(key[:-1], []).extend(value if isinstance(value, list) else [value])
    else:
        config[key] = value


def dotted_value(text: str) -> Any:
    """A value of the dotted spelling: JSON, Python's words for three of its values, or plain text."""
    try:
        return parse_json(text, "a field of --compilation-config")
    except UsageError:
        return {"True": True, "False": False, "None": None}.get(text, text)


def _config_words(words: list[str], config: dict[str, Any]) -> list[str]:
    """The dotted fields as one option; they win over those of a whole configuration that is given too."""
    if not config:
        return []
    for place, word in enumerate(words[:-1]):
        if word in CONFIG_NAMES:
            whole = dotted_value(words[place + 1])
            return [_CONFIG, json.dumps({**whole, **config})] if isinstance(whole, dict) else []
    return [_CONFIG, json.dumps(config)]


def add_command(
    app: typer.Typer, name: str, function: Callable[..., Shown | None], defaults: ChooseDefaults = lambda _: {}
) -> None:
    """Adds a command.

    Args:
        function: What it does with its spec, the type of its first argument, and with what takes its progress where it
            has a second one; its docstring is the help.
    """
    taken = list(inspect.signature(function).parameters)
    spec: type[Spec] = get_type_hints(function)[taken[0]]

    def command(context: typer.Context, **values: Any) -> None:
        with reported_errors(debug=bool(values.get("debug"))):
            asked: Any = read_spec(spec, context, values, defaults)
            with told(quiet=getattr(asked.shell, "quiet", False)) as progress:
                shown = function(asked, progress) if len(taken) > 1 else function(asked)
            if shown is not None:
                show(shown, as_json=asked.shell.json)

    parameters = [_parameter(key, entry) for key, entry in options_of(spec).items()]
    context = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    command.__signature__ = inspect.Signature([context, *parameters])  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in (context, *parameters)}
    # Typer joins the lines of the first paragraph alone.
    paragraphs = inspect.cleandoc(function.__doc__ or "").split("\n\n")
    command.__doc__ = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    command.spec = spec  # type: ignore[attr-defined]
    app.command(name, cls=CommandOfHabit)(command)


def specs_of_commands(app: typer.Typer) -> dict[str, type[Spec]]:
    """The spec class of every command by its name, in the order of the help."""
    return dict(_walk(typer.main.get_command(app), ""))


def _walk(command: Any, name: str) -> Iterator[tuple[str, type[Spec]]]:
    for part, inner in getattr(command, "commands", {}).items():
        yield from _walk(inner, f"{name} {part}".strip())
    if not hasattr(command, "commands"):
        yield name, getattr(command.callback, "__wrapped__", command.callback).spec


def read_spec(
    spec: type[Spec], context: typer.Context, values: Mapping[str, Any], defaults: ChooseDefaults = lambda _: {}
) -> Spec:
    """The spec of a command line.

    Raises:
        UsageError: A value, in a flag or in the file, that its option does not take, or two that contradict.
    """
    options = options_of(spec)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", IgnoredSetting)
        flags = read_values(options, {name: value for name, value in values.items() if _is_given(context, name)})
        from_file = read_config(values["config"], options) if values.get("config") is not None else {}
        found = make_spec(spec, {**from_file, **flags}, defaults)
    for text in dict.fromkeys(str(each.message) for each in caught if each.category is IgnoredSetting):
        tell(f"note: {text}")
    return found


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and not source.name.startswith("DEFAULT")


def _parameter(key: str, option: Option) -> inspect.Parameter:
    how: dict[str, Any] = {"help": option.help, "rich_help_panel": option.panel or None}
    how |= {"metavar": option.metavar, "envvar": option.variable}
    if option.completes is not None:
        how["autocompletion"] = option.completes
    kind: Any = list[option.kind] if option.is_repeatable else option.kind  # type: ignore[name-defined]
    default = inspect.Parameter.empty if option.default is dataclasses.MISSING else shown_default(option)
    if default is None:
        kind = Optional[kind]  # noqa: UP045 — built at run time
    info = typer.Argument(**how) if option.is_argument else typer.Option(*option.names, **how)
    return inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info])


def shown_default(option: Option) -> Any:
    """The default as the command line would be given it; None where no text says it, or nothing is the default."""
    default = option.default_value
    if option.turns_off:
        return not default
    if option.is_flag or (isinstance(default, int | float) and not isinstance(default, bool)):
        return str(default) if option.parse is not None else default
    if option.is_repeatable:
        return list(default) or None
    return default if isinstance(default, str) and default and option.parse is None else None


# -- files of settings -------------------------------------------------------------------------------------------------

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
