"""Finds the command that starts a server: in one line, in what a container or another program is told, in a script."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from itertools import chain, dropwhile, groupby, takewhile
from string import Template

from vitgraph.commands.options import values_in_vllm
from vitgraph.errors import UsageError

VLLM, SGLANG = "vLLM", "SGLang"

_SUBCOMMANDS = ("serve", "bench", "mm-processor")
_LEVELS = tuple("{0123456789")
_NUMBER = re.compile(r"-?\d+(\.\d+)?")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_EXAMPLE = "for example: vitgraph import \"vllm serve MODEL --compilation-config '{...}'\""

_CONTINUED = re.compile(r"[ \t]*[\\^`][ \t]*\r?\n|\r?\n(?=[ \t]*-)")
"""A line's end that does not end the command, as shells of several systems have it, or before a line of options."""
_COMMENT = re.compile(r"^[ \t]*#.*\n", re.MULTILINE)
_YAML = re.compile(r"---|-\s|[\w.-]+:(\s|$)")
_COMMAND_ENDS = ";&|\n"
_REDIRECTION = re.compile(r"\d*[<>].*")
_PROGRAM = re.compile(r"(?:ExecStart=)?(?:[^=]*/)?(vllm|sglang)")
_INNER_COMMAND = re.compile(r"\b(vllm|sglang) (serve|bench)\b|-m (vllm|sglang)\.")
_MODULE = re.compile(r"(vllm|sglang)\.\S+")
_SCRIPT = re.compile(r"\S*/(vllm|sglang)/\S+\.py")
_IMAGE = re.compile(r"(?:[\w.:-]+/)*[\w.-]*(vllm|sglang)[\w.-]*(?:[:@][\w.:-]+)?")
_CONTAINERS = ("docker", "podman", "nerdctl")
_VLLM_MARKS = ("--compilation-config", "--mm-encoder-attn-backend", "-cc", "-O")
_SGLANG_MARKS = ("--vit-cuda-graph", "--enable-vit-cuda-graph", "--model-path", "--mm-attention-backend")


def find_server(text: str) -> tuple[str, list[str], list[str], dict[str, list[str]]]:
    """The one command of a server in a shell's text; variables that the text sets are put in.

    Returns:
        The server; assignments before it that are none of those variables; its arguments without a name; its options,
        each with the values of its last occurrence.

    Raises:
        UsageError: It is no shell's text, or has no such command or several.
    """
    script = _COMMENT.sub("", text)
    if _YAML.match(script):
        raise UsageError(
            f"the text is YAML, which is not read: {_short(text)}; give the server's command in one line, {_EXAMPLE}"
        )
    try:
        commands = list(_commands(_CONTINUED.sub(" ", script)))
    except ValueError as error:
        raise UsageError(
            f"the line is not a shell command ({error}): {_short(text)}; quote it whole, {_EXAMPLE}"
        ) from None
    found = [(*place, words) for words in commands if (place := _server_start(words)) is not None]
    found = found or [(*place, words) for words in commands if (place := _marked_start(words)) is not None]
    if not found:
        raise UsageError(
            f"no command of vLLM or SGLang, and no option of theirs that shapes the encoder: {_short(text)}; give the "
            f"whole command, {_EXAMPLE}"
        )
    if len(found) > 1:
        raise UsageError(f"the text has {len(found)} commands of servers: {_short(text)}; give one, {_EXAMPLE}")
    server, start, words = found[0]
    before = [*chain.from_iterable(takewhile(lambda each: each is not words, commands)), *words[:start]]
    variables = {match[1]: match for word in before if (match := _ASSIGNMENT.fullmatch(word))}
    assigned = {name: match[2] for name, match in variables.items()}
    used = {name for word in words[start:] for name in re.findall(r"\$\{?(\w+)", word)}
    environment = [match[0] for name, match in variables.items() if name not in used]
    words = [Template(word).safe_substitute(assigned) for word in words[start:]]
    positional, options = _split_options(list(dropwhile(lambda word: word in _SUBCOMMANDS, words)))
    return server, environment, positional, options


def _commands(text: str) -> Iterator[list[str]]:
    """The words of each command of a shell's text; what another program is given to run has commands of its own."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=_COMMAND_ENDS)
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    for ends, words in groupby(lexer, lambda word: not word.strip(_COMMAND_ENDS) and word != ""):
        if ends:
            continue
        command = list(takewhile(lambda word: not word.startswith("#") and not _REDIRECTION.fullmatch(word), words))
        yield command
        for word in command:
            if _INNER_COMMAND.search(word):
                yield from _commands(word)


def _server_start(words: Sequence[str]) -> tuple[str, int] | None:
    """The server that a command starts, and the place of the first word behind the program, module or image of it."""
    for place, (before, word, after) in enumerate(zip(["", *words], words, [*words[1:], ""], strict=False), start=1):
        match = _PROGRAM.fullmatch(word) if after in _SUBCOMMANDS else _SCRIPT.fullmatch(word)
        match = _MODULE.fullmatch(word) if before == "-m" else match
        if match:
            return _server(match), place
    images = enumerate(words if set(_CONTAINERS) & {*words} else (), start=1)
    found = ((match, place) for place, word in images if "/" in word and (match := _IMAGE.fullmatch(word)))
    return next(((_server(match), place) for match, place in found), None)


def _marked_start(words: Sequence[str]) -> tuple[str, int] | None:
    """The server whose options a part of a command has, and the place of the first word."""
    names = [word.replace("_", "-") if word.startswith("--") else word for word in words]
    for server, marks in ((SGLANG, _SGLANG_MARKS), (VLLM, _VLLM_MARKS)):
        starts = tuple(f"{mark}{sign}" for mark in marks for sign in ".=-")
        if any(name in marks or name.startswith(starts) for name in names):
            return server, 0
    return None


def _server(match: re.Match[str]) -> str:
    return SGLANG if match[1] == "sglang" else VLLM


def _split_options(words: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Arguments without a name, and the values of each option's last occurrence, option names with dashes."""
    positional: list[str] = []
    options: dict[str, list[str]] = {}
    values, room = positional, sys.maxsize
    for word in words:
        if not word.startswith("-") or _NUMBER.fullmatch(word):
            # An argument may also follow an option and its value.
            (values if room > 0 else positional).append(word)
            room -= 1
            continue
        # vLLM spells -O3 and -O{...} without a space.
        name, is_set, value = ("-O", "=", word[2:]) if word.startswith("-O") and word[2:3] in _LEVELS else _parts(word)
        known = 1 if name == "--config" else values_in_vllm(name.partition(".")[0])
        room = 0 if is_set else sys.maxsize if known is None else known
        values = [value] if is_set else []
        if name.endswith("+"):
            # One word more of a list each time.
            values = options.setdefault(name, [])
            values += [value] if is_set else []
        else:
            options[name] = values
    return positional, options


def _parts(word: str) -> tuple[str, str, str]:
    """Name, `=` where there is one, and value of `--name=value`; `--name.key` keeps its key's spelling."""
    name, is_set, value = word.partition("=")
    head, dot, key = name.partition(".")
    if head.startswith("--"):
        head = head.replace("_", "-")
    if head == "-cc" or (head == "-O" and dot):
        head = "--compilation-config"
    return head + dot + key, is_set, value


def _short(text: str) -> str:
    line = " ".join(text.split())
    return repr(line if len(line) <= 80 else f"{line[:77]}...")
