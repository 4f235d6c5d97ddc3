"""Reads the encoder settings of other servers' command lines and says them in vitgraph's options.

Known are vLLM (`--compilation-config` and the options of `vllm serve` that shape the encoder) and SGLang (the options
proposed in https://github.com/sgl-project/sglang/pull/25986, its enabling variable, and what shapes the encoder).
"""

from __future__ import annotations

import json
import re
import shlex
import warnings
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from vitgraph.commands.habits import dotted_value
from vitgraph.commands.server_lines import SHELL_WORDS, Copied, ImportedSettings, LineReader, split_options
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

_MAX_FRAMES = "encoder_cudagraph_max_frames_per_batch"
_DATA = "data"
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.DOTALL)
_EXAMPLE = "for example: vitgraph import \"vllm serve MODEL --compilation-config '{...}'\""

_VLLM_MARKS = ("vllm", "--compilation-config", "--mm-encoder-attn-backend", "-cc", "-O")
_SGLANG_MARKS = ("sglang", "--vit-cuda-graph", "--enable-vit-cuda-graph", "--model-path", "--mm-attention-backend")

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
    assignments = list(takewhile(lambda word: word in SHELL_WORDS or _ASSIGNMENT.fullmatch(word), words))
    environment = [word for word in words if (word in assignments and "=" in word) or word.startswith("SGLANG_")]
    words = [word for word in words if word not in environment]
    positional, options = split_options(words)
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


def _import_vllm(
    positional: Sequence[str], options: dict[str, list[str]], environment: Sequence[str]
) -> ImportedSettings:
    reader = LineReader(options, ImportedSettings(VLLM))
    settings, notes = reader.settings, reader.settings.notes
    model = reader.take("--model")
    settings.options["--model"] = ""
    reader.take("-m")
    reader.copy(_COPIED[VLLM])
    fields = _compilation_fields(reader)
    if fields.pop(ENABLED_FIELD, None) is not True:
        notes.append(f"{ENABLED_FIELD} is not true in the line, so vLLM would run the encoder without graphs")
    for name, option in ENCODER_FIELDS.items():
        value = fields.get(name)
        # 0 and an empty list are automatic, but for frames, where 0 makes graphs image-only.
        if value or (name == _MAX_FRAMES and value is not None):
            listed = value if isinstance(value, list) else [value]
            settings.options[f"--{option.replace('_', '-')}"] = ",".join(map(str, listed))
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
    reader = LineReader(options, ImportedSettings(SGLANG))
    settings, notes = reader.settings, reader.settings.notes
    reader.take("-m")
    reader.copy(_COPIED[SGLANG])
    backend = reader.take("--mm-attention-backend")
    if backend is not None:
        _add_sglang_backend(settings, backend)
    if budgets is not None:
        settings.options["--token-budgets"] = ",".join(map(str, _integers("--vit-cuda-graph-token-budgets", budgets)))
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


def _compilation_fields(reader: LineReader) -> dict[str, Any]:
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
    is_enabled = config.get(ENABLED_FIELD)
    if is_enabled is False:
        del config[ENABLED_FIELD]
    with warnings.catch_warnings():
        # A server's line says much of the language model; only what is no option at all is named.
        warnings.simplefilter("ignore", IgnoredSetting)
        fields = parse_compilation_config(json.dumps(config))
    return {**fields, ENABLED_FIELD: is_enabled}


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


def _same(_: str, value: str) -> str:
    return value


_SHARED: tuple[Copied, ...] = (
    ("--dtype", ("--dtype",), lambda _, value: {"half": "float16", "float": "float32"}.get(value, value)),
    # Every other format names a way of reading the same weights.
    ("--load-format", ("--load-format",), lambda _, value: value if value == "dummy" else ""),
    ("--revision", ("--revision",), _same),
)
_SPELLED_ALIKE = (
    *("--dataset-name", "--dataset-path", "--hf-name", "--hf-subset", "--hf-split", "--num-prompts", "--num-warmups"),
    *("--random-mm-base-items-per-request", "--random-mm-num-mm-items-range-ratio", "--random-mm-limit-mm-per-prompt"),
    *("--random-mm-bucket-config", "--mm-processor-kwargs", "--video-pruning-rate", "--seed"),
)
_COPIED: Mapping[str, tuple[Copied, ...]] = {
    VLLM: (
        *_SHARED,
        ("--max-model-len", ("--max-model-len",), _tokens),
        ("--max-num-batched-tokens", ("--max-num-batched-tokens",), _tokens),
        ("--mm-encoder-attn-backend", ("--mm-encoder-attn-backend",), lambda _, value: value.upper()),
        *((name, (name,), _same) for name in _SPELLED_ALIKE),
    ),
    SGLANG: (
        ("--model", ("--model-path", "--model"), _same),
        *_SHARED,
        ("--max-model-len", ("--context-length",), _tokens),
        ("--max-num-batched-tokens", ("--chunked-prefill-size",), _tokens),
        (
            "--max-vision-items-per-batch",
            ("--vit-cuda-graph-max-batch-size",),
            lambda name, value: str(_integers(name, [value])[0]),
        ),
    ),
}
"""Options of either server that are options here, in the order of printing."""
