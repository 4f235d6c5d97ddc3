"""From option names and values, as a file or a Python call gives them, to a spec: the way of a command line too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vitgraph.errors import UsageError
from vitgraph.specs.fields import SpecOption, SpecType, build, defaults_of, options_of
from vitgraph.specs.values import near

ChooseDefaults = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""From what was given, values by option as a file holds them, to use where nothing was given."""

_KIND_NAMES: Mapping[type, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text (in quotes where YAML would read something else)",
    Path: "a path",
}


def read_values(place: str, given: Mapping[Any, Any], options: Mapping[str, SpecOption]) -> dict[str, Any]:
    """Reads values by the names of their options, with dashes or underscores.

    Args:
        place: Where they come from, for errors.
        given: The values; one that is None is left out.
        options: What may be set, by key.

    Returns:
        Values of fields by key.

    Raises:
        UsageError: A name or a value that the command does not take.
    """
    settings = {_plain(name): key for key, entry in options.items() for name in entry.names}
    values: dict[str, Any] = {}
    for name, value in given.items():
        key = settings.get(_plain(name)) if isinstance(name, str) else None
        if key is None:
            raise UsageError(f"{place}: unknown key {name!r}; {near(_plain(str(name)), settings)}")
        if key in values:
            raise UsageError(f"{place}: {name!r} sets {options[key].names[0]} a second time; name each option once")
        values[key] = value
    return {key: _convert(place, options[key], value) for key, value in values.items() if value is not None}


def expanded(options: Mapping[str, SpecOption], values: Mapping[str, Any]) -> dict[str, Any]:
    """The values, with what stands for several options spelled out; an option of its own wins over it.

    Raises:
        UsageError: It stands for one that the command does not have.
    """
    found: dict[str, Any] = {}
    for name, value in values.items():
        if not options[name].fields:
            if missing := sorted(value.keys() - options.keys()):
                raise UsageError(
                    f"{options[name].names[0]} asks for {', '.join(missing)}, which this command does not take; leave "
                    "that field out, or use `vitgraph bench`"
                )
            found |= _read_all(options, value)
    return found | {name: value for name, value in values.items() if options[name].fields}


def make_spec(spec: type[SpecType], asked: Mapping[str, Any], defaults: ChooseDefaults | None = None) -> SpecType:
    """A spec of what was asked for, with the defaults that depend on it.

    Args:
        spec: Its class.
        asked: Values of fields by key.
        defaults: Chooses further defaults, which the machine decides.

    Raises:
        UsageError: Values that contradict each other or a rule.
    """
    options, found = options_of(spec), dict(asked)
    for choose in (lambda known: defaults_of(spec, known), defaults or (lambda known: {})):
        found = {**expanded(options, _read_all(options, choose(found))), **found}
    return build(spec, found)


def spec_from(spec: type[SpecType], given: Mapping[str, Any], place: str) -> SpecType:
    """A spec of options by name, as a Python call has them; how a command talks is none of them.

    Raises:
        UsageError: A name or a value that is not taken, or values that contradict each other.
    """
    entries = options_of(spec)
    options = {key: entry for key, entry in entries.items() if not any("shell" in path for path in entry.fields)}
    return make_spec(spec, expanded(options, read_values(place, given, options)))


def _read_all(options: Mapping[str, SpecOption], values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: options[name].read(value) for name, value in values.items() if name in options}


def _convert(place: str, entry: SpecOption, value: Any) -> Any:
    if entry.option.parse is not None:
        if isinstance(value, bool):
            raise UsageError(f"{place}: {entry.key} is {value!r}; {entry.names[0]} is no switch")
        try:
            return entry.read(value)
        except UsageError as error:
            raise UsageError(f"{place}: {entry.key}: {error}") from error
    if entry.option.is_repeatable:
        return tuple(_convert_one(place, entry, each) for each in (value if isinstance(value, list) else [value]))
    return entry.read(_convert_one(place, entry, value))


def _convert_one(place: str, entry: SpecOption, value: Any) -> Any:
    takes = {float: (int, float), Path: (str, Path)}.get(entry.kind, (entry.kind,))
    if not isinstance(value, takes) or (isinstance(value, bool) and entry.kind is not bool):
        kind = _KIND_NAMES.get(entry.kind, "text")
        raise UsageError(f"{place}: {entry.key} is {value!r}; {entry.names[0]} takes {kind}")
    return entry.kind(value)


def _plain(name: str) -> str:
    return name.lstrip("-").replace("-", "_")
