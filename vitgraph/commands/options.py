"""Makes a command of a function that takes a spec: its options, its config file and its `--help` come from the fields.

The order is defaults, what the command chooses for this machine, the file, and the flags.
"""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Optional, get_type_hints

import typer

from vitgraph.commands.config_file import read_config
from vitgraph.commands.habits import CommandOfHabit
from vitgraph.commands.shell import Shown, reported_errors, show, tell, told
from vitgraph.specs.fields import Spec, SpecOption, options_of
from vitgraph.specs.given import ChooseDefaults, expanded, make_spec
from vitgraph.specs.values import IgnoredSetting


def add_command(
    app: typer.Typer, name: str, function: Callable[..., Shown | None], defaults: ChooseDefaults | None = None
) -> None:
    """Adds a command.

    Args:
        app: Gets it.
        name: Its name.
        function: What it does with its spec, the type of its first argument, and with what takes its progress where it
            has a second one; its docstring is the help.
        defaults: Chooses defaults that depend on the machine.
    """
    spec = spec_of(function)
    takes_progress = len(inspect.signature(function).parameters) > 1

    def command(context: typer.Context, **values: Any) -> None:
        with reported_errors(debug=bool(values.get("debug"))):
            asked = read_spec(spec, context, values, defaults)
            with told(quiet=getattr(asked.shell, "quiet", False)) as progress:  # type: ignore[attr-defined]
                shown = function(asked, progress) if takes_progress else function(asked)
            if shown is not None:
                show(shown, as_json=asked.shell.json)  # type: ignore[attr-defined]

    parameters = [_parameter(key, entry) for key, entry in options_of(spec).items()]
    context = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    command.__signature__ = inspect.Signature([context, *parameters])  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in (context, *parameters)}
    command.__doc__ = function.__doc__
    command.spec = spec  # type: ignore[attr-defined]
    app.command(name, cls=CommandOfHabit)(command)


def spec_of(function: Callable[[Any], Any]) -> type[Spec]:
    """The spec class that a command's function takes."""
    spec: type[Spec] = get_type_hints(function)[next(iter(inspect.signature(function).parameters))]
    return spec


def read_spec(
    spec: type[Spec], context: typer.Context, values: Mapping[str, Any], defaults: ChooseDefaults | None = None
) -> Spec:
    """The spec of a command line.

    Raises:
        UsageError: A value, in a flag or in the file, that its option does not take, or two that contradict.
    """
    options = options_of(spec)
    given = {name: value for name, value in values.items() if _is_given(context, name)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", IgnoredSetting)
        flags = expanded(options, {name: options[name].read(value) for name, value in given.items()})
        config = values.get("config")
        from_file = expanded(options, read_config(config, options)) if config is not None else {}
        found = make_spec(spec, {**from_file, **flags}, defaults)
    for text in dict.fromkeys(str(each.message) for each in caught if each.category is IgnoredSetting):
        tell(f"note: {text}")
    return found


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and not source.name.startswith("DEFAULT")


def _parameter(key: str, entry: SpecOption) -> inspect.Parameter:
    option = entry.option
    default = entry.default() if callable(entry.default) else entry.default
    is_missing = entry.default is dataclasses.MISSING
    how: dict[str, Any] = {"help": option.help, "rich_help_panel": option.panel, "hidden": option.is_hidden}
    how |= {"metavar": option.metavar, "envvar": option.variable}
    if option.completes is not None:
        how["autocompletion"] = option.completes
    kind: Any = list[entry.kind] if option.is_repeatable else entry.kind  # type: ignore[name-defined]
    shown = _shown_default(entry, default)
    if not is_missing and (shown is None):
        kind = Optional[kind]  # noqa: UP045 — built at run time
    info = typer.Argument(**how) if option.is_argument else typer.Option(*entry.names, **how)
    return inspect.Parameter(
        key,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if is_missing else shown,
        annotation=Annotated[kind, info],
    )


def _shown_default(entry: SpecOption, default: Any) -> Any:
    """The default as the command line would be given it; None where no text says it, or nothing is the default."""
    if entry.option.turns_off:
        return not default
    if entry.is_flag or (isinstance(default, int | float) and not isinstance(default, bool)):
        return str(default) if entry.option.parse is not None else default
    if entry.option.is_repeatable:
        return list(default) or None
    return default if isinstance(default, str) and default and entry.option.parse is None else None


def documented_options(spec: type[Spec]) -> Sequence[tuple[SpecOption, str]]:
    """The options of a command with their defaults as text, for pages and tests."""
    found = []
    for entry in options_of(spec).values():
        default = entry.default() if callable(entry.default) else entry.default
        shown = None if entry.default is dataclasses.MISSING else _shown_default(entry, default)
        found.append((entry, "" if shown is None or shown is False else str(shown)))
    return found
