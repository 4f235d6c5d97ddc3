"""Command lines as users of vLLM write them: its spellings are understood, its other options change nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

import typer.core

from vitgraph.commands.shell import tell
from vitgraph.errors import UsageError
from vitgraph.reading import parse_json
from vitgraph.report.say import clean

CONFIG_NAMES = ("--compilation-config", "-cc", "-O")
_CONFIG = CONFIG_NAMES[0]


class CommandOfHabit(typer.core.TyperCommand):
    """A command that takes the options of `vllm bench mm-processor`, each used or ignored with a word."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        flags = {name: bool(getattr(each, "is_flag", False)) for each in self.params for name in each.opts}
        words, ignored = as_here(args, flags)
        if ignored:
            tell(f"note: {', '.join(ignored)} shape no encoder; ignored")
        try:
            rest: list[str] = super().parse_args(ctx, words)
        except Exception as error:
            if hasattr(error, "message"):
                # It quotes what was given, which may hold what a terminal would obey.
                error.message = clean(error.message)
            raise
        return rest


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
