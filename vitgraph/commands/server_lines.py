"""A server's command line taken apart: its options by name, and what of them is read into options of vitgraph."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from vitgraph.errors import UsageError

SHELL_WORDS = ("env", "export", "sudo")
_PROGRAMS = (
    *("vllm", "serve", "bench", "mm-processor", "sglang", "python", "python3", "docker", "podman", "run", "exec"),
    *SHELL_WORDS,
)
_LEVELS = tuple("{0123456789")
_NUMBER = re.compile(r"-?\d+(\.\d+)?")


@dataclass(slots=True)
class ImportedSettings:
    """What a line of another server says of the encoder.

    Attributes:
        server: `vLLM` or `SGLang`.
        options: vitgraph option to its value as text, in the order of printing; an empty text is a switch.
        notes: What a reader must know before comparing.
        left_out: Options of the line that do not shape the encoder here, as typed.
    """

    server: str
    options: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def arguments(self) -> list[str]:
        """The options as arguments of `vitgraph bench`."""
        return [part for option, value in self.options.items() for part in ((option, value) if value else (option,))]

    def command(self) -> str:
        """The `vitgraph bench` command, quoted for a shell."""
        return shlex.join(["vitgraph", "bench", *self.arguments()])

    def as_dict(self) -> dict[str, Any]:
        """The settings for `--json`."""
        return {**asdict(self), "command": self.command()}


def split_options(words: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Arguments before the first option, and the values of each option's last occurrence, option names with dashes."""
    positional: list[str] = []
    options: dict[str, list[str]] = {}
    values = positional
    for word in words:
        if not word.startswith("-") or _NUMBER.fullmatch(word):
            values.append(word)
            continue
        # vLLM spells -O3 and -O{...} without a space.
        name, is_set, value = ("-O", "=", word[2:]) if word.startswith("-O") and word[2:3] in _LEVELS else _parts(word)
        values = [value] if is_set else []
        if name.endswith("+"):
            # One word more of a list each time.
            values = options.setdefault(name, [])
            values += [value] if is_set else []
        else:
            options[name] = values
    return [word for word in positional if word.rsplit("/", 1)[-1] not in _PROGRAMS], options


def _parts(word: str) -> tuple[str, str, str]:
    """Name, `=` where there is one, and value of `--name=value`; `--name.key` keeps its key's spelling."""
    name, is_set, value = word.partition("=")
    head, dot, key = name.partition(".")
    if head.startswith("--"):
        head = head.replace("_", "-")
    if head == "-cc" or (head == "-O" and dot):
        head = "--compilation-config"
    return head + dot + key, is_set, value


Copied = tuple[str, tuple[str, ...], Callable[[str, str], str]]
"""An option here, its names there, and what makes of such a name and its value the value here; empty for none."""


@dataclass(slots=True)
class LineReader:
    """Takes known options out of a line, one after the other; what is left at the end is left out."""

    given: dict[str, list[str]]
    settings: ImportedSettings
    extra: list[str] = field(default_factory=list)

    def take(self, *names: str) -> str | None:
        """The value of the first of these options that is given; an empty text for a switch."""
        found = [self.given.pop(name) for name in names if name in self.given]
        if not found:
            return None
        self.extra += found[0][1:]
        return found[0][0] if found[0] else ""

    def copy(self, options: Iterable[Copied]) -> None:
        """Says the values of options under vitgraph's names, where they are given and stand for anything."""
        for target, names, convert in options:
            value = self.take(*names)
            if value is None:
                continue
            if not value:
                raise UsageError(f"{names[0]} has no value in the line; give the whole command")
            converted = convert(names[0], value)
            if converted:
                self.settings.options[target] = converted
            else:
                self.settings.left_out.append(f"{names[0]} {value}")

    def finish(self) -> ImportedSettings:
        """The settings, with everything that was not taken named."""
        self.settings.left_out += [" ".join([name, *values]) for name, values in self.given.items()]
        return self.settings
