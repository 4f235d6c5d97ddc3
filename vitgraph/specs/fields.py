"""A field of a spec is an option: its name, type, default, help, panel, parser and rule are written there and once.

Commands (`vitgraph.commands.options`), config files, the settings in a record and the reference page of options are
made from what `options_of` finds in a spec class.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, TypeVar, get_args, get_origin, get_type_hints

from vitgraph.errors import UsageError

Rule = Callable[[Any], str | None]
"""Says what must hold for a value that it does not take; None for one that it takes."""

MOST_INT = 2**63 - 1
"""What a seed may be at most: torch, numpy and the files all take 64 bits with a sign."""

MOST_COUNT = 10**7
"""What a count may be at most unless its option says less or more: a slip of the keys must not run for days."""

_OPTION, _PART = "option", "part"
SpecType = TypeVar("SpecType", bound="Spec")

_type_hints: Callable[[Any], dict[str, Any]] = functools.cache(get_type_hints)
"""A command asks for those of its specs again and again."""


@dataclass(frozen=True, slots=True)
class Option:
    """How a field is asked for.

    Attributes:
        help: One sentence or two, shown by `--help`.
        panel: Heading that it stands under.
        names: Spellings, the first one is printed; empty takes the field's name.
        parse: Reads the text of a command line or the value of a file; None takes the field's own type.
        rule: What a value must fulfil.
        turns_off: A switch that sets the field to False.
        is_argument: Has a place instead of a name.
        is_repeatable: May be given several times.
        is_hidden: Is left out of `--help`.
        metavar: What `--help` calls the value.
        variable: Environment variable that sets it too.
        completes: Given what was typed, the values that a shell offers.
    """

    help: str
    panel: str | None = None
    names: tuple[str, ...] = ()
    parse: Callable[[Any], Any] | None = None
    rule: Rule | None = None
    turns_off: bool = False
    is_argument: bool = False
    is_repeatable: bool = False
    is_hidden: bool = False
    metavar: str | None = None
    variable: str | None = None
    completes: Callable[[str], list[str]] | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """How the options of a spec become options of the spec that holds it.

    Attributes:
        only: Fields that become options; empty is all.
        without: Fields that do not.
        defaults: Other defaults, by field.
    """

    only: frozenset[str]
    without: frozenset[str]
    defaults: Mapping[str, Any]


def option(default: Any, help_text: str, *names: str, panel: str | None = None, **how: Any) -> Any:
    """A field that is an option.

    Args:
        default: Its default; `dataclasses.MISSING` for one that must be given, a function to call for a new value.
        help_text: `Option.help`.
        names: `Option.names`.
        panel: `Option.panel`.
        how: The other attributes of `Option`.
    """
    metadata = {_OPTION: Option(help_text, panel, names, **how)}
    if default is dataclasses.MISSING:
        return field(metadata=metadata)
    return (
        field(default_factory=default, metadata=metadata)
        if callable(default)
        else field(default=default, metadata=metadata)
    )


def part(kind: Callable[[], Any], only: Collection[str] = (), without: Collection[str] = (), **defaults: Any) -> Any:
    """A field that is a spec, whose options become those of the spec around it; see `Part`."""
    metadata = {_PART: Part(frozenset(only), frozenset(without), defaults)}
    return field(default_factory=lambda: kind(**_own(kind, defaults)), metadata=metadata)


def _own(kind: Any, defaults: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in defaults.items() if name in kind.__dataclass_fields__}


class Spec:
    """Base of the specs: checks the rules of its fields, and gives the settings for a record."""

    ALIASES: ClassVar[Mapping[str, Option]] = {}
    """Options that stand for several others: their parser gives values by option."""

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):  # type: ignore[arg-type]
            rule = each.metadata[_OPTION].rule if _OPTION in each.metadata else None
            value = getattr(self, each.name)
            broken = rule(value) if rule is not None and value is not None else None
            if broken is not None:
                raise UsageError(f"{_names(each)[0]} is {value!r}; {broken}")

    @classmethod
    def defaults_for(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Defaults that depend on what was given, by option, as a file may hold them."""
        return {}

    def as_dict(self) -> dict[str, Any]:
        """The settings by field, as JSON takes them; how the command talks is none."""
        names = [each.name for each in dataclasses.fields(self) if each.name != "shell"]  # type: ignore[arg-type]
        return {name: _plain(getattr(self, name)) for name in names}


@dataclass(frozen=True, slots=True)
class SpecOption:
    """An option of a command, found in its spec.

    Attributes:
        key: The first spelling with underscores: its name in files and in Python.
        option: How it is asked for.
        names: Its spellings.
        kind: Type of one value on the command line.
        default: The field's value where nothing is given.
        fields: The fields that it fills, each as a path of names from the spec.
    """

    key: str
    option: Option
    names: tuple[str, ...]
    kind: type
    default: Any
    fields: tuple[tuple[str, ...], ...]

    @property
    def is_flag(self) -> bool:
        """It takes no value."""
        return self.kind is bool and self.option.parse is None

    def read(self, value: Any) -> Any:
        """The field's value for one of a command line or a file.

        Raises:
            UsageError: A value that its parser does not take.
        """
        if self.option.turns_off:
            return not value
        if self.option.is_repeatable:
            return tuple(value)
        return self.option.parse(value) if self.option.parse is not None else value


def options_of(spec: type[Spec]) -> dict[str, SpecOption]:
    """The options of a spec and of its parts by key, in their order; one that several parts name fills them all."""
    found: dict[str, SpecOption] = {}
    for entry in _walk(spec, Part(frozenset(), frozenset(), {}), ()):
        known = found.get(entry.key)
        if known is not None:
            entry = dataclasses.replace(known, fields=(*known.fields, *entry.fields))
        found[entry.key] = entry
    return found


def _walk(spec: type[Spec], chosen: Part, path: tuple[str, ...]) -> Iterator[SpecOption]:
    kinds = _type_hints(spec)
    for each in dataclasses.fields(spec):  # type: ignore[arg-type]
        if each.name in chosen.without:
            continue
        if _PART in each.metadata:
            own: Part = each.metadata[_PART]
            inner = Part(own.only, own.without | chosen.without, {**own.defaults, **chosen.defaults})
            yield from _walk(kinds[each.name], inner, (*path, each.name))
        elif _OPTION in each.metadata and (not chosen.only or each.name in chosen.only):
            names = _names(each)
            default = chosen.defaults.get(each.name, _default(each))
            kind = str if each.metadata[_OPTION].parse else _kind(kinds[each.name])
            yield SpecOption(_key(names), each.metadata[_OPTION], names, kind, default, ((*path, each.name),))
    for name, alias in spec.ALIASES.items():
        if name not in chosen.without and (not chosen.only or name in chosen.only):
            yield SpecOption(_key(alias.names), alias, alias.names, str, None, ())


def build(spec: type[SpecType], values: Mapping[str, Any]) -> SpecType:
    """A spec from the values of its options by key; those that are left out keep their defaults.

    Raises:
        UsageError: A value that a rule does not take, or an option that must be given.
    """
    of_field: dict[tuple[str, ...], Any] = {}
    for key, entry in options_of(spec).items():
        for path in entry.fields:
            value = values.get(key, entry.default)
            if value is dataclasses.MISSING:
                raise UsageError(f"{entry.names[0]} is missing: {entry.option.help}")
            of_field[path] = value() if callable(value) else value
    made: SpecType = _make(spec, of_field, (), {})
    return made


def _make(spec: Any, values: Mapping[tuple[str, ...], Any], path: tuple[str, ...], defaults: Mapping[str, Any]) -> Any:
    kinds = _type_hints(spec)
    settings: dict[str, Any] = {}
    for each in dataclasses.fields(spec):
        place = (*path, each.name)
        if _PART in each.metadata:
            own: Part = each.metadata[_PART]
            settings[each.name] = _make(kinds[each.name], values, place, {**own.defaults, **defaults})
        elif place in values or each.name in defaults:
            settings[each.name] = values.get(place, defaults.get(each.name))
    return spec(**settings)


def as_options(spec: Spec) -> dict[str, Any]:
    """The options that give this spec, by key, as a config file holds them; those at their defaults are left out."""
    found: dict[str, Any] = {}
    for key, entry in options_of(type(spec)).items():
        if not entry.fields:
            continue
        value: Any = spec
        for name in entry.fields[0]:
            value = getattr(value, name)
        default = entry.default() if callable(entry.default) else entry.default
        if value != default:
            found[key] = not value if entry.option.turns_off else _plain(value)
    return found


def defaults_of(spec: type[Spec], given: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults of a spec and of its parts that depend on what was given, by option."""
    kinds = _type_hints(spec)
    found = spec.defaults_for(given)
    for each in dataclasses.fields(spec):  # type: ignore[arg-type]
        if _PART in each.metadata:
            found = {**defaults_of(kinds[each.name], {**given, **found}), **found}
    return found


def _names(each: Any) -> tuple[str, ...]:
    own: Option = each.metadata[_OPTION]
    if own.is_argument:
        return (each.name,)
    return own.names or (f"--{each.name.replace('_', '-')}",)


def _key(names: tuple[str, ...]) -> str:
    return names[0].lstrip("-").replace("-", "_")


def _default(each: Any) -> Any:
    return each.default if each.default is not dataclasses.MISSING else each.default_factory


def _kind(annotation: Any) -> type:
    """The type of one value: without None, and of a list that of its entries."""
    if get_origin(annotation) is UnionType:
        annotation = next(kind for kind in get_args(annotation) if kind is not NoneType)
    if get_origin(annotation) is tuple and get_args(annotation)[-1] is ...:
        return _kind(get_args(annotation)[0])
    found: type = annotation
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, Spec):
        return value.as_dict()
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return str(value) if isinstance(value, Path) else value


def at_least(least: int, what: str = "", most: int = MOST_COUNT) -> Rule:
    """An integer from `least` to `most`."""

    def rule(value: Any) -> str | None:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            return f"it must be an integer of at least {least}{what}"
        return f"it must be at most {most:,}; give a smaller number" if value > most else None

    return rule


def between(least: float, most: float, what: str, open_ends: bool = False) -> Rule:
    """A finite number from `least` to `most`, said by `what`; both ends left out where they are open."""

    def rule(value: Any) -> str | None:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return f"it must be {what}"
        is_in = least < value < most if open_ends else least <= value <= most
        return None if is_in else f"it must be {what}"

    return rule


def one_of(*names: str) -> Rule:
    """One of these texts."""
    return lambda value: None if value in names else f"known: {', '.join(names)}"
