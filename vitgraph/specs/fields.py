"""A field of a spec is an option: its name, type, default, help, panel, parser and rule are written there and once.

Commands (`vitgraph.commands.options`), config files, Python calls, the settings in a record and the reference page of
options are made from what `options_of` finds in a spec class. A name that is unknown, a value that a parser or a rule
does not take, and values that contradict each other are a UsageError.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from vitgraph.errors import UsageError
from vitgraph.specs.values import Rule, near

ChooseDefaults = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""From what was given, values by option as a file holds them, to use where nothing was given."""

_OPTION, _PART = "option", "part"
_KIND_NAMES: Mapping[type, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text (in quotes where YAML would read something else)",
    Path: "a path",
}
SpecType = TypeVar("SpecType", bound="Spec")

_type_hints: Callable[[Any], dict[str, Any]] = functools.cache(get_type_hints)
"""A command asks for those of its specs again and again."""


@dataclass(frozen=True, slots=True)
class Option:
    """How a field is asked for.

    Attributes:
        help: One sentence or two, shown by `--help`.
        panel: Heading that it stands under; None for that of its spec.
        names: Spellings, the first one is printed; a field that gives none has its name.
        parse: Reads the text of a command line or the value of a file; None takes the field's own type.
        rule: What a value must fulfil.
        turns_off: A switch that sets the field to False.
        is_argument: Has a place instead of a name.
        is_repeatable: May be given several times.
        metavar: What `--help` calls the value.
        variable: Environment variable that sets it too.
        completes: Given what was typed, the values that a shell offers.
        kind: Type of one value on the command line.
        default: The field's value where nothing is given, or a function that makes it.
        fields: The fields that it fills, each as a path of names from the spec; none where it stands for options.
    """

    help: str
    panel: str | None = None
    names: tuple[str, ...] = ()
    parse: Callable[[Any], Any] | None = None
    rule: Rule | None = None
    turns_off: bool = False
    is_argument: bool = False
    is_repeatable: bool = False
    metavar: str | None = None
    variable: str | None = None
    completes: Callable[[str], list[str]] | None = None
    kind: type = str
    default: Any = None
    fields: tuple[tuple[str, ...], ...] = ()

    @property
    def key(self) -> str:
        """The first spelling with underscores: its name in files and in Python."""
        return _key(self.names[0])

    @property
    def is_flag(self) -> bool:
        """It takes no value."""
        return self.kind is bool and self.parse is None

    @property
    def default_value(self) -> Any:
        """The field's value where nothing is given; `dataclasses.MISSING` where something must be."""
        return self.default() if callable(self.default) else self.default

    def read(self, value: Any) -> Any:
        """The field's value for one of a command line or a file."""
        if self.turns_off:
            return not value
        if self.is_repeatable:
            return tuple(value)
        return self.parse(value) if self.parse is not None else value


class _Part(NamedTuple):
    """Which options of a spec become options of the spec that holds it (all but `without`, of `only` where it names
    some), and other defaults by field."""

    only: frozenset[str] = frozenset()
    without: frozenset[str] = frozenset()
    defaults: Mapping[str, Any] = {}
    is_left_out: bool = False

    def has(self, name: str) -> bool:
        return not self.is_left_out and name not in self.without and (not self.only or name in self.only)

    def inside(self, each: Any) -> _Part:
        """What is chosen of the spec in one of its fields."""
        own: _Part = each.metadata[_PART]
        is_left_out = self.is_left_out or each.name in self.without
        return _Part(own.only, own.without | self.without, {**own.defaults, **self.defaults}, is_left_out)

    def option(self, each: Any) -> Option:
        """The option of one of its fields."""
        own: Option = each.metadata[_OPTION]
        name = each.name if own.is_argument else f"--{each.name.replace('_', '-')}"
        default = self.defaults.get(each.name, own.default)
        return dataclasses.replace(own, names=own.names or (name,), default=default)


_WHOLE = _Part()


def option(default: Any, help_text: str, *names: str, panel: str | None = None, **how: Any) -> Any:
    """A field that is an option.

    Args:
        default: Its default; `dataclasses.MISSING` for one that must be given, a function to call for a new value.
        how: The other attributes of `Option`.
    """
    metadata = {_OPTION: Option(help_text, panel, names, default=default, **how)}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def part(kind: Any, only: Collection[str] = (), without: Collection[str] = (), **defaults: Any) -> Any:
    """A field that is a spec, whose options become those of the spec around it: `only` these fields, or all `without`
    some, with other `defaults`."""
    chosen = _Part(frozenset(only), frozenset(without), defaults)
    return field(default_factory=lambda: build(kind, {}, chosen), metadata={_PART: chosen})


class Spec:
    """Base of the specs: checks the rules of its fields, and gives the settings for a record."""

    PANEL: ClassVar[str | None] = None
    """Heading of its options, unless they name another one."""
    ALIASES: ClassVar[tuple[Option, ...]] = ()
    """Options that stand for several others: their parser gives values by option."""

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):  # type: ignore[arg-type]
            rule = each.metadata[_OPTION].rule if _OPTION in each.metadata else None
            value = getattr(self, each.name)
            broken = rule(value) if rule is not None and value is not None else None
            if broken is not None:
                raise UsageError(f"{_WHOLE.option(each).names[0]} is {value!r}; {broken}")

    @classmethod
    def defaults_for(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Defaults that depend on what was given, by option, as a file may hold them."""
        return {}

    def as_dict(self) -> dict[str, Any]:
        """The settings by field, as JSON takes them; how the command talks is none."""
        names = [each.name for each in dataclasses.fields(self) if each.name != "shell"]  # type: ignore[arg-type]
        return {name: _plain(getattr(self, name)) for name in names}


def options_of(spec: type[Spec]) -> dict[str, Option]:
    """The options of a spec and of its parts by key, in their order; one that several parts name fills them all."""
    found: dict[str, Option] = {}
    for entry in _walk(spec, _WHOLE, ()):
        known = found.get(entry.key)
        found[entry.key] = entry if known is None else dataclasses.replace(known, fields=known.fields + entry.fields)
    return found


def _walk(spec: type[Spec], chosen: _Part, path: tuple[str, ...]) -> Iterator[Option]:
    kinds = _type_hints(spec)
    for each in dataclasses.fields(spec):  # type: ignore[arg-type]
        place = (*path, each.name)
        if _PART in each.metadata:
            yield from _walk(kinds[each.name], chosen.inside(each), place)
        elif chosen.has(each.name):
            entry, kind = chosen.option(each), kinds[each.name]
            panel = spec.PANEL if entry.panel is None else entry.panel
            kind = str if entry.parse else _kind(kind)
            yield dataclasses.replace(entry, panel=panel, kind=kind, fields=(place,))
    yield from (alias for alias in spec.ALIASES if chosen.has(alias.key))


def _key(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


def _kind(annotation: Any) -> type:
    """The type of one value: without None, and of a list that of its entries."""
    if get_origin(annotation) is UnionType:
        annotation = next(kind for kind in get_args(annotation) if kind is not NoneType)
    if get_origin(annotation) is tuple and get_args(annotation)[-1] is ...:
        return _kind(get_args(annotation)[0])
    found: type = annotation
    return found


# -- from values to a spec, and back -----------------------------------------------------------------------------------


def build(spec: type[SpecType], values: Mapping[str, Any], chosen: _Part = _WHOLE) -> SpecType:
    """A spec from the values of its options by key; those that are left out keep their defaults."""
    kinds, made = _type_hints(spec), {}
    for each in dataclasses.fields(spec):  # type: ignore[arg-type]
        if _PART in each.metadata:
            made[each.name] = build(kinds[each.name], values, chosen.inside(each))
            continue
        entry = chosen.option(each)
        is_given = chosen.has(each.name) and entry.key in values
        made[each.name] = values[entry.key] if is_given else entry.default_value
        if made[each.name] is dataclasses.MISSING:
            raise UsageError(f"{entry.names[0]} is missing: {entry.help}")
    return spec(**made)


def as_options(spec: Spec) -> dict[str, Any]:
    """The options that give this spec, by key, as a config file holds them; those at their defaults are left out."""
    found: dict[str, Any] = {}
    for key, entry in options_of(type(spec)).items():
        value = functools.reduce(getattr, entry.fields[0], spec) if entry.fields else entry.default
        if value != entry.default_value:
            found[key] = not value if entry.turns_off else _plain(value)
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, Spec):
        return value.as_dict()
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return str(value) if isinstance(value, Path) else value


def read_values(options: Mapping[str, Option], given: Mapping[str, Any], place: str = "") -> dict[str, Any]:
    """Values of fields by key, with what stands for several options spelled out; an option of its own wins over it.

    Args:
        given: Values by key, as a command line or a file has them.
    """
    found: dict[str, Any] = {}
    own: dict[str, Any] = {}
    for key, raw in given.items():
        entry = options[key]
        try:
            value = entry.read(raw)
        except UsageError as error:
            if not place:
                raise
            raise UsageError(f"{place}: {key}: {error}") from error
        if entry.fields:
            own[key] = value
        elif missing := sorted(value.keys() - options.keys()):
            raise UsageError(
                f"{entry.names[0]} asks for {', '.join(missing)}, which this command does not take; leave that field "
                "out, or use `vitgraph bench`"
            )
        else:
            found |= read_values(options, value)
    return found | own


def read_named(place: str, given: Mapping[Any, Any], options: Mapping[str, Option]) -> dict[str, Any]:
    """Values of fields by key, from those of a file or a Python call by the names of their options.

    Args:
        given: The values by name, with dashes or underscores; one that is None is left out.
    """
    keys = {_key(name): key for key, entry in options.items() for name in entry.names}
    values: dict[str, Any] = {}
    for name, value in given.items():
        key = keys.get(_key(name)) if isinstance(name, str) else None
        if key is None:
            raise UsageError(f"{place}: unknown key {name!r}; {near(_key(str(name)), keys)}")
        if key in values:
            raise UsageError(f"{place}: {name!r} sets {options[key].names[0]} a second time; name each option once")
        values[key] = value
    checked = {key: _checked(place, options[key], value) for key, value in values.items() if value is not None}
    return read_values(options, checked, place)


def _checked(place: str, entry: Option, value: Any) -> Any:
    """A value of the type that the option takes."""
    if entry.parse is not None:
        if isinstance(value, bool):
            raise UsageError(f"{place}: {entry.key} is {value!r}; {entry.names[0]} is no switch")
        return value
    if entry.is_repeatable:
        one = dataclasses.replace(entry, is_repeatable=False)
        return [_checked(place, one, each) for each in (value if isinstance(value, list) else [value])]
    if kinds := get_args(entry.kind):
        if not isinstance(value, list | tuple) or len(value) != len(kinds):
            raise UsageError(f"{place}: {entry.key} is {value!r}; {entry.names[0]} takes a list of {len(kinds)}")
        each_of = zip(kinds, value, strict=True)
        return tuple(_checked(place, dataclasses.replace(entry, kind=kind), each) for kind, each in each_of)
    takes = {float: (int, float), Path: (str, Path)}.get(entry.kind, (entry.kind,))
    if not isinstance(value, takes) or (isinstance(value, bool) and entry.kind is not bool):
        kind = _KIND_NAMES.get(entry.kind, "text")
        raise UsageError(f"{place}: {entry.key} is {value!r}; {entry.names[0]} takes {kind}")
    return entry.kind(value)


def make_spec(spec: type[SpecType], asked: Mapping[str, Any], defaults: ChooseDefaults = lambda _: {}) -> SpecType:
    """A spec of what was asked for, with the defaults that depend on it.

    Args:
        defaults: Chooses further defaults, which the machine decides.
    """
    options, found = options_of(spec), dict(asked)
    for choose in (lambda given: _defaults_for(spec, given), defaults):
        chosen = {key: value for key, value in choose(found).items() if key in options}
        found = read_values(options, chosen) | found
    return build(spec, found)


def _defaults_for(spec: type[Spec], given: Mapping[str, Any]) -> dict[str, Any]:
    kinds = _type_hints(spec)
    found = spec.defaults_for(given)
    for each in dataclasses.fields(spec):  # type: ignore[arg-type]
        if _PART in each.metadata:
            found = {**_defaults_for(kinds[each.name], {**given, **found}), **found}
    return found


def spec_from(spec: type[SpecType], given: Mapping[str, Any], place: str) -> SpecType:
    """A spec of options by name, as a Python call has them; how a command talks is none of them."""
    entries = options_of(spec)
    options = {key: entry for key, entry in entries.items() if not any("shell" in path for path in entry.fields)}
    return make_spec(spec, read_named(place, given, options))
