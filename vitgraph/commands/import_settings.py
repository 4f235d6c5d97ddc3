"""Reads the encoder settings of other servers' command lines and says them in vitgraph's options.

Known are vLLM (`--compilation-config` and the options of `vllm serve` that shape the encoder) and SGLang (the options
proposed in https://github.com/sgl-project/sglang/pull/25986, its enabling variable, and what shapes the encoder).
"""

from __future__ import annotations

import json
import shlex
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from vitgraph.commands.options import SHAPING, set_field, unread_note
from vitgraph.commands.server_command import SGLANG, VLLM, find_server
from vitgraph.errors import UsageError, VitgraphError
from vitgraph.measure.setup import engine_notes
from vitgraph.models.registry import resolve_preset
from vitgraph.specs.fields import build, options_of, read_values
from vitgraph.specs.parts import GraphSpec
from vitgraph.specs.values import (
    ENABLED_FIELD,
    ENCODER_FIELDS,
    IgnoredSetting,
    parse_compilation_config,
    parse_tokens,
    parse_video_limit,
    read_json,
)

_MAX_FRAMES = "encoder_cudagraph_max_frames_per_batch"
_DATA = "data"
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
class ServerLine:
    """A line of another server, and what it says of the encoder.

    Known options are taken out of `given` one after the other; what is left at the end is left out.

    Attributes:
        given: Values of its options that were not taken.
        options: vitgraph option to its value as text, in the order of printing; an empty text is a switch.
        left_out: Options of the line that do not shape the encoder here, as typed.
    """

    server: str
    given: dict[str, list[str]]
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
        names = ("server", "options", "notes", "left_out")
        return {**{name: getattr(self, name) for name in names}, "command": self.command()}

    def take(self, *names: str) -> str | None:
        """The value of the first of these options that is given; an empty text for a switch."""
        found = [(name, self.given.pop(name)) for name in names if name in self.given]
        if not found:
            return None
        name, values = found[0]
        return checked_value(name, values[0]) if values else ""

    def join_dotted(self, name: str) -> None:
        """Makes one JSON value of an option and the fields of its dotted spelling, which win."""
        dotted = [each for each in self.given if each.startswith(f"{name}.")]
        if not dotted:
            return
        whole: dict[str, Any] = read_json(name, self.given[name][0]) if self.given.get(name) else {}
        for each in dotted:
            values = self.given.pop(each)
            if not values:
                raise UsageError(f"{each} has no value in the line; give the whole command")
            for value in values if each.endswith("+") else values[-1:]:
                set_field(whole, each.partition(".")[2], value)
        self.given[name] = [json.dumps(whole)]

    def copy(self) -> None:
        """Says the values of options under vitgraph's names, where they are given and stand for anything."""
        for target, names in _COPIED[self.server].items():
            value = self.take(*names)
            if value is None:
                continue
            if not value:
                raise UsageError(f"{names[0]} has no value in the line; give the whole command")
            converted = _CONVERTED[target](names[0], value) if target in _CONVERTED else value
            if converted:
                self.options[target] = converted
            else:
                self.left_out.append(f"{names[0]} {value}")

    def leave_out_the_rest(self) -> None:
        """Names everything that was not taken."""
        self.notes += [unread_note(name) for name in ("--config", *SHAPING) if name in self.given]
        self.left_out += [" ".join([name, *values]) for name, values in self.given.items()]


def checked_value(name: str, value: str) -> str:
    """The value, unless a shell would put another in its place.

    Raises:
        UsageError: It has a variable that the line does not set, or a command.
    """
    if "$" in value:
        raise UsageError(
            f"{name} is {value!r} in the line; write the value itself in place of what a shell would put in"
        )
    return value


def import_settings(text: str) -> ServerLine:
    """Reads a server's command line, a script or a part of one, or the JSON of vLLM's `--compilation-config`.

    Raises:
        UsageError: Not a line of a known server, more than one, or a value in it cannot be read.
    """
    stripped = text.strip()
    if stripped.startswith("{"):
        return _import_vllm([], {"--compilation-config": [stripped]}, [])
    server, environment, positional, options = find_server(stripped)
    return (_import_sglang if server == SGLANG else _import_vllm)(positional, options, environment)


def _import_vllm(positional: Sequence[str], given: dict[str, list[str]], environment: Sequence[str]) -> ServerLine:
    line = ServerLine(VLLM, given)
    options, notes = line.options, line.notes
    named = line.take("--model")
    model = named or next((checked_value("the model", word) for word in positional[:1]), None)
    options["--model"] = ""
    for name in ("--mm-processor-kwargs", "--limit-mm-per-prompt"):
        line.join_dotted(name)
    line.copy()
    fields = _compilation_fields(line)
    if fields.pop(ENABLED_FIELD, None) is not True:
        notes.append(f"{ENABLED_FIELD} is not true in the line, so vLLM would run the encoder without graphs")
    for name, option in ENCODER_FIELDS.items():
        value = fields.get(name)
        # 0 and an empty list are automatic, but for frames, where 0 makes graphs image-only.
        if value or (name == _MAX_FRAMES and value is not None):
            listed = value if isinstance(value, list) else [value]
            options[f"--{option.replace('_', '-')}"] = ",".join(map(str, listed))
    limit = line.take("--limit-mm-per-prompt")
    if limit and _allows_no_video(limit) and "--max-frames-per-batch" not in options:
        options["--max-frames-per-batch"] = "0"
        notes.append("the line allows no videos, for which vLLM captures image-only graphs: --max-frames-per-batch 0")
    elif limit and limit.startswith("{"):
        options["--limit-mm-per-prompt"] = limit
    options |= {"--packing": "greedy-defer", "--single-slot-tier": ""}
    notes.append(
        "--packing greedy-defer --single-slot-tier are what vLLM 0.33 does; without them the run uses vitgraph's own "
        "packing and segment-slot tiers"
    )
    size, mode = line.take("--tensor-parallel-size", "-tp"), line.take("--mm-encoder-tp-mode")
    _add_ranks(line, size, mode == _DATA, "--mm-encoder-tp-mode weights")
    line.left_out += [*environment, *positional[0 if named else 1 :]]
    line.leave_out_the_rest()
    if model:
        options["--model"] = model
        notes += _engine_notes(model, options, may_have_videos=not (limit and _allows_no_video(limit)))
    else:
        del options["--model"]
        notes.append("no model is named in the line; add --model")
    return line


def _engine_notes(model: str, options: Mapping[str, str], *, may_have_videos: bool) -> list[str]:
    """Which of the engine's rules the line breaks, where the model's shape is known without its files."""
    source, entries = resolve_preset(model), options_of(GraphSpec)
    if source is None:
        return []
    named = {key: options.get(entry.names[0]) for key, entry in entries.items() if not entry.is_flag}
    given = {key: entries[key].kind(text) for key, text in named.items() if text is not None}
    try:
        return engine_notes(source, build(GraphSpec, read_values(entries, given)), has_videos=may_have_videos)
    except VitgraphError as error:
        return [str(error)]


def _import_sglang(positional: Sequence[str], given: dict[str, list[str]], environment: Sequence[str]) -> ServerLine:
    budgets = given.pop("--vit-cuda-graph-token-budgets", None)
    line = ServerLine(SGLANG, given)
    options, notes = line.options, line.notes
    line.copy()
    backend = line.take("--mm-attention-backend")
    if backend is not None and backend in _SGLANG_BACKENDS:
        options["--mm-encoder-attn-backend"], version = _SGLANG_BACKENDS[backend]
        options |= {} if version is None else {"--flash-attn-version": str(version)}
    elif backend is not None:
        known = ", ".join(_SGLANG_BACKENDS)
        notes.append(f"--mm-attention-backend {backend} has no counterpart here; known are {known}")
    if budgets is not None:
        options["--token-budgets"] = ",".join(map(str, _integers("--vit-cuda-graph-token-budgets", budgets)))
    by_variable = [word for word in environment if word.startswith("SGLANG_VIT_ENABLE_CUDA_GRAPH=")]
    is_enabled = line.take("--enable-vit-cuda-graph") is not None or any(
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
    size = line.take("--tensor-parallel-size", "--tp-size", "--tp")
    _add_ranks(line, size, line.take("--mm-enable-dp-encoder") is not None, "no --mm-enable-dp-encoder")
    line.left_out += [*(word for word in environment if word not in by_variable), *positional]
    line.leave_out_the_rest()
    return line


def _compilation_fields(line: ServerLine) -> dict[str, Any]:
    """The encoder's fields, from the JSON and from the dotted spelling, which wins."""
    short = line.take("-O") or ""
    if short.startswith("{"):
        line.given.setdefault("--compilation-config", [short])
    line.join_dotted("--compilation-config")
    text = line.take("--compilation-config")
    config: dict[str, Any] = read_json("--compilation-config", text) if text else {}
    is_enabled = config.get(ENABLED_FIELD)
    if is_enabled is False:
        del config[ENABLED_FIELD]
    with warnings.catch_warnings():
        # A server's line says much of the language model; only what is no option at all is named.
        warnings.simplefilter("ignore", IgnoredSetting)
        fields = parse_compilation_config(json.dumps(config))
    return {**fields, ENABLED_FIELD: is_enabled}


def _add_ranks(line: ServerLine, size: str | None, shares_items: bool, split_by: str) -> None:
    """Several GPUs as ranks that share the items, where the server does so too.

    Args:
        shares_items: Each GPU of the server has a whole encoder.
        split_by: Why it has not, in the server's words.
    """
    if size is None:
        return
    ranks = _integers("--tensor-parallel-size", [size])[0]
    if ranks == 1:
        return
    if shares_items:
        line.options |= {"--mm-encoder-tp-mode": _DATA, "--tensor-parallel-size": str(ranks)}
        return
    line.notes.append(
        f"the server splits the encoder's weights over {ranks} GPUs ({split_by}), which is not measured here: the "
        f"command measures a whole encoder on one GPU. To share the items among the GPUs instead, as "
        f"--mm-encoder-tp-mode data does, add --mm-encoder-tp-mode data --tensor-parallel-size {ranks}"
    )


def _allows_no_video(limit: str) -> bool:
    with suppress(UsageError):
        return parse_video_limit(limit) == 0
    # The older spelling, image=4,video=0.
    return "video=0" in limit.split(",")


def _tokens(option: str, value: str) -> str:
    """Token counts as both servers read them: 32k is 32,000 and 32K is 32,768; empty where the server chooses."""
    return "" if value in ("auto", "-1") else str(parse_tokens(value, option))


def _integers(option: str, values: Sequence[str]) -> list[int]:
    parts = [part for value in values for part in value.strip("[]").replace(",", " ").split()]
    if not parts or not all(part.isdigit() and int(part) for part in parts):
        raise UsageError(
            f"{option} is {' '.join(values)!r} in the line; it must be positive integers, for example 1024"
        )
    return [int(part) for part in parts]


_CONVERTED: Mapping[str, Callable[[str, str], str]] = {
    "--dtype": lambda _, value: {"half": "float16", "float": "float32"}.get(value, value),
    # Every other format names a way of reading the same weights.
    "--load-format": lambda _, value: value if value == "dummy" else "",
    "--max-model-len": _tokens,
    "--max-num-batched-tokens": _tokens,
    "--mm-encoder-attn-backend": lambda _, value: value.upper(),
    "--max-vision-items-per-batch": lambda name, value: str(_integers(name, [value])[0]),
}
"""What makes of an option's name there and its value the value here; empty for none."""
_SPELLED_ALIKE = (
    *("--dtype", "--load-format", "--revision", "--max-model-len", "--max-num-batched-tokens"),
    *("--mm-encoder-attn-backend", "--dataset-name", "--dataset-path", "--hf-name", "--hf-subset", "--hf-split"),
    *("--num-prompts", "--num-warmups", "--random-mm-base-items-per-request", "--random-mm-num-mm-items-range-ratio"),
    *("--random-mm-limit-mm-per-prompt", "--random-mm-bucket-config", "--mm-processor-kwargs", "--video-pruning-rate"),
    "--seed",
)
_COPIED: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    VLLM: {name: (name,) for name in _SPELLED_ALIKE},
    SGLANG: {
        "--model": ("--model-path", "--model"),
        **{name: (name,) for name in ("--dtype", "--load-format", "--revision")},
        "--max-model-len": ("--context-length",),
        "--max-num-batched-tokens": ("--chunked-prefill-size",),
        "--max-vision-items-per-batch": ("--vit-cuda-graph-max-batch-size",),
    },
}
"""Options here that either server has, in the order of printing, each with its names there."""
