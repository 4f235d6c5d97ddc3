"""Reads the encoder settings of other servers' command lines and says them in vitgraph's options.

Known are vLLM (`--compilation-config` and the options of `vllm serve` that shape the encoder) and SGLang (the options
proposed in https://github.com/sgl-project/sglang/pull/25986, its enabling variable, and what shapes the encoder).
"""

from __future__ import annotations

import json
import re
import shlex
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from vitgraph.commands.habits import dotted_value
from vitgraph.errors import UsageError, VitgraphError
from vitgraph.measure.setup import engine_notes
from vitgraph.models.registry import resolve_preset
from vitgraph.reading import parse_json
from vitgraph.specs import DEFAULT_MAX_MODEL_LEN, DEFAULT_MAX_NUM_BATCHED_TOKENS, GraphSpec
from vitgraph.specs.values import (
    ENABLED_FIELD,
    ENCODER_FIELDS,
    IgnoredSetting,
    parse_compilation_config,
    parse_tokens,
    read_json,
)

VLLM, SGLANG = "vLLM", "SGLang"

_ENABLED = ENABLED_FIELD
_TOKEN_BUDGETS, _MAX_ITEMS, _MAX_FRAMES = ENCODER_FIELDS
_SHELL_WORDS = ("env", "export", "sudo")
_PROGRAMS = (
    *("vllm", "serve", "bench", "mm-processor", "sglang", "python", "python3", "docker", "podman", "run", "exec"),
    *_SHELL_WORDS,
)
_LEVELS = tuple("{0123456789")
_DATA = "data"
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.DOTALL)
_NUMBER = re.compile(r"-?\d+(\.\d+)?")
_EXAMPLE = "for example: vitgraph import \"vllm serve MODEL --compilation-config '{...}'\""

_VLLM_MARKS = ("vllm", "--compilation-config", "--mm-encoder-attn-backend", "-cc", "-O")
_SGLANG_MARKS = ("sglang", "--vit-cuda-graph", "--enable-vit-cuda-graph", "--model-path", "--mm-attention-backend")

_SAME_OPTIONS = (
    *("--dataset-name", "--dataset-path", "--hf-name", "--hf-subset", "--hf-split", "--num-prompts", "--num-warmups"),
    *("--random-mm-base-items-per-request", "--random-mm-num-mm-items-range-ratio", "--random-mm-limit-mm-per-prompt"),
    *("--random-mm-bucket-config", "--mm-processor-kwargs", "--video-pruning-rate", "--revision", "--seed"),
)
"""Options that vLLM spells as vitgraph does."""

_DTYPES = {"half": "float16", "float": "float32"}

_SGLANG_BACKENDS: Mapping[str, tuple[str, int | None]] = {
    "sdpa": ("TORCH_SDPA", None),
    "fa2": ("FLASH_ATTN", 2),
    "fa3": ("FLASH_ATTN", 3),
    "fa4": ("FLASH_ATTN", 4),
    "triton_attn": ("TRITON_ATTN", None),
    "aiter_attn": ("ROCM_AITER_FA", None),
    "flashinfer_cudnn": ("FLASHINFER", None),
}
"""Values of SGLang's `--mm-attention-backend`, as registry name and FlashAttention generation."""


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
        return {
            "server": self.server,
            "options": dict(self.options),
            "command": self.command(),
            "notes": list(self.notes),
            "left_out": list(self.left_out),
        }


def import_settings(text: str) -> ImportedSettings:
    """Reads a server's command line, a part of one, or the JSON of vLLM's `--compilation-config`.

    Args:
        text: One command, with the line continuations and quotes of a shell.

    Raises:
        UsageError: Not a line of a known server, or a value in it cannot be read.
    """
    stripped = text.strip()
    if stripped.startswith("{"):
        return _import_vllm([], {"--compilation-config": [stripped]}, [])
    try:
        words = shlex.split(stripped.replace("\\\n", " "))
    except ValueError as error:
        raise UsageError(
            f"the line is not a shell command ({error}): {_short(text)}; quote it whole, {_EXAMPLE}"
        ) from None
    server = _server_of(words, text)
    assignments = list(takewhile(lambda word: word in _SHELL_WORDS or _ASSIGNMENT.fullmatch(word), words))
    environment = [word for word in words if (word in assignments and "=" in word) or word.startswith("SGLANG_")]
    words = [word for word in words if word not in environment]
    positional, options = _split_options(words)
    return _import_sglang(options, environment) if server == SGLANG else _import_vllm(positional, options, environment)


def _server_of(words: Sequence[str], text: str) -> str:
    names = [word.replace("_", "-") if word.startswith("--") else word for word in words]
    for server, marks in ((SGLANG, _SGLANG_MARKS), (VLLM, _VLLM_MARKS)):
        starts = tuple(f"{mark}{sign}" for mark in marks for sign in ".=-/_")
        if any(name.rsplit("/", 1)[-1] in marks or name.lower().startswith(starts) for name in names):
            return server
    raise UsageError(
        f"neither vLLM nor SGLang is named, and no option of theirs that shapes the encoder: {_short(text)}; give "
        f"the whole command, {_EXAMPLE}"
    )


def _split_options(words: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
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


@dataclass(slots=True)
class _Reader:
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

    def copy(self, target: str, *names: str, convert: Callable[[str, str], str] | None = None) -> None:
        """Says the value of an option under vitgraph's name, where the option is given and stands for anything."""
        value = self.take(*names)
        if value is None:
            return
        if not value:
            raise UsageError(f"{names[0]} has no value in the line; give the whole command")
        converted = convert(names[0], value) if convert else value
        if converted:
            self.settings.options[target] = converted
        else:
            self.settings.left_out.append(f"{names[0]} {value}")

    def finish(self) -> ImportedSettings:
        """The settings, with everything that was not taken named."""
        self.settings.left_out += [" ".join([name, *values]) for name, values in self.given.items()]
        return self.settings


def _import_vllm(
    positional: Sequence[str], options: dict[str, list[str]], environment: Sequence[str]
) -> ImportedSettings:
    reader = _Reader(options, ImportedSettings(VLLM))
    settings, notes = reader.settings, reader.settings.notes
    model = reader.take("--model")
    settings.options["--model"] = ""
    _copy_shared(reader)
    reader.copy("--max-model-len", "--max-model-len", convert=_tokens)
    reader.copy("--max-num-batched-tokens", "--max-num-batched-tokens", convert=_tokens)
    reader.copy("--mm-encoder-attn-backend", "--mm-encoder-attn-backend", convert=lambda _, value: value.upper())
    for name in _SAME_OPTIONS:
        reader.copy(name, name)
    fields = _compilation_fields(reader)
    if fields.pop(_ENABLED, None) is not True:
        notes.append(f"{_ENABLED} is not true in the line, so vLLM would run the encoder without graphs")
    _add_graph_options(settings, fields)
    limit = reader.take("--limit-mm-per-prompt")
    if limit and _allows_no_video(limit) and "--max-frames-per-batch" not in settings.options:
        settings.options["--max-frames-per-batch"] = "0"
        notes.append("the line allows no videos, for which vLLM captures image-only graphs: --max-frames-per-batch 0")
    settings.options |= {"--packing": "greedy-defer", "--single-slot-tier": ""}
    notes.append(
        "--packing greedy-defer --single-slot-tier are what vLLM 0.33 does; without them the run uses vitgraph's own "
        "packing and segment-slot tiers"
    )
    size, mode = reader.take("--tensor-parallel-size", "-tp"), reader.take("--mm-encoder-tp-mode")
    _add_ranks(settings, size, mode == _DATA, "--mm-encoder-tp-mode weights")
    settings.left_out += environment
    reader.finish()
    # An argument without a name may also follow an option and its value.
    model = model or next((word for word in [*positional, *reader.extra] if ":" not in word), None)
    if model:
        settings.options["--model"] = model
        notes += _engine_notes(model, settings.options, may_have_videos=not (limit and _allows_no_video(limit)))
    else:
        del settings.options["--model"]
        notes.append("no model is named in the line; add --model")
    return settings


def _engine_notes(model: str, options: Mapping[str, str], *, may_have_videos: bool) -> list[str]:
    """Which of the engine's rules the line breaks, where the model's shape is known without its files."""
    source = resolve_preset(model)
    if source is None:
        return []
    frames = options.get("--max-frames-per-batch")
    spec = GraphSpec(
        token_budgets=tuple(map(int, options["--token-budgets"].split(","))) if "--token-budgets" in options else (),
        max_vision_items_per_batch=int(options.get("--max-vision-items-per-batch", 0)),
        max_frames_per_batch=None if frames is None else int(frames),
        max_model_len=int(options.get("--max-model-len", DEFAULT_MAX_MODEL_LEN)),
        max_num_batched_tokens=int(options.get("--max-num-batched-tokens", DEFAULT_MAX_NUM_BATCHED_TOKENS)),
    )
    try:
        return engine_notes(source, spec, has_videos=may_have_videos)
    except VitgraphError as error:
        return [str(error)]


def _import_sglang(options: dict[str, list[str]], environment: Sequence[str]) -> ImportedSettings:
    budgets = options.pop("--vit-cuda-graph-token-budgets", None)
    reader = _Reader(options, ImportedSettings(SGLANG))
    settings, notes = reader.settings, reader.settings.notes
    reader.copy("--model", "--model-path", "--model")
    reader.copy("--revision", "--revision")
    _copy_shared(reader)
    reader.copy("--max-model-len", "--context-length", convert=_tokens)
    reader.copy("--max-num-batched-tokens", "--chunked-prefill-size", convert=_tokens)
    backend = reader.take("--mm-attention-backend")
    if backend is not None:
        _add_sglang_backend(settings, backend)
    if budgets is not None:
        settings.options["--token-budgets"] = ",".join(map(str, _integers("--vit-cuda-graph-token-budgets", budgets)))
    items = reader.take("--vit-cuda-graph-max-batch-size")
    if items is not None:
        settings.options["--max-vision-items-per-batch"] = str(_integers("--vit-cuda-graph-max-batch-size", [items])[0])
    by_variable = [word for word in environment if word.startswith("SGLANG_VIT_ENABLE_CUDA_GRAPH=")]
    is_enabled = reader.take("--enable-vit-cuda-graph") is not None or any(
        word.partition("=")[2].lower() in ("1", "true", "yes", "y", "t", "on") for word in by_variable
    )
    if not is_enabled:
        notes.append(
            "neither --enable-vit-cuda-graph nor SGLANG_VIT_ENABLE_CUDA_GRAPH=1 is in the line, so SGLang would run "
            "the encoder without graphs"
        )
    if budgets is None:
        notes.append(
            "the line names no token budgets, so vitgraph's automatic list is used; an SGLang without this option "
            "captures one graph for each exact length: for that, give --packing exact and the token counts that "
            "`vitgraph workload inspect` lists as --token-budgets"
        )
    else:
        notes.append("SGLang's budgets count output tokens after the merge, as here")
    size = reader.take("--tensor-parallel-size", "--tp-size", "--tp")
    _add_ranks(settings, size, reader.take("--mm-enable-dp-encoder") is not None, "no --mm-enable-dp-encoder")
    settings.left_out += [word for word in environment if word not in by_variable]
    return reader.finish()


def _copy_shared(reader: _Reader) -> None:
    reader.take("-m")
    reader.copy("--dtype", "--dtype", convert=lambda _, value: _DTYPES.get(value, value))
    # Every other format names a way of reading the same weights.
    reader.copy("--load-format", "--load-format", convert=lambda _, value: value if value == "dummy" else "")


def _compilation_fields(reader: _Reader) -> dict[str, Any]:
    """The encoder's fields, from the JSON and from the dotted spelling, which wins."""
    short = reader.take("-O")
    text = reader.take("--compilation-config") or (short if (short or "").startswith("{") else None)
    config: dict[str, Any] = {}
    if text:
        config = read_json("--compilation-config", text)
    for name in [name for name in reader.given if name.startswith("--compilation-config.")]:
        key = name.partition(".")[2].replace("-", "_")
        values = reader.given.pop(name)
        if not values:
            raise UsageError(f"{name} has no value in the line; give the whole command")
        if key.endswith("+"):
            config[key[:-1]] = [*config.get(key[:-1], []), *map(dotted_value, values)]
        else:
            config[key] = dotted_value(values[-1])
    is_enabled = config.get(_ENABLED)
    if is_enabled is False:
        del config[_ENABLED]
    with warnings.catch_warnings():
        # A server's line says much of the language model; only what is no option at all is named.
        warnings.simplefilter("ignore", IgnoredSetting)
        fields = parse_compilation_config(json.dumps(config))
    return {**fields, _ENABLED: is_enabled}


def _add_graph_options(settings: ImportedSettings, fields: Mapping[str, Any]) -> None:
    if fields.get(_TOKEN_BUDGETS):
        settings.options["--token-budgets"] = ",".join(map(str, fields[_TOKEN_BUDGETS]))
    if fields.get(_MAX_ITEMS):
        settings.options["--max-vision-items-per-batch"] = str(fields[_MAX_ITEMS])
    if fields.get(_MAX_FRAMES) is not None:
        settings.options["--max-frames-per-batch"] = str(fields[_MAX_FRAMES])


def _add_ranks(settings: ImportedSettings, size: str | None, shares_items: bool, split_by: str) -> None:
    """Several GPUs as ranks that share the items, where the server does so too.

    Args:
        settings: Filled.
        size: Value of the option that says how many GPUs; None where it is not given.
        shares_items: Each GPU of the server has a whole encoder.
        split_by: Why it has not, in the server's words.
    """
    if size is None:
        return
    ranks = _integers("--tensor-parallel-size", [size])[0]
    if ranks == 1:
        return
    if shares_items:
        settings.options |= {"--mm-encoder-tp-mode": _DATA, "--tensor-parallel-size": str(ranks)}
        return
    settings.notes.append(
        f"the server splits the encoder's weights over {ranks} GPUs ({split_by}), which is not measured here: the "
        f"command measures a whole encoder on one GPU. To share the items among the GPUs instead, as "
        f"--mm-encoder-tp-mode data does, add --mm-encoder-tp-mode data --tensor-parallel-size {ranks}"
    )


def _add_sglang_backend(settings: ImportedSettings, backend: str) -> None:
    if backend not in _SGLANG_BACKENDS:
        settings.notes.append(
            f"--mm-attention-backend {backend} has no counterpart here; known are {', '.join(_SGLANG_BACKENDS)}"
        )
        return
    name, version = _SGLANG_BACKENDS[backend]
    settings.options["--mm-encoder-attn-backend"] = name
    if version is not None:
        settings.options["--flash-attn-version"] = str(version)


def _allows_no_video(limit: str) -> bool:
    try:
        limits = parse_json(limit, "--limit-mm-per-prompt")
    except UsageError:
        # The older spelling, image=4,video=0.
        limits = dict(part.partition("=")[::2] for part in limit.split(","))
    video = limits.get("video") if isinstance(limits, dict) else None
    return str(video.get("count") if isinstance(video, dict) else video) == "0"


def _tokens(option: str, value: str) -> str:
    """Token counts as both servers read them: 32k is 32,000 and 32K is 32,768; empty where the server chooses."""
    if value in ("auto", "-1"):
        return ""
    return str(parse_tokens(value, option))


def _integers(option: str, values: Sequence[str]) -> list[int]:
    parts = [part for value in values for part in value.strip("[]").replace(",", " ").split()]
    if not parts or not all(part.isdigit() and int(part) for part in parts):
        raise UsageError(
            f"{option} is {' '.join(values)!r} in the line; it must be positive integers, for example 1024"
        )
    return [int(part) for part in parts]


def _short(text: str) -> str:
    line = " ".join(text.split())
    return repr(line if len(line) <= 80 else f"{line[:77]}...")
